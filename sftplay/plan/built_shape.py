"""The shape of a model whose family the table lacks: transformers builds it without weights, in a child process.

    python -m sftplay.plan.built_shape < config.json

prints what was found as JSON. The parent keeps it, so that a config is built once for each version of transformers.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.places import cache_root
from sftplay.plan.config_json import ConfigJson
from sftplay.plan.shape import Linear, ModelShape, Routed

LONGEST_S = 300
SILENT = "the process that builds it gave no answer"
FORMAT = 3  # of what is kept; another one is built anew
MLP_PARTS = ("mlp", "feed_forward", "ffn", "moe", "expert", "fc", "w1", "w2", "w3")
RECURRENT = ("linear", "conv", "mamba", "recurrent", "hybrid")  # words in `layer_types` of layers that carry a state
ESTIMATED = "what its layers of other kinds keep for the backward pass: a generic estimate"


def can_build(text: ConfigJson) -> bool:
    """Return whether the installed transformers may have the class of the config's model."""
    found, kind = find_spec("transformers"), str(text.outer.get("model_type") or text.model_type)
    if found is None or found.origin is None:
        return False
    models = Path(found.origin).parent / "models"
    return any((models / name.replace("-", "_")).is_dir() for name in (kind, kind.removesuffix("_text")))


def built_shape(config: Mapping[str, Any], *, name: str) -> ModelShape | None:
    """Return the shape of the model as transformers builds it, None where it cannot be built."""
    try:
        asked = json.dumps([FORMAT, version("transformers"), version("peft"), config], sort_keys=True, default=str)
    except PackageNotFoundError:
        return None
    kept = cache_root() / "shapes" / f"{hashlib.sha256(asked.encode()).hexdigest()[:32]}.json"
    try:
        found = json.loads(kept.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        log.status(
            f"counting {name} by transformers' own class, as no table has its family (up to a minute, once)", "plan"
        )
        found = _ask_child(config)
        if found.get("error") != SILENT:  # a child that was killed or too slow may answer next time
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_text(kept, json.dumps(found))
    if "error" in found:
        log.say(f"note: {name} cannot be counted by transformers' own class: {found['error']}", "plan")
        return None
    return _read(found, name=name)


def _ask_child(config: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "sftplay.plan.built_shape"]
    try:
        done = subprocess.run(
            command, input=json.dumps(config), capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return {"error": SILENT}
    return found


def _read(found: Mapping[str, Any], *, name: str) -> ModelShape:
    """The shape that `asdict` made a mapping of."""
    values = dict(found)
    for key in ("linears", "linears_outside"):
        values[key] = tuple(Linear(**one) for one in values[key])
    values["routed"] = Routed(**values["routed"]) if values["routed"] else None
    values["parts"] = tuple(_read(part, name=name) for part in values["parts"])
    values["unmodelled"] = tuple(values["unmodelled"])
    return ModelShape(**{**values, "name": name})


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Build the model of a config.json on the meta device and describe its shape, as `_read` reads it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(keys), encoding="utf-8")
        library = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(library)
    return asdict(_describe_model(model, library.get_text_config(), is_quantised="quantization_config" in config))


def _describe_model(model: Any, text: Any, *, is_quantised: bool) -> ModelShape:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils import transformers_weight_conversion as conversion
    from torch import nn

    decoder, head, embedding = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    decoder = model if decoder is head else decoder  # `model.adapter.find_text_model`
    # Names that PEFT takes for those of experts, or refuses (`model.adapter.every_linear_of_text`).
    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    left_out = set(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {}))
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, "out_proj")
    except ValueError:
        left_out.add("out_proj")
    stacks = [m for m in decoder.modules() if isinstance(m, nn.ModuleList)]
    layers = max(stacks, key=lambda stack: (sum(p.numel() for p in stack.parameters()), len(stack)))
    kinds = getattr(text, "layer_types", None) or [""] * len(layers)
    made = [_describe_layer(layer, text, left_out, str(kind)) for layer, kind in zip(layers, kinds, strict=False)]
    counts = Counter(made)
    parts = tuple(replace(kind, layers=n, starts_at=made.index(kind)) for kind, n in counts.items())
    inside = {id(p) for p in layers.parameters()}
    whole = {id(p): p.numel() for p in model.parameters()}
    of_text = {id(p) for part in (decoder, head) for p in part.parameters()}
    outside_modules = (
        m for m in decoder.modules() if isinstance(m, nn.Linear) and m is not head and id(m.weight) not in inside
    )
    outside = tuple(
        Linear(name="outside", inputs=m.in_features, outputs=m.out_features) for m in outside_modules
    )  # fmt: skip
    other = sum(size for key, size in whole.items() if key in of_text and key not in inside)
    unmodelled = [ESTIMATED] if any(kind.family != "attends" for kind in parts) else []
    unmodelled += ["weights that are published already quantised"] if is_quantised else []
    most = max(parts, key=lambda kind: kind.layers)
    parts = tuple(replace(kind, family=text.model_type) for kind in parts)
    return replace(
        most, family=text.model_type, layers=len(layers), starts_at=0, vocab=embedding.weight.shape[0],
        tied=head.weight is embedding.weight, parts=parts if len(parts) > 1 else (), linears_outside=outside,
        other_params=other - sum(one.inputs * one.outputs for one in outside), unmodelled=tuple(unmodelled),
        vision_params=sum(size for key, size in whole.items() if key not in of_text),
        layer_pattern=len(parts), experts=max(kind.experts for kind in parts),
        state_leaks=any(kind.state_leaks for kind in parts),
        adds_router_loss=getattr(text, "output_router_logits", False) is True,
    )  # fmt: skip


