"""Losses of pairs: one number a pair, from the log-probabilities of both completions; no pair counts in another's. And
KTO, a loss of single answers that are wanted or not, with a reference point that all answers of a step share.

Names: w is the chosen completion, l the rejected one, |y| the labels of y, and h(y) = log p(y) - log p_ref(y) in nats
over all labels. Without a reference (`preference.reference: none`) h(y) = log p(y). s is the logistic function.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from sftplay.config.run import RunConfig
from sftplay.tasks.preference.spec import REFERRING, find_beta


def pair_losses(cfg: RunConfig, logps: Tensor, tokens: Tensor, reference: Tensor | None) -> Tensor:
    """Compute the loss of each pair, [pairs], from sums of log-probabilities and counts of labels, [pairs, 2].

    `reference` are the sums under the reference; None counts as none.
    """
    ratios = logps if reference is None else logps - reference
    if cfg.task_mode == "dpo":
        losses = dpo_losses(ratios, cfg.preference.loss, find_beta(cfg), cfg.preference.label_smoothing)
    elif cfg.task_mode == "ipo":
        losses = ipo_losses(ratios / tokens, find_beta(cfg))
    elif cfg.task_mode == "orpo":
        return orpo_losses(logps / tokens, find_beta(cfg))
    else:
        return simpo_losses(logps / tokens, find_beta(cfg), cfg.preference.gamma)
    if cfg.preference.rpo_alpha:
        losses = losses + rpo_losses(logps / tokens, cfg.preference.rpo_alpha)
    return losses


def compute_rewards(cfg: RunConfig, logps: Tensor, tokens: Tensor, reference: Tensor | None) -> Tensor:
    """Compute the rewards that a run reports, [pairs, 2]: beta h(y), in orpo and simpo beta log p(y) / |y|."""
    if cfg.task_mode in REFERRING:
        return find_beta(cfg) * (logps if reference is None else logps - reference)
    return find_beta(cfg) * logps / tokens


def dpo_losses(ratios: Tensor, loss: str, beta: float, label_smoothing: float) -> Tensor:
    """Losses of the margin m = beta (h(w) - h(l)), with the share e of labels that are taken to be swapped.

    - sigmoid: -(1 - e) log s(m) - e log s(-m). DPO: Rafailov et al. 2023, arXiv 2305.18290, equation 7; with e it is
      conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences and relationship to IPO").
    - robust: (-(1 - e) log s(m) + e log s(-m)) / (1 - 2 e), whose mean over swapped labels is the loss of the true
      ones. Chowdhury et al. 2024, arXiv 2403.00409.
    - hinge: max(0, 1 - m). SLiC-HF: Zhao et al. 2023, arXiv 2305.10425, with h for log p as in RSO (Liu et al. 2023,
      arXiv 2309.06657).
    """
    margin = beta * (ratios[:, 0] - ratios[:, 1])
    if loss == "hinge":
        return torch.relu(1 - margin)
    right, swapped = -logsigmoid(margin), -logsigmoid(-margin)
    if loss == "robust":
        return ((1 - label_smoothing) * right - label_smoothing * swapped) / (1 - 2 * label_smoothing)
    return (1 - label_smoothing) * right + label_smoothing * swapped


def ipo_losses(ratios: Tensor, beta: float) -> Tensor:
    """(h(w) / |w| - h(l) / |l| - 1 / (2 beta))^2. IPO: Azar et al. 2023, arXiv 2310.12036, equation 17.

    `ratios` are means over labels, which equation 17 does not show: its authors normalise so, as TRL 1.16 says
    (trl/trainer/dpo_trainer.py, loss "ipo").
    """
    return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * beta)) ** 2


def orpo_losses(means: Tensor, beta: float) -> Tensor:
    """-a(w) - beta log s(log odds(w) - log odds(l)), with a(y) = log p(y) / |y| and odds = exp(a) / (1 - exp(a)).

    ORPO: Hong et al. 2024, arXiv 2403.07691, equations 3, 4, 6 and 7. -a(w) is the mean over the labels of w; TRL's
    experimental trainer takes prompts in.
    """
    # A completion of probability 1 in fp32 has no finite odds.
    log_odds = means - (-torch.expm1(means.clamp(max=-1e-7))).log()
    return -means[:, 0] - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def simpo_losses(means: Tensor, beta: float, gamma: float) -> Tensor:
    """-log s(beta (a(w) - a(l)) - gamma) with a(y) = log p(y) / |y|. SimPO: Meng et al. 2024, arXiv 2405.14734,
    equation 6.
    """
    return -logsigmoid(beta * (means[:, 0] - means[:, 1]) - gamma)


def rpo_losses(means: Tensor, alpha: float) -> Tensor:
    """-alpha log p(w) / |w|, which is added to a loss. RPO: Pang et al. 2024, arXiv 2404.19733, equation 1."""
    return -alpha * means[:, 0]


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
