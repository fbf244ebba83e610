"""Completions of several turns in the trainer: who samples them, and how TRL and the scores get them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from sftplay.data.load_prompts import Question
from sftplay.environments.rollouts import RolloutIds, TurnRecord
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.sampler_check import SampledRow
from sftplay.train.preflight import has_sharded_weights
from sftplay.train.upstream import replaced_attributes


class Tokens(list[int]):
    """Tokens of a question. TRL makes a deep copy; a copy of each number costs more than reading them."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.ids)
        self.question = question

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return type(self)(self.question)


def roll_out(trainer: Any, questions: Sequence[Question], sample: Any) -> tuple[list[RolloutIds], Any]:
    """Return a completion of each question, and the log-probabilities of its tokens where the sampler returns them.

    `sample` takes what TRL's `_generate_single_turn` takes. Equal questions need not stand together in later turns.
    """
    has_logps, in_lockstep = False, has_sharded_weights(trainer) or trainer.use_vllm

    def find_most(n: int) -> int:
        return max(gather_objects(n, trainer.heartbeat)) if in_lockstep else n

    def sample_turn(prompts: list[list[int]], most: int) -> Any:
        nonlocal has_logps
        with limited_to(trainer, find_most(most)):  # a server gets the limit of the first rank, for all of them
            ids, logps = sample(prompts, None, {}, 1)
        has_logps |= logps is not None
        return ids, logps

    trainer.rollouts.beat = lambda: trainer.heartbeat.enter(trainer.heartbeat.phase)
    completions = trainer.rollouts.run(questions, sample_turn, count_going=find_most)
    return completions, list(map(join_logps, completions)) if has_logps else None


def join_logps(ids: RolloutIds) -> SampledRow:
    """Return what the sampler said of a completion, with the likeliest tokens of its turns: none where it did not
    write."""
    row = SampledRow(ids.logps)
    for begin, logps in ids.turn_logps:
        if isinstance(logps, SampledRow) and logps.top is not None:
            if row.top is None:
                shape = (len(ids), logps.top[0].shape[1])
                row.top = torch.zeros(shape, dtype=torch.long), torch.full(shape, -torch.inf)
            for whole, part in zip(row.top, logps.top, strict=True):
                whole[begin : begin + len(part)] = part[: len(ids) - begin]
    return row


def limited_to(trainer: Any, most: int) -> AbstractContextManager[None]:
    """Inside, the trainer samples at most so many new tokens."""
    if trainer.use_vllm:
        return replaced_attributes(trainer.vllm_generation, max_completion_length=most)
    return replaced_attributes(trainer.generation_config, max_new_tokens=most)


def as_rollouts(prompts: Sequence[list[int]], completion_ids: Sequence[list[int]], logps: Any) -> dict[str, Any]:
    """Return completions in the form that TRL wants of a `rollout_func` (trl 1.16, `_generate`)."""
    pairs = list(zip(prompts, completion_ids, strict=True))
    return {
        "prompt_ids": [ids.prompt_ids if isinstance(ids, RolloutIds) else prompt for prompt, ids in pairs],
        "completion_ids": list(completion_ids),
        "logprobs": logps,
        "env_mask": [ids.mask if isinstance(ids, RolloutIds) else [1] * len(ids) for ids in completion_ids],
    }


def count_sampled(ids: list[int]) -> int:
    """Count the tokens of a completion that the model wrote."""
    return ids.n_sampled if isinstance(ids, RolloutIds) else len(ids)


def read_records(completion_ids: Sequence[list[int]]) -> list[TurnRecord]:
    """Return what happened in each completion of several turns; empty for completions of one turn."""
    return [ids.record for ids in completion_ids if isinstance(ids, RolloutIds)]
