"""Pairs as tokens: both sides after the prompt they share, cut alike, and every row accounted for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pair_files import accounted, learned, load_pairs, pair_config, random_pairs, sides
from transformers import AutoTokenizer

from sftplay.data import tokenize
from sftplay.data.layouts import LayoutOptions
from sftplay.data.records import Source
from sftplay.data.render.render import Renderer
from sftplay.errors import DataError
from sftplay.tasks.preference.load_pairs import load, pairs_table
from sftplay.tasks.preference.render_pairs import PairExample, PairOptions, PairOutcome, PairProcessor

END = "<|im_end|>"
TURN = {"role": "user", "content": "Why salt?"}
CHAT = [TURN, {"role": "assistant", "content": "It keeps."}, {"role": "user", "content": "And pepper?"}]


@pytest.fixture(scope="module")
def saved(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture
def tokenizer(tiny_llama: Path) -> Any:
    """A tokenizer that a test may change."""
    return AutoTokenizer.from_pretrained(tiny_llama)


def by_template(tokenizer: Any, prompt: list[dict[str, str]], answer: str) -> list[int]:
    """The tokens up to the answer's end token, as transformers writes them."""
    messages = [*prompt, {"role": "assistant", "content": answer}]
    ids = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    return ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)]


def test_sides_continue_the_prompt_that_generation_begins_with(saved: Any, tmp_path: Path):
    row = {"prompt": CHAT, "chosen": "It burns the tongue.", "rejected": "It"}
    pairs = load_pairs(tmp_path, [row], saved)
    (found,) = pairs.train
    prompt, chosen, rejected = sides(found)
    asked = saved.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert prompt == asked == pairs.renderer.prompt_ids(pairs.records("train")[0].prompt)
    assert prompt + chosen == by_template(saved, CHAT, row["chosen"])
    assert prompt + rejected == by_template(saved, CHAT, row["rejected"])
    assert learned(found, saved) == (row["chosen"] + END, row["rejected"] + END)
    assert found["labels"][: len(prompt)] == [-100] * len(prompt)
    assert (found["row"], found["index"]) == (0, 0)
    assert math.isnan(found["margin"])
    assert pairs.report["preference"]["prompts_unlike_generation"] == 0


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cn", "Co"]), min_size=1, max_size=30).filter(
    lambda text: bool(text.strip())
)


@pytest.fixture(scope="module")
def processor(saved: Any) -> PairProcessor:
    renderer = Renderer.prove(saved, saved.chat_template, samples=[])
    return PairProcessor(renderer, PairOptions(LayoutOptions(), 1024, "drop"))


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS, WORDS)
def test_split_of_any_texts_joins_to_the_two_whole_texts(
    saved: Any, processor: PairProcessor, prompt: str, chosen: str, rejected: str
):
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    (outcome,) = processor.process([(0, Source("pairs", 1), row)], 0.0)
    asked = [{"role": "user", "content": prompt}]
    both = [by_template(saved, asked, text) for text in (chosen, rejected)]
    if both[0] == both[1]:
        assert outcome.dropped == "equal_sides"
        return
    (example,) = outcome.examples
    assert isinstance(example, PairExample)
    assert isinstance(outcome, PairOutcome)
    ids, labels = (np.frombuffer(one, np.int32).tolist() for one in (example.ids, example.labels))
    n_prompt, cut = example.prompt_tokens, example.prompt_tokens + example.chosen_tokens
    assert [ids[:cut], ids[:n_prompt] + ids[cut:]] == both
    generated = saved.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert outcome.is_joined == (ids[: len(generated)] != generated)
    assert labels[:n_prompt] == [-100] * n_prompt
    assert n_prompt >= 1
    for begin, end in ((n_prompt, cut), (cut, len(ids))):  # nothing but a white space that the prompt ends with is lost
        assert labels[end - 1] == saved.eos_token_id
        assert saved.decode([one for one in labels[begin:end] if one != -100])
        assert all(label in (-100, one) for label, one in zip(labels[begin:end], ids[begin:end], strict=True))


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ("Yes", "Yes, it does."),
        ("a", "b"),
        ("x" * 900, "y"),
        ("<|im_end|>", "<|im_start|>user"),
        ("\u200d\u0301", "\ufffd"),
    ],
)
def test_awkward_answers_are_learned_to_their_end(saved: Any, tmp_path: Path, chosen: str, rejected: str):
    row = {"prompt": "Why?", "chosen": chosen, "rejected": rejected}
    (found,) = load_pairs(tmp_path, [row], saved, max_seq_len=2048).train
    assert learned(found, saved) == (chosen + END, rejected + END)
    ids, cut = found["input_ids"], found["prompt_tokens"] + found["chosen_tokens"]
    assert ids[cut - 1] == ids[-1] == saved.eos_token_id  # typed end tokens are text, written ones are control
    assert ids[found["prompt_tokens"] : cut].count(saved.eos_token_id) == 1


