"""The models of a run of episodes: solver, guide, reference and critic, whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils.rnn import pad_sequence

from sftplay import log
from sftplay.errors import ConfigError
from sftplay.model.adapter import make_trainable_fp32
from sftplay.tasks.score.section import SEPARATE_WIDTH, CriticConfig
from sftplay.tasks.score.spec import Layout
from sftplay.train.eval_mode import eval_mode

T = TypeVar("T")


class FSDPModels(nn.Module):
    """The trained models as the Trainer's wrapped model. Every backward pass averages gradients."""

    bucket_bytes_cap = 25 * 2**20
    """Bucket size for gradients of weights that every rank has whole; torch DDP's default."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def no_sync(self) -> AbstractContextManager[None]:
        """Postpone nothing: whole gradients would take as much memory as a model."""
        return nullcontext()


def shard(model: Any, mesh: DeviceMesh, *, precision: str, keeps_head: bool = False) -> None:
    """Shard a model: a pass gathers one layer at a time, and an untied embedding likewise.

    A pass releases what it gathered. With `keeps_head` the model keeps its head until `reshard`: the backward pass of
    another model computes logits with a reference's head a second time. `precision` is accelerate's name: `no` computes
    in the stored dtype. Raise ConfigError where the model names no layers.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        fix = "choose another model, or score.placement: shared"
        raise ConfigError(f"{type(model).__name__} names no layers to shard", where="model.name", fix=fix)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    units = [*layers, *([embeddings] if embeddings.weight is not head.weight else [])]
    dtype = {"bf16": torch.bfloat16, "no": None}[precision]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in reversed(units):  # inner modules first
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps_head)
    model.run_with_weights = lambda work: work()
    register_fsdp_forward_method(model, "run_with_weights")


def run_with_weights(model: Any, work: Callable[[], T]) -> T:
    """Return the result of `work`, run with the gathered weights of `model` as in a forward pass.

    A backward pass through tensors of the result has the weights too.
    """
    return model.run_with_weights(work) if is_sharded(model) else work()


def is_sharded(model: Any) -> bool:
    """Whether this rank holds only a shard of the weights."""
    return hasattr(model, "unshard")


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor, to the CPU where it is sharded. Every rank must call it."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def gather_weights(model: Any) -> dict[str, Tensor]:
    """Gather name -> weight of a sharded model on the main rank; empty on others. Every rank must call it."""
    state = model.state_dict()  # reshards gathered weights
    named = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, Tensor] = {}
    wholes: dict[int, Tensor] = {}
    for name, tensor in state.items():
        key = id(named.get(name, tensor))  # tied weights stay one tensor
        if key not in wholes:
            whole = gather_tensor(tensor)
            wholes[key] = whole if log.is_main() else tensor
        found[name] = wholes[key]
    return found if log.is_main() else {}


def load_full_weights(model: Any, checkpoint: Path) -> None:
    """Load the whole weights that a Trainer has saved. Every rank must call it."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    for path in sorted(checkpoint.glob("model*.safetensors")):
        for name, whole in load_file(path).items():
            if name in weights:  # buffers stay as they are
                copy_into(whole, weights[name])


@torch.no_grad()
def copy_into(whole: Tensor, weight: Tensor) -> None:
    """Copy a whole tensor into a weight, or into this rank's shard. Every rank must call it."""
    weight.copy_(shard_like(whole, weight) if isinstance(weight, DTensor) else whole)


def shard_like(whole: Tensor, weight: DTensor) -> DTensor:
    """Return this rank's shard of a tensor, sharded like `weight`. Every rank must call it."""
    return distribute_tensor(whole.to(weight.device), weight.device_mesh, weight.placements)


class PaddedTokens(NamedTuple):
    """Texts as int64 [episodes, tokens], padded on the right, and their lengths, int64 [episodes]."""

    ids: Tensor
    lengths: Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> PaddedTokens:
        """Pad rows of ids; none may be empty. The network never reads the padding."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        return cls(ids, lengths)


class TextEncoder(nn.Module):
    """Encode token ids as one vector for each text, with a small recurrent network."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: PaddedTokens) -> Tensor:
        """Return the state after the last token, [episodes, width], on the network's device."""
        ids, lengths = (tensor.to(self.embedding.weight.device) for tensor in tokens)
        states, _ = self.recurrent(self.embedding(ids))
        return states[torch.arange(len(states), device=states.device), lengths - 1]


ValueFlow = Literal["shared_trunk", "stop", "straight_through"]


class ValueHead(nn.Module):
    """A linear layer on the guide's state, in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map states [..., width] to values [...] between 0 and 1."""
        return torch.sigmoid(self.linear(hidden.float().to(self.linear.weight.device)).squeeze(-1))


class SeparateValue(nn.Module):
    """A small recurrent network over token ids, with a value head."""

    def __init__(self, vocab_size: int, width: int = SEPARATE_WIDTH) -> None:
        super().__init__()
        self.encoder, self.head = TextEncoder(vocab_size, width), ValueHead(width)

    def forward(self, tokens: PaddedTokens) -> Tensor:
        """Return values between 0 and 1, [episodes]."""
        return self.head(self.encoder(tokens))


