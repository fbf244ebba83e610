"""Measures a model on the held-out documents and chats of each source.

Documents give perplexity and bits per byte. Chats are the anchor: their loss and their answers show what the model has
forgotten. It trains nothing; the same functions measure the base and the tuned model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.config.schema.run import RunConfig
from sftplay.data.pipeline import Examples
from sftplay.deliver.evaluate.comparison import Measured, Side, with_side
from sftplay.deliver.evaluate.evaluate import evaluate, ready_to_answer
from sftplay.deliver.evaluate.perplexity import Document, TextFigures, measure_perplexity, pooled, stride_of

TABLE = "perplexity.json"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out side of each source that has one."""

    documents: Mapping[str, list[Document]] = field(default_factory=dict)
    """Sources of documents."""

    chats: Mapping[str, Examples] = field(default_factory=dict)
    """Sources of chats."""


def measure_sources(model: Any, held_out: HeldOut, *, tokenizer: Any, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Measure `model` on every source and write `path`, such as eval/before.json: all documents' figures together.

    The figures of each source go into perplexity.json beside it, where those of the other side stay; its content is
    returned. A chat source NAME also gets anchor-NAME-before.json and its answers, as `evaluate` writes them.
    """
    prefix, side = _parts(path)
    window, stride = cfg.row_tokens, stride_of(cfg.row_tokens, cfg.eval.stride)
    how = {"window": window, "stride": stride, "pad_token_id": tokenizer.pad_token_id}
    texts = {}
    with ready_to_answer(model):
        for name, documents in held_out.documents.items():
            log.say(f"measuring the model ({path.stem}) on {len(documents):,} held-out documents of {name}", "eval")
            texts[name] = measure_perplexity(model, documents, **how)
            log.say(f"{path.stem}: {name}: {_told(texts[name])}", "eval")
    anchors = {
        name: evaluate(model, chats, cfg=cfg, path=path.with_name(f"{prefix}anchor-{name}-{side}.json"))
        for name, chats in held_out.chats.items()
    }
    measured = Measured(
        window=window,
        stride=stride,
        vocabulary=len(tokenizer),
        texts={name: figures.as_json() for name, figures in texts.items()},
        anchors=anchors,
    )
    table = path.with_name(f"{prefix}{TABLE}")
    content = with_side(read_object(table), side, measured=measured)
    write_text(table, json.dumps(content, indent=1) + "\n")
    write_text(path, json.dumps(pooled(list(texts.values())).as_json(), indent=1) + "\n")
    return content


def _parts(path: Path) -> tuple[str, Side]:
    """`quick-after.json` -> ("quick-", "after")."""
    side: Side = "before" if path.stem.endswith("before") else "after"
    return path.stem.removesuffix(side), side


def _told(figures: TextFigures) -> str:
    return (
        f"loss {figures.loss:.4f}  perplexity {figures.perplexity:.4f}  bits_per_byte {figures.bits_per_byte:.4f}"
        f"  (tokens {figures.tokens:,})"
    )
