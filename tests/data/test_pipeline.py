"""From files to token rows: every record accounted for, tokenised once, the same split whatever the order."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import HANG_S

from sftplay.config.run import RunConfig
from sftplay.data.pipeline import load_examples, load_held_out
from sftplay.data.render.render import Renderer
from sftplay.data.tokenize import Preparation
from sftplay.errors import DataError

Config = Callable[..., RunConfig]
Write = Callable[..., Path]


def row(n: int, answer: str = "A quiet hill.") -> dict[str, str]:
    return {"prompt": f"Why is boat {n} green?", "completion": answer}


def assert_accounted(report: dict[str, Any], n_read: int) -> None:
    assert report["read"] == n_read
    for part in [report, *report["sources"].values()]:
        assert part["read"] == part["kept"] + part["cut"] + sum(part["dropped"].values()) + part["refused"]
    assert sum(source["read"] for source in report["sources"].values()) == n_read
    assert len(Path(report["refused_rows"]).read_text().splitlines()) == report["refused"]


def test_bad_rows_end_the_run_with_the_first_five_and_their_number(tokenizer: Any, config: Config, write_rows: Write):
    path = write_rows([row(0), *[{"x": n} for n in range(8)], row(1)])
    with pytest.raises(DataError) as refusal:
        load_examples(config(path), tokenizer)
    text = str(refusal.value)
    assert "8 rows cannot be trained on" in text
    assert [f"train.jsonl:{n} " in text for n in range(1, 11)] == [False, *[True] * 5, *[False] * 4]
    assert "and 3 more" in text
    assert "data.on_bad_row: skip" in text


def sides(examples: Any) -> tuple[set[str], set[str]]:
    held_out = {chat.prompt[0].content for chat in examples.held_out_chats}
    texts = [examples.renderer.tokenizer.decode(ids) for ids in examples.train["input_ids"]]
    return {text.split("user\n")[1].split("<|im_end|>")[0] for text in texts}, held_out


def test_split_does_not_change_with_the_order_of_rows_or_with_duplicates(
    tokenizer: Any, config: Config, write_rows: Write
):
    rows = [row(n) for n in range(60)]
    first = sides(load_examples(config(write_rows(rows), split=0.25), tokenizer))
    shuffled = random.Random(0).sample([*rows, *rows[:30], *[row(n, "Another.") for n in range(60)]], 150)
    second = sides(load_examples(config(write_rows(shuffled, "b.jsonl"), split=0.25), tokenizer))
    assert first == second
    assert first[0].isdisjoint(first[1])
    assert len(first[1]) in range(6, 25)


def test_five_in_a_hundred_are_held_out_unless_said_otherwise_each_with_its_chat(
    tokenizer: Any, config: Config, write_rows: Write
):
    examples = load_examples(config(write_rows([row(n) for n in range(400)])), tokenizer)
    assert 8 <= len(examples.held_out) <= 33  # 20 +- three standard deviations of a binomial
    for found, chat in zip(examples.held_out, examples.held_out_chats, strict=True):
        assert chat.source.line == found["row"] + 1
        assert found["input_ids"] == examples.renderer.render([chat])[0].input_ids


def test_validation_file_is_held_out_whole_and_a_test_file_alone(tokenizer: Any, config: Config, write_rows: Write):
    train, val = write_rows([row(n) for n in range(20)]), write_rows([row(n) for n in range(90, 95)], "val.jsonl")
    examples = load_examples(config(train, val_path=str(val)), tokenizer)
    assert (len(examples.train), len(examples.held_out)) == (20, 5)
    assert {side: source["path"] for side, source in examples.report["sources"].items()} == {
        "train": str(train),
        "held_out": str(val),
    }
    assert_accounted(examples.report, 25)
    alone = load_held_out(config("absent.jsonl"), tokenizer, path=str(val))
    assert (len(alone.train), alone.held_out[:]) == (0, examples.held_out[:])


@pytest.mark.parametrize("has_val_file", [False, True], ids=["split", "validation file"])
def test_side_that_is_measured_is_prepared_alone_and_is_the_same(
    tokenizer: Any, config: Config, write_rows: Write, monkeypatch: Any, tmp_path: Path, has_val_file: bool
):
    train = write_rows([{"x": 1}, *[row(n) for n in range(60)], row(2), row(90)])
    val = str(write_rows([{"x": 1}, *[row(n) for n in range(80, 90)], row(85)], "val.jsonl")) if has_val_file else None
    options = {"val_path": val, "split": None if val else 0.25, "on_bad_row": "skip", "duplicates": "drop"}
    whole = load_examples(config(train, **options), tokenizer)
    n_rendered, render = [0], Renderer.render

    def render_and_count(self: Renderer, records: Any, *more: Any) -> Any:
        n_rendered[0] += len(records)
        return render(self, records, *more)

    monkeypatch.setattr(Renderer, "render", render_and_count)
    cfg = config(train, **options, processed_dir=str(tmp_path / "cold"))
    alone = load_examples(cfg, tokenizer, checked=whole.report["files"])
    assert n_rendered[0] == len(alone.held_out) + alone.report["dropped"].get("duplicate", 0)
    same = alone.report["sources"]["held_out"] | {"refused_rows": whole.report["refused_rows"]}
    assert same == whole.report["sources"]["held_out"]
    assert alone.held_out[:] == whole.held_out[:]
    assert (alone.held_out_chats, len(alone.train)) == (whole.held_out_chats, 0)
    assert [alone.find_source("held_out", n) for n in range(3)] == [whole.find_source("held_out", n) for n in range(3)]
    # The rows that training has prepared already are taken as they lie there.
    warm = load_examples(config(train, **options), tokenizer, checked=whole.report["files"])
    assert (warm.report, warm.train[:]) == (whole.report, whole.train[:])


def test_file_that_was_not_checked_for_leaks_is_checked_before_it_is_measured_on(
    tokenizer: Any, config: Config, write_rows: Write
):
    train, val = write_rows([row(n) for n in range(20)]), write_rows([row(90)], "val.jsonl")
    checked = load_examples(config(train, val_path=str(val)), tokenizer).report["files"]
    write_rows([row(90), row(3)], "val.jsonl")
    with pytest.raises(DataError, match=r"train\.jsonl:4 is held out as well, at .*val\.jsonl:2"):
        load_examples(config(train, val_path=str(val)), tokenizer, checked=checked)


def test_whatever_changes_the_tokens_makes_a_new_cache_entry(tokenizer: Any, config: Config, write_rows: Write):
    path = write_rows([row(n) for n in range(8)])
    prints = [load_examples(config(path, split=0), tokenizer).report["fingerprint"]]
    changed = [{"max_seq_len": 64}, {"split": 0.5}, {"format": "prompt_completion"}, {"too_long": "drop"}]
    changed += [
        {"duplicates": "drop"},
        {"contamination": "drop"},
        {"system": "Be brief."},
        {"columns": {"prompt": "prompt"}},
    ]
    changed += [{"encoding": "cp1252"}, {"delimiter": ";"}, {"test_path": str(write_rows([row(90)], "test.jsonl"))}]
    for options in [*changed, {"on_bad_row": "skip"}]:
        prints.append(load_examples(config(path, **{"split": 0, **options}), tokenizer).report["fingerprint"])
    other = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    other += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    prints.append(load_examples(config(path, split=0), tokenizer, renderer_template=other).report["fingerprint"])
    tokenizer.add_tokens(["boat"])
    prints.append(load_examples(config(path, split=0), tokenizer).report["fingerprint"])
    path.write_text(path.read_text().replace("boat 7", "boat 9"))
    prints.append(load_examples(config(path, split=0), tokenizer).report["fingerprint"])
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize("name", ["train.arrow", "held_out_chats.jsonl", "report.json", "SEAL.json"])
def test_damaged_cache_is_noticed_and_made_again(tokenizer: Any, config: Config, write_rows: Write, name: str):
    cfg = config(write_rows([row(n) for n in range(60)]), split=0.25)
    first = load_examples(cfg, tokenizer)
    ids = first.train["input_ids"][:]
    file = Path(first.report["refused_rows"]).with_name(name)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.unlink()
    file.write_bytes(content)
    assert load_examples(cfg, tokenizer).train["input_ids"][:] == ids


def _load_in_process(cfg: RunConfig, saved: str, start: Any, answers: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    run = Preparation.run
    ran = []

    def run_slowly(*of: Any, **how: Any) -> None:
        ran.append(1)
        time.sleep(0.5)
        run(*of, **how)

    Preparation.run = run_slowly  # type: ignore[method-assign]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved)
    start.wait()
    report = load_examples(cfg, tokenizer).report
    answers.put((len(ran), report))


def test_of_two_processes_one_tokenises_and_both_get_the_rows(
    tokenizer: Any, config: Config, write_rows: Write, tmp_path: Path
):
    cfg = config(write_rows([row(n) for n in range(60)]), split=0.25)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(2), context.Queue()
    given = (cfg, str(tmp_path / "tokenizer"), start, answers)
    workers = [context.Process(target=_load_in_process, args=given) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [answers.get(timeout=HANG_S) for _ in workers]
    for worker in workers:
        worker.join()
    assert sorted(count for count, _ in found) == [0, 1]
    assert found[0][1] == found[1][1]
