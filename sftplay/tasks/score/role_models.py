"""The models of the roles: solver, guide, and the frozen reference that both start from; and the value networks.

With adapters both roles share one base, and the reference is that base with its adapters disabled. Where the placement
or full tuning separates the roles, the guide is a second model, and full tuning has a frozen third one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from sftplay import log
from sftplay.model.adapter import make_trainable_fp32
from sftplay.plan.devices.layout import Layout
from sftplay.tasks.score.section import CriticConfig
from sftplay.tasks.score.shards import is_sharded, shard
from sftplay.tasks.score.value_model import Critic, SeparateValue, ValueHead
from sftplay.train.eval_mode import eval_mode

Role = Literal["solver", "guide"]

ADAPTER_NAMES: dict[Role, str] = {"solver": "default", "guide": "guide"}
"""Role -> adapter name. The kit saves, merges and exports the solver's adapter as the result of a run."""


class RoleModels:
    """Solver, guide and reference of a run, its value model and its critic."""

    def __init__(
        self,
        model: Any,
        *,
        has_guide: bool,
        guide_learns: bool,
        has_value: bool,
        value_is_separate: bool = False,
        critic: CriticConfig | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Build the guide as a copy of `model`, which is the solver: with an adapter, or with all weights trainable.

        Value model and critic are built only where they are used. Without a `layout`, all share a device.
        """
        layout = layout or Layout(placement="shared")
        self.model, self.has_guide, self.has_value = model, has_guide, has_value
        self.devices = layout.as_torch(str(model.device))
        self._has_adapters = hasattr(model, "peft_config")
        staging = "cpu" if layout.is_split else None  # until `shard`, a device holds the solver alone
        self.is_separate = has_guide and (layout.separates or not self._has_adapters)
        self._reference: Any = None
        if not self._has_adapters:
            self._reference = _copy(model, staging or self.devices["ref"]).eval().requires_grad_(False)
        guide = _copy(model, staging or self.devices["guide"]) if self.is_separate else model
        self.models: dict[Role, Any] = {"solver": model, "guide": guide}
        self._trained_models = [model, guide] if self.is_separate else [model]
        if has_guide and self._has_adapters:
            guide.add_adapter(ADAPTER_NAMES["guide"], deepcopy(guide.peft_config[ADAPTER_NAMES["solver"]]))
            guide.set_adapter(ADAPTER_NAMES["guide" if self.is_separate else "solver"])
            if self.is_separate:
                guide.delete_adapter(ADAPTER_NAMES["solver"])
        learners: list[Role] = ["solver", "guide"] if guide_learns else ["solver"]
        self.trainable: dict[str, list[nn.Parameter]] = {role: self._find_trainable(role) for role in learners}
        """Name of an optimizer group -> its parameters."""

        self.networks: dict[str, nn.Module] = {}
        """Value model, critic and target critic, by their names in a checkpoint."""

        self._add_networks(value_is_separate=value_is_separate, critic=critic)
        self._adapter_layers = [
            module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        ]
        self._note_weights()
        self._active_role: Role = "solver"
        for trained_model in self._trained_models:
            self._restore_requires_grad(trained_model)
            make_trainable_fp32(trained_model)

    @property
    def value_head(self) -> Any:
        """The value model V."""
        return self.networks["value_head"]

    @property
    def critic(self) -> Critic | None:
        """The critic; None without one."""
        found: Any = self.networks.get("critic")
        return found

    @property
    def target_critic(self) -> Critic:
        """The target critic, where there is a critic."""
        found: Any = self.networks["slow_critic"]
        return found

    @contextmanager
    def use_role(self, role: Role) -> Iterator[Any]:
        """Activate a role and yield its model. A backward pass that recomputes layers must run inside."""
        before = self._active_role
        self._activate(role)
        try:
            yield self.models[role]
        finally:
            self._activate(before)

    def _activate(self, role: Role) -> None:
        if role != self._active_role and self._has_adapters and not self.is_separate:
            # Both roles share one base. PeftModel.set_adapter does the same, but walks all modules three times.
            self.model.active_adapter = self.model.base_model.active_adapter = ADAPTER_NAMES[role]
            for layer in self._adapter_layers:
                layer.set_adapter(ADAPTER_NAMES[role])
            self._restore_requires_grad(self.model)
        self._active_role = role

    @contextmanager
    def reference(self, role: Role) -> Iterator[Any]:
        """Yield the frozen model that the role started from, without dropout."""
        if self._reference is not None:
            yield self._reference
            return
        model = self.models[role]
        with eval_mode(model), model.disable_adapter():
            yield model
        self._restore_requires_grad(model)

    def shard(self, precision: str) -> list[Any]:
        """Shard all models over the ranks; return those that train. Their weights are new objects afterwards.

        `precision` is accelerate's name of the compute precision.
        """
        mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (log.world_size(),))
        for model in (*self._trained_models, self._reference):
            shard(model, mesh, precision=precision, keeps_head=model is self._reference)
        for role in self.models:
            if role in self.trainable:
                self.trainable[role] = self._find_trainable(role)
        self._note_weights()
        return self._trained_models

    def train(self) -> None:
        """Switch the trained models to training mode."""
        for model in self._trained_models:
            model.train()

    def eval(self) -> None:
        """Switch the trained models to evaluation mode, and release the gathered weights of a sharded reference."""
        for model in self._trained_models:
            model.eval()
        if self._reference is not None and is_sharded(self._reference):
            self._reference.reshard()

    def extra_parameters(self) -> list[nn.Parameter]:
        """List the trainable weights that are not part of the solver's model."""
        ids = {id(parameter) for parameter in self.model.parameters()}
        return [parameter for group in self.trainable.values() for parameter in group if id(parameter) not in ids]

    def find_checkpoint_weights(self) -> dict[str, nn.Parameter]:
        """Find the weights that the Trainer does not save with a full solver: all trainable ones and the target critic.

        The names are the same in every placement.
        """
        named = dict(self.model.named_parameters()) if self._has_adapters else {}
        if self.is_separate:
            # Adapters have different names already.
            prefix = "" if self._has_adapters else "guide_model."
            named |= {f"{prefix}{name}": p for name, p in self.models["guide"].named_parameters()}
        for name, network in self.networks.items():
            named |= {f"{name}.{inner}": p for inner, p in network.named_parameters()}
        kept = [*self.trainable.values(), self.networks.get("slow_critic", nn.Module()).parameters()]
        ids = {id(parameter) for group in kept for parameter in group}
        return {name: parameter for name, parameter in named.items() if id(parameter) in ids}

    def _note_weights(self) -> None:
        """Note each model's weights and whether they train. A walk through a model takes as long as a short answer."""
        trained = {id(parameter) for group in self.trainable.values() for parameter in group}
        self._requires_grad = {
            model: [(p, id(p) in trained) for p in model.parameters()] for model in self._trained_models
        }

    def _add_networks(self, *, value_is_separate: bool, critic: CriticConfig | None) -> None:
        text, built = self.model.config.get_text_config(), dict[str, tuple[nn.Module, str]]()
        if self.has_value:
            value = SeparateValue(text.vocab_size) if value_is_separate else ValueHead(text.hidden_size)
            built["value_head"] = value, self.devices["value"]
        if critic is not None:
            trained_critic = Critic(text.vocab_size, critic.width)
            target_critic = deepcopy(trained_critic).requires_grad_(False)
            built["critic"] = trained_critic, self.devices["critic"]
            built["slow_critic"] = target_critic, self.devices["target_critic"]
        for name, (network, device) in built.items():
            self.networks[name] = network.to(device)
            # Attached to a solver with an adapter, so that DDP starts equal on all ranks.
            if self._has_adapters and device == self.devices["solver"]:
                setattr(self.model, name, network)
        for part, name in (("value", "value_head"), ("critic", "critic")):
            if name in self.networks:
                self.trainable[part] = list(self.networks[name].parameters())

    def _find_trainable(self, role: Role) -> list[nn.Parameter]:
        named = self.models[role].named_parameters()
        if not self._has_adapters:
            return [parameter for _, parameter in named if parameter.requires_grad]
        return [p for key, p in named if f".{ADAPTER_NAMES[role]}." in f"{key}." and "lora_" in key]

    def _restore_requires_grad(self, model: Any) -> None:
        """PEFT freezes every adapter but the active one."""
        for parameter, trains in self._requires_grad[model]:
            parameter.requires_grad_(trains)


def _copy(model: Any, device: str) -> Any:
    """Copy a model directly to `device`, so that the model's device never holds its weights twice.

    Weights in 4 bits are moved by their class.
    """
    plain = (p for p in model.parameters() if type(p) is nn.Parameter)
    copies: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(device, copy=True), p.requires_grad) for p in plain}
    copies |= {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    return deepcopy(model, copies).to(device)