def test_turns_of_users_and_tools_inside_a_side_are_not_learned(saved: Any, tmp_path: Path):
    longer = [TURN, CHAT[1], {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Quite."}]
    (found,) = load_pairs(tmp_path, [{"chosen": [TURN, CHAT[1]], "rejected": longer}], saved).train
    assert learned(found, saved) == (f"It keeps.{END}", f"It keeps.{END}Quite.{END}")
    assert "Sure?" in saved.decode(sides(found)[2])


def test_answers_of_several_turns_are_refused_where_the_template_rewrites_earlier_ones(tokenizer: Any, tmp_path: Path):
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('so ')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    first = {"role": "assistant", "content": "hm so salt"}
    longer = [TURN, first, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Quite."}]
    rows = [{"chosen": [TURN, CHAT[1]], "rejected": longer}, {"prompt": "Why?", "chosen": "a", "rejected": "b"}]
    pairs = load_pairs(tmp_path, rows, tokenizer, on_bad_row="skip")
    kept = pairs.train["row"][:]
    # Where this template's rewriting is found, the row cannot be one text; it is never learned in part.
    assert kept == [1]
    assert pairs.report["refused"] == 1
    assert accounted(pairs.report)
    assert "writes an earlier turn otherwise" in Path(pairs.report["refused_rows"]).read_text()


def long_chat(n_turns: int) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "Be short."}]
    for number in range(n_turns):
        turns.append({"role": "user", "content": f"Question {number} about salt and stones?"})
        turns.append({"role": "assistant", "content": f"Answer {number}."})
    return [*turns, {"role": "user", "content": "And the last one?"}]


def test_long_prompt_loses_its_first_turns_and_keeps_system_prompt_and_both_answers(saved: Any, tmp_path: Path):
    chat = long_chat(12)
    row = {"prompt": chat, "chosen": "Salt and stones.", "rejected": "No."}
    pairs = load_pairs(tmp_path, [row], saved, max_seq_len=200)
    (found,) = pairs.train
    prompt, chosen, rejected = sides(found)
    assert learned(found, saved) == (f"Salt and stones.{END}", f"No.{END}")
    kept = pairs.records("train")[0].prompt
    texts = [turn.content for turn in kept]
    assert texts == [chat[0]["content"], *(turn["content"] for turn in chat[len(chat) - len(texts) + 1 :])]
    assert kept[1].role == "user"
    assert 2 < len(kept) < len(chat)
    assert prompt == pairs.renderer.prompt_ids(kept)
    assert max(len(prompt + chosen), len(prompt + rejected)) <= 200
    # One exchange more would not fit: no more is cut than must be.
    more = [chat[0], *chat[len(chat) - len(texts) - 1 :]]
    assert len(by_template(saved, more, "Salt and stones.")) > 200
    report = pairs.report
    assert (report["cut"], report["kept"], report["cut_tokens"]) == (
        1,
        0,
        len(by_template(saved, chat, "Salt and stones.")) - len(prompt + chosen),
    )
    assert "1 of 1 prompts lose their first turns" in pairs_table(report)


@pytest.mark.parametrize("too_long", ["truncate", "drop"])
def test_pair_with_an_answer_that_does_not_fit_is_left_out_whole_and_counted(saved: Any, tmp_path: Path, too_long: str):
    rows = [{"prompt": "Why?", "chosen": "salt " * 300, "rejected": "No."}, *random_pairs(3, seed=1)]
    pairs = load_pairs(tmp_path, rows, saved, max_seq_len=200, too_long=too_long)
    assert pairs.train["row"][:] == [1, 2, 3]
    assert pairs.report["dropped"] == {"too_long": 1}
    assert accounted(pairs.report)
    assert "1 of 4 pairs do not fit" in pairs_table(pairs.report)


def test_drop_leaves_out_what_truncate_would_cut_and_error_names_it(saved: Any, tmp_path: Path):
    rows = [{"prompt": long_chat(12), "chosen": "Salt.", "rejected": "No."}, *random_pairs(2, seed=1)]
    assert load_pairs(tmp_path, rows, saved, max_seq_len=200, too_long="drop").report["dropped"] == {"too_long": 1}
    with pytest.raises(DataError, match=r"train.jsonl:1 has \d+ tokens; model.max_seq_len is 200"):
        load_pairs(tmp_path, rows, saved, max_seq_len=200, too_long="error")


def test_every_row_of_a_file_with_all_kinds_of_faults_is_accounted_for(saved: Any, tmp_path: Path):
    fine = random_pairs(40, seed=3)
    bad = [
        {"prompt": "Why?", "chosen": "a"}, {"prompt": "Why?", "chosen": "", "rejected": "b"}, {}, [1], "x", 7,
        {"prompt": "Why?", "chosen": "a", "rejected": "b", "score_chosen": "many", "score_rejected": 1},
        {"chosen": [TURN, CHAT[1]], "rejected": [{"role": "user", "content": "Else?"}, CHAT[1]]},
    ]  # fmt: skip
    equal = [{"prompt": "Same?", "chosen": "a b", "rejected": "a b"}] * 2
    long = [{"prompt": "Long?", "chosen": "salt " * 200, "rejected": "b"}]
    rows = [*fine, *bad, *equal, *long, {"prompt": long_chat(9), "chosen": "a", "rejected": "b"}]
    with pytest.raises(DataError, match="8 rows cannot be trained on"):
        load_pairs(tmp_path, rows, saved, max_seq_len=180)
    pairs = load_pairs(tmp_path, rows, saved, max_seq_len=180, on_bad_row="skip", split=0.2)
    report = pairs.report
    assert accounted(report)
    assert report["read"] == len(rows)
    assert (report["refused"], report["cut"]) == (8, 1)
    assert report["dropped"] == {"equal_sides": 2, "too_long": 1}
    refused = [json.loads(line) for line in Path(report["refused_rows"]).read_text().splitlines()]
    assert sorted(row["line"] for row in refused) == list(range(41, 49))
    assert all(row["reason"] for row in refused)
    assert pairs.held_out is not None
    assert sorted(pairs.train["row"][:] + pairs.held_out["row"][:]) == [*range(40), 51]
    for side, rows_of in (("train", pairs.train), ("held_out", pairs.held_out)):
        assert rows_of["index"][:] == list(range(len(rows_of)))
        assert [text.source.line - 1 for text in pairs.records(side)] == rows_of["row"][:]  # type: ignore[arg-type]


def test_prompt_stands_on_one_side_whatever_the_order_and_the_answers(saved: Any, tmp_path: Path):
    rows = random_pairs(60, seed=4)
    rows += [row | {"chosen": "Something else."} for row in rows]
    pairs = load_pairs(tmp_path / "a", rows, saved, split=0.3)
    other = load_pairs(tmp_path / "b", rows[::-1], saved, split=0.3)

    def prompts(found: Any, side: Any) -> set[str]:
        return {text.prompt[-1].content for text in found.records(side)}

    assert prompts(pairs, "train") & prompts(pairs, "held_out") == set()
    assert prompts(pairs, "held_out") == prompts(other, "held_out") != set()


def test_margins_are_kept_and_can_be_demanded(saved: Any, tmp_path: Path):
    rows = [row | {"score_chosen": 5.5, "score_rejected": 2} for row in random_pairs(3, seed=5)]
    assert load_pairs(tmp_path, rows, saved).train["margin"][:] == [3.5] * 3
    needed: dict[str, Any] = {"task": "reward_model", "reward_model": {"margin": True}}
    assert load_pairs(tmp_path, rows, saved, **needed).train["margin"][:] == [3.5] * 3
    with pytest.raises(DataError, match=r":4 has neither a margin nor two scores"):
        load_pairs(tmp_path, [*rows, *random_pairs(1, seed=6)], saved, **needed)


def test_cache_is_used_again_and_made_anew_when_the_rows_or_the_task_change(saved: Any, tmp_path: Path):
    rows = random_pairs(5, seed=7)
    names = [
        load_pairs(tmp_path, rows, saved).fingerprint,
        load_pairs(tmp_path, rows, saved).fingerprint,
        load_pairs(tmp_path, rows, saved, task="simpo").fingerprint,
        load_pairs(tmp_path, rows, saved, task="kto").fingerprint,
        load_pairs(tmp_path, rows, saved, max_seq_len=255).fingerprint,
        load_pairs(tmp_path, rows[:4], saved).fingerprint,
    ]
    assert names[0] == names[1] == names[2]
    assert len(set(names)) == 4


@pytest.mark.slow
def test_started_processes_give_the_same_rows_as_one(saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rows = random_pairs(600, seed=8)
    one = load_pairs(tmp_path / "a", rows, saved, split=0.2)
    monkeypatch.setattr(tokenize, "n_workers", lambda paths: 2)
    two = load_pairs(tmp_path / "b", rows, saved, split=0.2)
    for column in set(one.train.column_names) - {"margin"}:
        assert one.train[column][:] == two.train[column][:]
    assert one.report["preference"] == two.report["preference"]


def test_texts_are_continued_where_the_model_has_no_chat_template(tokenizer: Any, tmp_path: Path):
    tokenizer.chat_template = None
    row = {"prompt": "salt and", "chosen": " stones over the hill", "rejected": " boat"}
    pairs = load_pairs(tmp_path, [row], tokenizer)
    (found,) = pairs.train
    prompt, chosen, rejected = sides(found)
    assert prompt == tokenizer("salt and")["input_ids"] == pairs.records("train")[0].prompt_ids(pairs.renderer)
    for side, text in ((chosen, row["chosen"]), (rejected, row["rejected"])):
        assert prompt + side == [*tokenizer("salt and" + text)["input_ids"], tokenizer.eos_token_id]
    assert learned(found, tokenizer) == (row["chosen"] + END, row["rejected"] + END)


def test_prompt_that_ends_inside_a_token_is_counted_and_nothing_is_tokenised_apart(tokenizer: Any, tmp_path: Path):
    tokenizer.chat_template = None
    row = {"prompt": "salt and sto", "chosen": "nes over", "rejected": "p"}
    pairs = load_pairs(tmp_path, [row], tokenizer)
    prompt, chosen, rejected = sides(pairs.train[0])
    whole = [*tokenizer("salt and stones over")["input_ids"], tokenizer.eos_token_id]
    assert prompt + chosen == whole
    assert whole[: len(prompt)] == prompt != tokenizer("salt and sto")["input_ids"]
    assert prompt + rejected == [*tokenizer("salt and stop")["input_ids"], tokenizer.eos_token_id]
    assert pairs.report["preference"]["prompts_unlike_generation"] == 1
    assert any("generation would end in other tokens" in warning for warning in pairs.report["warnings"])


def test_chats_need_a_template(tokenizer: Any, tmp_path: Path):
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        load_pairs(tmp_path, [{"prompt": CHAT, "chosen": "a", "rejected": "b"}], tokenizer)


def test_pair_that_is_held_out_alone_is_said_to_be_held_out(saved: Any, tmp_path: Path):
    with pytest.raises(DataError, match="no pair is left to train on: 1 read, 1 held out"):
        load_pairs(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "b"}], saved, split=0.9)


