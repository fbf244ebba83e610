"""A finished run measured on all held-out puzzles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.data.puzzles.make.find import open_split
from sftplay.errors import DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.hrm.evaluation import write_measured
from sftplay.tasks.hrm.measuring import measure
from sftplay.tasks.hrm.network.saved import expect_its_kind, load_model
from sftplay.tasks.hrm.task import open_puzzles

AT_ONCE = 256
"""Puzzles that are refined at the same time."""


def measure_finished(cfg: RunConfig, folder: RunFolder, *, split: str, limit: int | None, path: Path) -> dict[str, Any]:
    """The figures of the result on the held-out puzzles, or on those of data.test_path for the split `test`; also
    written to `path`, with some answers beside it.

    Raises:
        DataError: nothing is held out; the puzzles or the result are not sound, or not of the same kind.
    """
    puzzles = _held_out(cfg, split=split)
    model = load_model(folder.path / "model", device=_device())
    expect_its_kind(model, puzzles)
    n = min(len(puzzles), limit or len(puzzles))
    measured = measure(
        model, puzzles, hrm=cfg.hrm, at_once=min(AT_ONCE, n), limit=limit,
        progress=lambda done: log.progress(done, n, what="puzzles measured", tag="eval"),
    )  # fmt: skip
    write_measured(path, measured)
    return measured.figures


def figures_table(figures: dict[str, Any]) -> str:
    """The figures for a terminal: a line for each segment, one for where the model halts, one for each pass@k."""
    lines = [f"{figures['n']:,} puzzles      solved   blanks    cells   judged"]
    named = [(f"segment {number}", each) for number, each in enumerate(figures["segments"], 1)]
    named.append((f"halts at {figures['halting_q']['segments']:.2f}", figures["halting_q"]))
    for name, each in named:
        shares = (each[key] for key in ("exact_accuracy", "blank_accuracy", "accuracy", "q_halt_accuracy"))
        lines.append(f"{name:16}" + "".join(f"{share:9.4f}" for share in shares))
    partial = figures.get("pass_at_partial", {})
    lines += ["            whole tasks   inputs"] if "pass_at" in figures else []
    lines += [f"pass@{k:11}{share:9.4f}{partial[k]:9.4f}" for k, share in figures.get("pass_at", {}).items()]
    return "\n".join(lines)


def _held_out(cfg: RunConfig, *, split: str) -> PuzzleFolder:
    if split == "test":
        return open_split(str(cfg.data.test_path), "test", key="data.test_path")
    _, held_out = open_puzzles(cfg)
    if held_out is None:
        raise DataError("no held-out puzzles to measure on", where="data", fix="set data.val_path")
    return held_out


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
