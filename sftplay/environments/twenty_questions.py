"""The game of twenty questions: a thing is thought of, and questions about it are answered by yes or no from a table.

The answerer knows no language. It looks for phrases of the table in the question: `data/twenty_questions` has 32
properties and 48 things. Equal questions have equal answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sftplay.errors import ConfigError, DataError, suggest
from sftplay.places import shipped
from sftplay.reward.code_rewards import without_reasoning

TABLE = "data/twenty_questions/table.json"

YES, NO = "Yes.", "No."
UNKNOWN = "I do not understand. Ask for one property, as in: Is it an animal? Or guess, as in: Is it a cat?"


def make(*, table: str | None = None, questions: int = 20) -> TwentyQuestions:
    """Make the game: `table` is a file like data/twenty_questions/table.json, None means that one.

    Raises:
        ConfigError: the file cannot be read as such a table, or there is no such number of questions.
    """
    if isinstance(questions, bool) or not isinstance(questions, int) or questions < 1:
        where = "grpo.environment_options.questions"
        raise ConfigError(f"{questions!r} is no number of questions", where=where, fix="write 20")
    path = Path(table) if table else shipped(TABLE)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        things = {str(name): frozenset(has) for name, has in content["things"].items()}
        properties = {str(name): [str(phrase) for phrase in phrases] for name, phrases in content["properties"].items()}
        if unknown := sorted(set().union(*things.values()) - set(properties)):
            raise ValueError(f"no property is called {unknown[0]!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = 'write {"properties": {NAME: [PHRASE, ...]}, "things": {NAME: [PROPERTY, ...]}}'
        what = f"is no table of things ({type(error).__name__}: {error})"
        raise ConfigError(what, where=str(path), fix=fix) from error
    return TwentyQuestions(things, properties, most_questions=questions)


class TwentyQuestions:
    """A game. The thing stands in the row's column `secret`; who names it in time gets 1, else 0."""

    def __init__(
        self, things: Mapping[str, frozenset[str]], properties: Mapping[str, list[str]], *, most_questions: int
    ) -> None:
        self._things, self._most = things, most_questions
        self._names = {_plain(name): name for name in things}
        # Longer phrases first: "a farm animal" asks for the farm.
        phrases = [(_plain(phrase), name) for name, several in properties.items() for phrase in several]
        self._phrases = sorted(phrases, key=lambda pair: -len(pair[0]))
        self._secret = ""
        self._asked = 0

    def reset(self, row: Mapping[str, Any]) -> None:
        """Think of the row's thing.

        Raises:
            DataError: it is not in the table.
        """
        secret = row.get("secret")
        if secret not in self._things:
            fix, near = suggest(str(secret), tuple(self._things), "name a thing of the table, or give your own table")
            raise DataError(f"{secret!r} is no thing of the table", where="secret", fix=fix, nearest=near)
        self._secret, self._asked = str(secret), 0

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """Answer the last question of a turn: what is said, the reward where the game is over, and whether it is."""
        self._asked += 1
        question = read_question(text)
        guess = self._find_guess(question)
        if guess == self._secret:
            return f"Yes, it is {guess}! That was question {self._asked}.", 1.0, True
        if self._asked >= self._most:
            return f"That was question {self._asked}. It is {self._secret}.", 0.0, True
        return (NO if guess else self._answer(question)), None, False

    def _find_guess(self, question: str) -> str | None:
        """Find the thing that a question names at its end: `is it a cat`, `my guess is cat`."""
        names = [question]
        for asked in re.finditer(r"\b(?:is it|it is|its|is|guess|answer)(?: (?:an?|the)\b)?(?= )", question):
            names.append(question[asked.end() + 1 :])
        return next((self._names[name] for name in names if name in self._names), None)

    def _answer(self, question: str) -> str:
        found = next((name for phrase, name in self._phrases if re.search(rf"\b{re.escape(phrase)}\b", question)), None)
        if found is None or " or " in question:
            return UNKNOWN
        is_denied = re.search(r"\b(?:not|no|never|without|isnt|doesnt|cannot|cant)\b", question) is not None
        return YES if (found in self._things[self._secret]) != is_denied else NO


def read_question(text: str) -> str:
    """Return the last question of a text, or its last line where nothing is asked: small letters, words and spaces.

    >>> read_question("It has fur. Is it a pet? Then: is it a DOG?"), read_question("My guess is: cat.")
    ('then is it a dog', 'my guess is cat')
    """
    lines = [line for line in without_reasoning(text).splitlines() if line.strip()]
    asked = re.findall(r"[^.?!]*(?=\?)", " ".join(lines))
    last = next((part for part in reversed(asked) if part.strip()), lines[-1] if lines else "")
    return _plain(last)


def _plain(text: str) -> str:
    return " ".join(re.findall(r"[\w-]+", text.replace("'", "").lower()))
