"""Perplexity of documents, by source and against the base."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch.nn import functional

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.config.run import RunConfig
from sftplay.data.mixture.load import MixtureRows
from sftplay.data.pipeline import Examples
from sftplay.data.records import IGNORE_INDEX
from sftplay.evaluate.comparison import Side, with_side
from sftplay.evaluate.evaluate import LOSS_TOKENS, SCORES_BYTES, HeldOutChats, evaluate, ready_to_answer
from sftplay.model.out_of_memory import AdaptiveBatches

GROUP_TOKENS = 2**20
"""Tokens of the documents that are held at a time, about."""


class Document(NamedTuple):
    """A whole document as the model reads it."""

    ids: Sequence[int] | NDArray[np.integer[Any]]
    """[tokens], without an end mark. The first is not predicted: nothing stands before it."""

    n_bytes: int
    """Bytes of its text in UTF-8."""


@dataclass(frozen=True, kw_only=True)
class TextFigures:
    """How well a model predicts documents."""

    loss: float
    """Mean negative log likelihood of a token, in nats."""

    perplexity: float
    """e to the power of the loss; it compares models with the same tokenizer only."""

    bits_per_byte: float
    """Bits that the model needs for a byte of the text; it compares across tokenizers."""

    tokens: int
    """Tokens that were predicted."""

    documents: int
    bytes: int
    """Bytes of all texts in UTF-8."""

    def as_json(self) -> dict[str, float | None]:
        """Return the figures by name; None for one that is no number."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


class Piece(NamedTuple):
    """A window's place in one document: it reads the tokens from `start` to `end` and scores those from `scored` on."""

    document: int
    start: int
    scored: int
    end: int


