"""Which checkpoints count, which are removed, and which metrics a resumed run removes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from sftplay.launch.checkpoints import (
    list_checkpoints,
    mark_complete,
    newest_complete,
    rotate,
    set_aside,
)
from sftplay.train.metrics import cut_back


def make(folder: Path, step: int, *, complete: bool = True) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    (checkpoint / "deep").mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(bytes(range(256)) * step)
    (checkpoint / "deep" / "state.json").write_text(json.dumps({"step": step}))
    (checkpoint / "empty").touch()
    if complete:
        mark_complete(checkpoint, {"order_hash": "abc"})
    return checkpoint


def names(folder: Path) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def test_marker_holds_size_and_sha256_of_every_file(tmp_path: Path):
    marker = json.loads((make(tmp_path, 3) / "COMPLETE.json").read_text())
    assert marker["step"] == 3
    assert marker["order_hash"] == "abc"
    content = bytes(range(256)) * 3
    assert marker["files"] == {
        "weights.bin": {"bytes": 768, "sha256": hashlib.sha256(content).hexdigest()},
        "deep/state.json": {"bytes": 11, "sha256": hashlib.sha256(b'{"step": 3}').hexdigest()},
        "empty": {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    }


def flip_a_byte(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "weights.bin").read_bytes())
    content[100] ^= 1
    (checkpoint / "weights.bin").write_bytes(bytes(content))


def truncate_the_marker(checkpoint: Path) -> None:
    marker = checkpoint / "COMPLETE.json"
    marker.write_text(marker.read_text()[:40])


def mark(checkpoint: Path, **fields: object) -> None:
    """Change fields of the marker."""
    path = checkpoint / "COMPLETE.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("harm", "damage"),
    [
        (flip_a_byte, "weights.bin has changed (sha256)"),
        (lambda c: (c / "deep" / "state.json").unlink(), "deep/state.json is missing"),
        (lambda c: (c / "weights.bin").write_bytes(b"short"), "weights.bin has 5 bytes instead of 1024"),
        (truncate_the_marker, "no readable COMPLETE.json"),
        (lambda c: (c / "COMPLETE.json").unlink(), "no readable COMPLETE.json"),
        (lambda c: mark(c, files=["weights.bin"]), "COMPLETE.json has an odd 'files'"),
        (lambda c: mark(c, step=5), "COMPLETE.json is of step 5"),
        (lambda c: mark(c, counters={"tokens_seen": "many"}), "COMPLETE.json has an odd 'counters'"),
        (lambda c: mark(c, rows_sha256="a"), "COMPLETE.json lacks 'rows'"),
        (lambda c: (c / "COMPLETE.json").write_bytes(b'{"step": 4\xff}'), "no readable COMPLETE.json"),
        (lambda c: (c / "COMPLETE.json").write_text("[" * 100_000), "no readable COMPLETE.json"),
    ],
)
def test_damaged_checkpoint_is_named_and_passed_over_for_the_one_before(harm, damage: str, tmp_path: Path):
    before, newest = make(tmp_path, 2), make(tmp_path, 4)
    assert newest_complete(tmp_path) == (newest, [])
    harm(newest)
    assert newest_complete(tmp_path) == (before, [f"skipping checkpoint-4: {damage}"])


def test_order_is_by_step_not_by_name_and_other_files_are_left_out(tmp_path: Path):
    for step in (10, 9, 100):
        make(tmp_path, step)
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert names(tmp_path) == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert newest_complete(tmp_path)[0] == tmp_path / "checkpoint-100"


def test_a_folder_whose_name_holds_no_step_is_named_and_passed_over(tmp_path: Path):
    whole = make(tmp_path, 3)
    for name in ("²", "٣", "03", "1" * 5000, "", "-4", "best"):
        if len(name) < 200:
            (tmp_path / f"checkpoint-{name}").mkdir()
    found, passed_over = newest_complete(tmp_path)
    assert found == whole
    assert "skipping 'checkpoint-²': its name ends with no number of steps" in passed_over
    assert len(passed_over) == 6
    assert set_aside(tmp_path, after_step=3) == []


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [(1, None, [5]), (9, None, [1, 2, 3, 4, 5]), (1, 2, [2, 5]), (3, 1, [1, 4, 5]), (2, 5, [4, 5])],
)
def test_rotation_removes_the_oldest_never_the_newest_nor_the_best(
    limit: int, best: int | None, left: list[int], tmp_path: Path
):
    for step in range(1, 6):
        make(tmp_path, step)
    removed = rotate(tmp_path, limit, best=tmp_path / f"checkpoint-{best}" if best else None)
    assert names(tmp_path) == [f"checkpoint-{step}" for step in left]
    assert sorted(removed + names(tmp_path)) == [f"checkpoint-{step}" for step in range(1, 6)]


def test_rotation_neither_counts_nor_touches_an_unmarked_checkpoint(tmp_path: Path):
    for step in (1, 2, 3):
        make(tmp_path, step, complete=step < 3)
    assert rotate(tmp_path, 1, best=None) == ["checkpoint-1"]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


def test_unmarked_and_later_checkpoints_are_set_aside_and_nothing_is_lost(tmp_path: Path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step, complete=step not in (1, 4))
    assert set_aside(tmp_path, after_step=2) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
    assert names(tmp_path) == ["checkpoint-2"]
    make(tmp_path, 4, complete=False)
    assert set_aside(tmp_path, after_step=9) == ["checkpoint-4"]
    kept = sorted(path.name for path in (tmp_path / "incomplete").iterdir())
    assert kept == ["checkpoint-1", "checkpoint-3", "checkpoint-4", "checkpoint-4-again"]
    assert (tmp_path / "incomplete" / "checkpoint-3" / "weights.bin").read_bytes() == bytes(range(256)) * 3


def test_broken_lines_of_metrics_are_named_and_kept_while_the_whole_ones_go_on(tmp_path: Path, capsys):
    path, lines = tmp_path / "metrics.jsonl", [json.dumps({"step": step, "loss": 0.1}) for step in (1, 2, 3)]
    bad = [b'{"step": 1, "lo\xffss": }', b"[]", b'"x"', b'{"loss": 1}', b"null", b"[" * 100_000]
    path.write_bytes(b"\n".join([lines[0].encode(), *bad, lines[1].encode(), lines[2].encode(), b'{"step": 4, "l']))
    broken = path.read_bytes()
    cut_back(path, 2)
    assert path.read_text().splitlines() == lines[:2]
    assert "metrics.jsonl: line 2, 3, 4, 6, 7 cannot be read: skipped, and kept in" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl.broken").read_bytes() == broken
    cut_back(path, 2)
    assert capsys.readouterr().out == ""


def test_measurements_behind_the_checkpoint_go_with_their_answers_and_all_others_stay(tmp_path):
    folder = tmp_path / "eval"
    folder.mkdir()
    names = [
        f"{stem}{kind}" for stem in ("step-0", "step-4", "step-6", "before", "code-9") for kind in (".json", ".jsonl")
    ]
    for name in names:
        (folder / name).write_text("{}")
    cut_back(tmp_path / "metrics.jsonl", 4)
    assert sorted(path.name for path in folder.iterdir()) == sorted(set(names) - {"step-6.json", "step-6.jsonl"})
    assert not (tmp_path / "none.jsonl").exists()
