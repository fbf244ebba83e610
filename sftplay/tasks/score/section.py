"""The section `score`: two-turn episodes with a guide, and what both models learn from them (task mode score).

Names are those of the literature where it has some. Rules between keys are in `spec`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from sftplay.config.section import NotNegative, Positive, PositiveFloat, Section

Guidance = Literal["none", "static", "model", "model_trained"]
Devices = Annotated[str, Field(pattern=r"^(auto|cpu|cuda:[0-9]+)$")]

PLACE = re.compile(r"\{(problem|attempt|hint)\}")
"""A place in a prompt that is filled in."""

PLACES: dict[str, tuple[str, ...]] = {
    "solve": ("problem",),
    "guide": ("problem", "attempt"),
    "revise": ("problem", "attempt", "hint"),
}
"""Prompt -> the places that it must have."""

SOLVE = """{problem}

Work step by step. End with the final answer alone on the last line, behind ####."""

GUIDE = """Problem:
{problem}

A student's attempt:
{attempt}

You review the attempt. Write one short hint: what exactly should the student check again?
Do not state the final answer."""

REVISE = """Problem:
{problem}

An attempt, which may be right or wrong:
{attempt}

A reviewer's hint:
{hint}

Write the complete solution anew, step by step. End with the final answer alone on the last line, behind ####."""

STATIC_HINT = "There may be a mistake in the attempt. Check each step, and correct what is wrong."


class PromptsConfig(Section):
    """The texts of the three prompts. Each must have its placeholders, each of them once. They go through the chat
    template where the model has one."""

    solve: str = SOLVE
    """Turn 1, with {problem}. It asks for a final answer in the form that the reward reads."""

    guide: str = GUIDE
    """What the guide is asked, with {problem} and {attempt}."""

    revise: str = REVISE
    """Turn 2, with {problem}, {attempt} and {hint}."""

    static_hint: str = STATIC_HINT
    """The hint of `guidance: static`, and of the evaluation with a static hint."""

    right_hint: str = "The final answer is {answer}."
    """The hint, with {answer}, by which a run finds out before its start whether the solver can use one."""


class DevicesConfig(Section):
    """Where each part lies: auto (as the placement says), cpu or cuda:N. cuda:N needs a run of one process."""

    solver: Devices = "auto"
    """The model that answers. It lies on the first visible GPU, or without one on the CPU."""

    guide: Devices = "auto"
    """The model that writes hints."""

    value: Devices = "auto"
    """The value of the state before turn 2."""

    critic: Devices = "auto"
    """The critic, where there is one."""

    target_critic: Devices = "auto"
    """The critic's slow copy."""

    ref: Devices = "auto"
    """The frozen model that the KL terms compare with, where all weights train. On the CPU it is slow."""


