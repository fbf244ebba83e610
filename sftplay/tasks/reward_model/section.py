"""The section `reward_model`: how a score for answers is learned from pairs. Rules between keys are in `spec`."""

from __future__ import annotations

from sftplay.config.section import NotNegative, Section


class RewardModelConfig(Section):
    """How a score for answers is learned from pairs (task mode reward_model). A row is a pair;
    train.effective_batch_size counts pairs."""

    margin: bool = False
    """Let the chosen answer be ahead by the row's `margin`, or by the difference of its two scores. Rows without either
    are refused. False only wants it ahead."""

    center: NotNegative = 0.0
    """Weight that keeps the sum of a pair's two scores near 0. 0.01 is usual; 0 leaves them free, as TRL does."""


SECTION = RewardModelConfig
