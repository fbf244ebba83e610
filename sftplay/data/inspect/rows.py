"""Examples as rows for people and files: their place, their text, and what is learned of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import check_new_file, whole_file
from sftplay.data.inspect.display import decoded, learned_texts, visible
from sftplay.data.pipeline import Examples
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError

PROMPT_END = 60
"""Characters shown of a prompt's end."""

BATCH = 1000


def spread_rows(examples: Examples, count: int) -> Iterator[dict[str, Any]]:
    """At most `count` training rows, evenly spread over all: row, source, split, input_ids, labels."""
    total = len(examples.train)
    for n in range(min(count, total)):
        index = n * total // min(count, total)
        yield _placed(examples, "train", index=index, row=examples.train[index])


def every_row(examples: Examples) -> Iterator[dict[str, Any]]:
    """All rows of both sides in the order of their files, as `spread_rows` gives them."""
    for split, rows in (("train", examples.train), ("held_out", examples.held_out)):
        index = 0
        for batch in [] if rows is None else rows.iter(BATCH):
            for values in zip(*batch.values(), strict=True):
                yield _placed(examples, split, index=index, row=dict(zip(batch, values, strict=True)))
                index += 1


def rendered(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A row as its text: row, source, split, text, n_tokens, n_learned, and the text of each learned stretch."""
    ids, labels = row["input_ids"], row["labels"]
    return {
        "row": row["row"],
        "source": row["source"],
        "split": row["split"],
        "text": decoded(tokenizer, ids),
        "n_tokens": len(ids),
        "n_learned": n_learned(row),
        "learned": learned_texts(tokenizer, ids, labels=labels),
    }


def n_learned(row: dict[str, Any]) -> int:
    """Tokens of a row that are learned."""
    return len(row["labels"]) - row["labels"].count(IGNORE_INDEX)


def prompt_ids_of(row: dict[str, Any]) -> list[int]:
    """The tokens before the row's last learned stretch: those with which inference asks for it."""
    labels = row["labels"]
    start = len(labels)
    while start and labels[start - 1] == IGNORE_INDEX:
        start -= 1
    while start and labels[start - 1] != IGNORE_INDEX:
        start -= 1
    return list(row["input_ids"][:start])


def show_rendered(row: dict[str, Any], tokenizer: Any) -> None:
    """Print a row as the template writes it, and where inference would ask for its last turn."""
    shown = rendered(row, tokenizer)
    log.show(f"\nrow {shown['row']}  {shown['source']}  {shown['n_tokens']:,} tokens, {shown['n_learned']:,} learned")
    log.show(visible(shown["text"]))
    prompt = prompt_ids_of(row)
    if not shown["n_learned"]:
        log.show("-- a prompt: completions are drawn after it, and nothing of it is learned")
    elif prompt:
        end = json.dumps(decoded(tokenizer, prompt)[-PROMPT_END:], ensure_ascii=False)
        log.show(f"-- inference asks for the last turn with the first {len(prompt):,} tokens, which end in {end}")
    else:
        log.show("-- plain text: learned from its first token, there is no prompt")


def write_rendered(examples: Examples, path: Path) -> int:
    """Write every row to a new jsonl file that appears only when it is whole; their number.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    check_new_file(path)
    count = 0
    try:
        with whole_file(path) as scratch:
            with scratch.open("w", encoding="utf-8") as file:
                for row in every_row(examples):
                    file.write(json.dumps(rendered(row, examples.renderer.tokenizer), ensure_ascii=False) + "\n")
                    count += 1
            check_new_file(path)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(what, where=str(path), fix="choose another file with OUT=") from error
    return count


def _placed(examples: Examples, split: Any, *, index: int, row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "source": examples.source_of(split, index), "split": split}
