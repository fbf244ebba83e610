"""`process`, `inspect` and `render` show pairs: the gate, and both sides with their learned tokens."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair_files import random_pairs, write_pairs

from sftplay.commands.data import inspect, process, render
from sftplay.errors import DataError
from sftplay.machine.probe import probe
from sftplay.runs.inputs import load_checked
from sftplay.runs.new_config import draft_config

Run = Callable[..., str]


@pytest.fixture
def run(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call a verb on rows, and return what it prints."""

    def call(verb: Any, rows: list[dict[str, Any]], *overrides: str, **options: Any) -> str:
        config = tmp_path / "run.yaml"
        data = {
            "train_path": str(write_pairs(tmp_path / "pairs.jsonl", rows)),
            "processed_dir": str(tmp_path / "cache"),
        }
        tree = {"task_mode": "dpo", "model": {"name": str(tiny_llama), "max_seq_len": 256}, "data": data}
        config.write_text(json.dumps(tree))
        args = {"config": str(config), "overrides": list(overrides), "json": False, "n": 2, "out": None}
        assert verb(Namespace(**args | options)) == 0
        return capsys.readouterr().out

    return call


ROWS = [{"prompt": "Why salt?", "chosen": "It keeps.", "rejected": "No idea."}, *random_pairs(30, seed=1, longer=1.0)]


def test_inspect_shows_the_gate_and_both_sides_behind_the_prompt_they_share(run: Run):
    shown = run(inspect, ROWS, "data.split=0")
    assert "31 pairs; 0 with equal sides" in shown
    assert "length alone gets 0.9" in shown
    head, _, rest = shown.partition("-- prompt")
    assert "Why salt?" not in head
    prompt, _, sides = rest.partition("-- chosen")
    chosen, _, rejected = sides.partition("-- rejected")
    assert "Why salt?" in prompt
    assert "\u27e6" not in prompt
    assert "\u27e6It keeps.<|im_end|>\u27e7" in chosen
    assert "\u27e6No idea.<|im_end|>\u27e7" in rejected


def test_inspect_gives_agents_the_tokens_and_the_text_of_each_side(run: Run):
    document = json.loads(run(inspect, ROWS, "data.split=0", json=True, n=1).splitlines()[-1])
    (row,) = document["rows"]
    assert row["sides"] == {
        "prompt": "<|im_start|>user\nWhy salt?<|im_end|>\n<|im_start|>assistant\n",
        "chosen": "It keeps.<|im_end|>",
        "rejected": "No idea.<|im_end|>",
    }
    assert row["text"] == "".join(row["sides"].values())
    assert len(row["input_ids"]) == len(row["labels"])
    assert document["report"]["preference"]["pairs"] == 31


def test_process_says_where_each_row_went_for_every_task_of_pairs(run: Run):
    assert "31 read = 31 kept" in run(process, ROWS, "task_mode=reward_model")
    assert "62 answers" in run(process, ROWS, "task_mode=kto", "data.split=0")
    assert json.loads(run(process, ROWS, json=True).splitlines()[-1])["preference"]["swapped"] == 0


def test_render_writes_every_pair_with_its_sides(run: Run, tmp_path: Path):
    run(render, ROWS, out=str(tmp_path / "rows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sorted(row["row"] for row in rows) == list(range(31))
    assert {tuple(row["sides"]) for row in rows} == {("prompt", "chosen", "rejected")}
    assert "-- rejected\nNo idea.<|im_end|>" in run(render, ROWS, "data.split=0", n=1)


def test_answers_with_verdicts_are_shown_with_theirs(run: Run):
    rows = [{"prompt": f"Why {n}?", "completion": f"Since {n}.", "label": n % 2 == 0} for n in range(4)]
    shown = run(inspect, rows, "task_mode=kto", "data.split=0", n=2)
    assert "-- wanted" in shown
    assert "-- mismatched" in shown
    assert "2 wanted and 2 unwanted answers" in shown


def test_answer_to_another_prompt_is_shown_as_read_and_not_learned(run: Run, tmp_path: Path):
    rows = [{"prompt": f"Why {n}?", "completion": f"Since {n}.", "label": n % 2 == 0} for n in range(4)]
    shown = run(inspect, rows, "task_mode=kto", "data.split=0", n=4)
    for part in shown.split("-- mismatched")[1:]:
        assert "\u27e6" not in part.split("-- wanted")[0].split("-- not wanted")[0]
    run(render, rows, "task_mode=kto", out=str(tmp_path / "rows.jsonl"))
    written = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert sorted(row["learned"] for row in written) == [[f"Since {n}.<|im_end|>"] for n in range(4)]


def test_file_without_pairs_is_refused_before_anything_is_started(run: Run, tmp_path: Path):
    with pytest.raises(DataError, match=r"(?s)none of its first 2 rows can be read.*has no 'chosen' side"):
        run(process, [{"prompt": "Why?", "completion": "So."}] * 2)
    with pytest.raises(DataError, match="neither an answer with a verdict nor a pair"):
        load_checked(str(tmp_path / "run.yaml"), ["task_mode=kto"])


def test_init_writes_a_config_for_pairs(tiny_llama: Path, tmp_path: Path):
    path = str(write_pairs(tmp_path / "pairs.jsonl", ROWS))
    asked = [f"model.name={tiny_llama}"]
    draft = draft_config(path, [*asked, "task_mode=dpo"], machine=probe(), out="run.yaml")
    assert draft.n_rows == 31
    assert draft.values["task_mode"][0] == "dpo"
    assert "data.columns" not in draft.values
    assert draft_config(path, asked, machine=probe(), out="run.yaml").values["task_mode"][0] == "dpo"


def test_file_of_another_task_is_refused_with_the_remedy_of_its_rows(run: Run):
    answers = [{"prompt": f"Why {n}?", "completion": "Since.", "label": True} for n in range(3)]
    with pytest.raises(DataError, match="none of its first 3 rows can be read") as refusal:
        run(inspect, answers)
    assert refusal.value.fix == "write task_mode: kto, or give pairs"
