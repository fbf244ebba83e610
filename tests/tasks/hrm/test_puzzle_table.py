"""The table of puzzle embeddings: the sign of summed gradients moves touched rows, on every rank alike."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sftplay.tasks.hrm.network.embedding import PuzzleTable, Touched

IDS, DIM, RATE, DECAY = 50, 6, 0.03, 0.7


def rows_of(step: int, n: int = 8) -> Touched:
    """The rows of the global batch of a step, with duplicates."""
    stream = torch.Generator().manual_seed(step)
    ids = torch.randint(0, IDS // 2, (n,), generator=stream)
    return Touched(ids, torch.randn(n, DIM, generator=stream) * 10.0 ** torch.randint(-6, 3, (n, 1), generator=stream))


def started() -> PuzzleTable:
    table = PuzzleTable(IDS, DIM)
    table.rows.copy_(torch.randn(IDS, DIM, generator=torch.Generator().manual_seed(99)))
    return table


def trained(steps: int) -> torch.Tensor:
    """The table after so many steps of this rank's share of the batch."""
    world, rank = (
        (torch.distributed.get_world_size(), torch.distributed.get_rank())
        if torch.distributed.is_initialized()
        else (1, 0)
    )
    table = started()
    for step in range(steps):
        whole = rows_of(step)
        share = len(whole.ids) // world
        mine = Touched(*(each[rank * share :][:share] for each in whole))
        table.update(mine, rate=RATE, weight_decay=DECAY)
    return table.rows


def on_ranks(world: int, work: Callable[[], torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """What `work` gives on each of so many gloo ranks."""

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        torch.save(work(), folder / f"{rank}.pt")
        torch.distributed.barrier()
        os._exit(0)

    children = [multiprocessing.get_context("fork").Process(target=one, args=(rank,)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * world
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def test_two_ranks_have_the_table_of_one_bit_for_bit_after_a_hundred_steps(tmp_path: Path):
    alone = trained(100)
    for rows in on_ranks(2, lambda: trained(100), tmp_path):
        assert torch.equal(rows, alone)
    assert torch.equal(alone[IDS // 2 :], started().rows[IDS // 2 :])  # never touched
    assert not torch.equal(alone[: IDS // 2], started().rows[: IDS // 2])


def test_opposite_gradients_of_two_ranks_cancel_to_no_move_and_the_row_still_decays(tmp_path: Path):
    def work() -> torch.Tensor:
        table, sign = started(), 1 - 2 * torch.distributed.get_rank()
        table.update(Touched(torch.tensor([7]), sign * torch.ones(1, DIM)), rate=RATE, weight_decay=DECAY)
        return table.rows

    for rows in on_ranks(2, work, tmp_path):
        assert torch.equal(rows[7], started().rows[7] * (1 - RATE * DECAY))


def test_duplicates_are_summed_before_the_sign():
    table = PuzzleTable(4, 2)
    gradients = torch.tensor([[3.0, 1.0], [-1.0, -2.0], [-1.0, 1.0], [5.0, 0.0]])
    touched = table.update(Touched(torch.tensor([1, 1, 1, 3]), gradients), rate=0.5, weight_decay=0.1)
    # 3 - 1 - 1 > 0, and 1 - 2 + 1 = 0, whose sign is 0; the sum of the signs would be -1 and +1
    assert table.rows.tolist() == [[0, 0], [-0.5, 0], [0, 0], [-0.5, 0]]
    assert touched == 2


def test_a_row_that_is_seen_k_times_moves_by_at_most_k_times_the_rate_and_decays_before_it_moves():
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
