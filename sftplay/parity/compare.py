"""The trained model in plain transformers and fp32, and its base; and engines' answers compared with what both say."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.export.export import load_whole
from sftplay.export.merge import load_unquantised, move_to_gpu
from sftplay.export.merge_check import merge_by_peft
from sftplay.generate.generate import Generator
from sftplay.launch.run_folder import RunFolder
from sftplay.model.merging import attach_for_merging
from sftplay.parity.engine import Answer, EngineReply, Question


@dataclass(frozen=True)
class TokenScores:
    """What a model says of an answer, place by place, and of the place behind its last token."""

    logprobs: list[float]
    """Of each token of the answer."""

    best: list[int]
    """The likeliest token at each place; one more than the answer has tokens."""

    best_logprobs: list[float]
    end_logprobs: list[float]
    """Of the likeliest end token, at the same places as `best`."""


class Reference:
    """The run's trained model. It is loaded on first use; `close` frees its memory."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, *, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self.cfg, self.folder, self.tokenizer, self.end_ids = cfg, folder, tokenizer, list(end_ids)
        self.has_adapter = (folder.path / "adapter").is_dir()
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The base with the adapter attached, or the whole model; fp32, in evaluation mode."""
        if self._model is None:
            log.status("opening the trained model in fp32", "parity")
            if self.has_adapter:
                base = load_unquantised(self.cfg, self.folder, dtype=torch.float32)
                with warnings.catch_warnings():  # an adapter that fits nothing is reported by `causes`
                    warnings.filterwarnings("ignore", message=".*missing adapter keys.*")
                    self._model = attach_for_merging(base, self.folder.path / "adapter")
            else:
                self._model, _ = load_whole(self.cfg, self.folder, dtype="fp32")
            self._model.eval()
            move_to_gpu(self._model)
        return self._model

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the greedy answers, an end token included."""
        generator = Generator(self.model, self.tokenizer, self.end_ids, max_new_tokens)
        answers = []
        for n, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt)])
            answers.append(generator.generate(ids, torch.ones_like(ids))[0, len(prompt) :].tolist())
            log.progress(n + 1, len(prompts), what="answered by the trained model", tag="parity")
        return answers

    @property
    def all_end_ids(self) -> list[int]:
        """The tokens that end an answer of the trained model."""
        return Generator(self.model, self.tokenizer, self.end_ids, 1).all_end_ids

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenScores]:
        """Return what the trained model says of each (prompt, answer)."""
        return score_pairs(self.model, pairs, end_ids=self.all_end_ids)

    def score_base(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenScores] | None:
        """Return what the model says that the run started from; None where it cannot be opened any more."""
        if self.has_adapter:
            with self.model.disable_adapter():
                return self.score(pairs)
        end_ids = self.all_end_ids
        self.close()
        with suppress(MachineError):
            base = load_unquantised(self.cfg, self.folder, dtype=torch.float32).eval()
            # A run may have added rows for new tokens, which its base lacks.
            if base.get_input_embeddings().num_embeddings > max(max(map(max, pair)) for pair in pairs if all(pair)):
                return score_pairs(base, pairs, end_ids=end_ids)
        return None

    def merged(self) -> nn.Module:
        """Return the whole model, adapter merged in fp32; after that only this can be asked for."""
        if not self.has_adapter:
            return self.model
        self._model = merge_by_peft(self.model.cpu())
        self.has_adapter = False
        return self._model

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None
        gc.collect()


