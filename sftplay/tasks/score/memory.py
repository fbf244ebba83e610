"""The phases of a step of two-turn episodes on each device: answers and hints are sampled, and two models learn.

Phases follow each other, on all devices together, so a device's peak is the largest of its own. What is learned from
has the length of `model.max_seq_len`, and an action takes its end.
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
"""A weight that trains in fp32, its gradient and two moments."""


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """The episodes that are sampled, what learns, and where it lies.

    `tokens` are those of the longest prompt and action together. A width is 0 where there is no such network, and where
    V is a head on the guide, which is small.
    """

    layout: Layout
    tokens: int
    answer_tokens: int
    hint_tokens: int
    has_guide: bool = True
    guide_learns: bool = True
    critic_width: int = 0
    value_width: int = 0

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
    """Return device -> bytes of every phase of one step in the steady state; of models in shards also of the start.

    `rows` is the micro-batch, `sampled` the answers that a process samples at a time.
    """
    found, held_by_device = {}, find_parts(episodes, execution)
    for device in sorted({*held_by_device, OWN}):
        held = frozenset(held_by_device.get(device, ()))
        on = DeviceMemory(shape, execution, episodes=episodes, held=held, world_size=world_size)
        found[device] = Footprint({name: parts for name, parts in on.phases(rows, sampled).items() if parts})
    if episodes.layout.is_split:
        # Guide and reference, as far as there are any, wait on the host until they are split.
        waiting = standing_bytes(shape, execution).weights * (episodes.has_guide + execution.trains_all)
        found["cpu"] = Footprint({START: {"weights": waiting}})
    return found


def find_parts(episodes: Episodes, execution: MemorySetup) -> dict[str, list[str]]:
    """Return device -> the parts that lie there, as far as the run has them."""
    unused = set() if episodes.has_guide else {"guide", "value"}
    unused |= set() if episodes.critic_width else {"critic", "target_critic"}
    unused |= set() if execution.trains_all else {"ref"}
    found: dict[str, list[str]] = {}
    for part, device in episodes.layout.devices().items():
        if part not in unused:
            found.setdefault(device, []).append(part)
    return found


class DeviceMemory:
    """The memory of one device of a run; `held` are the parts that it holds."""

    def __init__(
        self, shape: ModelShape, execution: MemorySetup, *, episodes: Episodes, held: frozenset[str], world_size: int
    ) -> None:
        self.shape, self.execution, self.episodes, self.held = shape, execution, episodes, held
        self.computing, self.gathered, self.head, is_split = execution, ALONE, 0.0, episodes.layout.is_split
        self.whole = standing_bytes(shape, execution)
        one = StaticMemory(**{name: size / (world_size if is_split else 1) for name, size in vars(self.whole).items()})
        if is_split:
            # A pass gathers the head, a layer, and the next one, in the precision that computes: there is no rounded
            # copy of shards. With tied weights the head is the embedding.
            width = execution.compute_bytes
            self.computing = replace(execution, weight_bytes=width, stream_bytes=width)
            self.head = float((shape.other_params - (0 if shape.tied else shape.vocab * shape.hidden)) * width)
            layer = (shape.total_params - shape.other_params) / shape.layers * width
            self.gathered = Communication(gathered=self.head + layer, ahead=layer)
        is_separate = episodes.has_guide and (episodes.layout.separates or execution.trains_all)
        solver, guide = "solver" in held, "guide" in held
        learners = solver + (guide and episodes.guide_learns)
        self.standing = StaticMemory(
            weights=(solver + (guide and is_separate)) * one.weights,
            adapters=(solver + guide) * one.adapters,
            gradients=learners * one.gradients,
            optimizer=learners * one.optimizer,
        )
        # DDP's buckets for the model that the Trainer holds; a separate guide is no part of it.
        sent = self.standing.gradients / (episodes.learners if is_separate else 1)
        # Critic and value: nearly all is the table of tokens, with gradient and moments. The slow copy has neither.
        row, copies = shape.vocab * FP32, ADAM_COPIES * ("critic" in held) + ("target_critic" in held)
        self.others = {
            REFERENCE: one.weights if "ref" in held else 0.0,
            CRITIC: float(row * episodes.critic_width * copies),
            VALUE: float(row * episodes.value_width * ADAM_COPIES * ("value" in held)),
            SHARDING: 0.0 if world_size == 1 or is_split else sent,
        }
        self.resident = {
            "weights": self.standing.weights,
            "adapters": self.standing.adapters,
            "optimizer": self.standing.optimizer,
            **self.others,
            "workspace": float(execution.workspace_bytes),
        }

    def phases(self, rows: int, sampled: int) -> dict[str, dict[str, float]]:
        """Return phase -> component -> bytes."""
        episodes, held = self.episodes, self.held
        found = {DRAW: self._sampling(sampled)}
        if episodes.layout.is_split:
            found[START] = {"weights": self.whole.weights}
        if "guide" in held and episodes.guide_learns:
            learned = self._learning(rows, episodes.hint_tokens)
            found |= {f"{GUIDE}{name}": learned[name] for name in ("head", "layer")} | {"step": learned["step"]}
        if "solver" in held:
            found |= self._learning(rows, episodes.answer_tokens)
        elif "ref" in held:
            # A forward pass of the reference for a model on another device.
            tokens, actions = rows * episodes.tokens, rows * episodes.answer_tokens
            layer = forward_layer(self.shape, self.execution, rows=rows, seq=episodes.tokens)
            head = reference_scores(self.shape, self.execution, tokens=tokens, labelled=actions)
            at_work = {"layer": layer} if layer > head else {"head": head}
            found[COMPARE] = {**self.resident, "gradients": self.standing.gradients, **at_work}
        if not found.get("step"):
            found["step"] = self.resident
        return found

    def _sampling(self, sampled: int) -> dict[str, float]:
        """Return the components of the role on this device that takes more."""
        # Of a score of the newest token: the model's in fp32, transformers' copy, that over the temperature, what was
        # left of the token before, and two rows of probabilities in fp64 (`generate.sampling.SampleByRow`).
        found, score_bytes = [], 32
        for role, longest in (("solver", self.episodes.answer_tokens), ("guide", self.episodes.hint_tokens)):
            if role in self.held:
                rollout = Rollout(
                    completions=sampled,
                    prompt_tokens=self.episodes.tokens - longest,
                    completion_tokens=longest,
                    micro_batch=1,
                )
                found.append(newest_token(self.shape, self.computing, rollout=rollout, score_bytes=score_bytes))
        most = max(found, key=lambda parts: sum(parts.values()), default={})
        sharding = self.others[SHARDING] + self.gathered.gathered + self.gathered.ahead
        return {**self.resident, SHARDING: sharding, **most}

    def _learning(self, rows: int, longest: int) -> dict[str, dict[str, float]]:
        """Return a micro-batch of one role; both models' gradients are there, since turn 2 follows turn 1."""
        size = Size(rows=rows, seq=self.episodes.tokens, labelled=rows * longest, accumulates=True)
        learned = estimate(
            self.shape, self.computing, size=size, standing=self.standing, communication=self.gathered
        ).phases
        if not self.episodes.layout.is_split:
            return {name: {**parts, **self.others} for name, parts in learned.items()}
        others = {**self.others, REFERENCE: self.others[REFERENCE] + self.head}
        del others[SHARDING]
        found = {name: {**parts, **others} for name, parts in learned.items()}
        # Whole gradients of the layer at work, and of the head, which are sent after all layers.
        found["layer"][SHARDING] += self.head + self.gathered.ahead
        return found
