"""With dropout, completions come from the model that answers, and not from one of the many that dropout makes of it.

The reference is what the sampler notes of each token: plain transformers in evaluation mode gives the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_run import grpo_options
from in_process import Inputs, train

from sftplay.tasks.grpo.sampling import LogprobCheck

pytestmark = pytest.mark.slow

DROPOUT = {"tuning__mode": "lora", "tuning__lora__dropout": 0.3, "train__learning_rate": 0.05}
"""The adapter is 0 in the first step and far from it in the second one."""


def test_the_tokens_of_a_drawing_have_the_probabilities_with_which_they_were_drawn(
    prompts: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gaps, dropped = list[float](), list[float]()
    compare = LogprobCheck.compare

    def noted(self: LogprobCheck, *, sampled: Any, before: Any, mask: torch.Tensor) -> None:
        if sampled is not None and before is not None and self.trained_logps is not None:
            kept = mask.bool()
            gaps.append(float((sampled - before)[kept].abs().max()))
            dropped.append(float((self.trained_logps - before)[kept].abs().max()))
        compare(self, sampled=sampled, before=before, mask=mask)

    monkeypatch.setattr(LogprobCheck, "compare", noted)
    window = {"grpo__num_iterations": 2, "grpo__beta": 0.1}
    steps = {"train__max_steps": 4, "grpo__logprob_check_steps": 1}
    run = train(tmp_path, prompts, **grpo_options(prompts, **DROPOUT, **steps, **window))
    assert max(gaps) < 1e-4  # rounding
    assert max(dropped) > 1e-2  # it still learns with dropout
    assert run.trainer.model.training
