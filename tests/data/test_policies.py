"""Policies across rows: repeated rows, rows of the held-out set, rows with nothing to learn; each counted and said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.run import RunConfig
from sftplay.data.pipeline import load_examples
from sftplay.data.row_outcomes import report_table
from sftplay.errors import DataError

Config = Callable[..., RunConfig]
Write = Callable[..., Path]


def row(question: str, answer: str = "A quiet hill.") -> dict[str, str]:
    return {"prompt": question, "completion": answer}


REPEATED = [
    row("Why salt?"),
    row("Why stones?"),
    row("Why salt?"),  # equal to the first
    row("  why SALT? "),  # equal but for white space and case
    row("Why salt?", "Another answer."),  # another answer to the first
    row("Why ﬁsh?"),
    row("Why fish?"),  # equal but for Unicode's spelling: the ligature is fi
]


def test_repeated_rows_are_counted_and_kept_or_on_demand_left_out(tokenizer: Any, config: Config, write_rows: Write):
    examples = load_examples(config(write_rows(REPEATED), split=0), tokenizer)
    assert len(examples.train) == len(REPEATED)
    report = examples.report
    assert (report["duplicates"], report["near_duplicates"], report["prompts_with_several_answers"]) == (1, 2, 1)
    assert "3 records repeat an earlier one, 2 of them up to white space or case; kept" in report_table(report)

    examples = load_examples(config(write_rows(REPEATED), split=0, duplicates="drop"), tokenizer)
    assert examples.train["row"][:] == [0, 1, 4, 5]
    assert examples.report["dropped"] == {"duplicate": 3}
    assert examples.report["read"] == examples.report["kept"] + 3
    assert "left out" in report_table(examples.report)


def test_row_of_the_validation_file_in_training_ends_the_run_with_both_places(
    tokenizer: Any, config: Config, write_rows: Write
):
    train, val = write_rows([row("One?"), row("TWO?  ")]), write_rows([row("Three?"), row("Two?")], "val.jsonl")
    with pytest.raises(DataError) as refusal:
        load_examples(config(train, val_path=str(val)), tokenizer)
    assert f"{train}:2 is held out as well, at {val}:2" in str(refusal.value)
    assert "data.contamination: drop" in str(refusal.value)


def test_row_of_the_test_file_in_training_is_a_leak_too(tokenizer: Any, config: Config, write_rows: Write):
    train, test = write_rows([row("One?"), row("Two?"), row("Three?")]), write_rows([row("two?")], "test.jsonl")
    cfg = config(train, test_path=str(test), split=0)
    with pytest.raises(DataError, match=r"is held out as well, at .*test\.jsonl:1"):
        load_examples(cfg, tokenizer)
    examples = load_examples(config(train, test_path=str(test), split=0, contamination="drop"), tokenizer)
    assert examples.train["row"][:] == [0, 2]
    assert examples.report["dropped"] == {"leak": 1}
    assert examples.held_out is None


def test_row_whose_answer_is_cut_away_ends_the_run_unless_bad_rows_are_skipped_and_others_are_left(
    tokenizer: Any, config: Config, write_rows: Write
):
    path = write_rows([row("One?"), row("boat " * 400, "no")])
    with pytest.raises(DataError, match=r"train\.jsonl:2 has nothing to learn in its first 128 of 423 tokens"):
        load_examples(config(path, split=0), tokenizer)
    report = load_examples(config(path, split=0, on_bad_row="skip"), tokenizer).report
    assert report["dropped"] == {"no_trainable_token_after_cut": 1}
    with pytest.raises(DataError, match="no row is left to train on: 1 read, 1 no trainable token after cut"):
        load_examples(config(write_rows([row("boat " * 400, "no")]), split=0, on_bad_row="skip"), tokenizer)
    with pytest.raises(DataError, match="no row is left to train on: 1 read, all held out") as refusal:
        load_examples(config(write_rows([row("One?")], "one.jsonl"), split=0.99), tokenizer)
    assert refusal.value.fix.startswith("write data.split: 0, or")
    with pytest.raises(DataError, match="no row is left to train on: 0 read"):
        load_examples(config(write_rows([], "empty.jsonl")), tokenizer)


def test_remedies_for_an_empty_training_set_are_those_that_would_fill_it(
    tokenizer: Any, config: Config, write_rows: Write
):
    odd, train = write_rows([{"Q": "One?", "A": "1"}], "odd.jsonl"), write_rows([row("One?")])
    with pytest.raises(DataError, match="1 read, 1 refused") as refusal:
        load_examples(config(odd, on_bad_row="skip"), tokenizer)
    assert "data.columns" in refusal.value.fix
    assert "max_seq_len" not in refusal.value.fix
    with pytest.raises(DataError, match="1 read, 1 leak") as refusal:
        load_examples(
            config(train, val_path=str(write_rows([row("One?")], "v.jsonl")), contamination="drop"), tokenizer
        )
    assert refusal.value.fix.startswith("name other rows to train on")


def test_data_in_which_no_end_of_turn_is_learned_is_refused(tokenizer: Any, config: Config, write_rows: Write):
    path = write_rows([row(f"Why {n}?", "salt " * 400) for n in range(3)])
    with pytest.raises(DataError, match="the end-of-turn token is in the loss of none of 3 examples"):
        load_examples(config(path, split=0), tokenizer)
    with pytest.raises(DataError, match="no row is left to train on: 3 read, 3 too long"):
        load_examples(config(path, split=0, too_long="drop"), tokenizer)


def test_columns_that_no_layout_reads_are_named_up_to_a_hundred(tokenizer: Any, config: Config, write_rows: Write):
    rows = [row("One?") | {"score": 3}, row("Two?") | {"score": 1, "to{pi}c\x1b": "x"}]
    report = load_examples(config(write_rows(rows), split=0), tokenizer).report
    assert report["unused_columns"] == {"score": 2, "to{pi}c\x1b": 1}
    assert r"'score' (2), 'to{pi}c\x1b' (1)" in report_table(report)

    rows = [row(f"{n}?") | {f"column {n}": 1} for n in range(300)]
    report = load_examples(config(write_rows(rows), split=0), tokenizer).report
    assert len(report["unused_columns"]) == 101
    assert report["unused_columns"]["(others)"] == 200


def test_plain_texts_need_no_template_and_have_no_prompt_to_answer(tokenizer: Any, config: Config, write_rows: Write):
    path = write_rows([{"text": f"The old boat {n} carries salt."} for n in range(40)])
    examples = load_examples(config(path, split=0.3, template="auto"), tokenizer)
    assert tokenizer.chat_template is None
    assert examples.held_out is not None
    assert examples.held_out_chats == []
    assert examples.report["trainable_token_share"] == 1.0
    assert examples.report["eos_in_loss_share"] == 1.0


def test_every_example_knows_its_file_and_line(tokenizer: Any, config: Config, tmp_path: Path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(row("One?")) + "\n\n" + json.dumps(row("Two?")) + "\n")
    (folder / "b.csv").write_text("prompt,completion\nThree?,Yes.\n")
    (folder / "notes.md").write_text("not data")
    examples = load_examples(config(folder, split=0), tokenizer)
    places = [examples.find_source("train", index) for index in range(3)]
    assert places == [f"{folder}/a.jsonl:1", f"{folder}/a.jsonl:3", f"{folder}/b.csv:2"]
    assert "files of other kinds are left alone: notes.md" in report_table(examples.report)


def test_same_prompt_with_another_answer_is_no_leak(tokenizer: Any, config: Config, write_rows: Write):
    train, val = write_rows([row("One?"), row("Two?")]), write_rows([row("Two?", "Other.")], "val.jsonl")
    assert len(load_examples(config(train, val_path=str(val)), tokenizer).train) == 2


def test_system_prompt_of_the_config_opens_every_chat_without_one(tokenizer: Any, config: Config, write_rows: Write):
    with_system = {
        "messages": [
            {"role": "system", "content": "Rhyme."},
            *({"role": r, "content": r} for r in ("user", "assistant")),
        ]
    }
    examples = load_examples(config(write_rows([row("One?"), with_system]), split=0, system="Be brief."), tokenizer)
    texts = [tokenizer.decode(ids) for ids in examples.train["input_ids"]]
    assert texts[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?")
    assert texts[1].startswith("<|im_start|>system\nRhyme.<|im_end|>")
    assert "Be brief." not in texts[1]
    assert examples.report["with_system"] == 1
