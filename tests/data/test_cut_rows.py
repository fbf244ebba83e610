"""Rows that are cut in masses: a warning with the length that would keep them, a refusal where most is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.data.pipeline import load_examples
from sftplay.data.row_outcomes import report_table
from sftplay.errors import DataError
from sftplay.model.source import TINY


@pytest.fixture
def written(tmp_path: Path, write_rows: Any) -> Any:
    """`written(words of each answer, options)`: the config of a file with such rows."""

    def write(words: list[int], **data: str) -> RunConfig:
        path = write_rows([{"prompt": f"{n}?", "completion": "salt " * n_words} for n, n_words in enumerate(words)])
        options = "".join(f"  {key}: {value}\n" for key, value in data.items())
        (tmp_path / "run.yaml").write_text(
            f"model: {{name: x, max_seq_len: 64}}\ndata:\n  train_path: {path}\n  template: chatml\n  split: 0\n"
            f"  processed_dir: {tmp_path}/processed\n{options}"
        )
        return load_config(tmp_path / "run.yaml")

    return write


def test_rows_cut_in_masses_are_a_warning_with_the_length_that_keeps_them(written, tokenizer):
    report = load_examples(written([*[60] * 24, 5]), tokenizer).report
    (warning,) = report["warnings"]
    longest, enough = report["longest_tokens"], report["tokens_that_keep_99_percent"]
    assert 0 < enough - longest < 8
    assert "24 of 25 rows are cut at 64 tokens" in warning
    assert f"the longest has {longest}; model.max_seq_len: {enough} keeps 99 % of them whole" in warning
    assert f"loses {report['lost_to_cut_share']:.0%} of what they teach" in warning
    assert f"warning        {warning}" in report_table(report)


def test_a_cut_that_loses_next_to_nothing_is_not_said_to_lose_0_percent(written, tokenizer):
    report = load_examples(written([*[30] * 40, 41]), tokenizer).report
    assert (report["cut"], report["longest_tokens"]) == (1, 66)
    assert 0 < report["lost_to_cut_share"] < 0.005
    assert "1 of 41 rows are cut at 64 tokens, which loses less than 1% of what they teach" in report["warnings"][0]
    report = load_examples(written([*[30] * 40, 40]), tokenizer).report  # the last token is a line break, not learned
    assert (report["cut"], report["longest_tokens"], report["lost_to_cut_share"]) == (1, 65, 0)
    assert report["warnings"] == []


def test_a_row_of_which_only_the_beginning_was_tokenised_is_as_long_as_all_of_it(written, tokenizer):
    """1,000,000 characters and 64 for each token that can be used are read of it; the rest is reckoned."""
    report = load_examples(written([*[5] * 40, 600_000], too_long="truncate"), tokenizer).report
    assert report["cut"] == 1
    assert report["longest_tokens"] == pytest.approx(600_000, rel=0.01)
    assert report["longest_tokens"] % 1000 == 0


def test_rows_that_lose_most_of_their_answers_are_refused_with_the_length_to_write(written, tokenizer):
    cfg = written([*[5] * 20, *[300] * 20])
    for _ in range(2):  # the second time the rows come from the cache
        with pytest.raises(DataError, match=r"\d\d% of the tokens to learn lie behind the cut at 64 tokens") as refusal:
            load_examples(cfg, tokenizer)
        assert "write model.max_seq_len: 3" in refusal.value.fix
        assert "data.too_long: drop, or truncate where the cut is meant" in refusal.value.fix


def test_the_length_to_write_is_none_beyond_the_positions_of_the_model(written, tokenizer, tmp_path):
    cfg, name = written([*[5] * 10, *[6000] * 20]), str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 2048}))
    for now, fix in (
        (64, f"write model.max_seq_len: 2048, all the positions that {name} has (99 % of the rows need 6032); or"),
        (2048, f"shorten or split the rows: {name} has 2048 positions, and 99 % of the rows need 6032; or"),
    ):
        model = cfg.model.model_copy(update={"name": name, "max_seq_len": now})
        cfg = cfg.model_copy(update={"model": model})
        with pytest.raises(DataError, match=f"behind the cut at {now:,}") as refusal:
            load_examples(cfg, tokenizer)
        assert refusal.value.fix == f"{fix} data.too_long: drop, or truncate where the cut is meant"


def test_rows_of_which_none_has_its_end_are_refused_with_the_length_of_them_and_no_number_to_write(written, tokenizer):
    with pytest.raises(DataError, match="all are cut at 64 tokens; 99 % have up to 6,032") as refusal:
        load_examples(written([6000] * 20), tokenizer)
    assert refusal.value.fix.startswith("raise model.max_seq_len (")


def test_who_writes_truncate_down_may_lose_them_and_rows_left_out_lose_nothing(written, tokenizer):
    report = load_examples(written([*[5] * 20, *[300] * 20], too_long="truncate"), tokenizer).report
    assert report["lost_to_cut_share"] > 0.5
    assert (report["cut"], len(report["warnings"])) == (20, 1)
    report = load_examples(written([*[5] * 20, *[300] * 20], too_long="drop"), tokenizer).report
    assert (report["dropped"], report["lost_to_cut_share"]) == ({"too_long": 20}, 0.0)


@pytest.mark.parametrize(
    ("rows", "options", "said", "unsaid"),
    [
        ([{"a": 1}], {}, "name its columns with data.columns", "max_seq_len"),
        ([{"prompt": "salt " * 90, "completion": "a"}], {}, "raise model.max_seq_len", "on_bad_row"),
        ([{"prompt": "a", "completion": "salt " * 90}], {"too_long": "error"}, "too_long: truncate", "on_bad_row"),
        ([{"prompt": "b", "completion": 1}], {}, "correct the row", "max_seq_len"),
    ],
)
def test_the_remedy_of_a_bad_row_fits_its_cause(tmp_path, config, tokenizer, write_rows, rows, options, said, unsaid):
    cfg = config(write_rows([*rows, {"prompt": "a", "completion": "b"}]), max_seq_len=64, split=0, **options)
    with pytest.raises(DataError) as refusal:
        load_examples(cfg, tokenizer)
    assert said in refusal.value.fix
    assert unsaid not in refusal.value.fix
    assert "leaks" not in refusal.value.fix
