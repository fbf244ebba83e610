"""The text of an accelerate config for one machine, for the user's own scripts.

The kit does not read it: `make train` passes the strategy in the workers' environment (`launch/command/strategy.py`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from sftplay.errors import ConfigError

CHECKSUM_LINE = "# Written by make setup-accelerate for this machine. Sum of what follows: "

_TEMPLATE = """\
# {about}
# Use:  accelerate launch --config_file {path} your_script.py
# (make train needs no such file.)
compute_environment: LOCAL_MACHINE
distributed_type: "{kind}"
num_machines: 1
machine_rank: 0
num_processes: {processes}   # {counted}
mixed_precision: "{precision}"   # {reason}
use_cpu: {use_cpu}
main_training_function: main
"""


def accelerate_text(path: Path, *, gpus: int, has_bf16: bool) -> str:
    """A config for the `gpus` of a machine, or one process on its CPU, which uses all cores."""
    processes = gpus or 1
    about = f"{gpus or 'No'} GPU{'' if gpus == 1 else 's'}: {processes} process{'es' if processes > 1 else ''}."
    precision, reason = "no", "a CPU is fastest in fp32"
    if not gpus:
        about += " Several processes on CPUs: accelerate_configs/cpu_ddp.yaml."
    elif has_bf16:
        precision, reason = "bf16", "this GPU has it"
    else:
        precision, reason = "fp16", "a GPU older than Ampere has no bf16"
    text = _TEMPLATE.format(
        about=about, path=path, kind="MULTI_GPU" if processes > 1 else "NO", processes=processes,
        counted="one per GPU" if gpus else "its threads share the cores", precision=precision, reason=reason,
        use_cpu=str(not gpus).lower(),
    )  # fmt: skip
    return f"{CHECKSUM_LINE}{_checksum(text)}\n{text}"


def write_accelerate(path: Path, text: str) -> None:
    """Write the file; ConfigError if the user has changed or written the one at `path`."""
    if path.exists() and not is_untouched(path.read_text(encoding="utf-8", errors="replace")):
        fix = "move it away, or give another file: make setup-accelerate OUT=accelerate_configs/mine.yaml"
        raise ConfigError("was changed after it was written, and stays as it is", where=str(path), fix=fix)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def is_untouched(text: str) -> bool:
    """True for a text from `accelerate_text` that nobody has changed."""
    first, _, rest = text.partition("\n")
    return first == CHECKSUM_LINE + _checksum(rest)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
