"""The trainer of episodes with sharded models: solver, guide and reference.

It overrides the methods that need whole weights: `create_optimizer`, `_wrap_model`, `save_model`, loading of
sharded weights, and saving and loading of the optimizer's state. Checkpoints hold whole models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from sftplay import log
from sftplay.tasks.score.checkpoint_weights import load_weights
from sftplay.tasks.score.shards import FSDPModels, gather_tensor, gather_weights, load_full_weights, shard_like
from sftplay.tasks.score.trainer import EpisodeTrainer


class ShardedEpisodeTrainer(EpisodeTrainer):
    """Shards the models after they are checked and loaded, and before the optimizer is created."""

    _models: FSDPModels | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self._models is None:
            self._models = FSDPModels(self.role_models.shard(self.accelerator.mixed_precision))
        return super().create_optimizer(model)

    def _wrap_model(self, *_: Any, **__: Any) -> nn.Module:
        assert self._models is not None
        return self._models

    def whole_weights(self) -> dict[str, dict[str, Tensor]]:
        """Gather model name ("" for the solver) -> weights on the main rank. Every rank must call it."""
        models = {"": self.model, **self.other_models}
        return {name: gather_weights(model) for name, model in models.items()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir, state_dict=gather_weights(self.model))

    def _load_weights(self, checkpoint: Path) -> None:
        if self._models is None:
            super()._load_weights(checkpoint)
            return
        load_weights(self.role_models, checkpoint)
        load_full_weights(self.model, checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state as of an unsharded optimizer, so that any layout can resume. Every rank must call it."""
        state, kept = self.optimizer.state_dict(), {}
        for number, values in state["state"].items():
            whole = {key: gather_tensor(value) if isinstance(value, Tensor) else value for key, value in values.items()}
            if log.is_main():
                kept[number] = whole
        if log.is_main():
            torch.save({**state, "state": kept}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for number, values in state["state"].items():
            weight = weights[number]
            for name, value in values.items():
                # A moment is sharded like its weight; a step count is not.
                if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.shape == weight.shape:
                    values[name] = shard_like(value, weight)
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
