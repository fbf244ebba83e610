"""The parameters of the towers for images of a multimodal model."""

from __future__ import annotations

from collections.abc import Mapping

from sftplay.plan.config_json import TEXT_ONLY, ConfigJson, open_config

_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14,
    "num_channels": 3,
}  # fmt: skip
"""The tower of Gemma 3: its repositories' vision_config, the same for 4B, 12B and 27B."""


def count_vision(config: ConfigJson, hidden: int) -> int | None:
    """Count the parameters of vision tower and projector: 0 for a text model, None for a tower that is not known.

    `hidden` is the text model's width. Counted: SigLIP behind Gemma 3's projector, by the modules in transformers'
    modeling_siglip.py and modeling_gemma3.py (no pooling head).
    """
    vision = config.outer.get("vision_config")
    if config.outer.get("model_type") in TEXT_ONLY:
        return 0
    if (towers := config.outer.get("towers")) is not None:  # counted beforehand, in the shipped table
        return int(towers)
    if (
        config.outer.get("model_type") != "gemma3"
        or not isinstance(vision, Mapping)
        or vision.get("vision_use_head") is True
    ):
        return None
    tower = open_config({**_SIGLIP, **vision, "model_type": "siglip_vision_model"}, config.where)
    width, mlp, layers = tower.count("hidden"), tower.count("mlp"), tower.count("layers")
    image, patch = tower.whole("image_size") or 1, tower.whole("patch_size") or 1
    channels = tower.whole("num_channels") or 1
    embeddings = channels * patch * patch * width + width + (image // patch) ** 2 * width
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * mlp + mlp + width
    projector = width * hidden + width
    return embeddings + layers * (attention + feed_forward + 4 * width) + 2 * width + projector
