"""Groups that teach nothing are drawn again with other prompts: how often, which, and the same on all ranks."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from processes import HANG_S

from sftplay import log
from sftplay.reward.calls import RewardValues
from sftplay.reward.reward_set import BatchRewards
from sftplay.tasks.grpo.dynamic_sampling import MAX_SKIPPED_TURNS, DynamicSampler, Reserve, LocalBatch, find_zero_variance_groups
from sftplay.tasks.grpo.scoring import Drawn, Judged, together

GROUP = 4
ROWS = [10 * n for n in range(12)]
"""Numbers of the prompts in the data. A prompt's tokens are its number; its completions say it again."""


class Prompts:
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"prompt": [ROWS[number]], "row": ROWS[number], "columns": {}}


def is_silent(row: int) -> bool:
    """Two prompts of three."""
    return row % 30 != 0


def judge_local(inputs: list[dict[str, Any]], places: list[int]) -> Drawn:
    """Rewards that differ within a group only where the prompt is not silent."""
    values: list[float | None] = [
        1.0 if is_silent(row["row"]) else float(place) for row, place in zip(inputs, places, strict=True)
    ]
    scored = BatchRewards({"r": RewardValues(values, [])}, [None] * len(values))
    rows = [row["row"] for row in inputs]
    words = [f"asked {row}" for row in rows]
    return Drawn(rows=rows, completions=[str(row) for row in rows], scored=scored, prompts=words)


def as_one(ranks: list[Drawn]) -> Judged:
    return together(ranks, names=("r",), weights=(1.0,))


