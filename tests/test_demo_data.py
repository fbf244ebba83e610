"""What data/demo promises: unseen names, distinct prompts, answers that cannot be looked up or guessed."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

DATA = Path(__file__).resolve().parents[1] / "data"
MONTH_NUMBERS = {
    "January": "01", "February": "02", "March": "03", "April": "04", "May": "05", "June": "06",
    "July": "07", "August": "08", "September": "09", "October": "10", "November": "11", "December": "12",
}  # fmt: skip


def load_generator(folder: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder}_generate", DATA / folder / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_pairs(file: str) -> list[tuple[str, str]]:
    """(prompt, answer) of each row, after checking that the row has the chat shape and nothing else."""
    pairs = []
    for line in (DATA / "demo" / file).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert list(row) == ["messages"]
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        pairs.append((row["messages"][0]["content"], row["messages"][1]["content"]))
    return pairs


def names_of(answer: str) -> set[str]:
    """First name and surname, read back out of an index-card line."""
    found = re.fullmatch(r"(\w+), (\w+) \| \d{4}-\d\d-\d\d", answer)
    assert found is not None, answer
    return set(found.groups())


@pytest.fixture(scope="module")
def train() -> list[tuple[str, str]]:
    return read_pairs("train.jsonl")


@pytest.fixture(scope="module")
def held_out() -> list[tuple[str, str]]:
    return read_pairs("held_out.jsonl")


def test_files_are_what_the_generator_writes():
    generator = load_generator("demo")
    for file, (share, count) in generator.FILES.items():
        assert (DATA / "demo" / file).read_text(encoding="utf-8") == generator.as_jsonl(share, count)


def test_the_practice_text_is_what_its_generator_writes():
    written = (DATA / "base" / "practice.txt").read_text(encoding="utf-8")
    assert written == "\n".join(load_generator("base").passages())


def test_no_name_of_a_held_out_row_occurs_in_training_or_in_the_base_text(train, held_out):
    held_out_names = set().union(*(names_of(answer) for _, answer in held_out))
    words = set(re.findall(r"\w+", " ".join(prompt + " " + answer for prompt, answer in train)))
    for path in (DATA / "base").glob("*.txt"):
        words |= {word.capitalize() for word in re.findall(r"[^\W\d_]+", path.read_text(encoding="utf-8"))}
    assert held_out_names & words == set()


def test_no_answer_is_common(train, held_out):
    for pairs in (train, held_out):
        most = Counter(answer for _, answer in pairs).most_common(1)[0][1]
        assert most / len(pairs) <= 0.05


def test_every_answer_follows_from_its_prompt(train, held_out):
    """The answer is worked out a second time, by patterns instead of by the generator's own template."""
    for prompt, answer in train + held_out:
        surname, first, year, month, day = re.findall(r"\w+", answer)
        assert {surname, first, year, str(int(day))} <= set(re.findall(r"\w+", prompt))
        (month_name,) = [word for word in MONTH_NUMBERS if re.search(rf"\b{word}\b", prompt)]
        assert MONTH_NUMBERS[month_name] == month
        assert f"{first} {surname}" in prompt or f"{surname}, {first}" in prompt


def test_the_shares_have_no_name_in_common():
    generator = load_generator("demo")
    train_pools, held_out_pools = generator.pools("train"), generator.pools("held_out")
    for field, names in held_out_pools.items():
        assert len(names) > 500
        assert not set(names) & set().union(*train_pools.values()), field


def test_the_answer_of_the_nearest_training_prompt_is_hardly_ever_right(train, held_out):
    """Nearest by shared character trigrams (Dice), a look-up that knows nothing of the task."""

    def trigrams(text: str) -> set[str]:
        return {text[i : i + 3] for i in range(len(text) - 2)}

    known = [(trigrams(prompt), answer) for prompt, answer in train]
    right = 0
    for prompt, answer in held_out:
        asked = trigrams(prompt)
        _, found = max(known, key=lambda pair: 2 * len(asked & pair[0]) / (len(asked) + len(pair[0])))
        right += found == answer
    assert right / len(held_out) <= 0.30


def test_the_base_text_holds_no_sentence_of_the_demo():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DATA / "base").glob("*.txt"))
    assert not re.search(r"\| \d{4}-\d\d-\d\d", text)
    assert "was born" not in (DATA / "base" / "practice.txt").read_text(encoding="utf-8")
    assert "date of birth" not in text
