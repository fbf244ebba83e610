"""KTO: a loss of single answers that are wanted or not, and the reference point that all answers of a step share."""

from __future__ import annotations

import torch
from torch import Tensor

from sftplay.config.run import RunConfig
from sftplay.tasks.preference.spec import find_beta


def kto_losses(cfg: RunConfig, ratios: Tensor, desirable: Tensor, *, reference_point: float | Tensor) -> Tensor:
    """Compute the loss of each answer, [answers], from h(y) = log p(y) - log p_ref(y) and bool [answers].

    With z0 the reference point and s the logistic function: w_d (1 - s(beta (h - z0))) where an answer is wanted, else
    w_u (1 - s(beta (z0 - h))); w_d and w_u are `desirable_weight` and `undesirable_weight`. KTO: Ethayarajh et al.
    2024, arXiv 2402.01306, equation 8. The constant of its expectation is the weight, as in the paper's code and TRL.
    """
    direction = torch.where(desirable, 1.0, -1.0).to(ratios.dtype)
    weights = torch.where(desirable, cfg.preference.desirable_weight, cfg.preference.undesirable_weight)
    # 1 - s(x) = s(-x), without the difference of two numbers near 1
    return weights.to(ratios.dtype) * torch.sigmoid(-find_beta(cfg) * direction * (ratios - reference_point))


def reference_point(ratio_sum: Tensor, rows: int) -> Tensor:
    """Return z0 = max(0, mean of h(y') over the step's answers), y' being an answer to another prompt.

    It estimates KL(p, p_ref); no gradient goes through it. `ratio_sum` is the sum over the rows of all ranks.
    """
    return (ratio_sum / rows).clamp(min=0)