class CriticConfig(Section):
    """The optional critic (advantage critic): two Q and two V on a small encoder of token ids, and a slow copy of it.
    Each answer is sampled twice for it."""

    learning_rate: PositiveFloat = 1e-4
    """Rate of its optimizer. Higher than the solver's, because it starts from nothing."""

    tau: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Share of the critic that its slow copy takes over after each step: 0.005 to 0.1 is usual."""

    width: Positive = 64
    """Width of its encoder. Small: it sees few episodes."""


SEPARATE_WIDTH = 64
"""Width of a value network of its own. Small: it sees few episodes."""


class ScoreConfig(Section):
    """Two-turn episodes (task mode score): the solver answers, the guide writes a hint, the solver answers again. A row
    is a problem; train.effective_batch_size counts episodes."""

    episodes_per_problem: Annotated[int, Field(ge=2)] = 4
    """Episodes of each problem in a step, K: the baseline of an episode is the mean of the others. Four or more make it
    steady."""

    guidance: Guidance = "model_trained"
    """Where hints come from. none: no hint (an empty one). static: a fixed instruction, which is SCoRe as published.
    model: the guide, which does not learn. model_trained: the guide, which learns."""

    guidance_warmup: Annotated[int, Field(ge=0)] = 0
    """Steps before the guide begins to learn. The first hints then meet a solver that has learned to read them."""

    stage1_steps: Annotated[int, Field(ge=0)] = 300
    """Steps of stage 1: turn 2 learns, turn 1 is held where it was. Without it both turns become one best answer."""

    stage2_steps: Annotated[int, Field(ge=0)] = 300
    """Steps of stage 2: both turns learn, and turn 2 gets a bonus for changes."""

    reset_adam: bool = False
    """Forget the optimizer's moments when stage 2 begins. Off: switching stages resets nothing."""

    kl1_max: PositiveFloat = 0.02
    """The gate at the end of stage 1: a larger KL of turn 1, or second answers that are no better, gives a warning."""

    alpha: NotNegative = 10.0
    """Bonus of turn 2 in stage 2 for each change of the reward: 1 + alpha for (wrong, right), -alpha for (right,
    wrong). 10 is the published value."""

    turn_discount: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of turn 2's return that is added to turn 1's. Above 1 / alpha, turn 1 is punished for being right."""

    beta1: NotNegative = 0.01
    """Weight of KL for turn 2, and in stage 2 for both turns. The published value."""

    beta2: NotNegative = 0.1
    """Weight of KL for turn 1 in stage 1. It pins the first answer: 0.1 was published for mathematics, 0.25 for
    code."""

    beta_guide: NotNegative = 0.05
    """Weight of KL for the guide. It keeps hints in plain language."""

    kl: Literal["full", "k3"] = "full"
    """How KL is computed at each token. full: over the whole vocabulary. k3: from the sampled token alone; noisier, and
    it needs less memory."""

    guide_reward: Literal["outcome", "progress", "signed"] = "outcome"
    """The reward of a hint. outcome: the reward of the second answer. progress: less that of the first. signed: from -1
    to 1."""

    leak_penalty: NotNegative = 0.0
    """Taken from the guide's reward where the hint contains the right answer. 0 measures leaks only."""

    format_reward: NotNegative = 0.0
    """Paid to both turns for an answer that every reward which judges the form accepts fully: 0.05 to 0.1 is usual. It
    is never part of the accuracy."""

    value_coef: NotNegative = 0.01
    """What V is multiplied by in the guide's return, and in shared_trunk the loss of V. 0 is learning without V, unless
    advantage is value."""

    value: Literal["head", "separate"] = "head"
    """What V is. head: one linear layer on the guide's last hidden state. separate: a small network of its own, which
    reads tokens; no gradient can reach the guide from it."""

    value_flow: Literal["shared_trunk", "stop", "straight_through"] = "shared_trunk"
    """How far the gradient of V goes. shared_trunk (full): into the guide. stop (partial): into the head only.
    straight_through: the guide climbs V through its sampled tokens; experimental, biased."""

    advantage: Literal["auto", "batch", "rloo", "value", "critic"] = "auto"
    """What turn 2's return is compared with. batch: the mean of all. rloo: the mean of the problem's other episodes.
    value: V. critic: a critic says what answer and prompt are worth, for both turns. auto: V. auto and critic begin
    once they explain more than a tenth of the variance; before it is rloo. Turn 1 and the guide use rloo, or batch
    where it is asked for."""

    scale: Literal["batch", "none"] = "batch"
    """batch divides advantages by their standard deviation: with alpha 10 they would be ten times too large."""

    steps_per_generation: Positive = 1
    """Optimizer steps that learn from one rollout batch. Each gets train.effective_batch_size of its episodes, and a
    rollout batch has as many as all of them. 1 is on policy; more learn from episodes of older weights."""

    num_iterations: Positive = 1
    """Times that the episodes of a rollout batch are learned from. Each time they are split into minibatches anew."""

    epsilon: PositiveFloat = 0.2
    """How far the ratio of a token's probability to that when it was sampled may be from 1 before it is cut off. It
    is used where a rollout batch feeds several optimizer steps; where it feeds one, there is no ratio."""

    temperature: PositiveFloat = 1.0
    """Temperature of sampling; the loss uses the same. 1 is the model's own distribution."""

    max_new_tokens: Positive = 512
    """Most tokens of an answer. One that is cut off there counts as wrong."""

    max_hint_tokens: Positive = 128
    """Most tokens of a hint. Short: a hint is no solution."""

    generation_rows: Positive | None = None
    """Answers that a process samples at the same time. None means all of its share, or parts that fit the device."""

    solver_learning_rate: PositiveFloat | None = None
    """Rate of the solver. None means train.learning_rate."""

    guide_learning_rate: PositiveFloat | None = None
    """Rate of the guide. None means a fifth of the solver's, with tuning.mode full a tenth: hints must not move faster
    than their reader."""

    value_learning_rate: PositiveFloat = 1e-4
    """Rate of the value head. High, because it starts from nothing."""

    min_hint_gain: NotNegative = 0.2
    """How much more often second answers must be right with a correct hint than with an empty one before training
    starts; else the run is refused: turn 2 would learn to copy. The correct hint is prompts.right_hint. 0 does not
    look."""

    eval_temperature: NotNegative = 0.0
    """Temperature of the evaluation. 0 takes the likeliest token each time. Above 0, each problem is also played once
    that way, for acc_t1_greedy and acc_t2_greedy; 0.7 with several eval_samples is usual."""

    eval_samples: Positive = 1
    """Episodes of each problem in the evaluation. More than one needs an eval_temperature above 0."""

    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    """The texts of the prompts."""

    placement: Literal["auto", "shared", "roles", "roles4", "sharded"] = "auto"
    """Which device holds what. shared: every process holds everything, adapters on one base. roles: one process, the
    solver on its first GPU, the guide as a model of its own on the second. roles4: on four. sharded: with
    tuning.mode full, every process holds a part of each weight (cluster.strategy fsdp). auto: the first that fits."""

    devices: DevicesConfig = Field(default_factory=DevicesConfig)
    """A device for each part, instead of the placement's."""

    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The optional critic."""

    samples: Annotated[int, Field(ge=0)] | None = 64
    """Episodes of each rollout batch that are written to samples/, by its first step. None means all, 0 none."""

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps that learn from one rollout batch."""
        return self.steps_per_generation * self.num_iterations

    @property
    def has_value(self) -> bool:
        """Whether there is a V: it is read from a guide."""
        return self.guidance in ("model", "model_trained") and (self.value_coef > 0 or self.advantage == "value")


SECTION = ScoreConfig
