"""Groups that teach nothing are drawn again with other prompts: how often, which, and the same on all ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from processes import HANG_S

from sftplay import log
from sftplay.reward.reward_set import BatchRewards
from sftplay.reward.table import RewardValues
from sftplay.tasks.grpo.scoring import (
    MAX_SKIPPED_TURNS,
    DynamicSampler,
    LocalBatch,
    Reserve,
    ScoredBatch,
    find_zero_variance_groups,
)

GROUP = 4
ROWS = [10 * n for n in range(12)]
"""Numbers of the prompts in the data. A prompt's tokens are its number; its completions say it again."""


class Prompts:
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"prompt": [ROWS[number]], "row": ROWS[number], "columns": {}}


def has_zero_variance(row: int) -> bool:
    """Two prompts of three."""
    return row % 30 != 0


def score_local(inputs: list[dict[str, Any]], places: list[int]) -> ScoredBatch:
    """Rewards that differ within a group only where the prompt is not silent."""
    values: list[float | None] = [
        1.0 if has_zero_variance(row["row"]) else float(place) for row, place in zip(inputs, places, strict=True)
    ]
    scored = BatchRewards({"r": RewardValues(values, [])}, [None] * len(values))
    rows = [row["row"] for row in inputs]
    words = [f"asked {row}" for row in rows]
    return ScoredBatch(weights=(1.0,), rows=rows, completions=[str(row) for row in rows], rewards=scored, prompts=words)