def _describe_layer(layer: Any, text: Any, left_out: set[str], kind: str) -> ModelShape:
    """One layer. `family` says `attends` where its matrices are those of attention."""
    from torch import nn

    def read(*names: str) -> Any:
        return next((found for name in names if (found := getattr(text, name, None)) is not None), None)

    linears, hidden = [], int(read("hidden_size", "n_embd", "d_model"))
    for path, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            name, is_mlp = path.rpartition(".")[2], any(part in path for part in MLP_PARTS) and "attn" not in path
            is_router = type(module) is not nn.Linear  # it gives more than a number for each output
            linears.append(
                Linear(
                    name=name, inputs=module.in_features, outputs=module.out_features, bias=module.bias is not None,
                    is_mlp=is_mlp, is_left_out=is_router or name in left_out,
                )
            )  # fmt: skip
    total = sum(p.numel() for p in layer.parameters())
    stacked = [p for name, p in layer.named_parameters() if p.ndim == 3 and "expert" in name]
    experts, routed = 0, None
    if stacked:
        experts, weights = stacked[0].shape[0], sum(p.numel() for p in stacked)
        width = weights // (3 * experts * hidden) or 1
        chosen = min(
            experts, int(read("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk") or 1)
        )
        routed = Routed(chosen=chosen, width=width, params=weights)
    norms = [child for name, child in layer.named_children() if "norm" in type(child).__name__.lower()]
    mixing = [one for one in linears if not one.is_mlp]
    names = {name.rpartition(".")[2] for name, _ in layer.named_parameters()}
    carries = (
        any(word in kind for word in RECURRENT)
        or bool({"A_log", "dt_bias", "D"} & names)
        or any(isinstance(m, nn.Conv1d) for m in layer.modules())
    )
    heads = int(read("num_attention_heads", "n_head", "n_heads") or 1)
    widest = max((one.inputs for one in mixing if one.outputs == hidden), default=hidden)
    is_plain = not carries and {one.name for one in mixing} >= {"q_proj", "k_proj", "v_proj"}
    kv_heads = int(read("num_key_value_heads", "num_kv_heads") or heads) if is_plain else heads
    mlps = [one for one in linears if one.is_mlp and one.outputs == hidden]
    dense = max((one.inputs for one in mlps), default=0) or (routed.width if routed else hidden)
    return ModelShape(
        name="", family="attends" if is_plain or not mixing else "mixes", layers=1, hidden=hidden, heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads, head_dim=max(1, widest // heads), mlp=dense,
        vocab=1, max_positions=read("max_position_embeddings", "max_seq_len", "n_positions"), tied=False,
        gated_mlp=True, linears=tuple(linears),
        layer_other_params=total - sum(one.inputs * one.outputs for one in linears), other_params=0,
        norm="layer" if any(isinstance(norm, nn.LayerNorm) for norm in norms) else "rms", norms_per_layer=len(norms),
        qk_norm=any(name.startswith("q_norm") for name in dict(layer.named_modules())), parallel_block=False,
        activation=str(read("hidden_activation", "hidden_act", "activation_function") or "silu"),
        softcap_final=read("final_logit_softcapping") is not None,
        softcap_attn=read("attn_logit_softcapping") is not None, sliding_window=read("sliding_window"), layer_pattern=1,
        experts=experts, vision_params=0, unmodelled=(), routed=routed, state_leaks=carries,
    )  # fmt: skip


def main() -> int:
    """Describe the config on standard input, or say why that cannot be done."""
    try:
        print(json.dumps(describe(json.load(sys.stdin))))
    except Exception as error:  # noqa: BLE001 - classes of transformers raise whatever they like
        print(json.dumps({"error": f"{type(error).__name__}: {str(error)[:200]}"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