def test_special_tokens_that_texts_spell_are_said(saved: Any, tmp_path: Path):
    rows = [
        {"prompt": "Why?", "chosen": f"a{END}", "rejected": "b"},
        {"prompt": "How?", "chosen": "a", "rejected": "b"},
    ]
    table = pairs_table(load_pairs(tmp_path, rows, saved).report)
    assert "special        1 pairs spell a special token; it is read as text" in table


def test_nothing_left_to_train_on_ends_the_run_with_where_the_rows_went(saved: Any, tmp_path: Path):
    with pytest.raises(DataError, match="no pair is left to train on: 1 read, 1 equal sides"):
        load_pairs(tmp_path, [{"prompt": "Why?", "chosen": "a", "rejected": "a"}], saved)


def test_whole_file_is_held_out_for_a_test(saved: Any, tmp_path: Path):
    cfg = pair_config(tmp_path, random_pairs(4, seed=9))
    found = load(cfg, saved, held_out_path=cfg.rows_path)
    assert len(found.train) == 0
    assert found.held_out is not None
    assert len(found.held_out) == 4


def test_answers_with_verdicts_carry_the_completion_of_another_prompt(saved: Any, tmp_path: Path):
    rows = [
        {"prompt": f"Why {number % 7}?", "completion": f"Since {number}.", "label": number % 3 == 0}
        for number in range(30)
    ]
    pairs = load_pairs(tmp_path, rows, saved, task="kto", max_seq_len=64)
    texts = [(row["prompt"], row["completion"]) for row in rows]
    lent = []
    for found, (prompt, completion), row in zip(pairs.train, texts, rows, strict=True):
        first, own, other = sides(found)
        assert found["desirable"] is row["label"]
        assert first + own == by_template(saved, [{"role": "user", "content": prompt}], completion)
        borrowed = saved.decode(other).removesuffix(END)
        asked = {one for one, text in texts if text == borrowed}
        assert asked
        assert prompt not in asked
        assert learned(found, saved) == (completion + END, borrowed + END)
        lent.append(borrowed)
    assert len(set(lent)) > 20  # about each completion stands once for the others
    again = load(pair_config(tmp_path / "b", rows, task="kto", max_seq_len=64), saved)
    assert again.train["input_ids"][:] == pairs.train["input_ids"][:]


