"""Planned and measured memory of whole runs on a CPU, `make train` as a user would start it. Prints a Markdown table.

    make bench-cpu-memory ARGS="--only lora"

Planned is plan.json's peak without its margin. Measured is the worker's peak resident set (VmHWM), and the anonymous
part of it, which no kernel can take back. The case `process` is a run whose model weighs 0.2 MB: what it measures is
the process itself, `CPU_PROCESS_BYTES` in `sftplay/plan/forecast.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.material import TEMPLATE

ROOT = Path(__file__).resolve().parents[1]
WORKER = "sftplay.tasks.worker"
LOOK_EVERY_S = 0.02
PROMPT_TOKENS = 32
"""More than the tokens around an answer; a row's answer fills the rest of max_seq_len."""


@dataclass(frozen=True)
class Case:
    """A model to invent and a run to make of it. `stored` is the dtype of the checkpoint."""

    shape: Mapping[str, Any]
    values: Mapping[str, Any]
    stored: str = "bfloat16"
    rows: int = 8


@dataclass
class Measured:
    """One run: its exit code, plan.json, and the worker's peaks in bytes."""

    code: int
    plan: dict[str, Any]
    peak_rss_bytes: int = 0
    peak_anonymous_bytes: int = 0
    said: str = ""
    wall_s: float = 0.0
    series: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds since the start, anonymous and file-backed resident bytes."""

    @property
    def planned_bytes(self) -> int:
        """Without what the plan keeps free beside it."""
        return int(self.plan["peak_bytes"] - self.plan["components"]["margin"])

    @property
    def error(self) -> float:
        """Of the plan, as a fraction of the measured peak."""
        return self.planned_bytes / self.peak_rss_bytes - 1


def _shape(hidden: int, layers: int, vocab: int) -> dict[str, int]:
    heads = max(2, hidden // 64)
    return {
        "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": vocab,
        "num_attention_heads": heads, "num_key_value_heads": heads // 2,
    }  # fmt: skip


CASES = {
    "process": Case(_shape(32, 1, 400), {"tuning.mode": "full", "model.max_seq_len": 128}),
    "full": Case(_shape(512, 10, 8000), {"tuning.mode": "full", "model.max_seq_len": 256}),
    "lora, long rows": Case(
        _shape(512, 6, 8000),
        {"tuning.mode": "lora", "model.max_seq_len": 1280, "train.gradient_checkpointing": False},
    ),
    "qlora, large vocabulary": Case(_shape(768, 6, 64_000), {"tuning.mode": "qlora", "model.max_seq_len": 512}),
}
"""Most of the bytes are weights with their gradients and moments, activations, and scores."""


def main() -> int:
    """Measure every case in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    found = {}
    for name in (name for name in CASES if options.only in name):
        with tempfile.TemporaryDirectory(prefix="cpu-memory-") as work:
            found[name] = measure(write_case(Path(work), CASES[name]))
            print(f"{name}: {found[name].wall_s:.0f} s", file=sys.stderr)
    print(as_table(found))
    if options.json:
        options.json.write_text(json.dumps({name: vars(each) for name, each in found.items()}, indent=1))
    return max((each.code for each in found.values()), default=0)


def as_table(found: Mapping[str, Measured]) -> str:
    """Markdown, sizes in MiB."""
    lines = ["| case | planned | measured peak RSS | of that anonymous | error |", "| --- | --- | --- | --- | --- |"]
    for name, each in found.items():
        sizes = (each.planned_bytes, each.peak_rss_bytes, each.peak_anonymous_bytes)
        lines.append(f"| {name} | {' | '.join(f'{size / 2**20:.0f}' for size in sizes)} | {each.error:+.1%} |")
    return "\n".join(lines)


def write_case(home: Path, case: Case) -> Path:
    """Model, rows and config of a case below `home`; the config's path."""
    make_model(home / "model", case)
    write_rows(home / "rows.jsonl", case.rows, int(case.values["model.max_seq_len"]) - PROMPT_TOKENS)
    config: dict[str, Any] = {"run_name": "run", "output_dir": str(home / "outputs")}
    usual = {
        "model.name": str(home / "model"),
        "train.max_steps": 2,
        "train.effective_batch_size": 2,
        "train.batch_size": 1,
        "data.train_path": str(home / "rows.jsonl"),
        "data.split": 0.0,
        "data.processed_dir": str(home / "processed"),
        "logging.steps": 1,
        "eval.before": False,
        "eval.after": False,
    }
    for dotted, value in {**usual, **case.values}.items():
        section, key = dotted.split(".")
        config.setdefault(section, {})[key] = value
    path = home / "run.yaml"
    path.write_text(json.dumps(config, indent=1))  # JSON is YAML
    return path


def make_model(folder: Path, case: Case) -> None:
    """Save a random Llama of the case's shape with a byte-level tokenizer of 300 tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials, alphabet = ["<pad>", "<|im_start|>", "<|im_end|>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    torch.manual_seed(0)
    config = LlamaConfig(
        **case.shape, max_position_embeddings=4096, pad_token_id=0, eos_token_id=2, bos_token_id=None
    )  # fmt: skip
    LlamaForCausalLM(config).to(getattr(torch, case.stored)).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)


def write_rows(path: Path, count: int, answer_tokens: int) -> None:
    """Dialogues whose answers have so many letters, of a token each."""
    lines = []
    for n in range(count):
        answer = "".join(chr(ord("A") + (n * 7 + i * i) % 26) for i in range(answer_tokens))
        turns = [{"role": "user", "content": str(n)}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")


def measure(config: Path, *overrides: str, before: Callable[[], None] | None = None) -> Measured:
    """`train` a config and look at its worker every 20 ms; `before` runs in the child ahead of the command."""
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    argv = [sys.executable, "-m", "sftplay", "train", "--config", str(config), *overrides]
    output, began = config.with_suffix(".log"), time.monotonic()
    seen = Measured(0, {})
    with output.open("w") as handle:
        kit = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=handle, stderr=handle, preexec_fn=before)
        worker: int | None = None
        while kit.poll() is None:
            worker = worker or find_worker(kit.pid)
            if worker:
                _look(seen, worker, time.monotonic() - began)
            time.sleep(LOOK_EVERY_S)
    seen.code, seen.wall_s, seen.said = kit.returncode, time.monotonic() - began, output.read_text()
    plan = config.parent / "outputs" / "run" / "plan.json"
    seen.plan = json.loads(plan.read_text()) if plan.is_file() else {}
    return seen


def _look(seen: Measured, pid: int, at_s: float) -> None:
    now = memory_of(pid)
    if "RssAnon" in now:
        # The kernel's own peak counts this image of the process only; ru_maxrss would count the parent's before exec.
        seen.peak_rss_bytes = max(seen.peak_rss_bytes, now["VmHWM"])
        seen.peak_anonymous_bytes = max(seen.peak_anonymous_bytes, now["RssAnon"])
        seen.series.append((round(at_s, 2), now["RssAnon"], now["RssFile"]))


def memory_of(pid: int) -> dict[str, int]:
    """VmHWM, VmRSS, RssAnon, RssFile of a process in bytes; empty once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.startswith(("VmHWM", "VmRSS", "RssAnon", "RssFile")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def find_worker(pid: int) -> int | None:
    """The process below `pid` that trains."""
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        try:
            if each != pid and WORKER in Path(f"/proc/{each}/cmdline").read_text().split("\0"):
                return each
            for thread in Path(f"/proc/{each}/task").iterdir():
                waiting += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue
    return None


if __name__ == "__main__":
    raise SystemExit(main())
