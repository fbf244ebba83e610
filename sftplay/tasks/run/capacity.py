"""What a run's adapter can hold beside what it shall learn, and with which rate it learns."""

from __future__ import annotations

from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.units import format_count

BITS_A_PARAMETER = 2
"""What a weight holds of facts at most (Allen-Zhu and Li, "Physics of Language Models: Part 3.3", 2024)."""

BITS_A_TOKEN = 1
"""About what a pretrained model has yet to learn of a token (Schulman et al., "LoRA Without Regret", 2025)."""


def describe_capacity(trainable: int, learned_tokens: int) -> str:
    """Parameters of the adapter against the tokens it shall learn, and what follows."""
    if not learned_tokens:
        return ""
    share = f"{format_count(trainable)} parameters for {format_count(learned_tokens)} learned tokens"
    each = f"{trainable / learned_tokens:.3g} a token"
    if BITS_A_PARAMETER * trainable >= BITS_A_TOKEN * learned_tokens:
        return f"adapter: {share}, {each}: it can hold them"
    return f"warning: the adapter has {share}, {each}: too few to hold them all; a larger tuning.lora.r holds more"


def describe_rate(cfg: RunConfig, plan: dict[str, Any]) -> str:
    """The peak rate and why it is this one."""
    chosen = [each for each in plan.get("decisions", []) if each.get("key") == "train.learning_rate"]
    origin = cfg.origins.get("train.learning_rate")
    why = chosen[0]["reason"] if chosen else f"set by {origin}" if origin else "as given"
    return f"learning rate: {cfg.train.peak_rate:.4g} at its peak, {cfg.train.lr_scheduler} after it ({why})"
