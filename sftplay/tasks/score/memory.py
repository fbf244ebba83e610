"""The phases of a step of two-turn episodes on each device: answers and hints are sampled, and two models learn.

Phases follow each other, on all devices together, so a device's peak is the largest of its own. What is learned from
has the length of `model.max_seq_len`, of which an action takes the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from sftplay.config.run import RunConfig
from sftplay.plan.devices.layout import OWN, Layout, resolve_layout
from sftplay.plan.memory.forecast import Forecast, Setting
from sftplay.plan.memory.head import reference_scores
from sftplay.plan.memory.memory_setup import MemorySetup
from sftplay.plan.memory.sharding import DeviceShare
from sftplay.plan.memory.step import (
    ALONE,
    SHARDING,
    Communication,
    Footprint,
    Size,
    StaticMemory,
    estimate,
    standing_bytes,
)
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.tasks.grpo.memory import DRAW, REFERENCE, SAMPLING_LABELS, Rollout, forward_layer, newest_token
from sftplay.tasks.score.section import SEPARATE_WIDTH

START, GUIDE, COMPARE, CRITIC, VALUE = "start", "guide's ", "reference's answer", "critic", "value"

FP32, ADAM_COPIES = 4, 4
"""A weight that trains in fp32 has a gradient and two moments beside it."""

DRAWN_BYTES = 32
"""Of a score of the newest token: the model's in fp32, transformers' copy, that over the temperature, what was left of
the token before, and two rows of probabilities in fp64 (`generate.sampling.SampleByRow`)."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """What is played, what learns, and where it lies."""

    layout: Layout
    tokens: int
    """Longest prompt and action together."""

    answer_tokens: int
    hint_tokens: int
    has_guide: bool = True
    guide_learns: bool = True
    critic_width: int = 0
    """0 where there is no critic."""

    value_width: int = 0
    """0 where V is a head on the guide, which is small, or where there is none."""

    labels: ClassVar[Mapping[str, str]] = {
        CRITIC: "critic and its slow copy",
        VALUE: "value network",
        START: "at the start, while the solver is whole",
        COMPARE: "while the reference scores actions",
        f"{GUIDE}head": "in the guide's loss",
        f"{GUIDE}layer": "in a layer's backward pass of the guide",
        **SAMPLING_LABELS,
    }

    @property
    def learners(self) -> int:
        """Models that train."""
        return 1 + self.guide_learns

    def forecast(self, setting: Setting, size: Size, *, sampled: int, share: DeviceShare) -> Forecast:
        """Forecast a step; the footprint is that of the fullest GPU, or of the process's own device."""
        found = estimate_episodes(
            setting.shape, setting.execution, episodes=self, rows=size.rows, sampled=sampled,
            world_size=setting.world_size,
        )  # fmt: skip
        on_host = found.pop("cpu").peak_bytes if "cpu" in found else 0
        fullest = max(found, key=lambda name: found[name].peak_bytes)
        return Forecast(setting, size, found[fullest], on_host, sampled, found if len(found) > 1 else {})


def read_episodes(cfg: RunConfig, *, gpus: int, processes: int) -> Episodes:
    """Read the episodes of a config in which the placement is decided."""
    score = cfg.score
    placement: Any = "shared" if score.placement == "auto" else score.placement
    return Episodes(
        layout=resolve_layout(cfg, placement=placement, gpus=gpus, processes=processes),
        tokens=cfg.model.max_seq_len,
        answer_tokens=score.max_new_tokens,
        hint_tokens=score.max_hint_tokens,
        has_guide=score.guidance in ("model", "model_trained"),
        guide_learns=score.guidance == "model_trained",
        critic_width=score.critic.width if score.advantage == "critic" else 0,
        value_width=SEPARATE_WIDTH if score.value == "separate" and score.has_value else 0,
    )


