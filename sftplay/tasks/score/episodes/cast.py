"""Who speaks: solver, guide, or the frozen reference that both began as.

Adapters of one base take turns on it, and the reference is that base with its adapters off. Where the placement or full
tuning separates them, the guide is a second model, and full tuning has a frozen third one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import nn

from sftplay.machine.releases import recompute
from sftplay.model.adapter import make_trainable_fp32
from sftplay.plan.devices.layout import Layout
from sftplay.tasks.score.learning.value import ValueHead

Role = Literal["solver", "guide"]

ADAPTERS: dict[Role, str] = {"solver": "default", "guide": "guide"}
"""Role -> name of its adapter. The solver's is the one that the kit saves, merges and exports as a run's result."""

SHARED = Layout(placement="shared")


class Cast:
    """Solver, guide and reference of a run, and the value head of the guide."""

    def __init__(
        self, model: Any, *, has_guide: bool, guide_learns: bool, has_value: bool, layout: Layout = SHARED
    ) -> None:
        """`model` is the solver with its adapter, or all of whose weights train; the guide begins as a copy of it."""
        self.model, self.has_guide, self.has_value = model, has_guide, has_value
        devices = layout.as_torch(str(model.device))
        self._has_adapters = hasattr(model, "peft_config")
        self._reference = None if self._has_adapters else _copy(model, devices["ref"]).eval().requires_grad_(False)
        self.is_separate = has_guide and (layout.separates or not self._has_adapters)
        guide = _copy(model, devices["guide"]) if self.is_separate else model
        self.models: dict[Role, Any] = {"solver": model, "guide": guide}
        if has_guide and self._has_adapters:
            guide.add_adapter(ADAPTERS["guide"], deepcopy(model.peft_config[ADAPTERS["solver"]]))
            if self.is_separate:
                guide.set_adapter(ADAPTERS["guide"])
                guide.delete_adapter(ADAPTERS["solver"])
            else:
                guide.set_adapter(ADAPTERS["solver"])
        self.parts: dict[str, list[nn.Parameter]] = {"solver": self._of("solver")}
        """What each optimizer group trains."""

        if guide_learns:
            self.parts["guide"] = self._of("guide")
        if has_value:
            guide.value_head = ValueHead(model.config.get_text_config().hidden_size).to(devices["value"])
            self.parts["value"] = list(guide.value_head.parameters())
        self._trained = {id(parameter) for part in self.parts.values() for parameter in part}
        self._speaker: Role = "solver"
        for each in self._all():
            self._let_train(each)
            make_trainable_fp32(each)

    @property
    def value_head(self) -> Any:
        """V, on the guide's last state."""
        return self.models["guide"].value_head

    @contextmanager
    def speaking(self, role: Role) -> Iterator[Any]:
        """The model of this role; a backward pass that computes layers anew must run inside."""
        before = self._speaker
        self._choose(role)
        try:
            yield self.models[role]
        finally:
            self._choose(before)

    @contextmanager
    def reference(self, role: Role) -> Iterator[Any]:
        """The frozen model that the role began as."""
        if self._reference is not None:
            yield self._reference
            return
        model = self.models[role]
        with model.disable_adapter():
            yield model
        self._let_train(model)

    def train(self) -> None:
        """All models as for learning; the reference stays as it is."""
        for each in self._all():
            each.train()

    def eval(self) -> None:
        """All models as for answering."""
        for each in self._all():
            each.eval()

    def forget_gradients(self) -> None:
        """Those of a guide of its own, which no Trainer knows."""
        if self.is_separate:
            self.models["guide"].zero_grad(set_to_none=True)

    def beside(self) -> list[nn.Parameter]:
        """Weights that train and are none of the solver's model."""
        if not self.is_separate:
            return []
        return [parameter for parameter in self.models["guide"].parameters() if parameter.requires_grad]

    def trained_weights(self) -> dict[str, nn.Parameter]:
        """Everything that trains, by a name of its own."""
        found = {}
        for role, model in list(self.models.items())[: 1 + self.is_separate]:
            # Adapters have different names already, so that a checkpoint is the same in every placement.
            prefix = "guide_model." if role == "guide" and not self._has_adapters else ""
            found |= {f"{prefix}{name}": p for name, p in model.named_parameters() if id(p) in self._trained}
        return found

    def recompute_guide(self) -> None:
        """Let a guide of its own compute its layers anew in backward passes, as the Trainer lets the solver."""
        if self.is_separate:
            recompute(self.models["guide"])

    def _all(self) -> list[Any]:
        return [self.model, self.models["guide"]] if self.is_separate else [self.model]

    def _of(self, role: Role) -> list[nn.Parameter]:
        named = self.models[role].named_parameters()
        if not self._has_adapters:
            return [parameter for _, parameter in named if parameter.requires_grad]
        return [p for key, p in named if f".{ADAPTERS[role]}." in f"{key}." and "lora_" in key]

    def _choose(self, role: Role) -> None:
        """Give the base this role's adapter, where both share one."""
        if role != self._speaker and self._has_adapters and not self.is_separate:
            self.model.set_adapter(ADAPTERS[role])
            self._let_train(self.model)
        self._speaker = role

    def _let_train(self, model: Any) -> None:
        """PEFT freezes every adapter but the active one."""
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in self._trained)


def _copy(model: Any, device: str) -> Any:
    """The same weights once more, on `device`."""
    with torch.no_grad():
        return deepcopy(model).to(device)
