"""Who speaks: solver, guide, or the frozen reference, which is the base with its adapters off, never a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

from torch import nn

from sftplay.model.adapter import make_trainable_fp32
from sftplay.tasks.score.learning.value import ValueHead

Role = Literal["solver", "guide"]

ADAPTERS: dict[str, str] = {"solver": "default", "guide": "guide"}
"""Role -> name of its adapter. The solver's is the one that the kit saves, merges and exports as a run's result."""


class Cast:
    """Two adapters on one base, and the value head of the guide, as modules of one model."""

    def __init__(self, model: Any, *, has_guide: bool, guide_learns: bool, has_value: bool) -> None:
        """`model` has the solver's adapter already; the guide's is a fresh one of the same shape."""
        self.model = model
        self.has_guide, self.has_value = has_guide, has_value
        if has_guide:
            model.add_adapter(ADAPTERS["guide"], deepcopy(model.peft_config[ADAPTERS["solver"]]))
        self.parts: dict[str, list[nn.Parameter]] = {"solver": self._of_adapter("solver")}
        """What each optimizer group trains."""

        if guide_learns:
            self.parts["guide"] = self._of_adapter("guide")
        if has_value:
            model.value_head = ValueHead(model.config.get_text_config().hidden_size).to(model.device)
            self.parts["value"] = list(model.value_head.parameters())
        self._trainable = [parameter for part in self.parts.values() for parameter in part]
        model.set_adapter(ADAPTERS["solver"])
        self._let_train()
        make_trainable_fp32(model)

    @contextmanager
    def speaking(self, role: Role) -> Iterator[Any]:
        """The model with this role's adapter."""
        self.model.set_adapter(ADAPTERS[role])
        self._let_train()
        try:
            yield self.model
        finally:
            self.model.set_adapter(ADAPTERS["solver"])
            self._let_train()

    @contextmanager
    def reference(self) -> Iterator[Any]:
        """The model that both roles began as."""
        with self.model.disable_adapter():
            yield self.model
        self._let_train()

    def _of_adapter(self, role: Role) -> list[nn.Parameter]:
        name = f".{ADAPTERS[role]}."
        return [p for key, p in self.model.named_parameters() if name in f"{key}." and "lora_" in key]

    def _let_train(self) -> None:
        """PEFT freezes every adapter but the active one."""
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        for parameter in self._trainable:
            parameter.requires_grad_(True)
