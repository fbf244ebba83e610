"""A plan takes the rows as long as they are, once they have been prepared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import RowLengths, planned_tokens
from sftplay.plan.sizing import size_run
from sftplay.runs.inputs import known_lengths

ROOT = Path(__file__).resolve().parents[2]
BASE = load_config(ROOT / "configs/run_lora.yaml")
SHORT = RowLengths(longest=128, mean=90.0, count=1000)


def gpu(gib: int) -> Machine:
    card = Gpu(0, "NVIDIA H200", gib << 30, gib << 30, (9, 0))
    return Machine(
        gpus=(card,), gpu_reason="", ram_bytes=1 << 34, cores=8, python="3", system="Linux", libraries={}
    )  # fmt: skip


def test_short_rows_give_larger_micro_batches_than_rows_of_full_length():
    machine, shape = gpu(12), find_shape("Qwen/Qwen2.5-1.5B-Instruct")
    cfg = BASE.with_values({"model.name": "Qwen/Qwen2.5-1.5B-Instruct", "model.max_seq_len": 4096}, "test")
    full = size_run(cfg, machine, shape=shape)
    known = size_run(cfg, machine, shape=shape, lengths=SHORT)
    assert known.cfg.train.batch_size > 4 * full.cfg.train.batch_size
    assert known.forecast.size.seq == 128
    assert known.forecast.verdict == "fits"
    assert known.cfg.model.max_seq_len == 4096


@pytest.mark.parametrize(
    ("key", "value"), [("train.packing", True), ("train.batching", "tokens"), ("train.packing", "auto")]
)
def test_what_fills_rows_or_batches_up_to_the_limit_is_planned_with_the_limit(key, value):
    cfg = BASE.with_values({"train.packing": False, key: value}, "test")
    assert planned_tokens(cfg, SHORT) == cfg.model.max_seq_len


def test_rows_that_were_prepared_are_known_until_their_file_or_a_setting_changes(
    tmp_path, write_config, chat_rows, capsys
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(chat_rows.read_text())
    config = write_config(data__train_path=str(rows), data__val_path=None)
    assert known_lengths(load_config(config)) is None
    assert main(["process", "--config", str(config), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    known = known_lengths(load_config(config))
    assert (known.longest, known.count) == (report["longest_tokens"], report["sources"]["train"]["examples"])
    assert known.mean == pytest.approx(report["sources"]["train"]["tokens"] / known.count)
    assert main(["plan", "--config", str(config)]) == 0
    assert f"rows of {known.longest} tokens, the longest of these files" in capsys.readouterr().out
    (tmp_path / "terms.txt").write_text("aorta")
    others = (["model.max_seq_len=64"], ["task_mode=kto"], [f"tuning.new_tokens.path={tmp_path}/terms.txt"])
    assert [known_lengths(load_config(config, other)) for other in others] == [None, None, None]
    rows.write_text(rows.read_text() + rows.read_text().splitlines()[0] + "\n")
    assert known_lengths(load_config(config)) is None


def test_a_damaged_note_of_lengths_means_that_nothing_is_known(tmp_path, write_config, capsys):
    config = write_config()
    assert main(["process", "--config", str(config)]) == 0
    (note,) = (tmp_path / "processed" / "lengths").iterdir()
    for text in ("[]", "{", '{"longest": "x", "mean": 1, "count": 1}', '{"longest": 0, "mean": 1, "count": 1}'):
        note.write_text(text)
        assert known_lengths(load_config(config)) is None
