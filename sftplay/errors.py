"""The error family and its one message shape: `where: what`, then `fix: one action`.

It does not print or exit: only `cli` turns an error into an exit code.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

LONGEST_LINE, LONGEST_END = 1_000, 200
"""Characters of a line of a message, and those kept of its end where it is cut: a message may repeat a value."""

MOST_PROBLEMS = 100  # problems of one error that are shown
_SECRETS = re.compile(r"hf_\w{6,}|(?<=://)[^/@\s]+(?=@)|(?<=token=)[^&\s]+|(?<=Bearer )\S+")


class SftplayError(Exception):
    """Ends a run with one readable message instead of a traceback."""

    exit_code = 1
    code = "bug"

    def __init__(self, what: str, *, where: str = "", fix: str = "", nearest: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.what, self.where, self.fix = (
            "\n".join(map(_cut, without_secrets(text).split("\n"))) for text in (what, where, fix)
        )
        self.nearest = list(nearest)

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  fix: {self.fix}" if self.fix else head

    def as_json(self) -> dict[str, object]:
        """The value of "error" in the JSON document."""
        return {"code": self.code, "where": self.where, "what": self.what, "fix": self.fix, "nearest": self.nearest}

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive the pickling of process pools without help.
        parts: dict[str, Any] = {"where": self.where, "fix": self.fix, "nearest": self.nearest}
        return (partial(type(self), **parts), (self.what,))


class ConfigError(SftplayError):
    """The config, the command line or the run's name cannot be used as given."""

    exit_code = 2
    code = "config"


class MachineError(SftplayError):
    """This machine cannot do what was asked: something is missing, or it will not fit."""

    exit_code = 3
    code = "machine"


class DataError(SftplayError):
    """The data cannot be read, or would not be learned."""

    exit_code = 4
    code = "data"


class RunError(SftplayError):
    """The run started and could not continue: the disk is full, a parity check failed, ranks disagree."""

    exit_code = 5
    code = "run"


class SeveralErrors(SftplayError):
    """Several problems, shown all at once. Code and exit code are those of the first."""

    def __init__(self, problems: Sequence[SftplayError]) -> None:
        first = problems[0]
        super().__init__(first.what, where=first.where, fix=first.fix, nearest=first.nearest)
        self.problems = list(problems)
        self.code, self.exit_code = first.code, first.exit_code

    def __str__(self) -> str:
        more = len(self.problems) - MOST_PROBLEMS
        shown = [str(problem) for problem in self.problems[:MOST_PROBLEMS]]
        return "\n".join([*shown, f"and {more:,} more problems"] if more > 0 else shown)

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "problems": [problem.as_json() for problem in self.problems]}

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.problems,))


class ConfigErrors(SeveralErrors, ConfigError):
    """Several config problems, in the order of the file."""


OUT_OF_RAM = ("failed to map segment", "Cannot allocate memory", "can't allocate memory")
"""What the loader of libraries, the system and torch say where a process may take no more memory."""

EXTENSION_FAILED = ("error return without exception set", "returned NULL without setting an exception")
"""What Python says of a module in C that fails in silence, as some do where an allocation fails."""

CPU_REFUSED = "DefaultCPUAllocator: can't allocate memory"
"""Only this text tells a failed allocation on a CPU from other RuntimeErrors (c10/core/impl/alloc_cpu.cpp)."""

GPU_REFUSED = re.compile(
    r"\b(CUDA|HIP|XPU|MPS)\b.{0,20}\bout of memory|Cuda failure (\d+ )?'out of memory'"
    r"|\b[A-Z]+_(STATUS_)?(INTERNAL_ERROR_(HOST|DEVICE)_)?ALLOC(ATION)?_FAILED\b"
)
"""What libraries say of a GPU without room:

- torch: `CUDA error: out of memory` (c10/cuda/CUDAException.cpp); `CUDA driver error: ...` (c10/cuda/driver_api.h)
- Triton: `Triton Error [CUDA]: out of memory` (nvidia/backend/driver.c)
- NCCL: `Cuda failure 2 'out of memory'` (include/checks.h), which torch's DistBackendError quotes
- CUBLAS_STATUS_ALLOC_FAILED, CUSOLVER_STATUS_ALLOC_FAILED, cuDNN's of release 9 and before (ATen/cuda/Exceptions.h)

A broken driver says CUBLAS_STATUS_NOT_INITIALIZED too, and Triton's OutOfResources is of a kernel's shared memory. CUDA
code of bitsandbytes ends the process (csrc/ops.cuh, `CUDA_CHECK_RETURN`): no error arrives.
"""


