"""What `process`, `inspect` and `render` show and write, compared with transformers' own rendering of the same rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sftplay import cli
from sftplay.launch.command import cache_environment, offline_environment, quiet_environment

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Runs a verb on a small run's config; keyword `a__b=c` sets the key a.b: (exit code, output, error output)."""
    for key in quiet_environment() | cache_environment() | offline_environment():
        monkeypatch.setenv(key, "1")  # so that what the verbs set is undone

    def run(verb: str, *words: object, **changes: Any) -> tuple[int, str, str]:
        code = cli.main([verb, "--config", str(write_config(**changes)), *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


def chats_in(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text().splitlines()]


def chat(question: str, answer: str, *before: tuple[str, str]) -> dict[str, Any]:
    turns = [*before, ("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def reference(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Ids and labels by transformers: the template's own generation blocks say what the assistant wrote."""
    made = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = made["input_ids"], made["assistant_masks"]
    return ids, [token if learned else -100 for token, learned in zip(ids, mask, strict=True)]


def test_inspect_as_json_gives_rows_spread_over_the_file_with_their_place_and_mask(
    call: Call, chat_rows: Path, tokenizer: Any
):
    code, out, _ = call("inspect", "--json", "--n", 4)
    result = json.loads(out)
    chats = chats_in(chat_rows)
    assert code == 0
    assert result["report"]["read"] == 82
    assert [row["row"] for row in result["rows"]] == [0, 17, 35, 52]
    for row in result["rows"]:
        assert list(row) == ["row", "source", "input_ids", "labels", "text"]
        assert row["source"] == f"{chat_rows}:{row['row'] + 1}"
        assert (row["input_ids"], row["labels"]) == reference(tokenizer, chats[row["row"]])
        assert row["text"] == tokenizer.apply_chat_template(chats[row["row"]], tokenize=False)


def test_inspect_shows_the_report_and_what_is_learned_between_marks(call: Call, tmp_path: Path):
    rows = [chat("why", "old \x1b[31m boats"), chat("the river", "walks", ("user", "a"), ("assistant", "b"))]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    code, out, _ = call("inspect", "--n", 9, data__train_path=path)
    assert code == 0
    assert out.index("data report") < out.index("what stands between ⟦ and ⟧ is learned")
    assert f"\nrow 0  {path}:1  " in out
    assert "<|im_start|>assistant\n⟦old \\x1b[31m boats<|im_end|>⟧\n" in out
    assert "<|im_start|>assistant\n⟦b<|im_end|>⟧\n<|im_start|>user\nthe river<|im_end|>\n" in out
    assert "\x1b" not in out
    code, out, _ = call("inspect", "--n", 0, data__train_path=path)
    assert code == 0
    assert "data report" in out
    assert "row 0" not in out


BAD = [*["{broken"] * 3, '["a list"]', *[{"nothing": "known"}] * 40]


@pytest.mark.parametrize("verb", ["inspect", "process", "render", "train"])
def test_a_file_whose_first_rows_are_all_unreadable_ends_with_4_naming_five(verb: str, call: Call, tmp_path: Path):
    path = write_rows(tmp_path / "bad.jsonl", BAD)
    code, out, err = call(verb, data__train_path=path)
    assert (code, out) == (4, "")
    assert f"{path}: none of its first 32 rows can be read" in err
    named = re.findall(r"^  (\S+:\d+) ", err, re.M)
    assert named == [f"{path}:{line}" for line in range(1, 6)]
    assert "fix: " in err
    assert not (tmp_path / "outputs").exists()


def test_pairs_in_fine_tuning_are_advised_to_the_task_that_learns_from_them(call: Call, tmp_path: Path):
    path = write_rows(
        tmp_path / "pairs.jsonl", [{"prompt": f"Why {n}?", "chosen": "So.", "rejected": "No."} for n in "ab"]
    )
    code, _, err = call("inspect", data__train_path=path)
    assert code == 4
    assert "fix: write task_mode: dpo" in err
    assert "data.columns: {completion: chosen}" in err
    code, out, err = call("inspect", "data.columns.completion=chosen", data__train_path=path, data__val_path=None)
    assert code == 0, err
    assert "⟦So.<|im_end|>⟧" in out


def test_render_shows_the_text_and_where_inference_would_ask(call: Call, chat_rows: Path, tokenizer: Any):
    code, out, _ = call("render", "--n", 1)
    messages = chats_in(chat_rows)[0]
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert code == 0
    assert f"\nrow 0  {chat_rows}:1  " in out
    assert f"\n{tokenizer.apply_chat_template(messages, tokenize=False)}" in out
    assert f"with the first {len(ids):,} tokens, which end in {json.dumps(prompt[-60:])}" in out


def test_render_writes_every_row_of_both_sides_once_and_never_over_a_file(
    call: Call, chat_rows: Path, held_out_rows: Path, tokenizer: Any, tmp_path: Path
):
    target = tmp_path / "new folder" / "rows.jsonl"
    code, out, _ = call("render", "--out", target)
    assert code == 0
    assert "82 rows in" in out
    rows = [json.loads(line) for line in target.read_text().split("\n") if line]
    chats = chats_in(chat_rows) + chats_in(held_out_rows)
    assert [row["split"] for row in rows] == ["train"] * 70 + ["held_out"] * 12
    assert [row["row"] for row in rows] == [*range(70), *range(12)]
    places = [f"{path}:{n + 1}" for path, count in ((chat_rows, 70), (held_out_rows, 12)) for n in range(count)]
    assert [row["source"] for row in rows] == places
    for row, messages in zip(rows, chats, strict=True):
        ids, labels = reference(tokenizer, messages)
        assert row["text"] == tokenizer.decode(ids)
        assert (row["n_tokens"], row["n_learned"]) == (len(ids), len(labels) - labels.count(-100))
        assert row["learned"] == [f"{messages[-1]['content']}<|im_end|>"]
    before = target.read_bytes()
    code, _, err = call("render", "--out", target)
    assert code == 2
    assert f"{target}: exists already" in err
    assert target.read_bytes() == before
    assert [path.name for path in target.parent.iterdir()] == ["rows.jsonl"]


def test_process_says_where_the_token_rows_lie_and_whether_they_were_there(call: Call, tmp_path: Path):
    code, out, err = call("process", "--json")
    report = json.loads(out)
    folder = tmp_path / "processed" / report["fingerprint"]
    assert code == 0
    assert folder.is_dir()
    assert f"[data] token rows written to {folder}" in err
    _, again, err = call("process", "--json")
    assert json.loads(again) == report
    assert f"[data] token rows found in {folder}" in err
    _, out, _ = call("process")
    assert f"token rows found in {folder}" in out
    assert f"data report      {report['read']} read = {report['kept']} kept" in out


@pytest.mark.contract
@pytest.mark.parametrize("count", ["-1", "two", "1.5", ""])
def test_a_number_of_rows_that_is_none_is_refused(count: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["inspect", "--config", "x.yaml", f"--n={count}"]) == 2
    assert f"not a number of rows: {count!r}" in capsys.readouterr().err


def test_the_blocks_of_a_mixture_are_shown_document_by_document(call: Call, tokenizer: Any, tmp_path: Path):
    texts = [f"Stone number {n}." for n in range(40)]
    documents, chats = tmp_path / "documents.jsonl", tmp_path / "chats.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chats.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": "stone"}) + "\n" for n in range(40)))
    changes = {
        "task_mode": "cpt_mixed", "data__train_path": None, "data__val_path": None, "data__split": 0,
        "datasets": [
            {"name": "domain", "path": str(documents), "type": "cpt", "weight": 0.5},
            {"name": "chat", "path": str(chats), "type": "chat", "weight": 0.5},
        ],
    }  # fmt: skip
    code, out, _ = call("inspect", "--json", "--n", 4, **changes)
    assert code == 0
    shown = json.loads(out[out.index("{") :])
    assert set(shown["report"]["sources"]) == {"domain", "chat"}
    assert {row["dataset"] for row in shown["rows"]} == {"domain", "chat"}
    for row in shown["rows"]:
        ids = [row["input_ids"][each["begin"] : each["end"]] for each in row["documents"]]
        assert list(chain(*ids)) == row["input_ids"]
        assert [each["begin"] for each in row["documents"]] == [n for n, at in enumerate(row["position_ids"]) if not at]
        if row["dataset"] == "domain":
            for each, tokens in zip(row["documents"][1:-1], ids[1:-1], strict=True):
                line = int(each["source"].rpartition(":")[2])
                assert tokenizer.decode(tokens) == texts[line - 1] + tokenizer.eos_token
    code, _, err = call("render", **changes)
    assert code == 2
    assert "blocks of documents, which no chat template writes" in err


@pytest.mark.contract
@pytest.mark.parametrize("verb", ["process", "inspect", "render"])
def test_a_verb_on_texts_refuses_puzzles_by_name(verb: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main([verb, "--config", str(ROOT / "configs" / "run_hrm_sudoku4.yaml")]) == 2
    assert "task_mode: task_mode hrm learns puzzles, which have neither a tokenizer" in capsys.readouterr().err
