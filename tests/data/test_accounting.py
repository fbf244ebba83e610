"""The accounting identity, read = kept + cut + dropped + refused, for every awkward file and every file at hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sftplay.config.run import RunConfig
from sftplay.data.files import find_suffix
from sftplay.data.pipeline import Examples, load_examples
from sftplay.errors import DataError
from tests.conftest import SHARED_DATA
from tests.data.awkward import AWKWARD, Awkward, lines, parquet, row

pytestmark = pytest.mark.contract

Config = Callable[..., RunConfig]

SOUND = [row(n, " sound") for n in range(100, 108)]
"""Rows added to each awkward file, so that something is left to train on if the file gives none."""

FOLDERS_WITH_TRAINING_ROWS = ("alpaca", "glaive-toolcall", "gpteacher-code", "gsm8k", "mbpp", "sgd-dialogues")
"""All others hold documents, puzzles, problems for tests, questions without answers: nothing there is to train on."""

FOLDERS_AT_HAND = sorted(path.name for path in SHARED_DATA.iterdir() if path.is_dir()) if SHARED_DATA.is_dir() else []


def check_account(examples: Examples) -> dict[str, Any]:
    """The report, after its sums, its sources and its list of refused rows were found to agree."""
    report = examples.report
    for part in (report, *report["sources"].values()):
        fates = part["kept"] + part["cut"] + sum(part["dropped"].values()) + part["refused"]
        assert part["read"] == fates
    for name in ("read", "kept", "cut", "refused", "examples", "tokens"):
        assert report[name] == sum(source[name] for source in report["sources"].values())
    named = [json.loads(line) for line in Path(report["refused_rows"]).read_text(encoding="utf-8").splitlines()]
    assert len(named) == report["refused"]
    assert all(row["path"] and row["line"] > 0 and row["reason"] for row in named)
    assert len({(row["path"], row["line"], row["record"]) for row in named}) == len(named)
    held_out = examples.held_out["input_ids"] if examples.held_out else []
    assert len(examples.train) + len(held_out) == report["examples"]
    assert sum(map(len, examples.train["input_ids"])) + sum(map(len, held_out)) == report["tokens"]
    return report


@pytest.mark.parametrize("file", AWKWARD, ids=lambda file: file.name)
def test_every_row_of_an_awkward_file_is_accounted_for(tmp_path: Path, config: Config, tokenizer: Any, file: Awkward):
    folder = tmp_path / "rows"
    folder.mkdir()
    # Bytes that every encoding and delimiter of the table reads alike.
    (folder / "0.parquet").write_bytes(parquet(pa.Table.from_pylist(SOUND)))
    (folder / file.name).write_bytes(file.content)
    cfg = config(folder, on_bad_row="skip", encoding=file.encoding, delimiter=file.delimiter)
    if file.error and not find_suffix(file.name):
        cfg = config(folder / file.name, on_bad_row="skip")
    if file.error:
        with pytest.raises(DataError) as refusal:
            load_examples(cfg, tokenizer)
        assert file.error in str(refusal.value)
        return
    report = check_account(load_examples(cfg, tokenizer))
    assert (report["read"], report["refused"]) == (len(SOUND) + file.good + file.refused, file.refused)
    named = [json.loads(line) for line in Path(report["refused_rows"]).read_text(encoding="utf-8").splitlines()]
    assert {Path(row["path"]).name for row in named} == ({file.name} if file.refused else set())


def test_all_awkward_files_in_one_folder_are_accounted_for_together(tmp_path: Path, config: Config, tokenizer: Any):
    files = [file for file in AWKWARD if not file.error and (file.encoding, file.delimiter) == ("auto", "auto")]
    for side in ("train", "held_out"):
        (tmp_path / side).mkdir()
    for place, file in enumerate(files):
        (tmp_path / ("held_out" if place % 5 == 0 else "train") / file.name).write_bytes(file.content)
    cfg = config(tmp_path / "train", val_path=str(tmp_path / "held_out"), on_bad_row="skip", contamination="drop")
    report = check_account(load_examples(cfg, tokenizer))
    assert report["read"] == sum(file.good + file.refused for file in files)
    assert report["refused"] == sum(file.refused for file in files)
    named = [json.loads(line) for line in Path(report["refused_rows"]).read_text(encoding="utf-8").splitlines()]
    found = Counter(Path(row["path"]).name for row in named)
    assert found == {file.name: file.refused for file in files if file.refused}


def test_bad_row_ends_the_run_unless_the_config_says_skip(tmp_path: Path, config: Config, tokenizer: Any):
    (tmp_path / "a.jsonl").write_text(lines(*SOUND) + "{\n")
    with pytest.raises(DataError) as refusal:
        load_examples(config(tmp_path / "a.jsonl"), tokenizer)
    assert "a.jsonl:9 is not JSON" in str(refusal.value)


@pytest.mark.skipif(not FOLDERS_AT_HAND, reason=f"needs the shared rows at {SHARED_DATA}")
@pytest.mark.parametrize("folder", FOLDERS_AT_HAND)
def test_every_row_of_a_file_at_hand_is_accounted_for(folder: str, config: Config, tokenizer: Any):
    files = sorted(path for path in (SHARED_DATA / folder).rglob("*") if path.is_file())
    assert files
    for path in files:
        cfg = config(path, on_bad_row="skip", contamination="drop", max_seq_len=8192)
        if find_suffix(path) and folder in FOLDERS_WITH_TRAINING_ROWS:
            report = check_account(load_examples(cfg, tokenizer))
            assert (report["read"], report["refused"]) == (rows_in(path), 0), path
            continue
        with pytest.raises(DataError) as refusal:
            load_examples(cfg, tokenizer)
        n = rows_in(path) if find_suffix(path) else 0
        expected = f"no row is left to train on: {n:,} read, {n:,} refused, see " if n else "unknown kind of file"
        if folder == "humaneval" and n:  # 8 of its 164 problems are held out by data.split, the others are for testing
            expected = "no row is left to train on: 156 read, 156 leak"
        assert expected in str(refusal.value), path


def rows_in(path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        document = json.loads(text)
        return len(document) if isinstance(document, list) else 1
    return sum(1 for line in text.split("\n") if line.strip()) - (path.suffix == ".csv")