def estimate_episodes(
    shape: ModelShape, execution: MemorySetup, *, episodes: Episodes, rows: int, sampled: int, world_size: int = 1
) -> dict[str, Footprint]:
    """Device -> bytes of every phase of one step in the steady state; of models in shards also of the start.

    `rows` is the micro-batch, `sampled` the answers that a process samples at a time.
    """
    found = {}
    for device in sorted(set(_in_use(episodes, execution).values()) | {OWN}):
        on = _On(shape, execution, episodes, device, world_size)
        found[device] = Footprint({name: parts for name, parts in on.phases(rows, sampled).items() if parts})
    if episodes.layout.is_split:
        # Guide and reference, as far as there are any, wait on the host until they are split.
        waiting = standing_bytes(shape, execution).weights * (episodes.has_guide + execution.trains_all)
        found["cpu"] = Footprint({START: {"weights": waiting}})
    return found


def held_by(episodes: Episodes, execution: MemorySetup) -> dict[str, list[str]]:
    """Device -> the parts that lie there, as far as the run has them."""
    found: dict[str, list[str]] = {}
    for part, device in _in_use(episodes, execution).items():
        found.setdefault(device, []).append(part)
    return found


def _in_use(episodes: Episodes, execution: MemorySetup) -> dict[str, str]:
    unused = set()
    if not episodes.has_guide:
        unused |= {"guide", "value"}
    if not episodes.critic_width:
        unused |= {"critic", "target_critic"}
    if not execution.trains_all:
        unused.add("ref")
    return {part: device for part, device in episodes.layout.devices().items() if part not in unused}


