"""The completions of each step with what they were paid and why, in samples/ of a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import whole_file


def samples_path(folder: Path, step: int) -> Path:
    """Where the completions of a step are kept, below a run's folder."""
    return folder / "samples" / f"step-{step}.jsonl"


def write_samples(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Keep completions with what they were paid; on the main rank."""
    if log.is_main() and lines:
        path.parent.mkdir(exist_ok=True)
        with whole_file(path, survives_power_cut=False) as scratch:
            scratch.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def cut_samples(folder: Path, *, after_step: int) -> None:
    """Remove what an earlier attempt wrote after the checkpoint that the run continues from."""
    if log.is_main():
        for path in (folder / "samples").glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > after_step:
                path.unlink()
