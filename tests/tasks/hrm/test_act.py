"""Halting by hand: which rows take another puzzle, which go on, and what the Q values are taught."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sftplay.tasks.hrm.act import (
    FIGURES,
    Carry,
    Puzzles,
    Segment,
    all_halted,
    cell_losses,
    compute_continue_target,
    halts,
    least_segments,
    reset_halted,
    run_segment,
)
from sftplay.tasks.hrm.network import Grid, PuzzleModel, SegmentOutput, State
from sftplay.tasks.hrm.section import HrmConfig

BATCH, CELLS, VOCAB = 4, 3, 5
SMALL = {"hidden_size": 8, "num_heads": 2, "h_layers": 1, "l_layers": 1}
FREE = torch.zeros(BATCH, dtype=torch.int64)


def made(**changes: Any) -> PuzzleModel:
    torch.manual_seed(0)
    return PuzzleModel(HrmConfig(**{**SMALL, **changes}), Grid(vocab_size=VOCAB, cells=CELLS, identifiers=2))


def puzzles(seed: int) -> Puzzles:
    stream = torch.Generator().manual_seed(seed)
    inputs, labels = (torch.randint(0, VOCAB, (BATCH, CELLS), generator=stream) for _ in range(2))
    return Puzzles(inputs, labels, torch.full((BATCH,), seed % 2))


def answer(halt: list[float], go_on: list[float]) -> SegmentOutput:
    return SegmentOutput(torch.zeros(len(halt), CELLS, VOCAB), torch.tensor(halt), torch.tensor(go_on))


class Told(torch.nn.Module):
    """A model that answers what it is told, call by call, and counts up its state."""

    def __init__(self, hrm: HrmConfig, *answers: SegmentOutput) -> None:
        super().__init__()
        self.hrm, self.answers, self.puzzles = hrm, list(answers), None

    def forward(self, state: State, _inputs: Tensor, **_: Any) -> tuple[State, SegmentOutput]:
        return State(state.high + 1, state.low + 1), self.answers.pop(0)


def test_halted_rows_take_the_next_puzzle_and_the_start_state_and_the_others_stay_bit_for_bit():
    model = made()
    state = State(*(torch.randn_like(each) for each in model.start(BATCH)))
    old, fresh = puzzles(1), puzzles(2)
    halted = torch.tensor([True, False, True, False])
    after = reset_halted(Carry(state, torch.tensor([4, 2, 1, 3]), halted, old), fresh, model=model)
    assert after.steps.tolist() == [0, 2, 0, 3]
    for n in range(BATCH):
        source, start = (fresh, model.start(BATCH)) if halted[n] else (old, state)
        for mine, its in zip((*after.puzzles, *after.state), (*source, *start), strict=True):
            assert torch.equal(mine[n], its[n])


def test_a_row_halts_at_the_last_segment_or_where_halting_is_worth_more_but_not_before_its_least():
    said = answer([1.0, -2.0, 3.0, 5.0, -1.0], [0.5, 1.0, 3.0, 1.0, -3.0])
    steps, at_least = torch.tensor([1, 4, 2, 2, 3]), torch.tensor([0, 0, 0, 3, 2])
    decide = {"steps": steps, "at_least": at_least}
    both, one = HrmConfig(n_supervision=4), HrmConfig(n_supervision=4, q_continue=False)
    # worth more; last; equal is not more; too early; worth more though below 0
    assert halts(said, hrm=both, **decide).tolist() == [True, True, False, False, True]
    # right with more than even odds; last; yes; too early; no
    assert halts(said, hrm=one, **decide).tolist() == [True, True, True, False, False]
    single = HrmConfig(n_supervision=1)
    assert halts(said, torch.ones(5), hrm=single, at_least=FREE.new_zeros(5)).all()


def told_segment(hrm: HrmConfig, said: list[SegmentOutput], *, steps: list[int], labels: Tensor) -> Segment:
    state = State(torch.zeros(BATCH, CELLS, 8), torch.zeros(BATCH, CELLS, 8))
    carry = Carry(state, torch.tensor(steps), FREE == 1, Puzzles(FREE.new_zeros(BATCH, CELLS), labels, FREE))
    return run_segment(Told(hrm, *said), carry, at_least=FREE)  # type: ignore[arg-type]


def test_losses_and_figures_of_a_segment_are_those_of_hand_arithmetic():
    hrm = HrmConfig(n_supervision=3, loss="softmax", loss_precision="fp32")
    logits = torch.zeros(BATCH, CELLS, VOCAB)
    logits[..., 1] = 2.0  # it answers 1 everywhere
    labels = torch.tensor([[1, 1, 1], [1, 2, 1], [1, -100, 1], [-100, -100, -100]])
    first = SegmentOutput(logits, torch.tensor([2.0, -1.0, 0.5, 9.0]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    following = SegmentOutput(logits, torch.tensor([0.0, 3.0, 1.0, 0.0]), torch.tensor([4.0, 0.0, 5.0, 0.0]))
    segment = told_segment(hrm, [first, following], steps=[0, 1, 2, 0], labels=labels)

    def bce(q: float, target: float) -> float:
        return target * math.log1p(math.exp(-q)) + (1 - target) * math.log1p(math.exp(q))

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    of_cells = [*cell_losses(logits, labels, hrm=hrm)[:3].tolist(), 0.0]
    of_halting = [bce(2, 1), bce(-1, 0), bce(0.5, 1), 0.0]
    of_continuing = [bce(1, sigmoid(4)), bce(1, sigmoid(3)), bce(1, sigmoid(1)), 0.0]  # the third row ends here
    expected = [a + 0.5 * (b + c) for a, b, c in zip(of_cells, of_halting, of_continuing, strict=True)]
    assert segment.losses.tolist() == pytest.approx(expected, rel=1e-6)
    assert segment.carry.steps.tolist() == [1, 2, 3, 1]
    assert segment.carry.halted.tolist() == [True, False, True, True]
    figures = dict(zip(FIGURES, segment.figures.tolist(), strict=True))
    assert figures["count"] == 2  # the padded row halts, and counts for nothing
    assert [figures[name] for name in ("accuracy", "exact_accuracy", "q_halt_accuracy", "steps")] == [2, 2, 2, 4]
    for name, parts in (("lm_loss", of_cells), ("q_halt_loss", of_halting), ("q_continue_loss", of_continuing)):
        assert figures[name] == pytest.approx(sum(parts), rel=1e-6)


def test_the_target_of_going_on_has_no_gradient_and_looks_on_from_the_new_state():
    model = made(n_supervision=3)
    with torch.no_grad():
        model.q_head.weight.normal_()
    carry = reset_halted(all_halted(model, BATCH), puzzles(1), model=model)
    segment = run_segment(model, carry, at_least=FREE)
    with torch.no_grad():
        rows = model.puzzles(carry.puzzles.identifiers) if model.puzzles is not None else None
        _, following = model(segment.carry.state, carry.puzzles.inputs, puzzle_rows=rows)
    target = compute_continue_target(following, FREE == 1)
    q = segment.answer.q_continue
    given = torch.autograd.grad(segment.losses.sum(), q, retain_graph=True)[0]
    assert torch.allclose(given, 0.5 * (q.sigmoid() - target), atol=1e-6)  # the derivative of BCE with a fixed target


def test_exploration_asks_one_row_in_ten_for_two_to_all_segments_and_depends_on_seed_and_step_alone():
    hrm = HrmConfig(n_supervision=4, halt_exploration=0.1)
    drawn = torch.cat([least_segments(hrm, 64, seed=3, step=step) for step in range(500)])
    explores = drawn > 0
    assert float(explores.float().mean()) == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / len(drawn)))
    shares = torch.bincount(drawn[explores], minlength=5)[2:] / explores.sum()
    assert shares.tolist() == pytest.approx([1 / 3] * 3, abs=4 * math.sqrt(2 / 9 / int(explores.sum())))
    assert torch.equal(least_segments(hrm, 64, seed=3, step=7), drawn[7 * 64 : 8 * 64])
    assert not torch.equal(least_segments(hrm, 64, seed=4, step=7), drawn[7 * 64 : 8 * 64])
    for off in (HrmConfig(n_supervision=1), HrmConfig(halt_exploration=0.0)):
        assert not least_segments(off, 64, seed=3, step=1).any()
