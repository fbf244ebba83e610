"""Figures of each source before and after training: what perplexity.json and its table say, against hand arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from in_process import Inputs, sized, written_config
from lively import lively_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.data.mixture.load import load_mixture
from sftplay.data.pipeline import load_examples
from sftplay.evaluate.comparison import comparison_table, with_side
from sftplay.evaluate.evaluate import evaluate
from sftplay.evaluate.perplexity import Document, HeldOut, find_held_out, measure_perplexity, measure_sources, pooled


def side(
    loss: float, chat: float | None = None, *, exact: float = 0.5, stride: int = 4, words: int = 400, rows: int = 20
) -> dict[str, Any]:
    text = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / 2, "tokens": 90, "documents": 3}
    anchor = (
        {} if chat is None else {"chat": {"n": 8, "rows": rows, "loss": chat, "perplexity": 1.0, "exact_match": exact}}
    )
    texts = {"domain": {**text, "bytes": 300}}
    return {"window": 8, "stride": stride, "vocabulary": words, "texts": texts, "anchors": anchor}


def both(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return with_side(with_side({}, "before", **before), "after", **after)


def test_each_source_has_its_figures_of_both_sides():
    content = both(side(3.0, 1.0), side(2.0, 1.04, exact=0.4))
    assert content["sources"]["domain"] == {
        "loss_before": 3.0, "loss_after": 2.0, "perplexity_before": math.exp(3), "perplexity_after": math.exp(2),
        "bits_per_byte_before": 1.5, "bits_per_byte_after": 1.0, "tokens": 90, "documents": 3, "bytes": 300,
    }  # fmt: skip
    anchor = content["anchor"]["chat"]
    assert (anchor["loss_before"], anchor["loss_after"], anchor["n"]) == (1.0, 1.04, 8)
    assert (anchor["exact_match_before"], anchor["exact_match_after"]) == (0.5, 0.4)
    assert (content["window"], content["stride"]) == (8, 4)


@pytest.mark.parametrize(
    ("after", "percent", "words"),
    [
        (0.9, -10.0, "fell by 10.0 % over 20 held-out row(s): nothing of it was forgotten"),
        (2.5, 150.0, "rose by 150.0 % over 20 held-out row(s): much of it was forgotten"),
    ],
)
def test_forgetting_is_the_rise_of_the_loss_on_chats_with_what_it_means(after: float, percent: float, words: str):
    anchor = both(side(3.0, 1.0), side(2.0, after))["anchor"]["chat"]
    assert anchor["forgetting_percent"] == pytest.approx(percent)
    assert anchor["forgetting"] == f"the loss on chat {words}"


def test_one_side_alone_says_nothing_about_forgetting():
    content = with_side({}, "after", **side(2.0, 1.0))
    assert content["anchor"]["chat"]["forgetting_percent"] is None
    assert content["sources"]["domain"]["perplexity_before"] is None
    assert content["perplexity_compares"]
    assert "- -> 7.389" in comparison_table(content)


def test_perplexity_of_another_tokenizer_is_marked_as_not_comparable():
    content = both(side(3.0), side(2.0, words=450))
    assert not content["perplexity_compares"]
    assert "perplexity does not compare, bits per byte does" in comparison_table(content)
    assert both(side(3.0), side(2.0))["perplexity_compares"]


def test_measuring_again_replaces_one_side_and_one_with_another_stride_both():
    again = with_side(both(side(3.0), side(2.0)), "before", **side(3.5))
    assert (again["sources"]["domain"]["loss_before"], again["sources"]["domain"]["loss_after"]) == (3.5, 2.0)
    content = both(side(3.0, 1.0), side(2.0, 1.0, stride=2))
    assert content["sources"]["domain"]["perplexity_before"] is None
    assert content["anchor"]["chat"]["loss_before"] is None


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


def test_a_model_is_measured_on_documents_and_chats_before_and_after(tiny_llama: Path, inputs: Inputs, home: Path):
    cfg = sized(written_config(home, inputs, model__max_seq_len=64, eval__stride=7))
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    chats = load_examples(cfg, tokenizer)
    ids = tokenizer("why old boats carry salt over quiet hills and green stone " * 9)["input_ids"]
    documents = {"domain": [Document(ids, 500), Document(ids[5:30], 40)], "general": [Document(ids[::-1], 500)]}
    held_out = HeldOut(documents=documents, chats={"chat": chats})
    models = {"before": AutoModelForCausalLM.from_pretrained(tiny_llama).eval(), "after": lively_model(tiny_llama)}
    for name, model in models.items():
        measure_sources(model, held_out, tokenizer=tokenizer, cfg=cfg, path=home / "eval" / f"{name}.json")
    content = json.loads((home / "eval" / "perplexity.json").read_text())
    for name, model in models.items():
        parts = {
            source: measure_perplexity(model, of, window=64, stride=7, pad_token_id=0)
            for source, of in documents.items()
        }
        for source, figures in parts.items():
            for key in ("loss", "perplexity", "bits_per_byte"):
                assert content["sources"][source][f"{key}_{name}"] == pytest.approx(getattr(figures, key))
        assert json.loads((home / "eval" / f"{name}.json").read_text()) == pooled(list(parts.values())).as_json()
        nats = sum(part.loss * part.tokens for part in parts.values())
        assert pooled(list(parts.values())).loss == pytest.approx(nats / sum(part.tokens for part in parts.values()))
        alone = evaluate(model, chats, cfg=cfg, path=home / "alone" / f"{name}.json")
        assert content["anchor"]["chat"][f"loss_{name}"] == alone["loss"]
        assert content["anchor"]["chat"][f"exact_match_{name}"] == alone["exact_match"]
        answers = (home / "eval" / f"anchor-chat-{name}.jsonl").read_text()
        assert answers == (home / "alone" / f"{name}.jsonl").read_text()
    assert content["sources"]["domain"]["tokens"] == len(ids) - 1 + 24


def test_held_out_documents_are_the_texts_themselves_and_their_bytes(tiny_llama: Path, inputs: Inputs, tmp_path: Path):
    texts = [f"Boat {n}: salt över green hills — why walks the river?" for n in range(9)]
    domain, held = tmp_path / "domain.jsonl", tmp_path / "held.jsonl"
    for path, some in ((domain, texts[:6]), (held, texts[6:])):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
    chat = {"name": "chat", "path": str(inputs.train), "type": "chat", "val_path": str(inputs.held_out)}
    sources = [{"name": "domain", "path": str(domain), "type": "cpt", "val_path": str(held)}, chat]
    nothing = {"data__train_path": None, "data__val_path": None}
    cfg = sized(written_config(tmp_path, inputs, task_mode="cpt_mixed", datasets=sources, **nothing))
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    held_out = find_held_out(load_mixture(cfg, tokenizer))
    documents = list(held_out.documents["domain"])
    assert [[int(token) for token in each.ids] for each in documents] == tokenizer(texts[6:])["input_ids"]
    assert [each.n_bytes for each in documents] == [len(text.encode()) for text in texts[6:]]
    alone = load_examples(sized(written_config(tmp_path, inputs)), tokenizer)
    assert alone.held_out is not None
    assert held_out.chats["chat"].held_out_chats == alone.held_out_chats
    for key in ("input_ids", "labels"):
        assert held_out.chats["chat"].held_out[key] == alone.held_out[key]
