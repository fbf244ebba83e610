"""Score completions by the rewards, sample groups again whose rewards are all equal, and write samples and figures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import stdev
from typing import Any, get_args

import torch
from transformers.trainer_callback import ExportableState

from sftplay import log
from sftplay.atomic import whole_file
from sftplay.config.run import RunConfig
from sftplay.data.pipeline import training_order
from sftplay.environments.rollouts import TurnRecord, abstain_where_failed, compute_turn_figures, turn_columns
from sftplay.evaluate.rewarded import find_mean
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.code_rewards import NO_CODE, How
from sftplay.reward.reward_set import BatchRewards, MissingRewardMonitor, RewardSet, aligned, combined
from sftplay.reward.table import RewardValues
from sftplay.reward.text_rewards import overlong_penalty
from sftplay.sandbox.boxes.job import Status
from sftplay.train.metrics import Observer


def write_samples(folder: Path, lines: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Write a step's completions with their rewards to samples/ of the run folder; on the main rank."""
    if log.is_main() and lines:
        path = folder / "samples" / f"step-{step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with whole_file(path, survives_power_cut=False) as scratch:
            scratch.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def cut_samples(folder: Path, *, after_step: int) -> None:
    """Remove the samples that an earlier attempt wrote after the checkpoint from which the run continues."""
    if log.is_main():
        for path in (folder / "samples").glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > after_step:
                path.unlink()


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """Completions with their rewards: those of one rank, or those of all ranks in rank order."""

    weights: tuple[float, ...]  # of the rewards, in their order
    rows: list[int]  # the row number of each completion's prompt in the data
    completions: list[str]
    rewards: BatchRewards
    prompts: list[str] = field(default_factory=list)  # the question of each completion as text
    records: list[TurnRecord] = field(default_factory=list)  # where completions have several turns
    lengths: list[int] = field(default_factory=list)  # the tokens that the model wrote
    control: list[float] | None = None
    """The rewards that the model learns from instead of the config's, in a control run."""

    penalties: list[float] | None = None
    """What is added to each completion's reward for its length (grpo.overlong_buffer)."""

    normalizes_each: bool = False
    """Whether each reward is compared within its group by itself (grpo.aggregation: normalize_then_sum)."""

    @classmethod
    def concatenate(cls, parts: Sequence[ScoredBatch]) -> ScoredBatch:
        """Concatenate the batches of all ranks, in rank order."""
        columns: dict[str, Any] = {
            name: [value for part in parts for value in getattr(part, name)] for name in parts[0].columns
        }
        return replace(parts[0], **columns, rewards=BatchRewards.concatenate([part.rewards for part in parts]))

    @property
    def columns(self) -> list[str]:
        """Names of the fields with a value for each completion; some are empty where nothing is known of them."""
        names = ("rows", "completions", "prompts", "records", "lengths", "control", "penalties")
        return [name for name in names if getattr(self, name) is not None]

    @cached_property
    def true_rewards(self) -> list[float | None]:
        """The weighted sum of the rewards of each completion; None where it is unknown."""
        return combined(self.rewards, self.weights)

    @property
    def training_rewards(self) -> list[float | None]:
        """The reward of each completion that the model learns from; None where it is unknown."""
        if self.control is not None:
            return list(self.control)
        if self.penalties is None:
            return self.true_rewards
        pairs = zip(self.true_rewards, self.penalties, strict=True)
        return [value if value is None else value + penalty for value, penalty in pairs]

    @property
    def compared_rewards(self) -> list[Any]:
        """What is compared within a group, for each completion; None where it is unknown. Completions of equal sums may
        still teach where each reward is compared by itself.
        """
        if not self.normalizes_each:
            return self.training_rewards
        parts = (tuple(None if math.isnan(value) else value for value in line) for line in self.make_reward_matrix())
        return [None if total is None else part for total, part in zip(self.training_rewards, parts, strict=True)]

    def make_reward_matrix(self) -> list[list[float]]:
        """Return the rewards that the model learns from, float [completions, rewards]; NaN where a reward abstains.

        A reward of weight 0 is only measured and has no column. Where the sum is unknown, the whole line is NaN. TRL
        then leaves the completion out of means and deviations, and its advantage is 0.
        """
        if self.control is not None:
            return [[value] for value in self.control]
        pairs = zip(self.rewards.by_name.values(), self.weights, strict=True)
        columns: list[Any] = [column.values for column, weight in pairs if weight]
        columns += [] if self.penalties is None else [self.penalties]
        lines = zip(self.true_rewards, zip(*columns, strict=True), strict=True)
        return [[math.nan if None in (total, value) else value for value in line] for total, line in lines]

    def compute_figures(self, num_generations: int) -> dict[str, float | None]:
        """Compute the figures of this batch for a line of metrics."""
        rewards = self.training_rewards
        groups = split_known(rewards, num_generations)
        known = [value for group in groups for value in group]
        compared = split_known(self.compared_rewards, num_generations)
        are_equal = [len(set(group)) == 1 for group in compared if len(group) > 1]
        columns = {name: column.values for name, column in self.rewards.by_name.items()}
        unknown = sum(None in line for line in zip(*columns.values(), strict=True))
        figures = {
            "reward": find_mean(rewards),
            "reward_std": stdev(known) if len(known) > 1 else None,
            "zero_variance_share": find_mean(are_equal),
            "abstained": unknown / len(self.rows),
            **{f"reward/{name}": find_mean(values) for name, values in columns.items()},
            **compute_program_figures(self.rewards.verdicts),
            **compute_turn_figures(self.records),
        }
        if self.penalties is not None:
            figures["overlong_penalty"] = find_mean(self.penalties)
        return figures if self.control is None else {**figures, "true_reward": find_mean(self.true_rewards)}

    def make_sample_lines(self, advantages: Sequence[float]) -> list[dict[str, Any]]:
        """Return the line of samples/step-N.jsonl for each completion."""
        columns = {name: column.values for name, column in self.rewards.by_name.items()}
        return [
            {
                "prompt_id": row,
                "prompt": self.prompts[n] if self.prompts else "",
                "completion": completion,
                **({"tokens": self.lengths[n]} if self.lengths else {}),
                "rewards": {name: values[n] for name, values in columns.items()},
                **({} if self.control is None else {"control": self.control[n]}),
                "advantage": advantages[n],
                "verdict": self.rewards.verdicts[n],
                **(self.records[n].as_json() if self.records else {}),
            }
            for n, (row, completion) in enumerate(zip(self.rows, self.completions, strict=True))
        ]