class World:
    """Ranks as threads: `draw` runs one drawing of `groups` on each, and gives what each has in the end."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch, *, rounds: int, in_lockstep: bool = False) -> None:
        self.ranks = ranks
        self.here = threading.local()
        self.barrier = threading.Barrier(ranks, timeout=HANG_S)
        self.board: list[Any] = [None] * ranks
        self.generated: list[list[int]] = [[] for _ in range(ranks)]
        """How many completions each call of a rank drew."""

        monkeypatch.setattr(log, "rank", lambda: self.here.rank)
        self.samplers = [
            DynamicSampler(Prompts(), rows=ROWS, rounds=rounds, num_generations=GROUP, seed=3, in_lockstep=in_lockstep)
            for _ in range(ranks)
        ]

    def gather(self, item: Any) -> list[Any]:
        self.board[self.here.rank] = item
        self.barrier.wait()
        items = list(self.board)
        self.barrier.wait()
        return items

    def sample(self, prompts: list[int]) -> list[tuple[LocalBatch, ScoredBatch, int]]:
        everywhere = [row for row in prompts for _ in range(GROUP)]
        size = len(everywhere) // self.ranks
        results: list[Any] = [None] * self.ranks

        def rank_main(rank: int) -> None:
            self.here.rank = rank
            inputs = [{"prompt": [row], "row": row, "columns": {}} for row in everywhere[rank * size :][:size]]
            sampler = self.samplers[rank]
            sampler.replace_skipped_prompts(
                inputs, [row for each in self.gather([row["row"] for row in inputs]) for row in each]
            )

            def generate(asked: list[list[int]]) -> tuple[list[list[int]], None]:
                self.generated[rank].append(len(asked))
                return [[*ids, 7] for ids in asked], None

            def score(rows: list[dict[str, Any]], ids: list[list[int]]) -> ScoredBatch:
                assert [each[0] for each in ids] == [row["row"] for row in rows]
                return ScoredBatch.concatenate(self.gather(score_local(rows, list(range(len(rows))))))

            local = LocalBatch(inputs, [row["prompt"] for row in inputs], *generate([row["prompt"] for row in inputs]))
            scored, resampled = sampler.resample(
                local, score(inputs, local.completion_ids), generate=generate, score=score
            )
            results[rank] = (local, scored, resampled)

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(results)
        return results


def test_silent_groups_get_other_prompts_until_none_is_silent_or_the_bound_is_reached(monkeypatch: pytest.MonkeyPatch):
    world = World(1, monkeypatch, rounds=8)
    [(local, scored, resampled)] = world.sample([0, 10, 20])
    # the first group is never touched; the others end with the prompts that are not silent, each once
    assert [row["row"] for row in local.inputs[:GROUP]] == [0] * GROUP
    assert not find_zero_variance_groups(scored.training_rewards, GROUP)
    assert len({row["row"] for row in local.inputs}) == 3
    assert [each[0] for each in local.completion_ids] == [row["row"] for row in local.inputs] == scored.rows
    assert local.prompt_ids == [[row] for row in scored.rows]
    assert scored.completions == [str(row) for row in scored.rows]
    assert scored.prompts == [f"asked {row}" for row in scored.rows]
    # each group drawn again is one of the calls of GROUP completions; nothing else is drawn
    assert world.generated == [[3 * GROUP, *world.generated[0][1:]]]
    assert sum(world.generated[0]) == (3 + resampled) * GROUP
    assert world.samplers[0].first_figures["first_zero_variance_share"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_ranks_that_share_a_group_choose_alike_and_generate_equally_often(
    in_lockstep: bool, monkeypatch: pytest.MonkeyPatch
):
    one = World(1, monkeypatch, rounds=3).sample([0, 10, 20])[0]
    world = World(2, monkeypatch, rounds=3, in_lockstep=in_lockstep)  # 12 rows: the second group lies on both ranks
    two = world.sample([0, 10, 20])
    assert two[0][1] == two[1][1]
    assert two[0][1].rows == one[1].rows
    assert [row["row"] for local, _, _ in two for row in local.inputs] == one[1].rows
    if in_lockstep:
        assert world.generated[0] == world.generated[1]
    states = [each.reserve.state() for each in world.samplers]
    assert states[0] == states[1]


def test_a_silent_prompt_passes_its_next_turns_and_comes_back():
    reserve = Reserve(ROWS, seed=0)
    for streak in range(1, 7):
        reserve.record(10, has_zero_variance=True)
        turns = [reserve.skips_turn(10) for _ in range(MAX_SKIPPED_TURNS + 2)]
        assert turns.count(True) == min(streak, MAX_SKIPPED_TURNS)
        assert turns == sorted(turns, reverse=True)
    reserve.record(10, has_zero_variance=True)
    reserve.record(10, has_zero_variance=False)
    assert not reserve.skips_turn(10)
    assert not reserve.skips_turn(20)


def test_turns_of_an_older_checkpoint_are_skipped_where_no_tokens_are_needed():
    reserve = Reserve(ROWS, seed=0)
    reserve.record(10, has_zero_variance=True)
    older = {key: value for key, value in reserve.state().items() if key != "tokens"}
    for needs_tokens, skips in ((False, True), (True, False)):
        copy = Reserve(ROWS, seed=0)
        copy.restore(older, needs_tokens=needs_tokens)
        assert copy.skips_turn(10) is skips


def test_the_reserve_shows_every_prompt_once_before_any_comes_again_and_goes_on_from_its_state():
    reserve = Reserve(ROWS, seed=5)
    assert sorted(reserve.take(()) for _ in ROWS) == ROWS
    reserve.record(30, has_zero_variance=True)
    copy = Reserve(ROWS, seed=5)
    copy.restore(reserve.state(), needs_tokens=True)
    following = [reserve.take({0}) for _ in range(9)]
    assert following == [copy.take({0}) for _ in range(9)]
    assert not {0, 30} & set(following)


def test_where_every_prompt_is_silent_or_taken_nothing_is_drawn_again(monkeypatch: pytest.MonkeyPatch):
    reserve = Reserve(ROWS[:3], seed=0)
    reserve.record(ROWS[0], has_zero_variance=True)
    assert reserve.take({ROWS[1]}) == ROWS[2]
    assert reserve.take(set(ROWS[1:3])) is None
    monkeypatch.setattr("test_dynamic_sampling.has_zero_variance", lambda _: True)
    silent = World(1, monkeypatch, rounds=2)
    assert silent.sample([0, 10])[0][2] == 4
    assert silent.generated == [[2 * GROUP] * 3]  # never more rounds than allowed
