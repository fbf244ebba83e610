"""Plays episodes: an answer, a hint, a second answer. The problem goes through all three, and so does its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from sftplay.config.schema.run import RunConfig
from sftplay.data.encode.render import Renderer
from sftplay.data.prompts.questions import Question
from sftplay.generate.generate import Generator
from sftplay.generate.sampling import Sampling, seed_of
from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.tasks.score.episodes.cast import Role
from sftplay.tasks.score.episodes.drawing import Action, RecordedSampling, draw_actions
from sftplay.tasks.score.episodes.figures import reference_of
from sftplay.tasks.score.episodes.templates import Template, make_templates, tokens_of, tokens_of_each

Hints = Literal["own", "empty", "static", "right", "other"]
"""Where hints come from. own: as `score.guidance` says. right: a text with the right answer. other: those given, which
were written for other problems."""


class Episode(NamedTuple):
    """One problem, answered twice."""

    question: Question
    first: Action
    hint: Action | None
    """None where nobody wrote one."""

    hint_ids: list[int]
    """The hint as it stands in the second prompt."""

    second: Action


Fresh = tuple[Action, Action]
"""Another answer to each of an episode's prompts: of turn 1 and of turn 2."""


class Speakers(Protocol):
    """Whoever can lend the model of a role."""

    def speaking(self, role: Role) -> AbstractContextManager[Any]: ...


class Player:
    """Plays episodes with the solver and the guide of a run."""

    def __init__(
        self,
        cfg: RunConfig,
        cast: Speakers,
        *,
        renderer: Renderer,
        sampling: Callable[..., Sampling] = RecordedSampling,
    ) -> None:
        """`sampling` makes of a temperature and a seed how tokens are chosen."""
        self._sampling = sampling
        self.cfg, self.cast, self.tokenizer = cfg, cast, renderer.tokenizer
        self.templates = make_templates(cfg.score.prompts, renderer, system=cfg.data.system)
        self._ends = renderer.end_token_ids
        self._at_once: AdaptiveBatches | None = None
        self.beat: Callable[[], None] = lambda: None
        """Called before each batch: only a single one can take too long."""

    def play(
        self,
        questions: Sequence[Question],
        *,
        numbers: Sequence[int],
        seed: int,
        temperature: float,
        hints: Hints = "own",
        firsts: Sequence[Action] | None = None,
        others: Sequence[list[int]] = (),
    ) -> list[Episode]:
        """An episode for each question; the model must be in evaluation mode.

        `numbers` are those of the episodes among all ranks; together with `seed` they decide every token. `firsts` are
        the first answers where the same model has drawn them already, for episodes with other hints.
        `others` are the hints of the kind `other`.
        """
        score, room = self.cfg.score, self.cfg.model.max_seq_len - self.cfg.score.max_new_tokens

        def answer(template: Template, ids: Sequence[dict[str, list[int]]], *, turn: int) -> list[Action]:
            prompts = [template.filled(each, room=room) for each in ids]
            return self._draw(
                prompts, "solver", numbers=numbers, seed=seed_of(seed, turn), temperature=temperature,
                longest=score.max_new_tokens,
            )  # fmt: skip

        texts = list({question.question for question in questions})
        problems = dict(zip(texts, tokens_of_each(self.tokenizer, texts), strict=True))
        known = [{"problem": problems[question.question]} for question in questions]
        firsts = answer(self.templates.solve, known, turn=1) if firsts is None else firsts
        known = [{**ids, "attempt": first.said} for ids, first in zip(known, firsts, strict=True)]
        written = self._written(known, numbers=numbers, seed=seed, temperature=temperature, hints=hints)
        given = others if hints == "other" else self._hint_ids(questions, written, hints=hints)
        known = [{**ids, "hint": hint} for ids, hint in zip(known, given, strict=True)]
        seconds = answer(self.templates.revise, known, turn=3)
        return [
            Episode(question=question, first=first, hint=hint, hint_ids=ids, second=second)
            for question, first, hint, ids, second in zip(questions, firsts, written, given, seconds, strict=True)
        ]

    def answer_again(
        self, episodes: Sequence[Episode], *, numbers: Sequence[int], seed: int, temperature: float
    ) -> list[Fresh]:
        """Other answers of the solver to the prompts of both turns, drawn independently of those of the episodes."""
        prompts = ([episode.first.prompt for episode in episodes], [episode.second.prompt for episode in episodes])
        first, second = (
            self._draw(
                each, "solver", numbers=numbers, seed=seed_of(seed, draw), temperature=temperature,
                longest=self.cfg.score.max_new_tokens,
            )
            for draw, each in enumerate(prompts, 4)
        )  # fmt: skip
        return list(zip(first, second, strict=True))

    def _written(
        self,
        known: Sequence[dict[str, list[int]]],
        *,
        numbers: Sequence[int],
        seed: int,
        temperature: float,
        hints: Hints,
    ) -> Sequence[Action | None]:
        """The guide's hints; None where it is not asked."""
        score = self.cfg.score
        if hints != "own" or score.guidance in ("none", "static"):
            return [None] * len(known)
        room = self.cfg.model.max_seq_len - score.max_hint_tokens
        prompts = [self.templates.guide.filled(each, room=room) for each in known]
        return self._draw(
            prompts, "guide", numbers=numbers, seed=seed_of(seed, 2), temperature=temperature,
            longest=score.max_hint_tokens,
        )  # fmt: skip

    def _hint_ids(
        self, questions: Sequence[Question], written: Sequence[Action | None], *, hints: Hints
    ) -> list[list[int]]:
        prompts, is_static = self.cfg.score.prompts, hints == "own" and self.cfg.score.guidance == "static"
        if hints == "right":
            texts = [prompts.right_hint.replace("{answer}", reference_of(question)) for question in questions]
            return tokens_of_each(self.tokenizer, texts)
        if hints == "static" or is_static:
            return [tokens_of(self.tokenizer, prompts.static_hint)] * len(questions)
        return [hint.said if hint is not None else [] for hint in written]

    def _draw(
        self,
        prompts: Sequence[list[int]],
        role: Role,
        *,
        numbers: Sequence[int],
        seed: int,
        temperature: float,
        longest: int,
    ) -> list[Action]:
        if self._at_once is None:
            rows = int(self.cfg.score.generation_rows or len(prompts))
            fix = "lower score.generation_rows, then `make resume`" if rows > 1 else "lower model.max_seq_len"
            together = self.cfg.score.placement == "sharded"
            self._at_once = AdaptiveBatches(rows, "generation", fix=fix if together else "")

        def draw(part: slice) -> list[Action]:
            self.beat()
            sampling = self._sampling(temperature=temperature, seed=seed)
            generator = Generator(model, self.tokenizer, self._ends, longest, sampling)
            return draw_actions(generator, prompts[part], rows=numbers[part])

        with self.cast.speaking(role) as model:
            return [action for part in self._at_once.each(len(prompts), draw) for action in part]


def exchange_hints(by_number: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Give each episode the next one's hint that differs from its own; nothing where all hints are equal.

    >>> exchange_hints({0: [5], 1: [5], 2: [6]})
    {0: [6], 1: [6], 2: [5]}
    """
    numbers = sorted(by_number)
    doubled = [by_number[number] for number in numbers] * 2
    if all(hint == doubled[0] for hint in doubled):
        return {}
    return {
        number: next(hint for hint in doubled[at:] if hint != by_number[number]) for at, number in enumerate(numbers)
    }


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an action or a hint."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
