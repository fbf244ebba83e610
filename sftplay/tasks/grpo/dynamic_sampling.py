"""Dynamic sampling: a group whose rewards are all equal teaches nothing, so its place goes to another prompt, or none.

Two things happen where grpo.dynamic_sampling_rounds is above 0. A prompt whose last groups were silent (all rewards
equal) passes its next turns, before anything is drawn for it. And a group that turns out silent is drawn again with the
next prompt of the reserve that is not known to be silent, at most grpo.dynamic_sampling_rounds times in a drawing;
where there is none, it is kept.
With grpo.skip_zero_variance nothing is drawn in the turns that a prompt passes.
The reserve is a seeded order of all prompts, apart from that of the training. Everything follows from rewards that all
ranks know, so they choose alike, and a checkpoint keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transformers.trainer_callback import ExportableState

from sftplay import log
from sftplay.data.order import training_order
from sftplay.reward.calls import Scores
from sftplay.tasks.grpo.scoring import Judged
from sftplay.train.observer import Observer

MOST_TURNS = 4
"""Most turns in a row that a silent prompt passes. The model may unlearn what it could, or learn what it could not."""

RESERVE_SEED = 0x5EED
"""Added to the run's seed, so that the reserve is another order than that of the training."""

Tokens = list[int]


class Prompts(Protocol):
    """Rows as TRL gets them."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> dict[str, Any]: ...


@dataclass
class Share:
    """A rank's part of a drawing. What is drawn again takes the place of what was there."""

    inputs: list[dict[str, Any]]
    """The rows, as TRL holds them."""

    prompt_ids: list[Tokens]
    completion_ids: list[Tokens]
    logps: list[list[float]] | None
    """What the sampler says of each token, where it says it."""

    def put(self, places: Sequence[int], drawn: tuple[list[Tokens], list[list[float]] | None]) -> None:
        """Take the completions that were drawn for these places."""
        completion_ids, logps = drawn
        for n, place in enumerate(places):  # there may be more: those that only keep ranks together
            self.completion_ids[place] = completion_ids[n]
            if self.logps is not None and logps is not None:
                self.logps[place] = logps[n]


