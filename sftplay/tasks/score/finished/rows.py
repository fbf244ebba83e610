"""Rows of a file, each played as an episode: both answers and the hint between them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.load import not_asked
from sftplay.data.prompts.prompt import Prompt
from sftplay.data.prompts.questions import Question
from sftplay.errors import DataError
from sftplay.evaluate.evaluate import ready_to_answer
from sftplay.generate.prompts import PromptFile
from sftplay.generate.sampling import Sampling
from sftplay.tasks.score.episodes.play import Player, text_of
from sftplay.tasks.score.finished.cast import FinishedCast


class RowPlayer:
    """Plays batches of rows; a row's number and the seed alone decide its tokens."""

    def __init__(self, cfg: RunConfig, cast: FinishedCast, *, renderer: Any, sampling: Sampling) -> None:
        self._cfg, self._cast, self._sampling = cfg, cast, sampling
        self._player = Player(cfg, cast, renderer=renderer, sampling=partial(Sampling, top_p=sampling.top_p))

    def answers(self, batch: Sequence[tuple[Prompt, list[int]]]) -> list[dict[str, str]]:
        """What each row gets: `first_answer`, `hint`, and `response`, which is the second answer."""
        with ready_to_answer(self._cast.model, self._cfg):
            episodes = self._player.play(
                [Question(row.number, ids, row.question, {}) for row, ids in batch],
                numbers=[row.number for row, _ in batch],
                seed=self._sampling.seed,
                temperature=self._sampling.temperature,
            )
        tokenizer = self._player.tokenizer
        return [
            {
                "first_answer": text_of(tokenizer, episode.first.ids),
                "hint": text_of(tokenizer, episode.hint_ids),
                "response": text_of(tokenizer, episode.second.ids),
            }
            for episode in episodes
        ]


def check_problems(questions: PromptFile, renderer: Any, *, cfg: RunConfig) -> None:
    """Make sure that every row has room for both answers and the hint, before any is played.

    Raises:
        DataError: one has not, or has more than a question, with its place.
    """
    for question in questions:
        if more := question.beside_question(cfg.data.system):
            raise DataError(not_asked(more), where=str(question.source), fix="put what matters into the last turn")
        n_tokens = len(question.prompt(renderer))
        if n_tokens > cfg.prompt_tokens:
            what = f"has {n_tokens} tokens; beside answers of {cfg.score.max_new_tokens} and a hint there is room for "
            fix = "shorten the row, or the answers: MAX_NEW_TOKENS="
            raise DataError(f"{what}{cfg.prompt_tokens}", where=str(question.source), fix=fix)
