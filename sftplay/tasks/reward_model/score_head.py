"""A head of one score on a causal model: transformers' class for sequence classification around the same weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from sftplay.errors import ConfigError
from sftplay.reward.model_reward import quiet_transformers

CARRIED = (
    "hf_quantizer", "hf_device_map", "is_quantized", "is_loaded_in_4bit", "quantization_method", "is_4bit_serializable",
)  # fmt: skip
"""What `from_pretrained` has noted on a model in 4 bits, and what Trainer and PEFT look for."""


class ScoreHead(nn.Linear):
    """A head without a bias that computes in fp32 under autocast too: in bf16 two scores near 4 differ by 1/64."""

    places: Tensor | None = None  # int64 [rows, k]: the only tokens to score; None: all
    _found: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return scores [rows, tokens, 1]; where `places` are set, `take` gives theirs, and all are that of the last.

        The class around it picks one score of each row, and a row that holds two answers has two.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            if self.places is None:
                return nn.functional.linear(hidden.float(), self.weight.float())
            states = hidden.gather(1, self.places[:, :, None].expand(-1, -1, hidden.shape[-1]))
            self._found = nn.functional.linear(states.float(), self.weight.float())
            return self._found[:, -1:].expand(-1, hidden.shape[1], -1)

    def take(self) -> Tensor:
        """Return the scores at `places`, fp32 [rows, k], once."""
        assert self._found is not None
        found, self._found = self._found.squeeze(-1), None
        return found


def to_score_model(model: Any, *, pad_token_id: int, seed: int) -> Any:
    """Return a model for sequence classification with one label on the weights of the causal `model`.

    Its head is new, and the same for the same seed. The text config gets the pad token: the score of a row is that of
    its last token that is none (transformers 5.17, modeling_layers.py, `GenericForSequenceClassification`).

    Raises:
        ConfigError: transformers has no such class for it, or one of another make.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_token_id
    classes = AutoModelForSequenceClassification._model_mapping
    name, base = type(model).__name__, model.base_model
    if type(config) not in classes:
        raise _refusal(f"transformers has no class that gives a score for a {name}")
    with quiet_transformers(), torch.device("meta"):
        scored = classes[type(config)]._from_config(config)
    head = next((head for head in SEQ_CLS_HEAD_NAMES if isinstance(getattr(scored, head, None), nn.Linear)), None)
    if head is None or type(scored.base_model) is not type(base) or getattr(scored, head).bias is not None:
        raise _refusal(f"{type(scored).__name__} is no {name} with one linear layer instead of its output head")
    setattr(scored, scored.base_model_prefix, base)
    width = getattr(scored, head).in_features
    setattr(scored, head, make_head(width, std=_spread(config), like=model.get_input_embeddings().weight, seed=seed))
    if left := [path for path, weight in scored.named_parameters() if weight.is_meta]:
        raise _refusal(f"{type(scored).__name__} has more weights than a {name}: {left[0]}")
    for note in CARRIED:
        if note in vars(model):
            setattr(scored, note, getattr(model, note))
    return scored.train(model.training)


def make_head(width: int, *, std: float, like: Tensor, seed: int) -> ScoreHead:
    """Return a new head, normal around 0, with the dtype and on the device of `like`."""
    head = ScoreHead(width, 1, bias=False, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        head.weight.copy_(torch.empty_like(head.weight).normal_(std=std, generator=torch.Generator().manual_seed(seed)))
    return head.to(device=like.device, dtype=like.dtype)


def _spread(config: Any) -> float:
    return float(getattr(config.get_text_config(), "initializer_range", None) or 0.02)


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where="model.name", fix="choose another model: Llama, Qwen, Mistral and Gemma have one")


def find_score_head(model: Any) -> ScoreHead:
    """Return the head of a score model that computes: with an adapter the copy that trains."""
    head = next(getattr(model, name) for name in SEQ_CLS_HEAD_NAMES if hasattr(model, name))
    found: ScoreHead = head.modules_to_save[head.active_adapters[0]] if hasattr(head, "modules_to_save") else head
    return found