def test_pair_becomes_two_answers_for_kto_with_opposite_verdicts(saved: Any, tmp_path: Path):
    rows = random_pairs(12, seed=10)
    pairs = load_pairs(tmp_path, rows, saved, task="kto")
    assert pairs.train["desirable"][:] == [True, False] * 12
    assert pairs.train["row"][:] == [number for number in range(12) for _ in range(2)]
    assert [(text.chosen, text.rejected) for text in pairs.records("train")][:2] == [
        (rows[0]["chosen"], ""), ("", rows[0]["rejected"]),
    ]  # fmt: skip
    prompts = [row["prompt"] for row in rows for _ in range(2)]
    for found, prompt in zip(pairs.train, prompts, strict=True):
        other = saved.decode(sides(found)[2]).removesuffix(END)
        assert other not in {row[side] for row in rows if row["prompt"] == prompt for side in ("chosen", "rejected")}
    assert accounted(pairs.report)
    assert pairs.report["unit"] == "answers"


def test_borrowed_completion_fits_behind_the_longest_prompt(saved: Any, tmp_path: Path):
    rows = [{"prompt": "Why " + "salt " * 20 + "?", "completion": "No.", "label": True}]
    rows += [
        {"prompt": f"How {n}?", "completion": "Since the old boat carries salt over stones.", "label": False}
        for n in range(3)
    ]
    whole = load_pairs(tmp_path / "a", rows, saved, task="kto").train[0]
    limit = whole["prompt_tokens"] + whole["chosen_tokens"] + 1
    found = load_pairs(tmp_path / "b", rows, saved, task="kto", max_seq_len=limit).train[0]
    prompt, own, other = sides(found)
    assert len(prompt + own) <= limit
    assert 1 <= len(other) <= limit - len(prompt)
    assert found["labels"][len(prompt + own)] == other[0]


def test_one_prompt_alone_is_refused_for_kto(saved: Any, tmp_path: Path):
    rows = [{"prompt": "Why?", "completion": word, "label": True} for word in ("a", "b", "c")]
    with pytest.raises(DataError, match="answers to two prompts at least"):
        load_pairs(tmp_path, rows, saved, task="kto")


def test_one_held_out_prompt_takes_its_mismatched_answer_from_training(saved: Any, tmp_path: Path):
    rows = [{"prompt": f"Why {n}?", "completion": f"Since {n}.", "label": True} for n in range(4)]
    pairs = load_pairs(
        tmp_path, rows, saved, task="kto", val=[{"prompt": "Who?", "completion": "You.", "label": False}]
    )
    assert pairs.held_out is not None
    assert saved.decode(sides(pairs.held_out[0])[2]).startswith("Since")
