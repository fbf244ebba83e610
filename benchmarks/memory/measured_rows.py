"""Reads rows of measured memory: columns to typed values, or in one sentence why a row cannot be used."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.errors import DataError, nearest_names
from sftplay.plan.forecast import Strategy
from sftplay.plan.memory_setup import Attention, Optimizer

COLUMNS = (
    "harness", "source", "model", "method", "lora_r", "quant", "batch", "seq_len", "grad_ckpt", "optimizer", "attn",
    "parallelism", "n_gpus", "gpu", "peak_gb",
)  # fmt: skip
"""Needed in every row; `lora_r` may be empty where everything trains."""

METHODS = ("full", "LoRA", "QLoRA", "DoRA", "LoRA-FA")
FOUR_BIT = ("nf4", "fp4", "bnb-4")

ATTENTION: Mapping[str, Attention] = {
    "eager": "eager",
    "sdpa-efficient": "efficient",
    "xformers": "efficient",
    "sdpa": "flash",
    "sdpa-flash": "flash",
}
"""Kernels by their names in tables; each name that begins with flash is flash attention."""


class OddRowError(ValueError):
    """A value of a row cannot be what its column says."""


class NotModelledError(ValueError):
    """A row is sound, and the closed form has no term for what it ran."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRow:
    """A row's values."""

    harness: str
    model: str
    method: str
    rank: int
    quant: str
    rows: int
    tokens: int
    checkpointing: bool
    optimizer: Optimizer
    attention: Attention
    strategy: Strategy
    gpus: int
    gpu: str
    measured_gib: float

    @property
    def is_sharded(self) -> bool:
        """True where no device holds all weights."""
        return self.strategy.startswith(("fsdp", "zero3"))


def read_table(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a CSV file, each with its line.

    Raises:
        DataError: the file cannot be read as CSV, or lacks columns.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            named = reader.fieldnames or ()
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot be read as CSV: {error}", where=str(path), fix="give a UTF-8 CSV file") from None
    missing = [name for name in COLUMNS if name not in named]
    if missing:
        fix = "name the columns as in shared/data/memory"
        raise DataError(f"columns are missing: {', '.join(missing)}", where=str(path), fix=fix)
    return rows


def parse_row(row: Mapping[str, Any]) -> MeasuredRow:
    """The values of a row.

    Raises:
        OddRowError: a value is missing or cannot be what its column says.
        NotModelledError: the closed form has no term for a value.
    """
    if None in row:
        raise OddRowError("has more values than columns")
    for name in COLUMNS:
        if not isinstance(row.get(name), str) or not (row[name].strip() or name == "lora_r"):
            raise OddRowError(f"{name} is missing")
    numbers = {name: _whole(row, name) for name in ("batch", "seq_len", "n_gpus")}
    measured, checkpointing = _size(row, "peak_gb"), _flag(row, "grad_ckpt")
    method = _method(row["method"])
    rank = 0 if method == "full" else _whole(row, "lora_r")
    if method == "QLoRA" and not row["quant"].startswith(FOUR_BIT):
        raise NotModelledError(f"quantisation {row['quant']}")
    return MeasuredRow(
        harness=row["harness"],
        model=row["model"],
        method=method,
        rank=rank,
        quant=row["quant"],
        rows=numbers["batch"],
        tokens=numbers["seq_len"],
        checkpointing=checkpointing,
        optimizer=_optimizer(row["optimizer"]),
        attention=_attention(row["attn"]),
        strategy=_strategy(row["parallelism"], gpus=numbers["n_gpus"]),
        gpus=numbers["n_gpus"],
        gpu=row["gpu"],
        measured_gib=measured,
    )


def _whole(row: Mapping[str, Any], name: str) -> int:
    text = row[name].strip()
    if name == "seq_len":
        text = text.removeprefix("<=")
    if not (text.isascii() and text.isdigit() and int(text[:12]) > 0 and len(text) <= 12):
        raise OddRowError(f"{name} is {row[name][:40]!r}, not a whole number above 0")
    return int(text)


def _size(row: Mapping[str, Any], name: str) -> float:
    try:
        value = float(row[name])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise OddRowError(f"{name} is {row[name][:40]!r}, not a number above 0")
    return value


def _flag(row: Mapping[str, Any], name: str) -> bool:
    if row[name].lower() not in ("true", "false"):
        raise OddRowError(f"{name} is {row[name][:40]!r}, neither True nor False")
    return bool(row[name].lower() == "true")


def _method(name: str) -> str:
    if name in METHODS:
        return name
    nearest = nearest_names(name, METHODS)
    raise NotModelledError(f"method {name[:40]}" + (f" (did you mean {nearest[0]}?)" if nearest else ""))


def _optimizer(name: str) -> Optimizer:
    words = name.lower()
    if "8bit" in words or "8-bit" in words:
        return "adamw_8bit"
    for start in ("adafactor", "sgd", "adamw"):
        if words.startswith(start):
            return start  # type: ignore[return-value]
    raise NotModelledError(f"optimizer {name[:40]}")


def _attention(name: str) -> Attention:
    if name.lower().startswith("flash"):
        return "flash"
    if name.lower() not in ATTENTION:
        raise NotModelledError(f"attention {name[:40]}")
    return ATTENTION[name.lower()]


STRATEGIES: Mapping[str, Strategy] = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "fsdpfullshard": "fsdp",
    "fsdp2": "fsdp",
    "fsdp2fullshard": "fsdp",
    "fsdpoffload": "fsdp_offload",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero2offload": "zero2_offload",
    "zero3": "zero3",
    "zero3offload": "zero3_offload",
}
"""Spellings without spaces, hyphens and the word CPU."""


def _strategy(text: str, *, gpus: int) -> Strategy:
    kind = re.sub(r"no ?offload|cpu|[^a-z0-9]", "", text.lower())
    if kind.startswith("single"):
        if gpus > 1:
            raise OddRowError(f"parallelism is {text[:40]!r} on {gpus} GPUs")
        return "single"
    if gpus == 1:
        if kind in ("none", "no", "ddp"):
            return "single"
        raise NotModelledError(f"parallelism {text[:40]} on one GPU")
    if kind not in STRATEGIES:
        raise NotModelledError(f"parallelism {text[:40]}")
    return STRATEGIES[kind]
