"""The table of puzzle embeddings: the sign of summed gradients moves touched rows, on every rank alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_ranks import on_ranks

from sftplay.tasks.hrm.network import ALL_ROWS, PuzzleTable, TableShare, Touched

IDS, DIM, RATE, DECAY = 50, 6, 0.03, 0.7


def rows_of(step: int, n: int = 8) -> Touched:
    """The rows of the global batch of a step, with duplicates."""
    stream = torch.Generator().manual_seed(step)
    ids = torch.randint(0, IDS // 2, (n,), generator=stream)
    return Touched(ids, torch.randn(n, DIM, generator=stream) * 10.0 ** torch.randint(-6, 3, (n, 1), generator=stream))


def started(*, is_sharded: bool = False) -> PuzzleTable:
    table = PuzzleTable(IDS, DIM, share=TableShare(*own_place()) if is_sharded else ALL_ROWS)
    table.load_state_dict({"rows": torch.randn(IDS, DIM, generator=torch.Generator().manual_seed(99))})
    return table


def own_place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    group = torch.distributed
    return (group.get_rank(), group.get_world_size()) if group.is_initialized() else (0, 1)


def trained(steps: int, *, is_sharded: bool = False) -> torch.Tensor:
    """The whole table after so many steps of this rank's share of the batch."""
    rank, world = own_place()
    table = started(is_sharded=is_sharded)
    for step in range(steps):
        whole = rows_of(step)
        share = len(whole.ids) // world
        mine = Touched(*(each[rank * share :][:share] for each in whole))
        table.update(mine, rate=RATE, weight_decay=DECAY)
    with table.collected():
        return table.state_dict()["rows"]


def test_two_ranks_have_the_table_of_one_bit_for_bit_after_a_hundred_steps(tmp_path: Path):
    alone = trained(100)
    for rows in on_ranks(2, lambda: trained(100), tmp_path):
        assert torch.equal(rows, alone)
    assert torch.equal(alone[IDS // 2 :], started().rows[IDS // 2 :])  # never touched
    assert not torch.equal(alone[: IDS // 2], started().rows[: IDS // 2])


@pytest.mark.parametrize("world", [2, 3])
def test_a_sharded_table_is_that_of_one_rank_bit_for_bit_and_is_whole_on_the_main_rank(world: int, tmp_path: Path):
    alone = trained(100) if world == 2 else started().rows
    on_main, *others = on_ranks(world, lambda: trained(100 if world == 2 else 0, is_sharded=True), tmp_path)
    assert torch.equal(on_main, alone)
    assert all(len(each) == 0 for each in others)


def test_ranks_fetch_the_rows_of_any_identifiers_exactly_from_those_that_hold_them(tmp_path: Path):
    asked = [torch.tensor([49, 3, 3, 0, 8, 1]), torch.tensor([6, 6, 6, 6, 6, 6]), torch.tensor([1, 4, 7, 10, 13, 48])]

    def work() -> torch.Tensor:
        table = started(is_sharded=True)
        assert len(table.rows) == -(-IDS // 3)
        fetched = table(asked[own_place()[0]])
        assert fetched.requires_grad
        fetched.grad = torch.full_like(fetched, 2)  # autograd does not run in a fork
        taken = table.take()
        assert torch.equal(taken.ids, asked[own_place()[0]])
        assert bool((taken.gradients == 2).all())
        return torch.cat((fetched.detach(), table.norm().expand(1, DIM)))

    whole = started().rows
    for ids, found in zip(asked, on_ranks(3, work, tmp_path), strict=True):
        assert torch.equal(found[:-1], whole[ids])
        assert float(found[-1, 0]) == pytest.approx(float(whole.norm()))


def test_duplicates_are_summed_before_the_sign_and_a_row_decays_before_it_moves_by_the_rate():
    table = PuzzleTable(4, 2)
    gradients = torch.tensor([[3.0, 1.0], [-1.0, -2.0], [-1.0, 1.0], [5.0, 0.0]])
    assert table.update(Touched(torch.tensor([1, 1, 1, 3]), gradients), rate=0.5, weight_decay=0.1) == 2
    # 3 - 1 - 1 > 0, and 1 - 2 + 1 = 0, whose sign is 0; the sum of the signs would be -1 and +1
    assert table.rows.tolist() == [[0, 0], [-0.5, 0], [0, 0], [-0.5, 0]]
    table = PuzzleTable(1, 1)
    table.rows.fill_(2.0)
    for _ in range(3):
        table.update(Touched(torch.tensor([0]), torch.tensor([[1e-30]])), rate=0.25, weight_decay=0.0)
    assert float(table.rows) == 2.0 - 3 * 0.25
    table.update(Touched(torch.tensor([0]), torch.tensor([[-7.0]])), rate=0.25, weight_decay=0.5)
    assert float(table.rows) == pytest.approx(1.25 * (1 - 0.25 * 0.5) + 0.25)


def test_a_lookup_gives_its_gradient_to_the_step_alone_and_neither_to_the_table_nor_to_an_optimizer():
    table = started()
    before = table.rows.clone()
    ids = torch.tensor([3, 3, 8])
    (table(ids) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert list(table.parameters()) == []
    assert torch.equal(table.rows, before)
    taken = table.take()
    assert torch.equal(taken.ids, ids)
    assert torch.equal(taken.gradients, torch.tensor([[1.0], [2.0], [3.0]]).expand(3, DIM))
    assert len(table.take().ids) == 0
    with torch.no_grad():
        table(ids)
    assert len(table.take().ids) == 0