@dataclass(frozen=True)
class _On:
    """One device of a run."""

    shape: ModelShape
    execution: MemorySetup
    episodes: Episodes
    device: str
    world_size: int

    def phases(self, rows: int, sampled: int) -> dict[str, dict[str, float]]:
        """Phase -> component -> bytes."""
        episodes = self.episodes
        found = {DRAW: self._drawing(sampled)}
        if episodes.layout.is_split:
            found[START] = {"weights": standing_bytes(self.shape, self.execution).weights}
        if self._holds("guide") and episodes.guide_learns:
            learned = self._learning(rows, episodes.hint_tokens)
            found |= {f"{GUIDE}{name}": learned[name] for name in ("head", "layer")} | {"step": learned["step"]}
        if self._holds("solver"):
            found |= self._learning(rows, episodes.answer_tokens)
        elif self._holds("ref"):
            found[COMPARE] = self._comparing(rows)
        found.setdefault("step", {})
        if not found["step"]:
            found["step"] = self._resident()
        return found

    def _holds(self, part: str) -> bool:
        return _in_use(self.episodes, self.execution).get(part) == self.device

    def _is_separate(self) -> bool:
        return self.episodes.has_guide and (self.episodes.layout.separates or self.execution.trains_all)

    def _one(self) -> StaticMemory:
        """What this device holds of a single model."""
        one = standing_bytes(self.shape, self.execution)
        parts = self.world_size if self.episodes.layout.is_split else 1
        return StaticMemory(**{name: size / parts for name, size in vars(one).items()})

    def _standing(self) -> StaticMemory:
        """Weights, gradients and moments of all models on this device, without the reference."""
        one, episodes = self._one(), self.episodes
        holds = {"solver": self._holds("solver"), "guide": self._holds("guide")}
        learns = holds["solver"] + (holds["guide"] and episodes.guide_learns)
        bases = holds["solver"] + (holds["guide"] and self._is_separate())
        return StaticMemory(
            weights=bases * one.weights,
            adapters=sum(holds.values()) * one.adapters,
            gradients=learns * one.gradients,
            optimizer=learns * one.optimizer,
        )

    def _resident(self) -> dict[str, float]:
        """What is always there beside weights and moments, and they."""
        standing = self._standing()
        return {
            "weights": standing.weights,
            "adapters": standing.adapters,
            "optimizer": standing.optimizer,
            REFERENCE: self._reference(),
            **self._networks(),
            SHARDING: self._sent(),
            "workspace": float(self.execution.workspace_bytes),
        }

    def _sent(self) -> float:
        """DDP's buckets for the model that the Trainer holds, which a guide of its own is no part of."""
        if self.world_size == 1 or self.episodes.layout.is_split:
            return 0.0
        return self._standing().gradients / (self.episodes.learners if self._is_separate() else 1)

    def _reference(self) -> float:
        return self._one().weights if self._holds("ref") else 0.0

    def _networks(self) -> dict[str, float]:
        """Critic and value: the table of tokens, which is nearly all of each, with gradient and moments. The critic's
        slow copy has neither."""
        row = self.shape.vocab * FP32
        copies = ADAM_COPIES * self._holds("critic") + self._holds("target_critic")
        return {
            CRITIC: float(row * self.episodes.critic_width * copies),
            VALUE: float(row * self.episodes.value_width * ADAM_COPIES * self._holds("value")),
        }

    def _drawing(self, sampled: int) -> dict[str, float]:
        """The role on this device that takes more."""
        found = []
        for role, longest in (("solver", self.episodes.answer_tokens), ("guide", self.episodes.hint_tokens)):
            if self._holds(role):
                rollout = Rollout(
                    completions=sampled,
                    prompt_tokens=self.episodes.tokens - longest,
                    completion_tokens=longest,
                    micro_batch=1,
                )
                found.append(newest_token(self.shape, self._computing(), rollout=rollout, score_bytes=DRAWN_BYTES))
        most = max(found, key=lambda parts: sum(parts.values()), default={})
        gathered = self._gathered()
        return {**self._resident(), SHARDING: self._sent() + gathered.gathered + gathered.ahead, **most}

    def _learning(self, rows: int, longest: int) -> dict[str, dict[str, float]]:
        """A micro-batch of one role; both models' gradients are there, since turn 2 follows turn 1."""
        standing, resident = self._standing(), self._resident()
        size = Size(rows=rows, seq=self.episodes.tokens, labelled=rows * longest, accumulates=True)
        beside = {name: resident[name] for name in (REFERENCE, CRITIC, VALUE, SHARDING)}
        if self.episodes.layout.is_split:
            return self._learning_in_shards(size, standing)
        learned = estimate(self.shape, self.execution, size=size, standing=standing).phases
        return {name: {**parts, **beside} for name, parts in learned.items()}

    def _learning_in_shards(self, size: Size, standing: StaticMemory) -> dict[str, dict[str, float]]:
        """The same where weights are gathered for each pass."""
        computed, gathered = self._computing(), self._gathered()
        learned = estimate(self.shape, computed, size=size, standing=standing, communication=gathered).phases
        head = float(self._head_params() * computed.compute_bytes)
        beside = {REFERENCE: self._reference() + head, **self._networks()}
        found = {name: {**parts, **beside} for name, parts in learned.items()}
        # Whole gradients of the layer at work, and of the head, which are sent behind all layers.
        found["layer"][SHARDING] += head + gathered.ahead
        return found

    def _computing(self) -> MemorySetup:
        """Shards are gathered in the precision that computes: there is no rounded copy beside them."""
        each = self.execution.compute_bytes if self.episodes.layout.is_split else None
        return replace(self.execution, weight_bytes=each, stream_bytes=each) if each else self.execution

    def _head_params(self) -> int:
        """What is gathered around the layers: with tied weights the head is the embedding."""
        shape = self.shape
        return shape.other_params - (0 if shape.tied else shape.vocab * shape.hidden)

    def _gathered(self) -> Communication:
        """Whole weights that a pass has on this device: the head, a layer, and the next one."""
        if not self.episodes.layout.is_split:
            return ALONE
        shape, each = self.shape, self.execution.compute_bytes
        layer = (shape.total_params - shape.other_params) / shape.layers * each
        return Communication(gathered=self._head_params() * each + layer, ahead=layer)

    def _comparing(self, rows: int) -> dict[str, float]:
        """A forward pass of the reference for a model on another device."""
        tokens, actions = rows * self.episodes.tokens, rows * self.episodes.answer_tokens
        layer = forward_layer(self.shape, self.execution, rows=rows, seq=self.episodes.tokens)
        head = reference_scores(self.shape, self.execution, tokens=tokens, labelled=actions)
        at_work = {"layer": layer} if layer > head else {"head": head}
        return {**self._resident(), "gradients": self._standing().gradients, **at_work}
