"""Writes data/base/practice.txt: short made-up passages in which a small model learns to copy, recase and answer.

    python data/base/generate.py             # practice.txt, byte for byte the same
    python data/base/generate.py --weights   # and data/base/tiny: the model trained on all texts of this folder

Every passage is new text from word lists and invented names, drawn with one fixed seed, so the file is the same on
every machine. It does not touch the other texts of this folder, and it never writes a record in the form that
data/demo asks for: the demo has to be learned from the demo's own rows.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

SEED = 20240
PASSAGES = 3200
OUT_FILE = Path(__file__).resolve().parent / "practice.txt"


def listed(text: str) -> list[str]:
    """The words of one line, to keep long lists readable."""
    return text.split()


ONSETS = listed("b br c ch d dr f g gr h j k l m n p qu r s sh st t th tr v w y z")
VOWELS = listed("a e i o u ai ea ie ou")
CODAS = ["", "", "", "l", "m", "n", "r", "s", "ck", "nd", "rt", "th", "x", "sk"]
NOUNS = listed("lamp basket kettle ladder ribbon candle map drum blanket bottle compass hammer saddle wheel bell coat")
COLOURS = listed("red green blue yellow grey white black brown purple orange")
DEEDS = listed("found sold painted borrowed carried mended lost wanted hid washed")
MONTHS = listed("January February March April May June July August September October November December")
NUMBER_WORDS = listed("one two three four five six seven eight nine ten eleven twelve")


def is_base_name(name: str) -> bool:
    """Whether a name belongs to this folder: one in four do, the demo draws only from the other three."""
    return zlib.crc32(name.lower().encode()) % 4 == 0


def name(rng: random.Random) -> str:
    """One invented capitalised name of two or three syllables that belongs to this folder."""
    while True:
        syllables = rng.choice((2, 2, 2, 3))
        letters = "".join(rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(syllables)) + rng.choice(CODAS)
        if is_base_name(letters):
            return letters.capitalize()


def chat(*turns: str) -> str:
    """The turns as a dialogue with the chat markers; user and assistant alternate, the user speaks first."""
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns))


def echo(rng: random.Random) -> str:
    copied = " ".join(name(rng) if rng.random() < 0.7 else str(rng.randint(1, 9999)) for _ in range(rng.randint(1, 5)))
    return chat(rng.choice(("Repeat: ", "Say it again: ", "Copy this: ")) + copied, copied)


def chant(rng: random.Random) -> str:
    words = [name(rng) for _ in range(rng.randint(2, 4))] + [
        str(rng.randint(1, 9999)) for _ in range(rng.randint(0, 2))
    ]
    rng.shuffle(words)
    if rng.random() < 0.5:
        words = [word.lower() for word in words]
    line = rng.choice((" ", ", ", " and ", "-")).join(words)
    return f"{line}\n" * rng.randint(3, 5)


def capitals(rng: random.Random) -> str:
    word = name(rng)
    asked = rng.choice((f"Write {word} in capitals.", f"{word} in big letters?"))
    if rng.random() < 0.7:
        return chat(asked, word.upper())
    return chat(f"Write {word.upper()} in small letters.", word.lower())


def who_and_where(rng: random.Random) -> str:
    person, town, colour, thing = name(rng), name(rng), rng.choice(COLOURS), rng.choice(NOUNS)
    deed = rng.choice(DEEDS)
    fact = rng.choice(
        (
            f"{person} {deed} the {colour} {thing} near {town}.",
            f"Near {town}, {person} {deed} the {colour} {thing}.",
            f"The {colour} {thing} that {person} {deed} is now in {town}.",
        )
    )
    questions = [("Who?", person), ("Where?", town), ("What?", f"the {colour} {thing}"), ("Which colour?", colour)]
    rng.shuffle(questions)
    asked = questions[: rng.randint(1, 3)]
    return chat(f"{fact} {asked[0][0]}", asked[0][1], *(part for pair in asked[1:] for part in pair))


def swap(rng: random.Random) -> str:
    first, second = name(rng), name(rng)
    return chat(f"Swap the two: {first} and {second}", f"{second} and {first}")


def backwards(rng: random.Random) -> str:
    words = [name(rng) for _ in range(rng.randint(3, 4))]
    return chat("Last one first: " + ", ".join(words), ", ".join(reversed(words)))


def pick(rng: random.Random) -> str:
    things = [f"{number}: {name(rng)}" for number in range(1, rng.randint(3, 5))]
    wanted = rng.randrange(len(things))
    return chat("\n".join(things) + f"\nWhich is number {wanted + 1}?", things[wanted].split(": ")[1])


def days(rng: random.Random) -> str:
    month, day, year = rng.choice(MONTHS), rng.randint(1, 28), rng.randint(1900, 2039)
    number = MONTHS.index(month) + 1
    kind = rng.randrange(5)
    if kind == 0:
        return f"{month} is month {number} of the year, written {number:02d}. Month {number:02d} is {month}.\n"
    if kind == 1:
        return chat(f"Which number has {month}?", f"{number:02d}")
    if kind == 2:
        return chat(f"{day} {month} {year}. Which year?", f"{year}", "Which month?", month, "Which day?", f"{day}")
    if kind == 3:
        return chat(f"Two digits: {day}", f"{day:02d}")
    return f"The {day}th day of {month} {year}, or {day}.{number}.{year}, or {month} {day}, {year}.\n"


def counting(rng: random.Random) -> str:
    start = rng.randint(0, 8)
    words = NUMBER_WORDS[start : start + rng.randint(2, 4)]
    digits = [str(NUMBER_WORDS.index(word) + 1) for word in words]
    return chat(", ".join(words), ", ".join(digits))


def codes(rng: random.Random) -> str:
    owners = {name(rng): str(rng.randint(1, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(2, 4))}
    told = ", ".join(f"{owner} has {code}" for owner, code in owners.items())
    asked = rng.sample(sorted(owners), rng.randint(1, 2))
    later = [part for who in asked[1:] for part in (f"{who}?", owners[who])]
    return chat(f"{told}. {asked[0]}?", owners[asked[0]], *later)


def tale(rng: random.Random) -> str:
    hero, friend, town, thing = name(rng), name(rng), name(rng), rng.choice(NOUNS)
    lines = [
        f"{hero} and {friend} walked to {town}.",
        f'"Is this {town}?" asked {hero}. "Yes, {hero}, it is {town}," said {friend}.',
        f"In {town}, {friend} {rng.choice(DEEDS)} a {thing} for {hero}.",
        f"{hero} thanked {friend}, and {friend} gave {hero} the {thing}.",
        f"So {hero} left {town} with {friend} and the {thing}.",
    ]
    return " ".join(lines[: rng.randint(2, 5)]) + "\n"


def inventory(rng: random.Random) -> str:
    rows = [f"- {name(rng)}, {rng.choice(COLOURS)} {rng.choice(NOUNS)}" for _ in range(rng.randint(2, 4))]
    return "The list:\n" + "\n".join(rows) + "\nThe list again:\n" + "\n".join(rows) + "\n"


KINDS: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (echo, 8),
    (chant, 12),
    (capitals, 2),
    (who_and_where, 10),
    (swap, 3),
    (backwards, 3),
    (pick, 3),
    (days, 4),
    (counting, 1),
    (codes, 6),
    (tale, 3),
    (inventory, 2),
)


def passages(seed: int = SEED, count: int = PASSAGES) -> list[str]:
    """`count` passages, each ending in a new line."""
    rng = random.Random(seed)
    writers, weights = zip(*KINDS, strict=True)
    return [writer(rng) for writer in rng.choices(writers, weights, k=count)]


def write_model(folder: Path) -> None:
    """Train `builtin:tiny` on the texts of this folder and put it in `folder`, with its recipe and hashes."""
    sys.path.insert(0, str(OUT_FILE.parents[2]))
    import tokenizers
    import torch
    import transformers
    from training import Recipe, fingerprint, make_base, write_manifest

    from sftplay.atomic import whole_folder

    recipe, versions = Recipe(), {each.__name__: each.__version__ for each in (torch, transformers, tokenizers)}
    with whole_folder(folder, replaces=True) as scratch:
        scratch.rmdir()
        make_base(scratch, recipe=recipe, files=sorted(OUT_FILE.parent.glob("*.txt")), say=print)
        mark = fingerprint(recipe, OUT_FILE.parent)
        write_manifest(scratch, fingerprint=mark, recipe=asdict(recipe), made_with=versions)


if __name__ == "__main__":
    OUT_FILE.write_text("\n".join(passages()), encoding="utf-8", newline="\n")
    print(f"{OUT_FILE.name}: {OUT_FILE.stat().st_size} bytes")
    if "--weights" in sys.argv[1:]:
        write_model(OUT_FILE.parent / "tiny")
