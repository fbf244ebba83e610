"""Perplexity over whole documents, compared with plain transformers, window by window, and with known answers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lively import lively_model
from torch.nn import functional

from sftplay.evaluate import perplexity as measuring
from sftplay.evaluate.perplexity import Document, measure_perplexity

VOCABULARY = 400


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    return lively_model(tiny_llama)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    """Random documents, also of one token and of none; as arrays and as lists."""
    torch.manual_seed(3)
    rows = [torch.randint(3, VOCABULARY, (n,)).tolist() for n in (1, 2, 7, 16, 17, 40, 61, 0, 33, 16)]
    return [Document(np.array(row, np.uint32) if n % 2 else row, 5 * len(row)) for n, row in enumerate(rows)]


@torch.no_grad()
def reference(model: Any, documents: list[Document], *, window: int, stride: int) -> tuple[float, int]:
    """Summed loss and tokens: each document alone, one window after another, every score at hand."""
    nats, tokens = 0.0, 0
    for document in documents:
        ids = torch.tensor([int(token) for token in document.ids])
        known = 1
        end = min(window, len(ids))
        while known < len(ids):
            begin = max(0, end - window)
            scores = model(input_ids=ids[None, begin:end]).logits[0].double()
            for place in range(known, end):
                nats -= float(functional.log_softmax(scores[place - begin - 1], dim=-1)[ids[place]])
                tokens += 1
            known, end = end, min(end + stride, len(ids))
    return nats, tokens


def measured(model: Any, documents: list[Document], **how: Any) -> measuring.TextFigures:
    return measure_perplexity(model, documents, pad_token_id=0, **how)


@pytest.mark.parametrize(("window", "stride"), [(16, None), (16, 1), (16, 15), (16, 5), (100, 50), (2, 1)])
def test_figures_are_those_of_one_window_after_another(
    window: int, stride: int | None, model: Any, documents: list[Document]
):
    nats, tokens = reference(model, documents, window=window, stride=stride or window // 2)
    figures = measured(model, documents, window=window, stride=stride)
    assert figures.tokens == tokens == sum(max(0, len(document.ids) - 1) for document in documents)
    assert figures.loss == pytest.approx(nats / tokens, rel=1e-6)
    assert figures.perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    n_bytes = sum(document.n_bytes for document in documents)
    assert figures.bits_per_byte == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)
    assert figures.documents == len(documents)


def test_neither_batch_nor_room_for_scores_nor_documents_at_a_time_change_a_figure(
    model: Any, documents: list[Document], monkeypatch: pytest.MonkeyPatch
):
    usual = measured(model, documents, window=32)
    ways = [("LOSS_TOKENS", 1), ("SCORES_BYTES", 4 * VOCABULARY * 3), ("SCORES_BYTES", 1), ("GROUP_TOKENS", 20)]
    for name, value in ways:
        with monkeypatch.context() as patch:
            patch.setattr(measuring, name, value)
            figures = measured(model, documents, window=32)
        assert (figures.tokens, figures.documents, figures.bytes) == (usual.tokens, usual.documents, usual.bytes)
        assert figures.loss == pytest.approx(usual.loss, rel=1e-6)


def test_nothing_to_score_is_no_figure(model: Any):
    for documents in ([], [Document([], 0)], [Document([7], 2)]):
        figures = measured(model, documents, window=16)
        assert figures.tokens == 0
        assert math.isnan(figures.loss)
        assert math.isnan(figures.bits_per_byte)
        assert (figures.as_json()["perplexity"], figures.as_json()["tokens"]) == (None, 0)


def test_an_adapter_is_measured_with_its_base(tiny_llama: Path, documents: list[Document]):
    from peft import LoraConfig, get_peft_model

    base = lively_model(tiny_llama)
    plain = measured(base, documents, window=16)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
    tuned = get_peft_model(base, config).eval()
    nats, tokens = reference(tuned, documents, window=16, stride=8)
    assert measured(tuned, documents, window=16).loss == pytest.approx(nats / tokens, rel=1e-6)
    assert measured(tuned, documents, window=16).loss != pytest.approx(plain.loss, rel=1e-3)
