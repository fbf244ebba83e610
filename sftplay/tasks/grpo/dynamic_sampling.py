"""Dynamic sampling: replace prompts or skip groups with zero reward variance, which have no gradient.

With grpo.dynamic_sampling_rounds above 0 two things happen. A prompt whose last groups had zero variance (all rewards
equal) skips its next turns, and another prompt takes its place before sampling. And a group that turns out to have zero
variance is sampled again with another prompt, in at most grpo.dynamic_sampling_rounds rounds per rollout batch. The new
prompt is the next one of the reserve without a known zero-variance group; without such a prompt the group stays.
With grpo.skip_zero_variance nothing is sampled in the turns that a prompt skips.
The reserve is a seeded order of all prompts, separate from the training order. All choices follow from rewards that all
ranks know, so all ranks make the same choices, and a checkpoint keeps the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers.trainer_callback import ExportableState

from sftplay import log
from sftplay.data.order import training_order
from sftplay.reward.calls import RewardValues
from sftplay.tasks.grpo.scoring import ScoredBatch
from sftplay.train.observer import Observer

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

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state()`."""
        self.position = state["position"]
        self.zero_variance, self.tokens = dict(state["silent"]), dict(state.get("tokens", []))
        # Older checkpoints have no tokens.
        self.turns_to_skip = dict(state["passes"]) if "tokens" in state else {}


class DynamicSampler:
    """Replaces, skips and resamples groups, with the same choices on every rank."""

    def __init__(
        self, prompts: Any, *, rows: Sequence[int], rounds: int, num_generations: int, seed: int, in_lockstep: bool
    ) -> None:
        """`prompts` are all training prompts, as TRL gets them; `rows` are their row numbers in the data, aligned.

        `in_lockstep`: whether all ranks must generate equally many completions at the same time.
        """
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
            groups = find_zero_variance_groups(batch.training_rewards, self.group_size)
            replacements = self._choose_replacements(groups, batch.rows[:: self.group_size])
            if not replacements:
                break
            resampled += len(replacements)
            places = self._replace_inputs(local.inputs, replacements)
            for place in places:
                local.prompt_ids[place] = list(local.inputs[place]["prompt"])
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
        zero_variance = set(find_zero_variance_groups(batch.training_rewards, self.group_size))
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
            self.trainer.dynamic_sampler.reserve.restore(saved["reserve"])
            self.trainer.sampling_totals.update(saved["drawn"])

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        if not hasattr(self, "trainer"):  # the Trainer asks as soon as it is built
            return {"args": {}, "attributes": {}}
        reserve = self.trainer.dynamic_sampler.reserve.state()
        return {"args": {}, "attributes": {"reserve": reserve, "drawn": self.trainer.sampling_totals}}


def find_zero_variance_groups(rewards: Sequence[float | None], group_size: int) -> list[int]:
    """Find the groups without two different known rewards, by number.

    >>> find_zero_variance_groups([1.0, 1.0, 0.0, 1.0, None, 0.5], 2)
    [0, 2]
    """
    groups = [rewards[first : first + group_size] for first in range(0, len(rewards), group_size)]
    return [number for number, values in enumerate(groups) if len({*values} - {None}) < 2]


def replace_rows(batch: ScoredBatch, part: ScoredBatch, *, places: Sequence[int]) -> ScoredBatch:
    """Return `batch` with the rows of `part` at `places`."""

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
    return replace(
        batch,
        rows=merge(batch.rows, part.rows),
        completions=merge(batch.completions, part.completions),
        prompts=merge(batch.prompts, part.prompts) if batch.prompts else [],
        rewards=rewards,
        control=None if batch.control is None else merge(batch.control, part.control or []),
    )
