"""A prompt that is computed once for all its answers."""

from __future__ import annotations

from typing import Any

from accelerate.utils import extract_model_from_parallel

from sftplay.train.upstream import find_attention

MASKED_ATTENTION = ("sdpa", "eager")  # they take a mask for each pair of tokens (transformers 5.17, masking_utils.py)

EXACT_TOLERANCE = 1e-5  # relative, in fp32: random weights hardly care for a wrong position


def unwrap(model: Any) -> Any:
    """Return the causal model inside DDP, DeepSpeed or an adapter."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attends_to_all(base: Any) -> bool:
    """Return whether each token of a causal model attends to all before it, under a mask that can be given."""
    config = base.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return find_attention(base) in MASKED_ATTENTION and (layers == {"full_attention"} if layers else not slides)
