"""Measures a model on the held-out documents and chats of each source.

Documents give perplexity and bits per byte. Chats are the anchor: their loss and their answers show what the model has
forgotten. It trains nothing; the same functions measure the base and the tuned model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.config.run import RunConfig
from sftplay.data.mixture.load import MixtureRows
from sftplay.data.records import Chat
from sftplay.data.render.render import Renderer
from sftplay.evaluate.comparison import Measured, Side, with_side
from sftplay.evaluate.evaluate import HeldOutChats, evaluate, ready_to_answer
from sftplay.evaluate.perplexity import Document, TextFigures, measure_perplexity, pooled, stride_of

TABLE = "perplexity.json"
KINDS = ("cpt", "chat")


@dataclass(frozen=True)
class Chats:
    """The held-out chats of a source, as `evaluate` takes them."""

    held_out: Dataset
    held_out_chats: list[Chat]
    renderer: Renderer


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out side of each source that has one."""

    documents: Mapping[str, Iterable[Document]] = field(default_factory=dict)
    """Sources of documents."""

    chats: Mapping[str, HeldOutChats] = field(default_factory=dict)
    """Sources of chats."""


def held_out_of(mixture: MixtureRows) -> HeldOut:
    """What a mixture holds out, each document and each chat whole.

    The end mark behind a document is left out: how well a model foretells where a file ends is not asked here.
    """
    end = mixture.renderer.tokenizer.eos_token_id
    names = {kind: [s.name for s in mixture.sources if s.kind == kind and s.name in mixture.held_out] for kind in KINDS}
    documents = {name: _texts(mixture, name, end=end) for name in names["cpt"]}
    return HeldOut(documents=documents, chats={name: _chats(mixture, name) for name in names["chat"]})


def _texts(mixture: MixtureRows, name: str, *, end: int | None) -> Iterator[Document]:
    for each in mixture.documents(name):
        has_end = len(each.ids) > 0 and each.ids[-1] == end
        yield Document(each.ids[:-1] if has_end else each.ids, each.n_bytes)


def _chats(mixture: MixtureRows, name: str) -> Chats:
    whole = list(mixture.documents(name))
    columns = {"input_ids": [each.ids for each in whole], "labels": [each.labels for each in whole]}
    return Chats(Dataset.from_dict(columns), mixture.held_out_chats(name), mixture.renderer)


def measure_sources(model: Any, held_out: HeldOut, *, tokenizer: Any, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Measure `model` on every source and write `path`, such as eval/before.json: all documents' figures together.

    The figures of each source go into perplexity.json beside it, where those of the other side stay; its content is
    returned. A chat source NAME also gets anchor-NAME-before.json and its answers, as `evaluate` writes them.
    """
    prefix, side = _parts(path)
    window, stride = cfg.row_tokens, stride_of(cfg.row_tokens, cfg.eval.stride)
    how = {"window": window, "stride": stride, "pad_token_id": tokenizer.pad_token_id}
    texts = {}
    with ready_to_answer(model, cfg):
        for name, documents in held_out.documents.items():
            log.say(f"measuring the model ({path.stem}) on the held-out documents of {name}", "eval")
            texts[name] = measure_perplexity(model, documents, **how)
            log.say(f"{path.stem}: {name}: {_format_figures(texts[name])}", "eval")
    anchors = {
        name: {
            **evaluate(model, chats, cfg=cfg, path=path.with_name(f"{prefix}anchor-{name}-{side}.json")),
            "rows": len(chats.held_out),
        }
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


def _format_figures(figures: TextFigures) -> str:
    return (
        f"loss {figures.loss:.4f}  perplexity {figures.perplexity:.4f}  bits_per_byte {figures.bits_per_byte:.4f}"
        f"  (tokens {figures.tokens:,})"
    )