def ran_out_of_memory(error: BaseException) -> bool:
    """True for a failed allocation of this process's numbers, on a GPU or a CPU, and for nothing else."""
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):  # torch's, without an import of torch
        return True
    said = str(error) if isinstance(error, RuntimeError) else ""
    return CPU_REFUSED in said or GPU_REFUSED.search(said) is not None


def no_memory(error: BaseException) -> MachineError | None:
    """The refusal where this process or its GPU has no room; None for any other error."""
    if not ran_out_of_memory(error) or CPU_REFUSED in str(error):
        return out_of_ram(error)
    fix = "free memory on the GPU; `make plan` shows what would fit"
    return MachineError(f"out of memory ({said_of_memory(error)})", where="this GPU", fix=fix)


def said_of_memory(error: BaseException) -> str:
    """The first line of an error that `ran_out_of_memory` knows, and its words for that where another line has them."""
    lines = [line.strip() for line in without_secrets(str(error)).splitlines() if line.strip()]
    lines = lines or [type(error).__name__]
    words = GPU_REFUSED.search(str(error))
    return lines[0] if words is None or words[0] in lines[0] else f"{lines[0]}: {words[0]}"


def out_of_ram(error: BaseException) -> MachineError | None:
    """The refusal for an error that says that this process gets no more memory; None for any other."""
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    signs = (*OUT_OF_RAM, *EXTENSION_FAILED) if is_limited else OUT_OF_RAM
    if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in signs):
        return None
    said = next((line for line in str(error).splitlines() if line.strip()), "the system gives no more")
    fix = "free memory, or raise the limit that was set for this shell (ulimit -v)"
    return MachineError(f"out of memory ({said})", where="this machine", fix=fix)


def machine_refusal(error: BaseException) -> MachineError | None:
    """The refusal for a library's error that this machine has caused; None for any other."""
    if "no kernel image" not in str(error):  # cudaGetErrorString of cudaErrorNoKernelImageForDevice
        return no_memory(error)
    what = "a library has no code for this GPU's compute capability (CUDA: no kernel image is available)"
    return no_memory(error) or MachineError(what, where="this GPU", fix="`make doctor` names the build that has it")


def without_secrets(text: str) -> str:
    """The text without tokens, and without the user and password of an address."""
    return _SECRETS.sub("...", text)


def _cut(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    end = line[-LONGEST_END:]
    begin = line[: LONGEST_LINE - LONGEST_END - 50]
    return f"{begin} ... ({len(line) - len(begin) - len(end):,} characters) ... {end}"


def nearest_names(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Up to three known names with a `difflib.SequenceMatcher.ratio` above `cutoff`, the most similar first."""
    return get_close_matches(name[:200], list(known), n=3, cutoff=cutoff)


def suggest(name: str, known: Iterable[str], otherwise: str) -> tuple[str, list[str]]:
    """The remedy for an unknown name, and the nearest known ones; `otherwise` is the remedy where none is near."""
    near = nearest_names(name, known)
    return f"did you mean {near[0]!r}?" if near else otherwise, near


def error_from_json(content: dict[str, Any]) -> SftplayError:
    """The error that another process wrote with `as_json`."""
    kinds: dict[str, type[SftplayError]] = {kind.code: kind for kind in (ConfigError, MachineError, DataError)}
    kind = kinds.get(str(content.get("code")), RunError)
    return kind(str(content["what"]), where=str(content.get("where", "")), fix=str(content.get("fix", "")))