def compute_program_figures(verdicts: Sequence[Mapping[str, Any] | None]) -> dict[str, float | None]:
    """Compute the shares of programs by status (`sandbox/STATUS`), by the way they were found in the completion
    (`found/HOW`), and that pass all hidden tests (`hidden_pass`); empty where no program was run. Those of 0 stay, or
    means over rollout batches would be wrong."""
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return {}
    statuses = Counter(verdict["status"] for verdict in known)
    ways = Counter(verdict.get("how") for verdict in known)
    return {
        **{f"sandbox/{status}": statuses[status] / len(known) for status in (*get_args(Status), NO_CODE)},
        **{f"found/{how}": ways[how] / len(known) for how in get_args(How)},
        "hidden_pass": find_mean([verdict.get("hidden_pass") for verdict in known]),
    }


class RewardScorer:
    """Scores completions with the rewards of a run on one rank; a context manager that ends the reward processes."""

    def __init__(self, cfg: RunConfig, columns: Sequence[str]) -> None:
        """`columns` are the columns that any row has."""
        self.rewards, self.columns = RewardSet(cfg), tuple(columns)
        self._control, self._buffer = cfg.grpo.placebo_reward, cfg.grpo.overlong_buffer
        self._most_tokens = cfg.grpo.max_completion_length
        self._normalizes_each = cfg.grpo.aggregation == "normalize_then_sum"
        self._missing_rewards = MissingRewardMonitor()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    @property
    def training_weights(self) -> dict[str, float]:
        """Name -> weight of the rewards that the model learns from."""
        if self._control is not None:
            return {"control": 1.0}
        pairs = zip(self.rewards.names, self.rewards.weights, strict=True)
        penalty = {} if self._buffer is None else {"overlong_penalty": 1.0}
        return {name: weight for name, weight in pairs if weight} | penalty

    def score(
        self,
        inputs: Sequence[Mapping[str, Any]],
        completions: Sequence[str],
        *,
        heartbeat: Heartbeat,
        completion_ids: Sequence[Sequence[int]],
        records: Sequence[TurnRecord] = (),
    ) -> ScoredBatch:
        """Score this rank's completions of the rows `inputs`; return the completions of all ranks with their rewards.
        `records` say what happened in completions of several turns, in their order.
        Raise RunError on every rank where a reward abstains too often.
        """
        with heartbeat.within("reward"):
            # Nothing is copied: rewards live in processes of their own, and programs get texts.
            columns = aligned([row["columns"] for row in inputs], self.columns) | turn_columns(records)
            rewards = self.rewards.score(completions, columns, completion_ids=completion_ids)
            rewards = abstain_where_failed(rewards, records)
            penalties = control = None
            if self._buffer is not None and self._control is None:
                most, soft = self._most_tokens, self._buffer
                penalties = [overlong_penalty(len(ids), most=most, soft=soft) for ids in completion_ids]
            if self._control is not None:  # random numbers come from torch, whose state a checkpoint keeps
                n = len(completions)
                control = [1.0] * n if self._control == "constant" else torch.rand(n).tolist()
            local = ScoredBatch(
                weights=self.rewards.weights,
                rows=[row["row"] for row in inputs],
                completions=list(completions),
                rewards=rewards,
                prompts=[row["question"] for row in inputs],
                records=list(records),
                lengths=list(map(len, completion_ids)),
                control=control,
                penalties=penalties,
                normalizes_each=self._normalizes_each,
            )
            batch = ScoredBatch.concatenate(gather_objects(local, heartbeat))
        self._missing_rewards.add(batch.rewards)
        return batch


