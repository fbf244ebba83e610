"""The losses of puzzles and their optimizer, against mpmath, plain torch and hand arithmetic."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from torch.nn import functional

from sftplay.tasks.hrm.act import cell_losses, log_stablemax
from sftplay.tasks.hrm.section import HrmConfig
from sftplay.tasks.hrm.trainer import AdamATan2, MovingAverage

SCORES = [
    [0.0, 1.0, -1.0],
    [3.5, -2.25, 0.125],
    [1e4, -1e4, 0.0],
    [-1e4, -1e4, -1e4],
    [1e-12, -1e-12, 5.0],
]


def stablemax_by_mpmath(scores: list[float]) -> list[mpmath.mpf]:
    with mpmath.workdps(60):
        shares = [mpmath.mpf(x) + 1 if x >= 0 else 1 / (1 - mpmath.mpf(x)) for x in scores]
        return [share / mpmath.fsum(shares) for share in shares]


@pytest.mark.parametrize("scores", SCORES)
def test_stablemax_is_that_of_mpmath_and_sums_to_one(scores: list[float]):
    logs = log_stablemax(torch.tensor(scores, dtype=torch.float64))
    for mine, exact in zip(logs, stablemax_by_mpmath(scores), strict=True):
        assert float(mine) == pytest.approx(float(mpmath.log(exact)), rel=1e-14, abs=1e-15)
    assert float(logs.exp().sum()) == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("scores", SCORES)
def test_the_gradient_of_stablemax_is_finite_and_that_of_mpmath(scores: list[float]):
    given = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
    (-log_stablemax(given)[1]).backward()
    assert given.grad is not None
    # d -log(s_1 / S) / dx_i = s'_i (1 / S - [i = 1] / s_1), with s'(x) = 1 from 0 on and s(x)^2 below it
    with mpmath.workdps(60):
        shares = [mpmath.mpf(x) + 1 if x >= 0 else 1 / (1 - mpmath.mpf(x)) for x in scores]
        slopes = [mpmath.mpf(1) if x >= 0 else share**2 for x, share in zip(scores, shares, strict=True)]
        total = mpmath.fsum(shares)
        exact = [slope * (1 / total - (i == 1) / shares[1]) for i, slope in enumerate(slopes)]
    for mine, its in zip(given.grad, exact, strict=True):
        assert math.isfinite(mine)
        assert float(mine) == pytest.approx(float(its), rel=1e-12, abs=1e-300)


def test_the_loss_of_a_row_is_the_mean_over_its_labelled_cells_and_a_row_without_labels_has_none():
    logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))
    labels = torch.tensor([[0, 1, 2, 3], [4, -100, -100, 1], [-100] * 4])
    hrm = HrmConfig(loss="softmax", loss_precision="fp32")
    expected = [functional.cross_entropy(logits[0], labels[0]), functional.cross_entropy(logits[1], labels[1]), 0.0]
    assert cell_losses(logits, labels, hrm=hrm).tolist() == pytest.approx([float(each) for each in expected], rel=1e-6)
    losses = cell_losses(logits, labels, hrm=HrmConfig())
    assert losses.dtype == torch.float64
    by_hand = -sum(float(mpmath.log(stablemax_by_mpmath(logits[1, n].tolist())[labels[1, n]])) for n in (0, 3)) / 2
    assert float(losses[1]) == pytest.approx(by_hand, rel=1e-12)


def reference_adam_atan2(weight: np.ndarray, gradients: np.ndarray, *, lr: float, decay: float) -> np.ndarray:
    """The weights after each gradient, by the kernel of the package adam-atan2 0.0.3 (csrc/adam_atan2.cu, adam_math).

    It decays first, corrects both moments, and has no factor on the angle.
    """
    first, second, ends = np.zeros_like(weight), np.zeros_like(weight), []
    for step, gradient in enumerate(gradients, start=1):
        weight = weight * (1 - lr * decay)
        first = first + 0.1 * (gradient - first)
        second = second + 0.05 * (gradient * gradient - second)
        denominator = np.sqrt(second) / math.sqrt(1 - 0.95**step)
        weight = weight - lr * np.arctan2(first / (1 - 0.9**step), denominator)
        ends.append(weight)
    return np.stack(ends)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_two_hundred_steps_of_adam_atan2_are_those_of_the_published_package(dtype: torch.dtype):
    stream = np.random.default_rng(5)
    start = 0.1 * stream.normal(size=40)
    gradients = stream.normal(size=(200, 40)) * 10.0 ** stream.integers(-9, 4, size=40)
    gradients[:, 0], gradients[50:, 1] = 0.0, 0.0
    weight = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
    optimizer = AdamATan2([weight], lr=1e-3, betas=(0.9, 0.95), weight_decay=1.0)
    for gradient, expected in zip(gradients, reference_adam_atan2(start, gradients, lr=1e-3, decay=1.0), strict=True):
        weight.grad = torch.tensor(gradient, dtype=dtype)
        optimizer.step()
        atol = 1e-12 if dtype == torch.float64 else 1e-6
        assert weight.detach().double().numpy() == pytest.approx(expected, rel=0, abs=atol)


def test_the_moving_average_is_that_of_the_formula_and_stands_in_for_the_weights_for_a_while():
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = MovingAverage(model, 0.75)
    for value in (2.0, 4.0):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update()
    with average.in_place():
        assert model.weight.item() == 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 4
    assert model.weight.item() == 4.0
