"""A tiny model whose answers are worth looking at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def lively_model(folder: Path) -> Any:
    """The model of `folder` with weights by which answers depend on every token of the prompt, and few end soon."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.3)
    return model
