"""Parts on two devices. `meta` stands for a second GPU: torch refuses an operation over it and the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from oracle.cases import FAMILIES
from oracle.gpu_kernels import replaced
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from sftplay.tasks.score import update as update_module
from sftplay.tasks.score.role_models import RoleModels, soft_update
from sftplay.tasks.score.sample_episodes import Action, Episode
from sftplay.tasks.score.section import CriticConfig, ScoreConfig
from sftplay.tasks.score.spec import Layout
from sftplay.tasks.score.update import CriticGradients, MinibatchSetup, PolicyGradients

ACTIONS = [Action(prompt=[1, 2, 3], ids=[4, 5], log_probs=[-1.0, -0.1], is_truncated=False)] * 2
LAYOUTS = {
    "guide elsewhere": Layout(placement="roles", guide="meta", value="meta", target_critic="meta", ref="meta"),
    "value, critic and reference elsewhere": Layout(placement="roles4", value="meta", critic="meta", ref="meta"),
    "guide and its value apart": Layout(placement="roles4", guide="meta", critic="meta"),
}


class Crossing(torch.autograd.Function):
    """A tensor of zeros on another device, and a gradient of zeros on the way back."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        tensor, device = given
        ctx.device = tensor.device
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch.zeros(grads[0].shape, dtype=grads[0].dtype, device=ctx.device), None


class TwoDevices(TorchFunctionMode):
    """Lets tensors go from `meta` to the CPU and back; there is no number on `meta` that code could read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "__float__":
            return 0.0
        wanted = "cpu" if name == "cpu" else args[1] if name == "to" and len(args) > 1 else None
        if isinstance(wanted, str | torch.device) and torch.device(wanted).type != args[0].device.type:
            return Crossing.apply(args[0], wanted)
        return func(*args, **kwargs)


def make_model(*, adapts: bool) -> Any:
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    described = {**FAMILIES["llama"], **small, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))
    if adapts:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


def make_cast(layout: Layout, *, adapts: bool) -> RoleModels:
    model = make_model(adapts=adapts)
    return RoleModels(
        model, has_guide=True, guide_learns=True, has_value=True, critic=CriticConfig(width=4), layout=layout
    )  # fmt: skip


def compute_once(compute: Any, *given: Any, use_reentrant: bool, preserve_rng_state: bool, **named: Any) -> Any:
    return compute(*given, **named)


CASES = [
    *((name, False) for name in LAYOUTS),
    ("value, critic and reference elsewhere", True),  # PEFT leaves an adapter on the CPU where its base is on `meta`
]


@pytest.mark.parametrize(("name", "adapts"), CASES)
def test_nothing_is_computed_over_two_devices(name: str, adapts: bool):
    masks = replaced(masking_utils, "fast_all", lambda _mask: True)
    # A chunk is computed anew outside of the mode.
    chunks = replaced(update_module, "checkpoint", compute_once)
    with masks, chunks, TwoDevices():
        check(make_cast(LAYOUTS[name], adapts=adapts), LAYOUTS[name])


def check(role_models: RoleModels, layout: Layout) -> None:
    found = {name: {str(p.device) for p in part} for name, part in role_models.trainable.items()}
    wanted = layout.as_torch("cpu")
    assert found == {part: {wanted[part]} for part in ("solver", "guide", "value", "critic")}
    assert {str(p.device) for p in role_models.target_critic.parameters()} == {wanted["target_critic"]}
    batch = MinibatchSetup(
        micro_batch=1, n_episodes=2, pad=0, backward=lambda loss: loss.backward(), context=nullcontext
    )
    update, ones = PolicyGradients(role_models, ScoreConfig(), batch=batch), torch.ones(2)
    assert str(update.predict_values(ACTIONS).device) == "cpu"
    update.learn(ACTIONS, "guide", beta=0.05, advantage=ones, value_target=ones, n_tokens=4)
    update.learn_value(ACTIONS, value_target=ones)
    for turn in (1, 2):
        update.learn(ACTIONS, f"t{turn}", advantage=ones, beta=0.1, n_tokens=4)
    assert role_models.critic is not None
    step = CriticGradients(role_models.critic, role_models.target_critic, batch=batch)
    question: Any = None
    episodes = [Episode(question=question, first=a, hint=a, hint_ids=[4], second=a) for a in ACTIONS]
    resampled = [(action, action) for action in ACTIONS]
    assert str(step.estimate_values(episodes, resampled).device) == "cpu"
    step.learn(episodes, resampled, returns=(ones, ones), weight=ones, discount=0.5)
    soft_update(role_models.target_critic, role_models.critic, tau=0.1)
    for name, part in role_models.trainable.items():
        assert all(p.grad is not None and p.grad.device == p.device for p in part if "lora_A" not in name), name