def value_loss(
    value: nn.Module,
    seen: Tensor | PaddedTokens,
    *,
    target: Tensor,
    flow: ValueFlow,
    value_coef: float,
    n_episodes: float,
) -> Tensor | None:
    """Return these episodes' share of the mean squared error of V, weighted as `flow` says; None where the weight is 0.

    `seen` is the input of V: the guide's states [episodes, width], or tokens. shared_trunk: weight `value_coef`, and
    the gradient reaches the guide through its states. stop and straight_through: weight 1, for V alone. A nan target
    is unknown: V learns nothing from it.
    """
    weight = value_coef if flow == "shared_trunk" else 1.0
    if weight == 0:
        return None
    values = value(seen.detach() if isinstance(seen, Tensor) and flow != "shared_trunk" else seen)
    target = target.to(values.device)
    error: Tensor = (values - target.where(~target.isnan(), values.detach())).square().sum()
    return weight * error / n_episodes


def straight_through(log_probs: Tensor, tokens: Tensor, *, embedding: Tensor) -> Tensor:
    """Return embeddings of sampled tokens with the gradient of the expected embedding (straight-through estimator).

    log_probs [..., vocabulary], tokens int64 [...], embedding [vocabulary, width] -> [..., width]. The values are the
    embeddings of the tokens; the gradient flows as if each token were the mixture that it was sampled from (biased).
    """
    probabilities = log_probs.exp()
    one_hot = torch.nn.functional.one_hot(tokens, log_probs.shape[-1]).to(probabilities.dtype)
    return (one_hot + probabilities - probabilities.detach()) @ embedding.detach().to(probabilities.dtype)


class CriticInputs(NamedTuple):
    """One turn of all episodes: the state, the answer of the episode, and a second sample of the solver."""

    state: PaddedTokens
    answer: PaddedTokens
    resampled_answer: PaddedTokens


class Critic(nn.Module):
    """Twin Q(s, a) and twin V(s). The smaller estimate of each pair counts, because the larger one overestimates."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.encoder = TextEncoder(vocab_size, width)
        self.q_heads, self.v_heads = (
            nn.ModuleList(nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1)) for _ in range(2))
            for inputs in (2 * width, width)
        )

    def q_values(self, state: PaddedTokens, answer: PaddedTokens) -> Tensor:
        """Estimate the return of an answer twice: [2, episodes]."""
        encoded = torch.cat([self.encoder(state), self.encoder(answer)], -1)
        return torch.stack([head(encoded).squeeze(-1) for head in self.q_heads])

    def v_values(self, state: PaddedTokens) -> Tensor:
        """Estimate the return of a state twice: [2, episodes]."""
        encoded = self.encoder(state)
        return torch.stack([head(encoded).squeeze(-1) for head in self.v_heads])


@torch.no_grad()
def soft_update(target_critic: nn.Module, critic: nn.Module, *, tau: float) -> None:
    """Update target <- (1 - tau) * target + tau * critic in place, a tensor at a time; copy buffers.

    The target critic may lie on another device: one tensor at a time is sent there.
    """
    for target, online in zip(target_critic.parameters(), critic.parameters(), strict=True):
        target.lerp_(online.detach().to(target.device), tau)
    for target, online in zip(target_critic.buffers(), critic.buffers(), strict=True):
        target.copy_(online)


def critic_loss(
    critic: Critic,
    target_critic: Critic,
    *,
    turns: tuple[CriticInputs, CriticInputs],
    returns: tuple[Tensor, Tensor],
    weight: Tensor,
    discount: float,
    n_episodes: float,
) -> dict[str, Tensor]:
    """Return four squared errors: Q(s1, y1) <- R1 + discount * min V'(s2), Q(s2, y2) <- R2, V(s) <- min Q'(s, y').

    V' and Q' are estimates of the target critic, and y' is the resampled answer. Each error is the share of these
    episodes in the mean over twins and a batch of `n_episodes`; `weight` [episodes] is 0 where nothing is learned.
    `weight` and `returns` lie on the critic's device; the target critic may lie on another one.
    """
    first, second = turns
    with torch.no_grad():
        next_value = target_critic.v_values(second.state).min(0).values
        targets = {
            "q1": returns[0] + discount * next_value.to(returns[0].device),
            "q2": returns[1],
            "v1": target_critic.q_values(first.state, first.resampled_answer).min(0).values,
            "v2": target_critic.q_values(second.state, second.resampled_answer).min(0).values,
        }
    estimates = {
        "q1": critic.q_values(first.state, first.answer),
        "q2": critic.q_values(second.state, second.answer),
        "v1": critic.v_values(first.state),
        "v2": critic.v_values(second.state),
    }
    return {
        name: ((estimates[name] - target.to(weight.device)).square().mean(0) * weight).sum() / n_episodes
        for name, target in targets.items()
    }


@torch.no_grad()
def estimate_values(critic: Critic, turn: CriticInputs) -> tuple[Tensor, Tensor]:
    """Return min Q(s, y) and min V(s), both [episodes]: the answer's expected return, and the state's."""
    return critic.q_values(turn.state, turn.answer).min(0).values, critic.v_values(turn.state).min(0).values


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
        return self.networks["value_head"]

    @property
    def critic(self) -> Critic | None:
        found: Any = self.networks.get("critic")
        return found

    @property
    def target_critic(self) -> Critic:
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
