"""What keys of the sections `preference` and `reward_model` change, for the table of all keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import DataError
from sftplay.model.tokenizer import load_tokenizer
from sftplay.tasks.preference import load_pairs
from sftplay.tasks.preference.losses import kto_losses, pair_losses
from sftplay.tasks.preference.reference import ReferenceKind, find_shares
from sftplay.tasks.preference.spec import uses_reference
from sftplay.tasks.reward_model import scores

Check = Callable[[Any], None]

ROOT = Path(__file__).resolve().parents[1]
LOGPS = torch.tensor([[-4.0, -6.0], [-9.0, -7.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-5.0, -5.5], [-8.0, -7.5]], dtype=torch.float64)
TOKENS = torch.tensor([[4, 3], [6, 7]])
MARGIN = torch.tensor([1.5, -1.5], dtype=torch.float64)  # of LOGPS and REFERENCE


def config(task: str, **changes: Any) -> RunConfig:
    return load_config(ROOT / "configs/run_dpo.yaml", [f"task_mode={task}", *(f"{k}={v}" for k, v in changes.items())])


def losses(task: str, **changes: Any) -> torch.Tensor:
    cfg = config(task, **{f"preference.{key}": value for key, value in changes.items()})
    return pair_losses(cfg, LOGPS, TOKENS, REFERENCE if uses_reference(cfg) else None)


def sigmoid_loss(margin: torch.Tensor) -> torch.Tensor:
    return torch.log1p(torch.exp(-margin))


def check_losses(_: Any) -> None:
    """Each loss by its formula, with other values of its keys."""
    close = torch.testing.assert_close
    close(losses("dpo", beta=0.3), sigmoid_loss(0.3 * MARGIN))
    close(losses("dpo", loss="hinge", beta=0.3), torch.relu(1 - 0.3 * MARGIN))
    smoothed = 0.8 * sigmoid_loss(0.3 * MARGIN) + 0.2 * sigmoid_loss(-0.3 * MARGIN)
    close(losses("dpo", beta=0.3, label_smoothing=0.2), smoothed)
    close(losses("dpo", beta=0.3, rpo_alpha=2.0), sigmoid_loss(0.3 * MARGIN) - 2 * LOGPS[:, 0] / TOKENS[:, 0])
    means = (LOGPS / TOKENS)[:, 0] - (LOGPS / TOKENS)[:, 1]
    close(losses("simpo", beta=3.0, gamma=0.7), sigmoid_loss(3 * means - 0.7))


def check_weights(_: Any) -> None:
    """A weight scales the losses of its own kind of answers, and no other's."""
    desirable = torch.tensor([True, False])

    def find(**changes: float) -> torch.Tensor:
        cfg = config("kto", **{f"preference.{key}": value for key, value in changes.items()})
        return kto_losses(cfg, LOGPS[:, 0] - REFERENCE[:, 0], desirable, reference_point=0.0)

    plain = find()
    torch.testing.assert_close(find(desirable_weight=3.0), plain * torch.tensor([3.0, 1.0]))
    torch.testing.assert_close(find(undesirable_weight=0.5), plain * torch.tensor([1.0, 0.5]))


def check_reference(_: Any) -> None:
    """Which model the reference is, and none."""
    kinds = [ReferenceKind.find(config("dpo", **{"preference.reference": name})).name for name in ("start", ROOT)]
    assert kinds[0] != kinds[1] == "path"
    assert [uses_reference(config("dpo", **{"preference.reference": name})) for name in ("start", "none")] == [
        True,
        False,
    ]


def check_shared_prompt(_: Any) -> None:
    """Whether a prompt is computed once."""
    small = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(small).eval()
    found = [find_shares(config("dpo", **{"preference.shared_prompt": value}), model) for value in ("auto", "false")]
    assert found == [True, False]


def check_margin(_: Any) -> None:
    """Rows without a margin are refused where it is wanted."""
    cfg = load_config(ROOT / "configs/run_reward_model.yaml", ["model.name=builtin:tiny", "reward_model.margin=true"])
    with pytest.raises(DataError, match="margin"):
        load_pairs.load(cfg, load_tokenizer(cfg.model))


def check_center(_: Any) -> None:
    pairs = torch.tensor([[2.0, 1.0]])
    plain, centred = (scores.pair_losses(pairs, None, center=center) for center in (0.0, 0.5))
    torch.testing.assert_close(centred - plain, torch.tensor([0.5 * 9.0]))


OF_PREFERENCE: dict[str, Check] = {
    **dict.fromkeys(("loss", "beta", "label_smoothing", "rpo_alpha", "gamma"), check_losses),
    **dict.fromkeys(("desirable_weight", "undesirable_weight"), check_weights),
    "reference": check_reference,
    "shared_prompt": check_shared_prompt,
}
OF_REWARD_MODEL: dict[str, Check] = {"margin": check_margin, "center": check_center}
