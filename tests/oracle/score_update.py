"""What every traced update of task score begins with: an optimizer that holds its state, and rows of zeros."""

from __future__ import annotations

import torch

from sftplay.tasks.score.role_models import RoleModels
from sftplay.tasks.score.update import ActionBatch


def optimizer_with_state(role_models: RoleModels) -> torch.optim.Optimizer:
    """Of all that trains, after one step; there are no gradients."""
    trained = [weight for part in role_models.trainable.values() for weight in part]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def batch_of_zeros(rows: int, tokens: int, *, longest: int) -> ActionBatch:
    """The last `longest` tokens of each row are its action."""
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    action = ids[:, -longest:].clone()
    return ActionBatch(ids, torch.ones_like(ids), ids.clone(), action, torch.ones(action.shape), action.float())