MAX_SKIPPED_TURNS = 4
"""Most turns in a row that a zero-variance prompt skips. The model may forget what it could do, or learn what it could
not."""

RESERVE_SEED = 0x5EED  # added to the run's seed, so that the reserve has another order than the training

Tokens = list[int]


@dataclass
class LocalBatch:
    """One rank's part of a rollout batch. Resampled rows replace the rows before."""

    inputs: list[dict[str, Any]]  # the rows, as TRL holds them
    prompt_ids: list[Tokens]
    completion_ids: list[Tokens]
    logps: list[list[float]] | None  # the sampler's log-probability of each token, where it returns them

    def replace_completions(
        self, places: Sequence[int], sampled: tuple[list[Tokens], list[list[float]] | None]
    ) -> None:
        """Put the first sampled completions at these places."""
        completion_ids, logps = sampled
        for n, place in enumerate(places):  # there may be more: dummies that keep ranks in lockstep
            self.completion_ids[place] = completion_ids[n]
            if self.logps is not None and logps is not None:
                self.logps[place] = logps[n]


class Reserve:
    """The order of replacement prompts, and the prompts with a zero-variance group at present.

    `rows` are the row numbers of the prompts in the data.
    """

    def __init__(self, rows: Sequence[int], *, seed: int) -> None:
        self.rows, self.seed = rows, seed + RESERVE_SEED
        self.position = 0
        self.zero_variance: dict[int, int] = {}  # prompt -> number of zero-variance groups in a row
        self.turns_to_skip: dict[int, int] = {}  # prompt -> turns that it skips from now on
        self.tokens: dict[int, int] = {}  # prompt -> trained tokens of its last group, with grpo.skip_zero_variance
        self._orders: dict[int, list[int]] = {}

    def record(self, prompt: int, *, has_zero_variance: bool) -> None:
        """Record the result of a prompt's group."""
        if has_zero_variance:
            self.zero_variance[prompt] = self.zero_variance.get(prompt, 0) + 1
            self.turns_to_skip[prompt] = min(self.zero_variance[prompt], MAX_SKIPPED_TURNS)
        else:
            self.zero_variance.pop(prompt, None)
            self.turns_to_skip.pop(prompt, None)

    def skips_turn(self, prompt: int) -> bool:
        """Count a turn of the prompt, and return whether the prompt skips it."""
        left = self.turns_to_skip.pop(prompt, 0)
        if left > 1:
            self.turns_to_skip[prompt] = left - 1
        return left > 0

    def take(self, taken: Collection[int]) -> int | None:
        """Take the next prompt that is neither in `taken` nor known for zero variance; None where there is none."""
        n = len(self.rows)
        for position in range(self.position, self.position + n):
            epoch, place = divmod(position, n)
            if epoch not in self._orders:
                self._orders = {known: order for known, order in self._orders.items() if known == epoch - 1}
                self._orders[epoch] = training_order(n, n, seed=self.seed + epoch)
            prompt = self.rows[self._orders[epoch][place]]
            if prompt not in taken and prompt not in self.zero_variance:
                self.position = position + 1
                return prompt
        return None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; numbers and lists only."""
        by_prompt = {"silent": self.zero_variance, "passes": self.turns_to_skip, "tokens": self.tokens}
        return {"position": self.position, **{key: list(counts.items()) for key, counts in by_prompt.items()}}

    def restore(self, state: Mapping[str, Any], *, needs_tokens: bool) -> None:
        """Continue from a state of `state()`. Checkpoints of an older release have no tokens of skipped groups."""
        self.position = state["position"]
        self.zero_variance, self.tokens = dict(state["silent"]), dict(state.get("tokens", []))
        self.turns_to_skip = {} if needs_tokens and "tokens" not in state else dict(state["passes"])


class DynamicSampler:
    """Replaces, skips and resamples groups whose rewards are all equal: they have no gradient.

    A prompt whose last groups had zero variance skips its next turns. With grpo.dynamic_sampling_rounds another prompt
    takes them, and a group that turns out to
    have zero variance is sampled again with another prompt, in at most so many rounds per rollout batch. The new prompt
    is the next of the reserve, a seeded order of all prompts, without a known zero-variance group; without one the
    group stays. With grpo.skip_zero_variance nothing is sampled in the turns that a prompt skips.

    All choices follow from rewards that all ranks know, so all ranks make the same, and a checkpoint keeps the state.
    """

    def __init__(
        self, prompts: Any, *, rows: Sequence[int], rounds: int, num_generations: int, seed: int, in_lockstep: bool
    ) -> None:
        """`prompts` are all training prompts, as TRL gets them; `rows` are their row numbers in the data, aligned. With
        `in_lockstep` all ranks generate equally many completions at the same time."""
        self.prompts, self.rounds, self.group_size, self.in_lockstep = prompts, rounds, num_generations, in_lockstep
        self.reserve = Reserve(rows, seed=seed)
        self._places = {row: place for place, row in enumerate(rows)}
        self.skipped: list[int] = []  # groups of this rollout batch for which nothing is sampled
        self.skipped_tokens = 0  # tokens that these groups had when they were sampled last
        self.first_figures: dict[str, float | None] = {}
        """Reward and zero-variance share of the last rollout batch before resampling. The kept completions say less
        about the model, because zero-variance groups are missing among them."""

    def replace_skipped_prompts(self, inputs: list[dict[str, Any]], rows: Sequence[int]) -> int:
        """Replace the prompts that skip their turn, in place, and count them; `rows` are the rows of all ranks."""
        prompts = rows[:: self.group_size]
        replacements = self._choose_replacements(self._count_turns(prompts), prompts)
        self._replace_inputs(inputs, replacements)
        return len(replacements)

    def choose_skipped_groups(self, rows: Sequence[int]) -> int:
        """Choose the groups for which nothing is sampled, and count them; at least one group is sampled."""
        prompts = rows[:: self.group_size]
        skipping = self._count_turns(prompts)
        self.skipped = skipping if len(skipping) < len(prompts) else skipping[1:]
        self.skipped_tokens = sum(self.reserve.tokens.get(prompts[group], 0) for group in self.skipped)
        return len(self.skipped)

    def _count_turns(self, prompts: Sequence[int]) -> list[int]:
        return [group for group, prompt in enumerate(prompts) if self.reserve.skips_turn(prompt)]

    def find_sampled_places(self, first: int, count: int) -> list[int]:
        """Return the places of sampled rows among the `count` rows of the rollout batch from `first` on."""
        return [n for n in range(count) if (first + n) // self.group_size not in self.skipped]

    def record_sampled(self, batch: ScoredBatch, *, tokens: Sequence[int]) -> None:
        """Record the results of sampled groups and their `tokens`, one number per row; `batch` has no other rows."""
        self._record_groups(batch, range(len(batch.rows) // self.group_size))
        for first in range(0, len(batch.rows), self.group_size):
            self.reserve.tokens[batch.rows[first]] = sum(tokens[first : first + self.group_size])

    def resample(
        self,
        local: LocalBatch,
        batch: ScoredBatch,
        *,
        generate: Callable[[list[Tokens]], tuple[list[Tokens], list[list[float]] | None]],
        score: Callable[[list[dict[str, Any]], list[Tokens]], ScoredBatch],
    ) -> tuple[ScoredBatch, int]:
        """Resample zero-variance groups; return the scored batch that is kept and the number of resampled groups.

        `batch` is the first rollout batch, scored. `generate` samples completions of a list of prompts. `score` takes
        one rank's completions and returns the scored completions of all ranks, in rank order.
        """
        figures, resampled = batch.compute_figures(self.group_size), 0
        self.first_figures = {f"first_{name}": figures[name] for name in ("reward", "zero_variance_share")}
        self._record_groups(batch, range(len(batch.rows) // self.group_size))
        for _ in range(self.rounds):
            groups = find_zero_variance_groups(batch.compared_rewards, self.group_size)
            replacements = self._choose_replacements(groups, batch.rows[:: self.group_size])
            if not replacements:
                break
            resampled += len(replacements)
            places = self._replace_inputs(local.inputs, replacements)
            for place in places:
                local.prompt_ids[place] = local.inputs[place]["prompt"]
            places_of_all = [group * self.group_size + n for group in replacements for n in range(self.group_size)]
            n_sampled = len(places)
            if self.in_lockstep:  # as many as the rank with most of these rows
                n_sampled = max(Counter(place // len(local.inputs) for place in places_of_all).values())
            if n_sampled:
                dummies = [local.prompt_ids[0]] * (n_sampled - len(places))
                local.replace_completions(places, generate([local.prompt_ids[place] for place in places] + dummies))
            part = score([local.inputs[n] for n in places], [local.completion_ids[n] for n in places])
            batch = replace_rows(batch, part, places=places_of_all)
            self._record_groups(batch, replacements)
        return batch, resampled

    def _record_groups(self, batch: ScoredBatch, groups: Collection[int]) -> None:
        zero_variance = set(find_zero_variance_groups(batch.compared_rewards, self.group_size))
        for group in groups:
            first = group * self.group_size
            # Equal rewards with an unknown one among them do not show zero variance.
            is_known = None not in batch.training_rewards[first : first + self.group_size]
            if group not in zero_variance or is_known:
                self.reserve.record(batch.rows[first], has_zero_variance=group in zero_variance)

    def _choose_replacements(self, groups: Sequence[int], prompts: Sequence[int]) -> dict[int, int]:
        """Map groups to replacement prompts, as far as the reserve has any; `prompts` are the prompts of all groups."""
        taken, replacements = set(prompts), {}
        for group in groups:
            if (prompt := self.reserve.take(taken)) is not None:
                replacements[group] = prompt
                taken.add(prompt)
        return replacements

    def _replace_inputs(self, inputs: list[dict[str, Any]], replacements: Mapping[int, int]) -> list[int]:
        """Put the replacement prompts into this rank's rows, and return the places of these rows."""
        first = log.rank() * len(inputs)
        places = [n for n in range(len(inputs)) if (first + n) // self.group_size in replacements]
        for place in places:
            inputs[place] = self.prompts[self._places[replacements[(first + place) // self.group_size]]]
        return places


class KeepDraws(Observer, ExportableState):
    """Keeps the reserve and the sampling totals in the Trainer's checkpoints, where the class name is their key."""

    trainer: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes")
        if saved:
            needs_tokens = self.trainer.cfg.grpo.skip_zero_variance
            self.trainer.dynamic_sampler.reserve.restore(saved["reserve"], needs_tokens=needs_tokens)
            self.trainer.sampling_totals.update(saved["drawn"])

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        if not hasattr(self, "trainer"):  # the Trainer asks as soon as it is built
            return {"args": {}, "attributes": {}}
        reserve = self.trainer.dynamic_sampler.reserve.state()
        return {"args": {}, "attributes": {"reserve": reserve, "drawn": self.trainer.sampling_totals}}


def find_zero_variance_groups(rewards: Sequence[Any], group_size: int) -> list[int]:
    """Find the groups without two different known rewards, by number.

    >>> find_zero_variance_groups([1.0, 1.0, 0.0, 1.0, None, 0.5], 2)
    [0, 2]
    """
    return [number for number, known in enumerate(split_known(rewards, group_size)) if len(set(known)) < 2]


def split_known(rewards: Sequence[Any], group_size: int) -> list[list[Any]]:
    groups = (rewards[first : first + group_size] for first in range(0, len(rewards), group_size))
    return [[value for value in group if value is not None] for group in groups]


def replace_rows(batch: ScoredBatch, part: ScoredBatch, *, places: Sequence[int]) -> ScoredBatch:
    def merge(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        merged = list(old)
        for place, value in zip(places, new, strict=True):
            merged[place] = value
        return merged

    by_name = {
        name: RewardValues(merge(column.values, part.rewards.by_name[name].values), column.reasons)
        for name, column in batch.rewards.by_name.items()
    }
    rewards = replace(batch.rewards, by_name=by_name, verdicts=merge(batch.rewards.verdicts, part.rewards.verdicts))
    columns: dict[str, Any] = {
        name: merge(getattr(batch, name), getattr(part, name)) for name in batch.columns if getattr(batch, name)
    }
    return replace(batch, **columns, rewards=rewards)
