"""Predicted against measured peak memory, over figures that others published.

    python benchmarks/memory_accuracy.py --csv FILE [--json] [--check]

A row is predicted from its method columns and its `harness`, never from its source, notes, place or measured value;
what a harness does is in `memory/harnesses.py`, each fact with its public source. An unknown harness is taken to run
transformers' Trainer and PEFT as they come. Rows that the closed form does not model, and odd rows, are named with the
reason and not counted. `CLASSES` are the rows for which an accuracy is promised; `--check` ends with 5 where one is not
kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.memory.measured_rows import MeasuredRow, NotModelledError, OddRowError, parse_row, read_table
from benchmarks.memory.prediction import predict
from sftplay.errors import DataError, RunError

HIDDEN = ("source", "peak_gb", "notes", "params_b")
"""Columns on which no prediction may depend."""


@dataclass(frozen=True)
class Judged:
    """One row: its columns, and either a prediction or why there is none."""

    row: Mapping[str, Any]
    values: MeasuredRow | None = None
    """None where the row is odd, or not modelled by its columns."""

    predicted_gib: float | None = None
    phase: str = ""
    excluded: str = ""
    is_odd: bool = False
    line: int = 0
    """Of the file; 0 where there is none."""

    @property
    def measured_gib(self) -> float | None:
        """None in an odd row."""
        return None if self.is_odd else float(self.row["peak_gb"])

    @property
    def error(self) -> float | None:
        """As a fraction of the measured value; None without a prediction."""
        if self.predicted_gib is None or self.measured_gib is None:
            return None
        return self.predicted_gib / self.measured_gib - 1

    @property
    def counts(self) -> bool:
        return self.predicted_gib is not None and not self.excluded

    def as_dict(self) -> dict[str, Any]:
        names = (
            "harness", "source", "model", "method", "lora_r", "batch", "seq_len", "grad_ckpt", "attn", "parallelism",
            "gpu",
        )  # fmt: skip
        shown = {name: self.row.get(name) for name in names}
        gpus = self.row.get("n_gpus") if self.is_odd else int(self.row["n_gpus"])
        judged = {"measured": self.measured_gib, "predicted": self.predicted_gib, "error": self.error}
        reasons = {"phase": self.phase, "excluded": self.excluded, "odd": self.is_odd, "line": self.line}
        return {**shown, "n_gpus": gpus, "class": class_of(self), **judged, **reasons}


@dataclass(frozen=True, kw_only=True)
class Promise:
    """Rows for which an accuracy is promised, and which."""

    title: str
    harnesses: tuple[str, ...]
    strategies: tuple[str, ...]
    mean_abs: float
    within_6: float = 0.0
    """Share of the rows that are off by at most 6 %."""

    worst_under: float
    worst: float | None = None

    def is_kept(self, figures: Mapping[str, Any]) -> bool | None:
        """None where no row counts."""
        if not figures["n"]:
            return None
        return bool(
            figures["mean_abs"] <= self.mean_abs
            and figures["within_6"] >= self.within_6
            and figures["worst_under"] >= self.worst_under
            and (self.worst is None or abs(figures["worst"]) <= self.worst)
        )

    def as_text(self) -> str:
        parts = [f"mean at most {self.mean_abs:.1%}"]
        parts += [f"{self.within_6:.0%} of the rows within 6 %"] if self.within_6 else []
        parts += [f"none off by more than {self.worst:.0%}"] if self.worst else []
        return ", ".join([*parts, f"no under-prediction beyond {-self.worst_under:.0%}"])


MODERN = ("fitcheck", "fms", "peft-bench")
"""Harnesses on libraries of today."""

CLASSES = {
    "modern": Promise(
        title="modern single-GPU dense rows",
        harnesses=MODERN,
        strategies=("single",),
        mean_abs=0.025,
        within_6=0.9,
        worst_under=-0.10,
    ),
    "several_gpus": Promise(
        title="modern dense rows of several GPUs, DDP and FSDP",
        harnesses=(*MODERN, "peft-docs"),
        strategies=("ddp", "fsdp", "fsdp_offload"),
        mean_abs=0.025,
        worst_under=-0.08,
        worst=0.08,
    ),
}


def class_of(judged: Judged) -> str:
    """Name of the promise under which a row falls; empty where none is made."""
    values = judged.values
    if values is None:
        return ""
    names = [
        name
        for name, each in CLASSES.items()
        if values.harness in each.harnesses and values.strategy in each.strategies
    ]
    return names[0] if names else ""


def judge(rows: Sequence[Mapping[str, Any]], lines: Sequence[int] = ()) -> list[Judged]:
    """A prediction, or the reason why there is none, for each row; `lines` are those of the file."""
    alike = Counter(_columns(row) for row in rows)
    numbers = lines or [0] * len(rows)
    return [
        replace(_judge(row, is_alone=alike[_columns(row)] == 1), line=line)
        for row, line in zip(rows, numbers, strict=True)
    ]


def _columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a prediction may depend on."""
    return tuple(str(value) for name, value in row.items() if name not in HIDDEN)


