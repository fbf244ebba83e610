"""Find the words and word sequences of the training texts that would save most tokens as one token each.

It splits words at white space and punctuation, so it finds nothing in scripts that put no space between words. A file
of terms may hold any script."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sftplay.config.run import RunConfig
from sftplay.data.layouts import read_layout_options, to_record
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Refused, Text
from sftplay.errors import ConfigError, DataError

WORD = r"[^\W\d_]\w*(?:['’-]\w+)*"
RUN = re.compile(rf"(?<= ){WORD}(?: {WORD})*")
"""Words with one space between; the first follows a space too."""

MOST_WORDS = 3
"""Of a word sequence."""

READ_CHARACTERS = 20_000_000
"""Of the training texts, from their beginning: about four million words, counted in seconds and within 1 GB."""

LONGEST_TERM = 100
"""Characters of a term in a file."""

Words = tuple[str, ...]


def read_terms(path: str) -> list[str]:
    """Return the terms of a file, each once, in its order.

    Raises:
        ConfigError: it cannot be read, holds no term, or one that is too long.
    """
    where = f"tuning.new_tokens.path {path}"
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"cannot be read: {reason}", where=where, fix="name a text file, one term a line") from None
    for number, line in enumerate(lines, 1):
        if len(line.strip()) > LONGEST_TERM or "\0" in line:
            what = f"this is no term: {line.strip()[:40]!r}, {len(line.strip()):,} characters"
            fix = f"one term a line, {LONGEST_TERM} characters at most"
            raise ConfigError(what, where=f"{where}:{number}", fix=fix)
    terms = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not terms:
        raise ConfigError("holds no term", where=where, fix="write one term a line")
    return terms


def find_text_source(cfg: RunConfig) -> tuple[str, float]:
    """Return the path of the rows to search for terms, and the share of them that is held out."""
    if cfg.learns_documents:
        trained = [source for source in cfg.sources if source.weight > 0] or cfg.sources
        source = next((candidate for candidate in trained if candidate.type == "cpt"), trained[0])
        path, has_held_out = source.path, source.val_path
        split = cfg.data.split if source.split is None else source.split
    else:
        path, has_held_out, split = cfg.rows_path, cfg.data.val_path, cfg.data.split
    return path, 0.0 if has_held_out else 0.05 if split is None else split


def training_texts(cfg: RunConfig) -> list[str]:
    """Return the first `READ_CHARACTERS` of the training texts, without held-out and unreadable rows."""
    from sftplay.data.row_outcomes import compute_keys, is_held_out  # slow to import, and terms of a file need it not

    path, held_out = find_text_source(cfg)
    reading, texts, left = read_layout_options(cfg.data), [], READ_CHARACTERS
    for source, row in read_rows(path, read_dialect(cfg.data)):
        if isinstance(row, Refused):
            continue
        try:
            record = to_record(row, source, reading=reading)
        except DataError:  # the pass over all rows reports it
            continue
        if is_held_out(compute_keys(record), held_out):
            continue
        for text in [record.text] if isinstance(record, Text) else [turn.content for turn in record.messages]:
            texts.append(text[:left])
            left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def list_words(texts: Sequence[str]) -> list[str]:
    """Return all words of the texts, sorted, each once."""
    return sorted({word for text in texts for word in re.findall(WORD, text)})


def find_terms(
    texts: Sequence[str], count_pieces: Callable[[list[str]], list[int]], *, wanted: int, min_count: int
) -> list[str]:
    """Return at most `wanted` terms that occur at least `min_count` times behind a space, the largest savings first.

    A sequence of words is a term if it holds at least half of the occurrences of its rarest word. The saving of a
    chosen term is no longer counted for the terms that it contains, or that contain it.

    Args:
        count_pieces: returns the number of tokens of each term behind a space.
    """
    runs = [run.split(" ") for text in texts for run in RUN.findall(text)]
    words = Counter(word for run in runs for word in run)
    frequent = {word for word, count in words.items() if count >= min_count}
    found: Counter[Words] = Counter({(word,): words[word] for word in frequent})
    for run in runs:
        for start in range(len(run)):
            for end in range(start + 2, min(start + MOST_WORDS, len(run)) + 1):
                if run[end - 1] not in frequent or run[start] not in frequent:
                    break
                found[tuple(run[start:end])] += 1
    rarest = {term: min(words[word] for word in term) for term in found}
    counts = {term: count for term, count in found.items() if count >= min_count and 2 * count >= rarest[term]}
    ordered = sorted(counts)
    pieces = count_pieces([" ".join(term) for term in ordered])
    costs = {term: cost for term, cost in zip(ordered, pieces, strict=True) if cost > 1}
    return [" ".join(term) for term in _select(counts, costs, wanted=wanted, min_count=min_count)]


def _select(counts: Mapping[Words, int], costs: Mapping[Words, int], *, wanted: int, min_count: int) -> list[Words]:
    chosen: dict[Words, int] = {}
    touching: dict[str, list[Words]] = {}

    def gain(words: Words) -> tuple[int, int]:
        """Return the occurrences that are left, and the tokens that each of them saves."""
        near = {other for word in words for other in touching.get(word, ())}
        count = counts[words] - sum(chosen[other] for other in near if _holds(other, words))
        cost = costs[words] - sum(costs[other] - 1 for other in near if _holds(words, other))
        return count, cost - 1

    waiting = [(-counts[words] * (cost - 1), words) for words, cost in costs.items()]
    heapq.heapify(waiting)
    while waiting and len(chosen) < wanted:
        stored, words = heapq.heappop(waiting)
        count, saved = gain(words)
        if count < min_count or saved < 1:
            continue
        if count * saved < -stored:  # gains only fall
            heapq.heappush(waiting, (-count * saved, words))
            continue
        chosen[words] = count
        for word in set(words):
            touching.setdefault(word, []).append(words)
    return list(chosen)


def _holds(outer: Words, inner: Words) -> bool:
    starts = range(len(outer) - len(inner) + 1)
    return len(outer) > len(inner) and any(outer[at : at + len(inner)] == inner for at in starts)
