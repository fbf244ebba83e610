"""Completions of several turns in the trainer: who samples them, and how TRL and the scores get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Prompts, Question
from sftplay.environments.dialogue import Dialogue
from sftplay.environments.processes import EnvironmentSpec
from sftplay.environments.rollouts import RolloutIds, Rollouts, Start, TurnRecord
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.rollouts import replaced_attributes
from sftplay.train.preflight import has_sharded_weights


class Tokens(list[int]):
    """Tokens of a question. TRL makes a deep copy; a copy of each number costs more than reading them."""

    def __init__(self, question: Question) -> None:
        super().__init__(question.ids)
        self.question = question

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return type(self)(self.question)


def open_rollouts(cfg: RunConfig, prompts: Prompts, *, end_ids: Sequence[int]) -> Rollouts | None:
    """Return what runs completions of several turns; None where the config has neither environment nor tools.

    Raises:
        ConfigError, MachineError: the environment or a tool cannot be opened.
        DataError: the chat template is refused for turns.
    """
    spec = EnvironmentSpec.from_config(cfg)
    if spec is None:
        return None
    named = f"of {cfg.model.name} (data.template: {cfg.data.template})"
    dialogue = Dialogue.prove(
        prompts.renderer, tools=prompts.tools, has_environment=spec.environment is not None, named=named
    )
    return Rollouts(
        spec, dialogue, max_turns=cfg.grpo.max_turns, max_tokens=cfg.grpo.max_completion_length,
        max_prompt_tokens=cfg.prompt_tokens, end_ids=end_ids, seed=cfg.seed,
    )  # fmt: skip


def make_start(question: Question) -> Start:
    """Return what the completions of a question begin with."""
    return Start(ids=question.ids, row=question.row, columns=question.columns, turns=question.turns)


def roll_out(trainer: Any, questions: Sequence[Question], sample: Any) -> tuple[list[RolloutIds], Any]:
    """Return a completion of each question, and the log-probabilities of its tokens where the sampler returns them.

    `sample` takes what TRL's `_generate_single_turn` takes. Equal questions need not stand together in later turns.
    """
    has_logps = False

    def sample_turn(prompts: list[list[int]], most: int) -> Any:
        nonlocal has_logps
        with limited_to(trainer, most):
            ids, logps = sample(prompts, None, {}, 1)
        has_logps |= logps is not None
        return ids, logps

    def count_going(n: int) -> int:
        in_lockstep = has_sharded_weights(trainer) or trainer.use_vllm
        return max(gather_objects(n, trainer.heartbeat)) if in_lockstep else n

    completions = trainer.rollouts.run(list(map(make_start, questions)), sample_turn, count_going=count_going)
    return completions, [ids.logps for ids in completions] if has_logps else None


@contextmanager
def limited_to(trainer: Any, most: int) -> Iterator[None]:
    """Inside, the trainer samples at most so many new tokens."""
    if trainer.use_vllm:
        with replaced_attributes(trainer.vllm_generation, max_completion_length=most):
            yield
        return
    with replaced_attributes(trainer.generation_config, max_new_tokens=most):
        yield


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