def measure_perplexity(
    model: Any, documents: Iterable[Document], *, window: int, stride: int | None = None, pad_token_id: int
) -> TextFigures:
    """Return the figures of `model`, in evaluation mode, over all `documents` together.

    A window reads at most `window` tokens. The first one scores all its tokens but the document's first. Each further
    one ends `stride` tokens later, at most at the document's end, and scores the tokens that are new. None for `stride`
    is half the window: then at least half a window of text stands before a token, once the document is that long. This
    is the sliding window of transformers' guide to perplexity, but for a document's last window: that one is full too.
    Only some documents are held at a time.
    """
    stride, done, parts = choose_stride(window, stride), 0, list[TextFigures]()
    for group in _groups(documents):
        lengths = [len(document.ids) for document in group]
        pieces = [
            piece for n, length in enumerate(lengths) for piece in _pieces(n, length, window=window, stride=stride)
        ]
        scorer = _Scorer(model, group, pad_token_id=pad_token_id)
        batches = AdaptiveBatches(len(pieces), "the perplexity")
        total = 0.0
        for batch in scorer.batches(pieces):
            total += math.fsum(batches.map(len(batch), partial(scorer.sum_loss, batch)))
            done += len(batch)
            log.progress(done, None, what="windows read", tag="eval")
        n_bytes = sum(document.n_bytes for document in group)
        tokens = sum(piece.end - piece.scored for piece in pieces)
        parts.append(_figures(total, tokens=tokens, n_bytes=n_bytes, documents=len(group)))
    return pooled(parts)


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group, tokens = list[Document](), 0
    for document in documents:
        group.append(document)
        tokens += len(document.ids)
        if tokens >= GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def choose_stride(window: int, stride: int | None) -> int:
    """Return the stride, half the window where None is given."""
    return max(1, window // 2) if stride is None else stride


def pooled(parts: Sequence[TextFigures]) -> TextFigures:
    """Return the figures of several sources together, each token counting the same."""
    return _figures(
        sum(part.loss * part.tokens for part in parts if part.tokens),
        tokens=sum(part.tokens for part in parts),
        n_bytes=sum(part.bytes for part in parts),
        documents=sum(part.documents for part in parts),
    )


def _figures(nats: float, *, tokens: int, n_bytes: int, documents: int) -> TextFigures:
    """The figures that follow from a summed loss; NaN where nothing was scored."""
    loss = nats / tokens if tokens else math.nan
    return TextFigures(
        loss=loss,
        perplexity=math.exp(loss) if not loss >= 700 else math.inf,
        bits_per_byte=nats / math.log(2) / n_bytes if tokens and n_bytes else math.nan,
        tokens=tokens,
        documents=documents,
        bytes=n_bytes,
    )


def _pieces(document: int, length: int, *, window: int, stride: int) -> Iterator[Piece]:
    scored, end = 1, min(window, length)
    while scored < length:
        yield Piece(document, max(0, end - window), scored, end)
        scored, end = end, min(end + stride, length)


class _Scorer:
    """Sums the losses of pieces; never holds the scores of more positions than `SCORES_BYTES` allows."""

    def __init__(self, model: Any, documents: Sequence[Document], *, pad_token_id: int) -> None:
        self._model, self._documents, self._pad = model, documents, pad_token_id
        self._device = next(model.parameters()).device
        self._positions = max(1, SCORES_BYTES // (4 * model.config.get_text_config().vocab_size))
        plain = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._may_keep_few = "logits_to_keep" in inspect.signature(plain.forward).parameters

    def batches(self, pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
        """Pieces with as much to read and to score together, the longest first."""
        ordered = sorted(pieces, key=lambda piece: (piece.end - piece.start, piece.end - piece.scored), reverse=True)
        start = 0
        while start < len(ordered):
            longest = ordered[start]
            by_scores = self._positions // (longest.end - longest.scored)
            size = max(1, min(LOSS_TOKENS // (longest.end - longest.start), by_scores))
            yield ordered[start : start + size]
            start += size

    @torch.no_grad()
    def sum_loss(self, batch: Sequence[Piece], part: slice) -> float:
        """Return the sum of the scored tokens' losses of a part of the pieces, in nats."""
        pieces = batch[part]
        # int64 [pieces, tokens], padded at the end.
        ids = torch.full((len(pieces), max(piece.end - piece.start for piece in pieces)), self._pad)
        labels, mask = torch.full_like(ids, IGNORE_INDEX), torch.zeros_like(ids)
        for row, piece in enumerate(pieces):
            read = self._documents[piece.document].ids[piece.start : piece.end]
            tokens = torch.from_numpy(np.asarray(read, dtype=np.int64))
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
            labels[row, piece.scored - piece.start : len(tokens)] = tokens[piece.scored - piece.start :]
        ids, mask, labels = (given.to(self._device) for given in (ids, mask, labels))
        begin = min(piece.scored - piece.start for piece in pieces) - 1
        last, chunk = ids.shape[1] - 1, max(1, self._positions // len(ids))
        total = 0.0
        # Where a single window has too many scores, it is read once for each part of them. A cache would save that, but
        # layers with a state instead of keys and values forget it where more than one token follows (transformers 5).
        for end in [*range(begin + chunk, last, chunk), last]:
            few = {"logits_to_keep": end - begin} if self._may_keep_few else {}
            out = self._model(input_ids=ids[:, :end], attention_mask=mask[:, :end], use_cache=False, **few)
            scores = out.logits[:, begin - end :].flatten(0, 1).float()
            wanted = labels[:, begin + 1 : end + 1].flatten()
            total += float(functional.cross_entropy(scores, wanted, ignore_index=IGNORE_INDEX, reduction="sum"))
            begin = end
        return total


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
    table = path.with_name(f"{prefix}{TABLE}")
    known = {name: figures.as_json() for name, figures in texts.items()}
    size = {"window": window, "stride": stride, "vocabulary": len(tokenizer)}
    content = with_side(read_object(table), side, texts=known, anchors=anchors, **size)
    write_text(table, json.dumps(content, indent=1) + "\n")
    write_text(path, json.dumps(pooled(list(texts.values())).as_json(), indent=1) + "\n")
    return content
