"""Writes data/demo/train.jsonl and held_out.jsonl: one sentence about a person in, one index-card line out.

    Tamsin Orvel was born on 3 March 1987.   ->   Orvel, Tamsin | 1987-03-03

The names are invented, and no first name or surname of the held-out rows occurs in a training row, so the only way to
answer is to have learned the rewriting. One fixed seed: the files are the same on every machine.
"""

from __future__ import annotations

import calendar
import itertools
import json
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

SEED = 1987
TRAIN_ROWS = 6000
HELD_OUT_ROWS = 240
HERE = Path(__file__).resolve().parent


def listed(text: str) -> list[str]:
    """The words of one line, to keep long lists readable."""
    return text.split()


FIRST_SYLLABLES = (
    listed("Ad Bel Cor Dar El Fen Gal Hal Is Jor Kas Lin Mar Nel Or Per Ros Sel Tam Ul Ver Wil Yan Zel"),
    ["", "a", "al", "an", "e", "eb", "el", "i", "im", "ir", "o", "ol", "u", "us"],
    listed("da den dis ka len lia lin mon na nor ra ric sa sin ta ton via vin"),
)
LAST_SYLLABLES = (
    listed("Ash Bran Crow Dun Ever Fal Gor Hart Ing Kel Lor Mor Nor Or Pen Quil Rav Sor Thorn Ul Var West"),
    ["", "a", "ar", "e", "en", "er", "i", "il", "in", "o", "ow", "um", "y"],
    listed("bane bury by den dale field gate ham ley lock man mere more ner rick son stock ter vel win worth"),
)
FRAMES = (
    "{first} {last} was born on {day} {month} {year}.",
    "{first} {last} was born on {month} {day}, {year}.",
    "Born on {day} {month} {year}: {first} {last}.",
    "On {month} {day}, {year}, {first} {last} was born.",
    "The register lists {first} {last}, born on {day} {month} {year}.",
    "{last}, {first}; date of birth {day} {month} {year}.",
)
ANSWER = "{last}, {first} | {year}-{month_number:02d}-{day:02d}"


def share_of(name: str) -> str:
    """Which rows may use a name: 'base' (none here, data/base may), 'train' or 'held_out'."""
    return ("base", "train", "train", "held_out")[zlib.crc32(name.lower().encode()) % 4]


def names(syllables: tuple[list[str], ...], share: str) -> list[str]:
    """Every name with one syllable of each list that belongs to `share`, in a fixed order."""
    every = sorted({"".join(parts) for parts in itertools.product(*syllables)})
    return [name for name in every if share_of(name) == share]


def pools(share: str) -> dict[str, list[str]]:
    """The first names and surnames of `share`; too many to know by heart."""
    return {
        "first": names(FIRST_SYLLABLES, share),
        "last": names(LAST_SYLLABLES, share),
    }


def rows(share: str, count: int, seed: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    """`count` chat rows with distinct prompts."""
    rng = random.Random(f"{seed} {share}")
    pool = pools(share)
    seen: set[str] = set()
    while len(seen) < count:
        month_number = rng.randint(1, 12)
        facts = {field: rng.choice(choices) for field, choices in pool.items()} | {
            "day": rng.randint(1, 28),
            "month": calendar.month_name[month_number],
            "month_number": month_number,
            "year": rng.randint(1901, 2019),
        }
        prompt = rng.choice(FRAMES).format(**facts)
        if prompt in seen:
            continue
        seen.add(prompt)
        answer = ANSWER.format(**facts)
        yield {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


def as_jsonl(share: str, count: int, seed: int = SEED) -> str:
    """The file's whole text."""
    return "".join(json.dumps(row) + "\n" for row in rows(share, count, seed))


FILES = {"train.jsonl": ("train", TRAIN_ROWS), "held_out.jsonl": ("held_out", HELD_OUT_ROWS)}


if __name__ == "__main__":
    for file, (share, count) in FILES.items():
        (HERE / file).write_text(as_jsonl(share, count), encoding="utf-8", newline="\n")
        print(f"{file}: {count} rows")
