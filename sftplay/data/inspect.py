"""Show rows as they are learned: the exact tokens with the loss mask."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import check_new_file, whole_file
from sftplay.data.load_prompts import Prompts, Questions
from sftplay.data.mixture.load import MixtureRows
from sftplay.data.mixture.mixture import source_and_block
from sftplay.data.pipeline import Examples
from sftplay.data.records import IGNORE_INDEX
from sftplay.data.row_outcomes import Side
from sftplay.errors import ConfigError

OPEN, CLOSE = "\u27e6", "\u27e7"  # white square brackets: rare in text, and escaped where they do stand in it
LEARNED, READ, SPECIAL = "1;32", "2", ";4"

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that steer a terminal or turn the direction of text."""


def legend(*, colours: bool) -> str:
    """Return one line that explains the output of `mark_learned`."""
    if colours:
        return f"{_paint('learned', LEARNED)}  {_paint('only read', READ)}  {_paint('special token', READ + SPECIAL)}"
    return f"what stands between {OPEN} and {CLOSE} is learned, all else is only read"


def mark_learned(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int], colours: bool) -> str:
    """Return the row's text, special tokens included, in colours or with its learned stretches between OPEN and CLOSE.

    Characters that would steer the terminal are written as escapes.
    """
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    special = {*tokenizer.all_special_ids, *added} if colours else set()
    kinds = [(label != IGNORE_INDEX, token in special) for token, label in zip(ids, labels, strict=True)]
    parts = []
    for (is_learned, is_special), text in stretches(tokenizer, ids, kinds=kinds):
        if colours:
            parts.append(_paint(visible(text), (LEARNED if is_learned else READ) + SPECIAL * is_special))
        else:
            parts.append(f"{OPEN}{visible(text)}{CLOSE}" if is_learned else visible(text))
    return "".join(parts)


def stretches(tokenizer: Any, ids: Sequence[int], *, kinds: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the text of each stretch of tokens of one kind; joined they are the whole text."""
    before, end = "", 0
    for kind, group in groupby(kinds):
        start, end = end, end + sum(1 for _ in group)
        # A token's text may depend on those before it: a decoder drops the space at the beginning.
        whole = decoded(tokenizer, ids[:end])
        yield kind, whole[len(before) :] if whole.startswith(before) else decoded(tokenizer, ids[start:end])
        before = whole


def learned_texts(tokenizer: Any, ids: Sequence[int], *, labels: Sequence[int]) -> list[str]:
    kinds = [label != IGNORE_INDEX for label in labels]
    return [text for is_learned, text in stretches(tokenizer, ids, kinds=kinds) if is_learned]


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the tokens' text as it is, special tokens included."""
    return str(tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False))


def visible(text: str) -> str:
    """Return the text with control characters and our own marks as escapes; line ends and tabs stay."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match.group())
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return _HIDDEN.sub(escape, text).replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7")


def _paint(text: str, colour: str) -> str:
    # Line by line, because pagers forget a colour at the end of a line.
    return "\n".join(f"\x1b[{colour}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


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
    ids, labels = block["input_ids"], block["labels"]
    log.show(f"\nrow {block['row']}  {block['dataset']}  {len(ids):,} tokens, {n_learned(block):,} learned")
    for document in block["documents"]:
        begin, end, first = document["begin"], document["end"], document["first_token"]
        part = f", continued from its token {first:,}" if first else ""
        log.show(f"-- {document['source']}  {end - begin:,} tokens{part}")
        log.show(mark_learned(tokenizer, ids[begin:end], labels=labels[begin:end], colours=colours))


def as_json(block: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
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
    """Yield at most `count` training rows, evenly spaced over all: row, source, split, input_ids, labels; of pairs the
    other columns too."""
    total = len(examples.train)
    for n in range(min(count, total)):
        index = n * total // min(count, total)
        yield {**as_learned(examples.train[index]), "source": examples.find_source("train", index), "split": "train"}


def as_learned(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row without labels on the answer to another prompt that kto's KL term reads, without a gradient."""
    if "desirable" not in row:
        return row
    end, labels = row["prompt_tokens"] + row["chosen_tokens"], row["labels"]
    return {**row, "labels": labels[:end] + [IGNORE_INDEX] * (len(labels) - end)}


def rendered(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a row as its text: row, source, split, text, n_tokens, n_learned, and the text of each learned stretch."""
    return {
        **{name: row[name] for name in ("row", "source", "split")},
        **as_texts(row, tokenizer),
        "n_tokens": len(row["input_ids"]),
        "n_learned": n_learned(row),
        "learned": learned_texts(tokenizer, row["input_ids"], labels=row["labels"]),
    }


def as_texts(row: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the text of a row; of a pair also its `sides`, the text of each and of their prompt."""
    parts = {name: decoded(tokenizer, ids) for name, (ids, _) in sides(row).items() if name}
    return {"text": decoded(tokenizer, row["input_ids"]), **({"sides": parts} if parts else {})}


def sides(row: Mapping[str, Any]) -> dict[str, tuple[list[int], list[int]]]:
    """Return name -> tokens and labels: of a pair its prompt and what follows it on each side; else the row, without a
    name. What an answer with a verdict has as its second side is the answer to another prompt."""
    ids, labels = row["input_ids"], row["labels"]
    if "prompt_tokens" not in row:
        return {"": (ids, labels)}
    names = ("chosen", "rejected")
    if "desirable" in row:
        names = ("wanted" if row["desirable"] else "not wanted", "mismatched")
    first, second = row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
    cuts = {"prompt": slice(0, first), names[0]: slice(first, second), names[1]: slice(second, None)}
    return {name: (ids[cut], labels[cut]) for name, cut in cuts.items()}


def show_learned(row: dict[str, Any], tokenizer: Any, *, colours: bool) -> None:
    """Print a row with its learned tokens marked; of a pair each side, after the prompt that they share."""
    log.show(f"\nrow {row['row']}  {row['source']}  {len(row['input_ids']):,} tokens, {n_learned(row):,} learned")
    for name, (ids, labels) in sides(row).items():
        log.show(f"-- {name}  {len(ids):,} tokens") if name else None
        log.show(mark_learned(tokenizer, ids, labels=labels, colours=colours))


def n_learned(row: dict[str, Any]) -> int:
    """Count the tokens of a row that are learned."""
    return len(row["labels"]) - row["labels"].count(IGNORE_INDEX)


def show_rendered(row: dict[str, Any], tokenizer: Any) -> None:
    """Print a row as the template writes it, and where the inference prompt for its last turn ends."""
    shown = rendered(row, tokenizer)
    log.show(f"\nrow {shown['row']}  {shown['source']}  {shown['n_tokens']:,} tokens, {shown['n_learned']:,} learned")
    if "sides" in shown:
        for name, text in shown["sides"].items():
            log.show(f"-- {name}")
            log.show(visible(text))
        return
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
    Raise ConfigError where the file exists, or cannot be written.
    """
    check_new_file(path)
    count = 0
    sides: dict[Side, Any] = {"train": examples.train, "held_out": examples.held_out or []}
    rows = (
        {**as_learned(row), "source": examples.find_source(side, index), "split": side}
        for side, found in sides.items()
        for index, row in enumerate(found)
    )
    try:
        with whole_file(path) as scratch:
            with scratch.open("w", encoding="utf-8") as file:
                for row in rows:
                    file.write(json.dumps(rendered(row, examples.renderer.tokenizer), ensure_ascii=False) + "\n")
                    count += 1
            check_new_file(path)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(what, where=str(path), fix="choose another file with OUT=") from error
    return count
