"""Add rows of new tokens to a model: in the input embedding and in the output head, each the mean of its pieces' rows.

Source: Gee et al., 2022, "Fast Vocabulary Transfer for Language Model Compression" (arXiv:2402.09977), section 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sftplay.config.run import LoraConfig
from sftplay.errors import ConfigError
from sftplay.model.new_tokens import NewToken

IN_FULL = "tuning.lora.modules_to_save"


def add_rows(model: Any, tokens: Sequence[NewToken]) -> None:
    """Add a row for each token to `model`; rows that the model has beyond its vocabulary are used first.

    Means are taken in fp32 and rounded once. Embedding and head that are one weight stay one.
    """
    if not tokens:
        return
    needed = max(token.id for token in tokens) + 1
    if needed > len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(needed, mean_resizing=False)
    ids = [token.id for token in tokens]
    head, ends = model.get_output_embeddings(), [model.get_input_embeddings().weight]
    if head is not None and head.weight is not ends[0]:
        ends.append(head.weight)
    if getattr(head, "bias", None) is not None:
        ends.append(head.bias)
    with torch.no_grad():
        for values in ends:
            means = [values[list(token.pieces)].float().mean(dim=0) for token in tokens]
            values[ids] = torch.stack(means).to(values.dtype)


def find_trainable_rows(model: Any, lora: LoraConfig, *, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """Return PEFT's `trainable_token_indices` for the new tokens `ids`; None if their matrices train in full.

    Raises:
        ConfigError: the config trains these matrices in another way that leaves the new rows out.
    """
    if not ids:
        return None
    first, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is first.weight
    paths = {id(module): path for path, module in model.named_modules()}
    names = [paths[id(end)].rpartition(".")[2] for end in (first, head)]  # as configs name them
    in_full = [name for name in names if name in lora.modules_to_save]
    if is_tied and len(in_full) == 1:
        what = f"{in_full[0]} trains in full, but new tokens are added, and it is one weight with the other of {names}"
        raise ConfigError(what, where=IN_FULL, fix=f"write [{', '.join(names)}], or none of them")
    left = [name for name in names if name not in in_full]
    adapted = [name for name in left if lora.target_modules != "auto" and name in lora.target_modules]
    if adapted:
        what = f"{adapted[0]} has an adapter pair, so the rows of new tokens cannot train"
        raise ConfigError(what, where="tuning.lora.target_modules", fix=f"move {adapted[0]} to {IN_FULL}")
    if left and getattr(head, "bias", None) is not None:
        # peft 0.21, tuners/trainable_tokens/layer.py: the forward pass of such a linear is given no bias.
        what = f"{names[1]} has a bias, which PEFT leaves out where single rows train"
        raise ConfigError(what, where=IN_FULL, fix=f"write [{', '.join(names)}]")
    return {name: list(ids) for name in (left[:1] if is_tied else left)} or None