@torch.no_grad()
def score_pairs(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, end_ids: Sequence[int]
) -> list[TokenScores]:
    """Return what `model` says of each (prompt, answer), each in a pass of its own."""
    device, vocabulary = next(model.parameters()).device, model.get_input_embeddings().num_embeddings
    found = []
    for prompt, answer in pairs:
        # An engine with another vocabulary may answer what this model cannot read.
        ids = [token if token < vocabulary else 0 for token in (*prompt, *answer)]
        logits = model(input_ids=torch.tensor([ids], device=device)).logits[0, len(prompt) - 1 :].float()
        scores = logits.log_softmax(-1).cpu()
        best = scores.max(-1)
        answered = torch.tensor(ids[len(prompt) :], dtype=torch.long)
        ends = scores[:, list(end_ids)].max(-1).values if end_ids else torch.full((len(scores),), -torch.inf)
        found.append(
            TokenScores(
                scores[: len(answer)].gather(1, answered[:, None])[:, 0].tolist(),
                best.indices.tolist(), best.values.tolist(), ends.tolist(),
            )
        )  # fmt: skip
    return found


BOUNDS = {
    "float32": 1e-4, "float16": 0.05, "bfloat16": 0.25, "q8_0": 0.4, "q6_k": 0.6, "q5_k": 1.0, "q5_0": 1.0, "q5_1": 1.0,
    "q4_k": 2.0, "q4_0": 3.0, "q4_1": 3.0,
}  # fmt: skip
"""Largest difference of log-probabilities by the precision of what is served. Where they come from: docs/parity.md."""

LOOSEST = max(BOUNDS.values())
"""The bound for a precision that has no line of its own."""

NEARER = 4.0
"""An engine answers as the base where its mean distance to the base is so many times smaller than to the run."""


@dataclass(frozen=True)
class FirstDifference:
    """The first place where the engine says what the trained model would not."""

    row: int
    position: int
    """Number of the token in the answer, from 0; -1 where the prompts differ, and then `wanted` and `found` are ids at
    the first place where these do. Of an engine that gives text alone, the number of the character."""

    wanted: int | str | None
    """None for the end of the answer or prompt."""

    found: int | str | None


@dataclass(frozen=True)
class Comparison:
    """Counts of equal rows, None for what the engine does not tell."""

    n: int
    same_prompt_ids: int | None
    same_answer_ids: int | None
    ties: int
    """Rows with other ids where the trained model scores both tokens the same within the bound."""

    max_logprob_diff: float | None
    mean_logprob_diff: float | None
    first: FirstDifference | None

    def differs(self, bound: float) -> bool:
        """Return whether the engine says something that the trained model would not."""
        return self.first is not None or (self.max_logprob_diff or 0.0) > bound


def compare(
    questions: Sequence[Question], reply: EngineReply, *, expected: Sequence[Sequence[int]], texts: Sequence[str],
    scores: Sequence[TokenScores], bound: float, end_ids: Sequence[int], max_new_tokens: int,
) -> Comparison:  # fmt: skip
    """Compare all answers. `expected` are the trained model's own, `texts` the same as text, `scores` what it says of
    the engine's answers behind the engine's own prompts.
    """
    ends, differences, firsts, n_prompts, n_answers, ties = set(end_ids), list[float](), [], 0, 0, 0
    rows = zip(questions, reply.answers, expected, texts, scores, strict=True)
    for question, answer, wanted, text, scored in rows:
        differences += [abs(a - b) for a, b in zip(answer.logprobs, scored.logprobs)]
        found = _differ_in_prompt(question, answer)
        n_prompts += found is None
        if answer.text is not None and not answer.answer_ids:
            is_same = answer.text.strip() == text.strip()
            found = found or (None if is_same else _differ_in_text(question.row, text, answer.text))
        else:
            is_same = _without_end(answer.answer_ids, ends) == _without_end(wanted, ends)
            found = found or _differ_in_answer(question.row, answer.answer_ids, scored, bound, ends, max_new_tokens)
        n_answers += is_same
        ties += not is_same and found is None
        firsts += [found] if found else []
    gives_prompts = any(answer.prompt_ids for answer in reply.answers)
    return Comparison(
        len(questions), n_prompts if gives_prompts else None, n_answers, ties,
        # A NaN is no number that lies within a bound.
        max((d if d == d else float("inf") for d in differences), default=None),
        sum(differences) / len(differences) if differences else None,
        # Where prompts differ, answers do too; the prompt is the place to look at.
        min(firsts, key=lambda found: found.position >= 0, default=None),
    )  # fmt: skip


