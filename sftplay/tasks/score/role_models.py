"""Who speaks: solver, guide, or the frozen reference that both began as.

Adapters of one base take turns on it, and the reference is that base with its adapters off. Where the placement or full
tuning separates them, the guide is a second model, and full tuning has a frozen third one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from sftplay.config.schema.score import CriticConfig
from sftplay.machine.libraries import recompute
from sftplay.model.adapter import make_trainable_fp32
from sftplay.plan.devices.layout import Layout
from sftplay.tasks.score.shards import is_sharded, mesh_of_ranks, shard
from sftplay.tasks.score.value_model import Critic, SeparateValue, ValueHead, slow_copy
from sftplay.train.eval_mode import eval_mode

Role = Literal["solver", "guide"]

ADAPTERS: dict[Role, str] = {"solver": "default", "guide": "guide"}
"""Role -> name of its adapter. The solver's is the one that the kit saves, merges and exports as a run's result."""

SHARED = Layout(placement="shared")


class Cast:
    """Solver, guide and reference of a run, the value and the critic."""

    def __init__(
        self,
        model: Any,
        *,
        has_guide: bool,
        guide_learns: bool,
        has_value: bool,
        value_is_separate: bool = False,
        critic: CriticConfig | None = None,
        layout: Layout = SHARED,
    ) -> None:
        """`model` is the solver with its adapter, or all of whose weights train; the guide begins as a copy of it.

        Value and critic are built where they are used, and nowhere else.
        """
        self.model, self.has_guide, self.has_value = model, has_guide, has_value
        self.devices = layout.as_torch(str(model.device))
        self._has_adapters = hasattr(model, "peft_config")
        own = "cpu" if layout.is_split else None  # until `shard`, a device has the solver alone
        self.is_separate = has_guide and (layout.separates or not self._has_adapters)
        self._reference = None if self._has_adapters else _frozen_copy(model, own or self.devices["ref"])
        self.models: dict[Role, Any] = {"solver": model, "guide": model}
        if self.is_separate:
            self.models["guide"] = _copy(model, own or self.devices["guide"])
        if has_guide and self._has_adapters:
            self._add_guides_adapter()
        learners: list[Role] = ["solver", "guide"] if guide_learns else ["solver"]
        self.parts: dict[str, list[nn.Parameter]] = {role: self._of(role) for role in learners}
        """What each optimizer group trains."""

        self.networks: dict[str, nn.Module] = {}
        """Value, critic and its slow copy, by the names that they have in a checkpoint."""

        self._add_networks(value_is_separate=value_is_separate, critic=critic)
        self._layers = [each for each in model.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper)]
        self._trains = self._known_weights()
        self._speaker: Role = "solver"
        for each in self._all():
            self._let_train(each)
            make_trainable_fp32(each)

    @property
    def value_head(self) -> Any:
        """V."""
        return self.networks["value_head"]

    @property
    def critic(self) -> Critic | None:
        """The critic, where there is one."""
        found: Any = self.networks.get("critic")
        return found

    @property
    def slow_critic(self) -> Critic:
        """The critic's slow copy, where there is a critic."""
        found: Any = self.networks["slow_critic"]
        return found

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
        """The frozen model that the role began as, without dropout."""
        if self._reference is not None:
            yield self._reference
            return
        model = self.models[role]
        with eval_mode(model), model.disable_adapter():
            yield model
        self._let_train(model)

    def shard(self, precision: str) -> list[Any]:
        """Leave this rank a part of each model; those that learn. Afterwards their weights are other objects.

        `precision` is accelerate's name of what they compute in.
        """
        mesh = mesh_of_ranks()
        for model in (*self._all(), self._reference):
            shard(model, mesh, precision=precision, keeps_head=model is self._reference)
        for role in self.models:
            if role in self.parts:
                self.parts[role] = self._of(role)
        self._trains = self._known_weights()
        return self._all()

    def train(self) -> None:
        """All models as for learning; the reference stays as it is."""
        for each in self._all():
            each.train()

    def eval(self) -> None:
        """All models as for answering; a reference in shards keeps nothing whole meanwhile."""
        for each in self._all():
            each.eval()
        if self._reference is not None and is_sharded(self._reference):
            self._reference.reshard()

    def forget_gradients(self) -> None:
        """Those of weights that no Trainer knows."""
        for parameter in self.beside():
            parameter.grad = None

    def beside(self) -> list[nn.Parameter]:
        """Weights that train and are none of the solver's model."""
        own = {id(parameter) for parameter in self.model.parameters()}
        return [each for part in self.parts.values() for each in part if id(each) not in own]

    def kept_weights(self) -> dict[str, nn.Parameter]:
        """What a checkpoint keeps beside a solver in full: what trains, and the critic's slow copy.

        The names are the same in every placement.
        """
        named = dict(self.model.named_parameters()) if self._has_adapters else {}
        if self.is_separate:
            # Adapters have different names already.
            prefix = "" if self._has_adapters else "guide_model."
            named |= {f"{prefix}{name}": p for name, p in self.models["guide"].named_parameters()}
        for name, network in self.networks.items():
            named |= {f"{name}.{inner}": p for inner, p in network.named_parameters()}
        kept = [*self.parts.values(), self.networks.get("slow_critic", nn.Module()).parameters()]
        ids = {id(parameter) for part in kept for parameter in part}
        return {name: parameter for name, parameter in named.items() if id(parameter) in ids}

    def recompute_guide(self) -> None:
        """Let a guide of its own compute its layers anew in backward passes, as the Trainer lets the solver."""
        if self.is_separate:
            recompute(self.models["guide"])

    def _all(self) -> list[Any]:
        return [self.model, self.models["guide"]] if self.is_separate else [self.model]

    def _known_weights(self) -> dict[Any, list[tuple[nn.Parameter, bool]]]:
        """Models -> their weights, and whether these train. To walk a model takes as long as a small one's answer."""
        trained = {id(parameter) for part in self.parts.values() for parameter in part}
        return {each: [(p, id(p) in trained) for p in each.parameters()] for each in self._all()}

    def _add_guides_adapter(self) -> None:
        guide = self.models["guide"]
        guide.add_adapter(ADAPTERS["guide"], deepcopy(guide.peft_config[ADAPTERS["solver"]]))
        guide.set_adapter(ADAPTERS["guide" if self.is_separate else "solver"])
        if self.is_separate:
            guide.delete_adapter(ADAPTERS["solver"])

    def _add_networks(self, *, value_is_separate: bool, critic: CriticConfig | None) -> None:
        text = self.model.config.get_text_config()
        if self.has_value:
            value = SeparateValue(text.vocab_size) if value_is_separate else ValueHead(text.hidden_size)
            self._lay("value_head", value, device=self.devices["value"])
            self.parts["value"] = list(value.parameters())
        if critic is not None:
            learner = Critic(text.vocab_size, critic.width)
            self._lay("critic", learner, device=self.devices["critic"])
            self._lay("slow_critic", slow_copy(learner), device=self.devices["target_critic"])
            self.parts["critic"] = list(learner.parameters())

    def _lay(self, name: str, network: nn.Module, *, device: str) -> None:
        """Beside the solver's adapter a network belongs to its model, so that DDP begins with the same on all ranks."""
        self.networks[name] = network.to(device)
        if self._has_adapters and device == self.devices["solver"]:
            setattr(self.model, name, network)

    def _of(self, role: Role) -> list[nn.Parameter]:
        named = self.models[role].named_parameters()
        if not self._has_adapters:
            return [parameter for _, parameter in named if parameter.requires_grad]
        return [p for key, p in named if f".{ADAPTERS[role]}." in f"{key}." and "lora_" in key]

    def _choose(self, role: Role) -> None:
        """Give the base this role's adapter, where both share one."""
        if role != self._speaker and self._has_adapters and not self.is_separate:
            # As PeftModel.set_adapter, which walks all modules three times.
            self.model.active_adapter = self.model.base_model.active_adapter = ADAPTERS[role]
            for layer in self._layers:
                layer.set_adapter(ADAPTERS[role])
            self._let_train(self.model)
        self._speaker = role

    def _let_train(self, model: Any) -> None:
        """PEFT freezes every adapter but the active one."""
        for parameter, trains in self._trains[model]:
            parameter.requires_grad_(trains)


def _copy(model: Any, device: str) -> Any:
    """The same weights once more, made on `device`: the model's own never has them twice for it.

    Weights in 4 bits are moved as their class does it.
    """
    plain = (p for p in model.parameters() if type(p) is nn.Parameter)
    made: dict[int, Any] = {id(p): nn.Parameter(p.detach().to(device, copy=True), p.requires_grad) for p in plain}
    made |= {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    return deepcopy(model, made).to(device)


def _frozen_copy(model: Any, device: str) -> Any:
    return _copy(model, device).eval().requires_grad_(False)
