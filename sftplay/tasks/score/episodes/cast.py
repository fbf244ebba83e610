"""Who speaks: solver, guide, or the frozen reference, which is the base with its adapters off, never a copy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

from torch import nn

from sftplay.config.schema.score import CriticConfig
from sftplay.model.adapter import make_trainable_fp32
from sftplay.tasks.score.learning.critic import Critic, slow_copy
from sftplay.tasks.score.learning.value import SeparateValue, ValueHead

Role = Literal["solver", "guide"]

ADAPTERS: dict[str, str] = {"solver": "default", "guide": "guide"}
"""Role -> name of its adapter. The solver's is the one that the kit saves, merges and exports as a run's result."""


class Cast:
    """Two adapters on one base, the value and the critic, as modules of one model."""

    def __init__(
        self,
        model: Any,
        *,
        has_guide: bool,
        guide_learns: bool,
        has_value: bool,
        value_is_separate: bool = False,
        critic: CriticConfig | None = None,
    ) -> None:
        """`model` has the solver's adapter already; the guide's is a fresh one of the same shape.

        Value and critic are built where they are used, and nowhere else.
        """
        self.model = model
        self.has_guide, self.has_value = has_guide, has_value
        if has_guide:
            model.add_adapter(ADAPTERS["guide"], deepcopy(model.peft_config[ADAPTERS["solver"]]))
        self.parts: dict[str, list[nn.Parameter]] = {"solver": self._of_adapter("solver")}
        """What each optimizer group trains."""

        if guide_learns:
            self.parts["guide"] = self._of_adapter("guide")
        text = model.config.get_text_config()
        if has_value:
            value = SeparateValue(text.vocab_size) if value_is_separate else ValueHead(text.hidden_size)
            model.value_head = value.to(model.device)
            self.parts["value"] = list(model.value_head.parameters())
        self.critic: Critic | None = None
        self.kept: list[nn.Parameter] = []
        """What a checkpoint has to keep: everything that trains, and the critic's slow copy."""

        if critic is not None:
            self.critic = model.critic = Critic(text.vocab_size, critic.width).to(model.device)
            model.slow_critic = slow_copy(self.critic)
            self.parts["critic"] = list(self.critic.parameters())
            self.kept += model.slow_critic.parameters()
        self._trainable = [parameter for part in self.parts.values() for parameter in part]
        self.kept += self._trainable
        model.set_adapter(ADAPTERS["solver"])
        self._let_train()
        make_trainable_fp32(model)

    @property
    def slow_critic(self) -> Critic:
        """The critic's slow copy, where there is a critic."""
        slow: Critic = self.model.slow_critic
        return slow

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