class Reserve:
    """The prompts that take the places of others, in their order, and which of them are silent at present.

    `rows` are the numbers of the prompts, as the data has them.
    """

    def __init__(self, rows: Sequence[int], *, seed: int) -> None:
        self.rows, self.seed = rows, seed + RESERVE_SEED
        self.position = 0
        self.silent: dict[int, int] = {}
        """Prompt -> groups in a row whose rewards were all equal."""

        self.passes: dict[int, int] = {}
        """Prompt -> turns that it passes from now on."""

        self.tokens: dict[int, int] = {}
        """Prompt -> learned tokens of its last group, with grpo.skip_zero_variance."""

        self._orders: dict[int, list[int]] = {}

    def note(self, prompt: int, *, is_silent: bool) -> None:
        """Remember what a prompt's group has shown."""
        if is_silent:
            self.silent[prompt] = self.silent.get(prompt, 0) + 1
            self.passes[prompt] = min(self.silent[prompt], MOST_TURNS)
        else:
            self.silent.pop(prompt, None)
            self.passes.pop(prompt, None)

    def passes_turn(self, prompt: int) -> bool:
        """Whether the prompt passes the turn that it has now."""
        left = self.passes.pop(prompt, 0)
        if left > 1:
            self.passes[prompt] = left - 1
        return left > 0

    def take(self, taken: Collection[int]) -> int | None:
        """The next prompt that is neither among `taken` nor silent at present; None: there is none."""
        for step in range(len(self.rows)):
            prompt = self._at(self.position + step)
            if prompt not in taken and prompt not in self.silent:
                self.position += step + 1
                return prompt
        return None

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, len(self.rows))
        if epoch not in self._orders:
            self._orders = {each: order for each, order in self._orders.items() if each == epoch - 1}
            self._orders[epoch] = training_order(len(self.rows), len(self.rows), seed=self.seed + epoch)
        return self.rows[self._orders[epoch][place]]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; numbers and lists only."""
        by_prompt = {"silent": self.silent, "passes": self.passes, "tokens": self.tokens}
        return {"position": self.position, **{name: list(each.items()) for name, each in by_prompt.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.position = state["position"]
        self.silent, self.tokens = dict(state["silent"]), dict(state.get("tokens", []))
        self.passes = dict(state["passes"]) if "tokens" in state else {}  # checkpoints of before do not know tokens


class Redraws:
    """Draws again, the same on every rank."""

    def __init__(
        self, prompts: Prompts, *, rows: Sequence[int], rounds: int, num_generations: int, seed: int, together: bool
    ) -> None:
        """`prompts` are all those of the training, as TRL gets them; `rows` are their numbers in the data, aligned.

        `together`: whether all ranks must generate equally many completions at the same time.
        """
        self.prompts, self.rounds, self.group, self.together = prompts, rounds, num_generations, together
        self.reserve = Reserve(rows, seed=seed)
        self._places = {row: place for place, row in enumerate(rows)}
        self.skipped: list[int] = []
        """Groups of this drawing for which nothing is drawn."""

        self.skipped_tokens = 0
        """Tokens that these groups had when they were drawn last."""

        self.first_draw: dict[str, float | None] = {}
        """Reward and silent share of the last drawing before anything was drawn again. The completions that are kept
        say less about the model: silent groups are missing among them."""

    def give_turns(self, inputs: list[dict[str, Any]], rows: Sequence[int]) -> int:
        """Replace the prompts that pass their turn, in place, and count them; `rows` are those of all ranks."""
        now = list(rows[:: self.group])
        chosen = self._chosen([group for group, prompt in enumerate(now) if self.reserve.passes_turn(prompt)], now)
        self._replace(inputs, chosen)
        return len(chosen)

    def skip_turns(self, rows: Sequence[int]) -> int:
        """Choose the groups for which nothing is drawn, and count them; one group is always drawn."""
        now = list(rows[:: self.group])
        passing = [group for group, prompt in enumerate(now) if self.reserve.passes_turn(prompt)]
        self.skipped = passing if len(passing) < len(now) else passing[1:]
        self.skipped_tokens = sum(self.reserve.tokens.get(now[group], 0) for group in self.skipped)
        return len(self.skipped)

    def places_drawn(self, first: int, count: int) -> list[int]:
        """Of `count` rows from number `first` of the drawing, those of groups that are drawn, counted from 0."""
        return [n for n in range(count) if (first + n) // self.group not in self.skipped]

    def note_drawn(self, judged: Judged, *, tokens: Sequence[int] = ()) -> None:
        """Remember what the groups have shown that were drawn, and their `tokens`, one number a row; `judged` has no
        other rows."""
        self._note(judged, range(len(judged.rows) // self.group))
        for first in range(0, len(judged.rows), self.group):
            self.reserve.tokens[judged.rows[first]] = sum(tokens[first : first + self.group])

    def run(
        self,
        share: Share,
        judged: Judged,
        *,
        generate: Callable[[list[Tokens]], tuple[list[Tokens], list[list[float]] | None]],
        judge: Callable[[list[dict[str, Any]], list[Tokens]], Judged],
    ) -> tuple[Judged, int]:
        """Draw silent groups again within the bound; what the kept completions were paid, and groups drawn again.

        `judged` is that of the first draw. `generate` draws for a list of prompts, `judge` asks about a rank's
        completions and answers for those of all ranks, in rank order.
        """
        figures, redrawn = judged.figures(self.group), 0
        self.first_draw = {f"first_{name}": figures[name] for name in ("reward", "zero_variance_share")}
        self._note(judged, range(len(judged.rows) // self.group))
        for _ in range(self.rounds):
            silent = silent_groups(judged.paid, self.group)
            chosen = self._chosen(silent, judged.rows[:: self.group])
            if not chosen:
                break
            redrawn += len(chosen)
            places = self._replace(share.inputs, chosen)
            for place in places:
                share.prompt_ids[place] = list(share.inputs[place]["prompt"])
            if n_drawn := self._most_places(chosen, len(share.inputs)) if self.together else len(places):
                asked = [share.prompt_ids[place] for place in places] + [share.prompt_ids[0]] * (n_drawn - len(places))
                share.put(places, generate(asked))
            part = judge([share.inputs[n] for n in places], [share.completion_ids[n] for n in places])
            everywhere = [group * self.group + n for group in chosen for n in range(self.group)]
            judged = spliced(judged, part, places=everywhere)
            self._note(judged, chosen)
        return judged, redrawn

    def _note(self, judged: Judged, groups: Collection[int]) -> None:
        silent = set(silent_groups(judged.paid, self.group))
        for group in groups:
            first = group * self.group
            # Equal rewards with an unknown one among them do not show that the prompt is silent.
            if group not in silent or None not in judged.paid[first : first + self.group]:
                self.reserve.note(judged.rows[first], is_silent=group in silent)

    def _chosen(self, groups: Sequence[int], now: Sequence[int]) -> dict[int, int]:
        """Group -> the prompt that takes its place, where there is one; `now` are the prompts of all groups."""
        taken = set(now)
        chosen = {}
        for group in groups:
            prompt = self.reserve.take(taken)
            if prompt is not None:
                chosen[group] = prompt
                taken.add(prompt)
        return chosen

    def _replace(self, inputs: list[dict[str, Any]], chosen: Mapping[int, int]) -> list[int]:
        """Put the chosen prompts into this rank's rows of their groups; the places of these rows."""
        first = log.rank() * len(inputs)
        places = [n for n in range(len(inputs)) if (first + n) // self.group in chosen]
        for place in places:
            inputs[place] = self.prompts[self._places[chosen[(first + place) // self.group]]]
        return places

    def _most_places(self, groups: Collection[int], share: int) -> int:
        """The most rows that a rank has in these groups, where each rank has `share` rows."""
        ranks = [(group * self.group + n) // share for group in groups for n in range(self.group)]
        return max(ranks.count(rank) for rank in set(ranks))


class KeepDraws(Observer, ExportableState):
    """Keeps the reserve and the totals of what was drawn in the Trainer's checkpoints."""

    trainer: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes")
        if saved:
            self.trainer.redraws.reserve.restore(saved["reserve"])
            self.trainer.drawn.update(saved["drawn"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        if not hasattr(self, "trainer"):  # the Trainer asks as soon as it is built
            return {"args": {}, "attributes": {}}
        kept = {"reserve": self.trainer.redraws.reserve.state(), "drawn": self.trainer.drawn}
        return {"args": {}, "attributes": kept}


def silent_groups(paid: Sequence[float | None], group: int) -> list[int]:
    """Numbers of the groups whose known rewards are all equal, or of which none is known.

    >>> silent_groups([1.0, 1.0, 0.0, 1.0, None, 0.5], 2)
    [0, 2]
    """
    groups = [paid[first : first + group] for first in range(0, len(paid), group)]
    return [number for number, values in enumerate(groups) if len({*values} - {None}) < 2]


def spliced(judged: Judged, part: Judged, *, places: Sequence[int]) -> Judged:
    """`judged` with the completions of `part` at `places`."""

    def put(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        merged = list(old)
        for place, value in zip(places, new, strict=True):
            merged[place] = value
        return merged

    by_name = {
        name: Scores(put(scores.values, part.scored.by_name[name].values), scores.reasons)
        for name, scores in judged.scored.by_name.items()
    }
    return replace(
        judged,
        rows=put(judged.rows, part.rows),
        completions=put(judged.completions, part.completions),
        prompts=put(judged.prompts, part.prompts) if judged.prompts else [],
        scored=replace(judged.scored, by_name=by_name, verdicts=put(judged.scored.verdicts, part.scored.verdicts)),
        control=None if judged.control is None else put(judged.control, part.control or []),
    )