class World:
    """Ranks as threads: `draw` runs one drawing of `groups` on each, and gives what each has in the end."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch, *, rounds: int, together: bool = False) -> None:
        self.ranks = ranks
        self.here = threading.local()
        self.barrier = threading.Barrier(ranks, timeout=HANG_S)
        self.board: list[Any] = [None] * ranks
        self.generated: list[list[int]] = [[] for _ in range(ranks)]
        """How many completions each call of a rank drew."""

        monkeypatch.setattr(log, "rank", lambda: self.here.rank)
        self.redraws = [
            DynamicSampler(Prompts(), rows=ROWS, rounds=rounds, num_generations=GROUP, seed=3, together=together)
            for _ in range(ranks)
        ]

    def gather(self, item: Any) -> list[Any]:
        self.board[self.here.rank] = item
        self.barrier.wait()
        items = list(self.board)
        self.barrier.wait()
        return items

    def draw(self, prompts: list[int]) -> list[tuple[LocalBatch, Judged, int]]:
        everywhere = [row for row in prompts for _ in range(GROUP)]
        size = len(everywhere) // self.ranks
        results: list[Any] = [None] * self.ranks

        def rank_main(rank: int) -> None:
            self.here.rank = rank
            inputs = [{"prompt": [row], "row": row, "columns": {}} for row in everywhere[rank * size :][:size]]
            redraws = self.redraws[rank]
            redraws.give_turns(inputs, [row for each in self.gather([row["row"] for row in inputs]) for row in each])

            def generate(asked: list[list[int]]) -> tuple[list[list[int]], None]:
                self.generated[rank].append(len(asked))
                return [[*ids, 7] for ids in asked], None

            def judge(rows: list[dict[str, Any]], ids: list[list[int]]) -> Judged:
                assert [each[0] for each in ids] == [row["row"] for row in rows]
                return as_one(self.gather(judge_local(rows, list(range(len(rows))))))

            share = LocalBatch(inputs, [row["prompt"] for row in inputs], *generate([row["prompt"] for row in inputs]))
            judged, redrawn = redraws.run(share, judge(inputs, share.completion_ids), generate=generate, judge=judge)
            results[rank] = (share, judged, redrawn)

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(results)
        return results


def test_only_groups_whose_known_rewards_are_equal_are_silent():
    assert find_zero_variance_groups([1.0, 1.0, 0.0, 1.0, None, None, None, 0.5, 0.2, 0.2 + 1e-9], 2) == [0, 2, 3]


def test_silent_groups_get_other_prompts_until_none_is_silent_or_the_bound_is_reached(monkeypatch: pytest.MonkeyPatch):
    world = World(1, monkeypatch, rounds=8)
    [(share, judged, redrawn)] = world.draw([0, 10, 20])
    # the first group is never touched; the others end with the prompts that are not silent, each once
    assert [row["row"] for row in share.inputs[:GROUP]] == [0] * GROUP
    assert not find_zero_variance_groups(judged.paid, GROUP)
    assert len({row["row"] for row in share.inputs}) == 3
    assert [each[0] for each in share.completion_ids] == [row["row"] for row in share.inputs] == judged.rows
    assert share.prompt_ids == [[row] for row in judged.rows]
    assert judged.completions == [str(row) for row in judged.rows]
    assert judged.prompts == [f"asked {row}" for row in judged.rows]
    # each group drawn again is one of the calls of GROUP completions; nothing else is drawn
    assert world.generated == [[3 * GROUP, *world.generated[0][1:]]]
    assert sum(world.generated[0]) == (3 + redrawn) * GROUP
    assert world.redraws[0].first_draw["first_zero_variance_share"] == pytest.approx(2 / 3)


def test_never_more_rounds_than_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("test_redraws.is_silent", lambda _: True)
    world = World(1, monkeypatch, rounds=2)
    [(_, judged, redrawn)] = world.draw([0, 10])
    assert world.generated == [[2 * GROUP] * 3]
    assert redrawn == 4
    assert find_zero_variance_groups(judged.paid, GROUP) == [0, 1]


@pytest.mark.parametrize("together", [False, True])
def test_ranks_that_share_a_group_choose_alike_and_generate_equally_often(
    together: bool, monkeypatch: pytest.MonkeyPatch
):
    one = World(1, monkeypatch, rounds=3).draw([0, 10, 20])[0]
    world = World(2, monkeypatch, rounds=3, together=together)  # 12 rows: the second group lies on both ranks
    two = world.draw([0, 10, 20])
    assert two[0][1] == two[1][1]
    assert two[0][1].rows == one[1].rows
    assert [row["row"] for share, _, _ in two for row in share.inputs] == one[1].rows
    if together:
        assert world.generated[0] == world.generated[1]
    states = [each.reserve.state() for each in world.redraws]
    assert states[0] == states[1]


def test_a_silent_prompt_passes_its_next_turns_and_comes_back():
    reserve = Reserve(ROWS, seed=0)
    for streak in range(1, 7):
        reserve.note(10, is_silent=True)
        turns = [reserve.passes_turn(10) for _ in range(MAX_SKIPPED_TURNS + 2)]
        assert turns.count(True) == min(streak, MAX_SKIPPED_TURNS)
        assert turns == sorted(turns, reverse=True)
    reserve.note(10, is_silent=True)
    reserve.note(10, is_silent=False)
    assert not reserve.passes_turn(10)
    assert not reserve.passes_turn(20)


def test_the_turn_of_a_silent_prompt_goes_to_another_before_anything_is_drawn(monkeypatch: pytest.MonkeyPatch):
    world = World(1, monkeypatch, rounds=1)
    world.here.rank = 0
    for row in ROWS:
        world.redraws[0].reserve.note(row, is_silent=is_silent(row))
    inputs = [{"prompt": [row], "row": row, "columns": {}} for row in [0] * GROUP + [10] * GROUP]
    assert world.redraws[0].give_turns(inputs, [row["row"] for row in inputs]) == 1
    assert [row["row"] for row in inputs[:GROUP]] == [0] * GROUP
    assert {row["row"] for row in inputs[GROUP:]} <= {30, 60, 90}  # not silent, and not the one that is there


def test_nothing_is_drawn_in_a_passed_turn_but_one_group_is_always_drawn(monkeypatch: pytest.MonkeyPatch):
    redraws = World(1, monkeypatch, rounds=0).redraws[0]
    silent, other = ROWS[1], ROWS[3]
    judged = as_one([judge_local([{"row": row} for row in [silent] * GROUP + [other] * GROUP], list(range(2 * GROUP)))])
    redraws.note_drawn(judged)
    assert redraws.skip_turns([other] * GROUP + [silent] * GROUP) == 1
    assert redraws.places_drawn(0, 2 * GROUP) == list(range(GROUP))
    # on the second of two ranks, which has the second half of the second group and the whole third one
    assert redraws.places_drawn(6, 6) == [2, 3, 4, 5]
    assert redraws.skip_turns([silent] * GROUP) == 0  # its turn has passed
    redraws.note_drawn(judged)
    assert redraws.skip_turns([silent] * 2 * GROUP) == 1
    assert redraws.places_drawn(0, 2 * GROUP) == list(range(GROUP))


def test_the_reserve_shows_every_prompt_once_before_any_comes_again_and_goes_on_from_its_state():
    reserve = Reserve(ROWS, seed=5)
    assert sorted(reserve.take(()) for _ in ROWS) == ROWS
    reserve.note(30, is_silent=True)
    copy = Reserve(ROWS, seed=5)
    copy.restore(reserve.state())
    following = [reserve.take({0}) for _ in range(9)]
    assert following == [copy.take({0}) for _ in range(9)]
    assert not {0, 30} & set(following)


def test_where_every_prompt_is_silent_or_taken_nothing_is_drawn_again(monkeypatch: pytest.MonkeyPatch):
    reserve = Reserve(ROWS[:3], seed=0)
    reserve.note(ROWS[0], is_silent=True)
    assert reserve.take({ROWS[1]}) == ROWS[2]
    assert reserve.take(set(ROWS[1:3])) is None
    world = World(1, monkeypatch, rounds=9)
    for row in ROWS:
        world.redraws[0].reserve.note(row, is_silent=True)
    world.redraws[0].reserve.passes.clear()
    [(_, judged, redrawn)] = world.draw([10, 20])
    assert (judged.rows, redrawn) == ([10] * GROUP + [20] * GROUP, 0)
    assert world.generated == [[2 * GROUP]]
