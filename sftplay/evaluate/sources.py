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
from sftplay.data.pipeline import Examples
from sftplay.evaluate.comparison import Measured, Side, with_side
from sftplay.evaluate.evaluate import HeldOutChats, evaluate, ready_to_answer
from sftplay.evaluate.perplexity import Document, choose_stride, measure_perplexity, pooled

TABLE = "perplexity.json"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out documents and chats of each source that has some."""

    documents: Mapping[str, Iterable[Document]] = field(default_factory=dict)
    chats: Mapping[str, Examples | HeldOutChats] = field(default_factory=dict)


def find_held_out(mixture: MixtureRows) -> HeldOut:
    """Return what a mixture holds out, each document and each chat whole.

    The end mark behind a document is left out: how well a model foretells where a file ends is not asked here.
    """
    end = mixture.renderer.tokenizer.eos_token_id
    sources = [source for source in mixture.sources if source.name in mixture.held_out]

    def documents(name: str) -> Iterator[Document]:
        for document in mixture.documents(name):
            has_end = len(document.ids) > 0 and document.ids[-1] == end
            yield Document(document.ids[:-1] if has_end else document.ids, document.n_bytes)

    def chats(name: str) -> HeldOutChats:
        whole = list(mixture.documents(name))
        columns = {"input_ids": [chat.ids for chat in whole], "labels": [chat.labels for chat in whole]}
        return HeldOutChats(Dataset.from_dict(columns), mixture.held_out_chats(name), mixture.renderer)

    return HeldOut(
        documents={source.name: documents(source.name) for source in sources if source.kind == "cpt"},
        chats={source.name: chats(source.name) for source in sources if source.kind == "chat"},
    )


def measure_sources(model: Any, held_out: HeldOut, *, tokenizer: Any, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Measure `model` on every source and write `path`, such as eval/before.json: all documents' figures together.

    The figures of each source go into perplexity.json next to it, where those of the other side stay; its content is
    returned. A chat source NAME also gets anchor-NAME-before.json and its answers, as `evaluate` writes them.
    """
    side: Side = "before" if path.stem.endswith("before") else "after"
    prefix = path.stem.removesuffix(side)  # quick- of quick-after.json
    window, stride = cfg.row_tokens, choose_stride(cfg.row_tokens, cfg.eval.stride)
    how = {"window": window, "stride": stride, "pad_token_id": tokenizer.pad_token_id}
    texts, anchors = {}, {}
    with ready_to_answer(model, cfg):
        for name, documents in held_out.documents.items():
            log.say(f"measuring the model ({path.stem}) on the held-out documents of {name}", "eval")
            texts[name] = found = measure_perplexity(model, documents, **how)
            summary = "  ".join(f"{key} {getattr(found, key):.4f}" for key in ("loss", "perplexity", "bits_per_byte"))
            log.say(f"{path.stem}: {name}: {summary}  (tokens {found.tokens:,})", "eval")
    for name, chats in held_out.chats.items():
        figures = evaluate(model, chats, cfg=cfg, path=path.with_name(f"{prefix}anchor-{name}-{side}.json"))
        anchors[name] = {**figures, "rows": len(chats.held_out or ())}
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