def _differ_in_prompt(question: Question, answer: Answer) -> FirstDifference | None:
    if not answer.prompt_ids or list(answer.prompt_ids) == list(question.prompt_ids):
        return None
    place = first_difference(question.prompt_ids, answer.prompt_ids)
    wanted, found = ([*ids, None][min(place, len(ids))] for ids in (question.prompt_ids, answer.prompt_ids))
    return FirstDifference(question.row, -1, wanted, found)


def _differ_in_text(row: int, wanted: str, found: str) -> FirstDifference:
    place = first_difference(wanted, found)
    return FirstDifference(row, place, wanted[place : place + 20] or None, found[place : place + 20] or None)


def _differ_in_answer(
    row: int, answer: Sequence[int], scored: TokenScores, bound: float, ends: set[int], max_new_tokens: int
) -> FirstDifference | None:
    """Return the first token that the trained model would not give behind the tokens before it, up to ties."""
    for place, token in enumerate(answer):
        if place and answer[place - 1] in ends:
            return FirstDifference(row, place, None, token)
        gap = scored.best_logprobs[place] - scored.logprobs[place]
        if token != scored.best[place] and not gap <= 2 * bound:
            return FirstDifference(row, place, scored.best[place], token)
    place = len(answer)
    has_ended = place >= max_new_tokens or (place and answer[-1] in ends)
    if not has_ended and not scored.best_logprobs[place] - scored.end_logprobs[place] <= 2 * bound:
        return FirstDifference(row, place, scored.best[place], None)
    return None


def _without_end(ids: Sequence[int], ends: set[int]) -> list[int]:
    return list(ids[:-1]) if ids and ids[-1] in ends else list(ids)


def first_difference(a: Sequence[object] | str, b: Sequence[object] | str) -> int:
    """Return the first place where two sequences differ; the length of the shorter one where one begins the other."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def find_change(
    reply: EngineReply, *, expected: Sequence[Sequence[int]], of_run: Sequence[TokenScores],
    of_base: Sequence[TokenScores], run_alone: Sequence[TokenScores], base_alone: Sequence[TokenScores], bound: float,
    is_same: bool,
) -> tuple[bool | None, str]:  # fmt: skip
    """Return whether the engine answers otherwise than the base, None where nobody can tell, and why.

    `of_run` and `of_base` are the scores of the engine's answers by the trained model and by its base; `run_alone` and
    `base_alone` those of the trained model's own answers, `expected`; `is_same` says that the engine's are the same.
    """
    pairs = [(a, b) for run, base in zip(run_alone, base_alone) for a, b in zip(run.logprobs, base.logprobs)]
    moved = max((abs(a - b) for a, b in pairs), default=0.0)
    turned = any(
        any(token != best for token, best in zip(answer, base.best)) for answer, base in zip(expected, base_alone)
    )
    given = [
        (said, run, base)
        for answer, by_run, by_base in zip(reply.answers, of_run, of_base, strict=True)
        for said, run, base in zip(answer.logprobs, by_run.logprobs, by_base.logprobs)
    ]
    if not given:
        if not turned:
            return None, "the base gives the same answers as the trained model"
        return (True, "") if is_same else (None, "the engine gives no log-probabilities")
    if any(said != said for said, _, _ in given):
        return None, "the engine's log-probabilities are not numbers"
    to_run = sum(abs(said - run) for said, run, _ in given) / len(given)
    to_base = sum(abs(said - base) for said, _, base in given) / len(given)
    if to_base * NEARER < to_run:
        return False, ""
    if to_run * NEARER < to_base:
        return True, ""
    if moved <= 2 * bound:
        return None, f"the training itself moves no log-probability by more than {moved:.2g}"
    return max(abs(said - base) for said, _, base in given) > bound, ""
