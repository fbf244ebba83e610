"""Writes train.jsonl and held_out.jsonl: small problems in words, in the form of GSM8K (question, answer behind ####).

They are a stand-in: enough to try the rewards of configs/run_grpo_math.yaml before the real rows are there. One fixed
seed: the files are the same on every machine.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SEED = 5
ROWS = {"train.jsonl": 60, "held_out.jsonl": 20}
HERE = Path(__file__).resolve().parent

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eda", "Finn", "Gül", "Hana")
THINGS = ("apples", "books", "coins", "pens", "shells", "stamps")


def bought(rng: random.Random) -> tuple[str, str, int]:
    """A product and a difference: the question, the way to its answer, the answer."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    packs, each = rng.randint(3, 9), rng.randint(4, 12)
    given = rng.randint(2, packs * each - 1)
    question = f"{name} buys {packs} packs of {each} {thing} and gives away {given} of them. How many {thing} are left?"
    way = f"{name} buys {packs} * {each} = <<{packs}*{each}={packs * each}>>{packs * each} {thing}.\n"
    left = packs * each - given
    return question, f"{way}Then {packs * each} - {given} = <<{packs * each}-{given}={left}>>{left} are left.", left


def shared(rng: random.Random) -> tuple[str, str, int]:
    """A sum and a quotient."""
    first, second = rng.sample(NAMES, 2)
    thing, children, each = rng.choice(THINGS), rng.randint(2, 8), rng.randint(3, 15)
    mine = rng.randint(1, children * each - 1)
    yours = children * each - mine
    question = (
        f"{first} has {mine} {thing} and {second} has {yours}. They share all of them equally among {children}"
        f" children. How many {thing} does each child get?"
    )
    whole = mine + yours
    way = f"Together they have {mine} + {yours} = <<{mine}+{yours}={whole}>>{whole} {thing}.\n"
    return question, f"{way}Each child gets {whole} / {children} = <<{whole}/{children}={each}>>{each}.", each


def files() -> dict[str, str]:
    """Name of a file -> its text. No question occurs twice."""
    rng = random.Random(SEED)
    seen: set[str] = set()
    texts = {}
    for name, count in ROWS.items():
        lines: list[str] = []
        while len(lines) < count:
            question, way, answer = rng.choice((bought, shared))(rng)
            if question not in seen:
                seen.add(question)
                row = {"question": question, "answer": f"{way}\n#### {answer}"}
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        texts[name] = "".join(lines)
    return texts


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} rows")
