"""Blocks of a mixture as people read them: which documents stand in one, and what is learned of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sftplay import log
from sftplay.data.inspect.display import decoded, mark_learned
from sftplay.data.mix.load import MixtureRows
from sftplay.data.mix.mixture import source_and_block
from sftplay.data.records import IGNORE_INDEX

LOOKED_AT = 1000
"""Rows that are looked at for one of another source; a source with a small weight may have none among them."""


def spread_blocks(mixture: MixtureRows, count: int) -> Iterator[dict[str, Any]]:
    """At most `count` blocks, evenly spread over the run and taking turns between the sources, as `described`."""
    total, numbers = len(mixture.train), [source.number for source in mixture.train.sources]
    for n in range(min(count, total)):
        first = n * total // min(count, total)
        wanted = numbers[n % len(numbers)]
        near = range(first, min(total, first + LOOKED_AT))
        is_wanted = (row for row in near if source_and_block(mixture.train.row_id(row))[0] == wanted)
        yield described(mixture, next(is_wanted, first))


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