def _judge(row: Mapping[str, Any], *, is_alone: bool) -> Judged:
    try:
        values = parse_row(row)
    except OddRowError as error:
        return Judged(row, excluded=str(error), is_odd=True)
    except NotModelledError as error:
        return Judged(row, excluded=str(error))
    try:
        found = predict(values)
    except NotModelledError as error:
        return Judged(row, values, excluded=str(error))
    excluded = "its table holds two code paths under the same columns" if found.is_one_of_two and not is_alone else ""
    return Judged(row, values, found.gib, found.phase, excluded)


def summarise(judged: Sequence[Judged]) -> dict[str, Any]:
    """Count, mean, ninth decile and worst of the absolute errors, and the worst under-prediction."""
    errors = [each.error for each in judged if each.counts and each.error is not None]
    sizes = sorted(map(abs, errors))
    reasons = Counter("an odd row" if each.is_odd else each.excluded for each in judged if each.excluded)
    figures: dict[str, Any] = {"n": len(errors), "excluded": sum(reasons.values()), "excluded_because": dict(reasons)}
    if not errors:
        return {**figures, "mean_abs": None, "p90_abs": None, "worst": None, "worst_under": None, "within_6": None}
    return {
        **figures,
        "mean_abs": sum(sizes) / len(sizes),
        "p90_abs": sizes[max(0, -(-9 * len(sizes) // 10) - 1)],
        "worst": max(errors, key=abs),
        "worst_under": min(0.0, *errors),
        "within_6": sum(size <= 0.06 for size in sizes) / len(sizes),
    }


def tables(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """`summary` by source, `methods` by harness and method, and one for each of `CLASSES` with `kept`."""

    def by(key: Any) -> dict[str, Any]:
        names = dict.fromkeys(key(each.row) for each in judged)
        return {name: summarise([each for each in judged if key(each.row) == name]) for name in names}

    classes = {name: summarise([each for each in judged if class_of(each) == name]) for name in CLASSES}
    return {
        "summary": by(lambda row: str(row.get("source"))),
        "methods": by(lambda row: f"{row.get('harness')} {row.get('method')}"),
        **{name: {**classes[name], "kept": promise.is_kept(classes[name])} for name, promise in CLASSES.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", required=True, help="measured rows; columns as in shared/data/memory")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--check", action="store_true", help="end with 5 where a promised accuracy is not kept")
    args = parser.parse_args(argv)
    try:
        table = read_table(Path(args.csv))
    except DataError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    judged = judge([row for _, row in table], [line for line, _ in table])
    found = tables(judged)
    if args.json:
        print(json.dumps({"rows": [each.as_dict() for each in judged], **found}, indent=1))
    else:
        _print(judged, found)
    is_broken = any(found[name]["kept"] is False for name in CLASSES)
    return RunError.exit_code if args.check and is_broken else 0


def _print(judged: Sequence[Judged], found: Mapping[str, Mapping[str, Any]]) -> None:
    for each in judged:
        print(_line(each))
    for title in ("summary", "methods"):
        print(f"\n{title}: rows, excluded, mean |error|, 90 % within, worst")
        for name, figures in found[title].items():
            print(f"  {_figures(figures)}  {name}")
    for name, promise in CLASSES.items():
        figures = found[name]
        under = f"worst under {figures['worst_under']:+.1%}" if figures["n"] else ""
        verdict = {True: "kept", False: "NOT KEPT", None: "no row counts"}[figures["kept"]]
        print(f"\n{promise.title}\n  {_figures(figures)}  {under}\n  promised: {promise.as_text()}: {verdict}")


def _line(each: Judged) -> str:
    if each.is_odd:
        name = " ".join(str(each.row.get(column)) for column in ("harness", "model", "method"))
        return f"line {each.line} skipped ({name[:80]}): {each.excluded}"
    row = each.row
    what = (
        f"{row['harness']:13.13} {row['model']:26.26} {row['method']:7.7} {row['n_gpus']:>2} "
        f"{row['parallelism']:16.16} {row['batch']:>3} x {row['seq_len']:<6}"
    )
    if each.predicted_gib is None:
        return f"{what} measured {each.measured_gib:7.2f}  not predicted: {each.excluded}"
    note = f"  (not counted: {each.excluded})" if each.excluded else ""
    return f"{what} measured {each.measured_gib:7.2f} predicted {each.predicted_gib:7.2f} {each.error:+7.1%}{note}"


def _figures(figures: Mapping[str, Any]) -> str:
    if not figures["n"]:
        return f"{0:3} {figures['excluded']:3}       -       -       -"
    return (
        f"{figures['n']:3} {figures['excluded']:3} {figures['mean_abs']:7.2%} {figures['p90_abs']:7.2%} "
        f"{figures['worst']:+7.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
