"""The folder of ARC with the counts of the published sets, and test pairs that are learned elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sftplay.cli import main
from sftplay.tasks.hrm.puzzles.folder import PuzzleFolder

Json = dict[str, Any]


def write_arc(folder: Path, parts: dict[str, tuple[int, int, int]]) -> None:
    """So many tasks with so many demonstrations and test pairs. No pair is a copy of another."""
    stream = np.random.Generator(np.random.Philox(7))
    for part, (tasks, demonstrations, tests) in parts.items():
        (folder / part).mkdir(parents=True)
        for number in range(tasks):
            pairs = {
                name: [
                    {side: stream.integers(0, 10, (4, 5)).tolist() for side in ("input", "output")}
                    for _ in range((number + 1) * total // tasks - number * total // tasks)
                ]
                for name, total in (("train", demonstrations), ("test", tests))
            }
            (folder / part / f"{part[0]}{number:04}.json").write_text(json.dumps(pairs))


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_text())
    return found


def recoloured(pair: Json) -> Json:
    """The pair with other colours; 0 stays."""
    return {side: [[cell and cell % 9 + 1 for cell in row] for row in rows] for side, rows in pair.items()}


PUBLISHED = {
    # Tasks, demonstrations and test pairs of each part, counted in TRM's kaggle/combined/*.json, and the pairs that its
    # dataset/build_arc_dataset.py trains on: all but the test pairs of the evaluation.
    "ARC-AGI-1": ({"training": (400, 1302, 416), "evaluation": (400, 1363, 419)}, 3081),
    "ARC-AGI-1 and ConceptARC": ({"training": (560, 1302 + 427, 416 + 480), "evaluation": (400, 1363, 419)}, 3988),
    "ARC-AGI-2": ({"training": (1000, 3232, 1076), "evaluation": (120, 358, 172)}, 4666),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_training_has_as_many_pairs_as_the_published_code_learns(name: str, tmp_path: Path):
    parts, learned = PUBLISHED[name]
    write_arc(tmp_path / "in", parts)
    assert main(["puzzle-data", "--kind=arc", f"--in={tmp_path / 'in'}", f"--out={tmp_path / 'out'}", "--aug=0"]) == 0
    assert len(PuzzleFolder.open(tmp_path / "out" / "train")) == learned
    assert len(PuzzleFolder.open(tmp_path / "out" / "test")) == parts["evaluation"][2]


@pytest.mark.contract
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_test_pair_that_another_task_has_in_other_colours_is_counted_and_named(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "in"
    write_arc(source, {"training": (4, 12, 5), "evaluation": (4, 12, 5)})
    other = read(source / "training" / "t0001.json")
    content = read(source / "evaluation" / "e0002.json")
    content["test"][0] = recoloured(other[part][0])
    (source / "evaluation" / "e0002.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    assert main(["puzzle-data", "--kind=arc", f"--in={source}", f"--out={out}", "--aug=0"]) == 0
    assert "1 test pairs are copies of a pair of another task: e0002 like t0001" in capsys.readouterr().out
    report = read(out / "report.json")
    assert report["test_pairs_like_another_task"] == 1
    assert report["like_another_task"] == [{"task": "e0002", "test_pair": 1, "like": ["t0001"]}]
    assert report["test_pairs_like_a_demonstration"] == 0
