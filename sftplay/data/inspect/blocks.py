"""Blocks of a mixture as people read them: which documents stand in one, and what is learned of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sftplay import log
from sftplay.data.inspect.display import decoded, mark_learned
from sftplay.data.mix.load import MixtureRows
from sftplay.data.records import IGNORE_INDEX


def spread_blocks(mixture: MixtureRows, count: int) -> Iterator[dict[str, Any]]:
    """At most `count` blocks of the run, evenly spread over it: row, dataset, source, input_ids, labels, documents."""
    total = len(mixture.train)
    for n in range(min(count, total)):
        yield described(mixture, n * total // min(count, total))


def described(mixture: MixtureRows, number: int) -> dict[str, Any]:
    """One block. `documents` says of each where it stands, its tokens in the block, and from where in it they are."""
    row, pieces = mixture.train[number], mixture.train.pieces(number)
    documents, begin = [], 0
    for place, first, end in pieces:
        documents.append({"source": str(place), "begin": begin, "end": begin + end - first, "first_token": first})
        begin += end - first
    return {
        "row": row["row"],
        "dataset": mixture.sources[row["source"]].name,
        "source": documents[0]["source"],
        "input_ids": row["input_ids"].tolist(),
        "labels": row["labels"].tolist(),
        "position_ids": row["position_ids"].tolist(),
        "documents": documents,
    }


def show_block(block: dict[str, Any], tokenizer: Any, *, colours: bool) -> None:
    """Print a block, one document after the other."""
    ids, labels = block["input_ids"], block["labels"]
    learned = sum(label != IGNORE_INDEX for label in labels)
    log.show(f"\nrow {block['row']}  {block['dataset']}  {len(ids):,} tokens, {learned:,} learned")
    for document in block["documents"]:
        begin, end, first = document["begin"], document["end"], document["first_token"]
        part = f", continued from its token {first:,}" if first else ""
        log.show(f"-- {document['source']}  {end - begin:,} tokens{part}")
        log.show(mark_learned(tokenizer, ids[begin:end], labels=labels[begin:end], colours=colours))


def as_json(block: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The block with its text."""
    return {**block, "text": decoded(tokenizer, block["input_ids"])}
