"""Show rows as the model learns them: tokens in the loss, blocks, prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import check_new_file, whole_file
from sftplay.data.display import decoded, learned_texts, mark_learned, visible
from sftplay.data.mixture.load import MixtureRows
from sftplay.data.mixture.mixture import source_and_block
from sftplay.data.pipeline import Examples
from sftplay.data.prompts.load import Prompts
from sftplay.data.prompts.questions import Questions
from sftplay.data.records import IGNORE_INDEX
from sftplay.data.tokenize.policies import Side
from sftplay.errors import ConfigError


def evenly_spaced_blocks(mixture: MixtureRows, count: int) -> Iterator[dict[str, Any]]:
    """Yield at most `count` blocks, evenly spaced over the run and in turn from each source.

    `documents` of a block lists for each its source, its tokens in the block, and the first of them in it.
    """
    total, numbers = len(mixture.train), [source.number for source in mixture.train.sources]
    for n in range(min(count, total)):
        first = n * total // min(count, total)
        near = range(first, min(total, first + 1000))  # a source with a small weight may have none among them
        wanted = numbers[n % len(numbers)]
        number = next((row for row in near if source_and_block(mixture.train.row_id(row))[0] == wanted), first)
        row, documents, begin = mixture.train[number], [], 0
        for place, start, end in mixture.train.pieces(number):
            documents.append({"source": str(place), "begin": begin, "end": begin + end - start, "first_token": start})
            begin += end - start
        yield {
            "row": row["row"],
            "dataset": mixture.sources[row["source"]].name,
            "source": documents[0]["source"],
            **{name: row[name].tolist() for name in ("input_ids", "labels", "position_ids")},
            "documents": documents,
        }


def show_block(block: dict[str, Any], tokenizer: Any, *, colours: bool) -> None:
    """Print a block, one document after the other."""
    ids, labels = block["input_ids"], block["labels"]
    log.show(f"\nrow {block['row']}  {block['dataset']}  {len(ids):,} tokens, {n_learned(block):,} learned")
    for document in block["documents"]:
        begin, end, first = document["begin"], document["end"], document["first_token"]
        part = f", continued from its token {first:,}" if first else ""
        log.show(f"-- {document['source']}  {end - begin:,} tokens{part}")
        log.show(mark_learned(tokenizer, ids[begin:end], labels=labels[begin:end], colours=colours))


def as_json(block: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the block with its text."""
    return {**block, "text": decoded(tokenizer, block["input_ids"])}


def as_examples(prompts: Prompts) -> Examples:
    """Return the prompts of both sides with labels that are all -100."""
    sides: dict[Side, Questions] = {"train": prompts.train, "held_out": prompts.held_out}
    asked = {
        side: questions.rows.select_columns(["row", "input_ids"]).map(
            lambda row: {"labels": [IGNORE_INDEX] * len(row["input_ids"])}, keep_in_memory=True
        )
        for side, questions in sides.items()
    }
    return Examples(
        train=asked["train"],
        held_out=asked["held_out"] if len(prompts.held_out) else None,
        held_out_chats=[],
        renderer=prompts.renderer,
        report=prompts.report,
        places={side: questions.rows.select_columns(["path", "line", "record"]) for side, questions in sides.items()},
    )


def evenly_spaced_rows(examples: Examples, count: int) -> Iterator[dict[str, Any]]:
    """Yield at most `count` training rows, evenly spaced over all: row, source, split, input_ids, labels."""
    total = len(examples.train)
    for n in range(min(count, total)):
        index = n * total // min(count, total)
        yield {**examples.train[index], "source": examples.find_source("train", index), "split": "train"}


def rendered(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a row as its text: row, source, split, text, n_tokens, n_learned, and the text of each learned stretch."""
    return {
        **{name: row[name] for name in ("row", "source", "split")},
        "text": decoded(tokenizer, row["input_ids"]),
        "n_tokens": len(row["input_ids"]),
        "n_learned": n_learned(row),
        "learned": learned_texts(tokenizer, row["input_ids"], labels=row["labels"]),
    }


def n_learned(row: dict[str, Any]) -> int:
    """Count the tokens of a row that are learned."""
    return len(row["labels"]) - row["labels"].count(IGNORE_INDEX)


def show_rendered(row: dict[str, Any], tokenizer: Any) -> None:
    """Print a row as the template writes it, and where the inference prompt for its last turn ends."""
    shown = rendered(row, tokenizer)
    log.show(f"\nrow {shown['row']}  {shown['source']}  {shown['n_tokens']:,} tokens, {shown['n_learned']:,} learned")
    log.show(visible(shown["text"]))
    start = len(row["labels"])  # of the last learned stretch: the tokens before it are the prompt at inference
    for is_learned in (False, True):
        while start and (row["labels"][start - 1] != IGNORE_INDEX) == is_learned:
            start -= 1
    if not shown["n_learned"]:
        log.show("-- a prompt: completions are sampled after it, and none of its tokens are in the loss")
    elif start:
        end = json.dumps(decoded(tokenizer, row["input_ids"][:start])[-60:], ensure_ascii=False)
        log.show(f"-- inference asks for the last turn with the first {start:,} tokens, which end in {end}")
    else:
        log.show("-- plain text: learned from its first token, there is no prompt")


def write_rendered(examples: Examples, path: Path) -> int:
    """Write every row of both sides to a new jsonl file that appears only when it is whole; return their number.

    Raises ConfigError: the file exists, or cannot be written.
    """
    check_new_file(path)
    count = 0
    try:
        with whole_file(path) as scratch:
            with scratch.open("w", encoding="utf-8") as file:
                for row in _every_row(examples):
                    file.write(json.dumps(rendered(row, examples.renderer.tokenizer), ensure_ascii=False) + "\n")
                    count += 1
            check_new_file(path)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(what, where=str(path), fix="choose another file with OUT=") from error
    return count


def _every_row(examples: Examples) -> Iterator[dict[str, Any]]:
    sides: dict[Side, Any] = {"train": examples.train, "held_out": examples.held_out or []}
    for side, rows in sides.items():
        for index, row in enumerate(rows):
            yield {**row, "source": examples.find_source(side, index), "split": side}
