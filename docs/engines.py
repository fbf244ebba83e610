"""Write docs/engines.md: what PEFT, vLLM and SGLang make of an adapter and a merged model of each architecture.

From configs alone, on `meta`: the class that AutoModelForCausalLM opens gets the kit's adapter, and its names are
looked up in sftplay/export/served_names.yaml. `make engines` runs it; tests/export/test_served_names.py holds the page,
and the table against vLLM's own classes.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engines.md"
sys.path.insert(0, str(ROOT))

_TWO = {"num_hidden_layers": 2}
_FOUR = {"num_hidden_layers": 4}  # Qwen3.5: three layers of linear attention and one of full attention
_GEMMA4 = {**_TWO, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
_EYES = {"depth": 2, "deepstack_visual_indexes": [0]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _TWO,
    "mistral": _TWO,
    "ministral3": _TWO,
    "mistral3": {"text_config": _TWO, "vision_config": _TWO},
    "qwen2": _TWO,
    "qwen3": _TWO,
    "qwen3_5": {"text_config": _FOUR, "vision_config": {"depth": 2}},
    "qwen3_vl": {"text_config": _TWO, "vision_config": _EYES},
    "gemma2": _TWO,
    "gemma3_text": _TWO,
    "gemma3": {"text_config": _TWO, "vision_config": _TWO},
    "gemma4": {"text_config": _GEMMA4, "vision_config": _TWO},
    "phi3": _TWO,
    "olmo2": _TWO,
    "smollm3": _TWO,
    "granite": _TWO,
    "glm4": _TWO,
    "glm4_moe": {**_TWO, "head_dim": 128},
    "gpt_oss": _TWO,
    "mixtral": _TWO,
    "olmoe": _TWO,
    "qwen3_moe": _TWO,
    "qwen3_5_moe": {"text_config": _FOUR, "vision_config": {"depth": 2}},
    "qwen3_vl_moe": {"text_config": {**_TWO, "norm_topk_prob": True}, "vision_config": _EYES},
}
"""`model_type` -> what makes its config small; whatever is left out is transformers' default."""

MERGED_ALONE = {
    "qwen3_5_text": _FOUR,
    "qwen3_5_moe_text": _FOUR,
    "gemma4_text": _GEMMA4,
}
"""Text classes that only a model saved by itself names."""


def make_config(family: str) -> Any:
    """A small config with the class in `architectures` that the hub's models of the family name."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    config = CONFIG_MAPPING[family](**(FAMILIES | MERGED_ALONE)[family])
    images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    config.architectures = [images.get(family) or modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    return config


def make_model(config: Any) -> Any:
    """The model that AutoModelForCausalLM opens, or else AutoModelForImageTextToText, on `meta`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_text = type(config) in AutoModelForCausalLM._model_mapping
    opens = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    with torch.device("meta"):
        return opens.from_config(config)


def adapter_keys(model: Any) -> list[str]:
    """The names that the kit's adapter on every linear layer of the text has in its file."""
    from peft import get_peft_model_state_dict

    from sftplay.config.run import LoraConfig
    from sftplay.model.adapter import add_adapter

    with contextlib.redirect_stderr(io.StringIO()):
        return list(get_peft_model_state_dict(add_adapter(model, LoraConfig())))


def describe_family(family: str) -> list[str]:
    """The row of a family: opened class, then what each engine makes of the adapter and of the merged model."""
    from sftplay.export.adapter_names import ENGINE_NAMES, find_mounted, rename_for_vllm, served_names

    config = make_config(family)
    model = make_model(config)
    opened, served = type(model).__name__, config.architectures[0]
    keys, known = adapter_keys(model), config.to_dict()
    cells = []
    for engine in ENGINE_NAMES:
        renamed = rename_for_vllm(known, keys) if engine == "vllm" else None
        found = find_mounted(known, keys, engine)
        if found.mounts_all:
            cells.append(f"{found.matched} of {found.total}")
        elif renamed:
            halves = max(map(len, renamed.values())) > 1
            how = "`gate_up_proj` halved" if halves else "`model.` → `model.language_model.`"
            cells.append(f"{len(renamed) // 2} of {found.total}, rewritten by export: {how}")
        else:
            cells.append(f"refused: {_why(found, engine)}")
    for engine in ("vllm", "sglang"):
        row = served_names()[engine]["classes"].get(opened)
        why = (row or {}).get("merged")
        if why or row is None:
            cells.append(f"refused: {why or 'no class of its own (its transformers backend is untried)'}")
        else:
            cells.append("loads")
    names = f"`{opened}`" if opened == served else f"`{opened}`, hub: `{served}`"
    return [f"`{family}`: {names}", *cells]


def _why(found: Any, engine: str) -> str:
    if not found.is_known:
        return "class not in its table"
    if ".experts" in found.first_unmatched:
        return "experts trained as one tensor"
    if "has no place for" in found.fix:
        return "no place for " + found.fix.partition("has no place for ")[2].partition(";")[0]
    return "image tower shares the text's names" if engine == "sglang" else found.fix


HEAD = """\
<!-- Written by `make engines`, held by a test: change docs/engines.py or sftplay/export/served_names.yaml. -->
# Engines: which names of an adapter each one mounts

A LoRA names the modules of the class it was trained on. Where an engine serves another class (`architectures` in the
base's config.json), the names can miss: vLLM then mounts nothing, logs it at its debug level only, and answers as the
base (vllm#34186, #48019, #49354, #34591). `make export` looks every name up first: `adapter/` is as trained, for PEFT
on the class that `AutoModelForCausalLM` opens, with a pattern in `target_modules` as a list, since SGLang takes lists
only. `{folder}/` is written where vLLM needs other names; SGLang takes either, since it goes by the number of
the layer and the last part of a name. What an engine cannot mount is said by name; the merged model serves.

The table is for the kit's adapter on every linear layer of the text (`target_modules: auto`) of 2 to 4 layers, from
transformers' config classes alone. PEFT was asked itself; vLLM {vllm} by building its classes and loading the saved
names; SGLang {sglang} was read, not run. The kit does not train `qwen3_vl`, `qwen3_vl_moe` and `mistral3`, which no
class that `AutoModelForCausalLM` opens has; their rows are for adapters of the image-text class.

"""
TAIL = """
transformers 5 keeps the experts of a layer in one tensor. PEFT 0.21 trains them as parameters on `qwen3_moe`,
`glm4_moe`, `olmoe` and `mixtral` (with the router), and passes them over on `gpt_oss`, `qwen3_5_moe` and
`qwen3_vl_moe`. Either is said before training, with its size, and so is a full copy by `modules_to_save`.
"""


def page() -> str:
    """The page as docs/engines.md holds it."""
    from sftplay.export.adapter_names import FOR_ENGINES, served_names

    versions = {engine: served_names()[engine]["version"] for engine in ("vllm", "sglang")}
    head = ["family: class", "adapter: PEFT", "adapter: vLLM", "adapter: SGLang", "merged: vLLM", "merged: SGLang"]
    rows = [head, ["---"] * len(head), *map(describe_family, FAMILIES)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return HEAD.format(folder=FOR_ENGINES, **versions) + table + TAIL


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
