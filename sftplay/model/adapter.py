"""Put a new or stored LoRA adapter on a model, and describe the weights that train."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLora
from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper, load_peft_weights
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import nn

from sftplay.config.run import LoraConfig
from sftplay.errors import ConfigError, MachineError, suggest
from sftplay.model.hub import describe_error, refusing
from sftplay.model.source import SAFE_COPY, describe_pickle
from sftplay.units import format_count


def add_adapter(model: Any, lora: LoraConfig, *, new_ids: Sequence[int] = ()) -> Any:
    """Return `model` as a PeftModel with a new fp32 adapter; the rows of the tokens `new_ids` train too.

    fp32 adapters make a 4-bit run resume bit for bit; TRL would turn them into bf16
    (https://github.com/huggingface/trl/blob/v1.14.0/trl/trainer/sft_trainer.py, "When using QLoRA").

    Raises:
        ConfigError: a name in target_modules or modules_to_save fits no module, or one that cannot have a pair.
    """
    targets, token_rows = lora.target_modules, None
    check_names(model, lora)
    if new_ids:
        from sftplay.model.embedding_rows import find_trainable_rows

        token_rows = find_trainable_rows(model, lora, ids=new_ids)
    config = PeftLora(
        r=lora.r, lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.r, lora_dropout=lora.dropout,
        target_modules=every_linear_of_text(model) if targets == "auto" else list(targets), bias="none",
        modules_to_save=list(lora.modules_to_save) or None, trainable_token_indices=token_rows,
        use_dora=lora.dora, use_rslora=lora.rslora,
        task_type="CAUSAL_LM" if model.get_output_embeddings() is not None else "SEQ_CLS",  # its head trains in full
    )  # fmt: skip
    with _no_peft_warnings():
        try:
            adapted = get_peft_model(model, config)
        except ValueError as error:
            linear = (path for path, module in model.named_modules() if isinstance(module, nn.Linear))
            names = sorted({path.rpartition(".")[2] for path in linear})
            what = f"PEFT cannot adapt these modules ({str(error).splitlines()[0]})"
            fix = f"name layers that multiply with a matrix, such as {', '.join(names[:8])}"
            raise ConfigError(what, where="tuning.lora.target_modules", fix=fix) from error
    make_trainable_fp32(adapted)
    return adapted


@contextmanager
def _no_peft_warnings() -> Iterator[None]:
    """Silence PEFT's warnings that nobody can act on."""
    with warnings.catch_warnings():
        # It warns that a tied head trains apart from its embedding, which modules_to_save asks for.
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        # It looks for the ranks of experts among modules only, and applies them (tuners_utils.py, rank_pattern).
        warnings.filterwarnings(
            "ignore", message=r"The following (rank|alpha)_pattern keys did not match.*gate_up_proj"
        )
        # PEFT 0.21 uses an attribute name that transformers has renamed (machine/probe.py).
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield


def continue_adapter(model: Any, lora: LoraConfig, *, adapter: Path) -> Any:
    """Return `model` as a PeftModel with the adapter stored in `adapter`, ready to train.

    Dropout is the config's; everything that shapes the weights is the adapter's.

    Raises:
        ConfigError: the adapter sits on other layers than the config names.
    """
    check_names(model, lora)
    wanted = target_paths(model, lora)
    continued = attach_adapter(model, adapter, dropout=lora.dropout)
    adapted = {
        name
        for name, module in continued.get_base_model().named_modules()
        if hasattr(module, "lora_A") and not isinstance(module, ParamWrapper)  # of experts, which PEFT adds by itself
    }
    if adapted != wanted:
        stored, named = (sorted({path.rpartition(".")[2] for path in paths}) for paths in (adapted, wanted))
        here, there = f"{len(wanted)} layers ({', '.join(named)})", f"{len(adapted)} ({', '.join(stored)})"
        what = f"{here} here, but the adapter {adapter} that is continued has {there}"
        fix = f"write [{', '.join(stored)}], or model.merge_adapter: true, which trains a new adapter of any shape"
        raise ConfigError(what, where="tuning.lora.target_modules", fix=fix)
    make_trainable_fp32(continued)
    return continued


def attach_adapter(model: Any, adapter: Path, *, dropout: float | None = None) -> Any:
    """Return `model` as a PeftModel with the adapter stored in `adapter`, in fp32; it trains when `dropout` is given.

    Raises:
        MachineError: its files cannot be read, or hold what PEFT cannot use, or are a pickle that torch refuses.
    """

    def explain(error: Exception) -> MachineError:
        if isinstance(error, pickle.UnpicklingError):
            return MachineError(f"the adapter's pickle {describe_pickle(error)}", where=str(adapter), fix=SAFE_COPY)
        fix = "correct the files there, or copy the adapter again"
        return MachineError(f"the adapter cannot be used ({describe_error(error)})", where=str(adapter), fix=fix)

    with refusing(explain):
        config = PeftConfig.from_pretrained(str(adapter))
        if dropout is not None:
            config.lora_dropout = dropout
        with _no_peft_warnings():
            attached = PeftModel.from_pretrained(
                model, str(adapter), config=config, is_trainable=dropout is not None, torch_device=str(model.device)
            )
        # What an adapter stores of modules that train in full, or in some of their rows. PEFT rounds it to the base's
        # dtype, https://github.com/huggingface/peft/blob/v0.21.2/src/peft/utils/other.py
        modules = list(attached.modules())
        rounded = [found.modules_to_save for found in modules if isinstance(found, ModulesToSaveWrapper)]
        wrapped = [found for found in modules if isinstance(found, TrainableTokensWrapper)]
        rounded += [found.token_adapter.trainable_tokens_delta for found in wrapped]
        for module in filter(None, rounded):
            module.float()
        if any(rounded):
            set_peft_model_state_dict(attached, load_peft_weights(str(adapter), device="cpu"))
        return attached


@contextmanager
def trained_weights_kept(model: nn.Module) -> Iterator[None]:
    """Keep the fp32 values of trainable weights over the block, whatever a library does inside.

    TRL rounds a 4-bit base's adapter to bf16 (its "When using QLoRA"), which a continued adapter would show at once.
    """
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    yield
    for name, parameter in model.named_parameters():
        if name in kept:
            parameter.data = kept[name].float()


def find_head(model: Any) -> Any:
    """Return the output head of a causal model, or the head of one that gives a score."""
    scores = (getattr(model, name) for name in SEQ_CLS_HEAD_NAMES if hasattr(model, name))
    return model.get_output_embeddings() or next(scores)


def find_text_model(model: Any) -> Any:
    """Return the text model inside, or `model` where `get_decoder` gives its head (ModernBERT's decoder)."""
    decoder = model.get_decoder()
    return model if decoder is model.get_output_embeddings() else decoder


def freeze_outside_text(model: Any) -> int:
    """Freeze weights that no row of text reaches, such as a vision tower; return the number of these weights.

    A weight that trains and never gets a gradient ends a run of several processes.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    reached = {id(p) for part in (find_text_model(base), find_head(base)) for p in part.parameters()}
    unreached = [p for p in model.parameters() if p.requires_grad and id(p) not in reached]
    for parameter in unreached:
        parameter.requires_grad_(False)
    return sum(p.numel() for p in unreached)


def every_linear_of_text(model: Any) -> str | list[str]:
    """Return what `target_modules: auto` is for PEFT: the linears of the text model but its head.

    PEFT reads some names on a mixture of experts as those that transformers 4 gave the experts' layers: asked for
    gate_proj it puts a pair on every expert, and none on the shared expert or the dense layers, whose linear is called
    so. These names are left out, and so are linears that cannot have a pair (`_takes_pair`).
    """
    decoder = find_text_model(model)
    linears = {name: module for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    names = {name for name, module in linears.items() if _takes_pair(model, name, module)}
    if taken := names_of_experts(model):
        return sorted({name.rpartition(".")[2] for name in names} - {"lm_head"} - taken)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    if len(names) == len(linears) and prefix in ("", model.base_model_prefix):
        return "all-linear"  # nothing but text; PEFT knows how to leave out the head
    names -= {name for name in names if linears[name] is find_head(model)}
    # 4-bit layers are nn.Linear too.
    return re.escape(f"{prefix}." if prefix else "") + f"({'|'.join(sorted(map(re.escape, names)))})"


def _takes_pair(model: Any, name: str, linear: nn.Linear) -> bool:
    """Return whether PEFT puts a pair on this linear, and the linear gives one number for each of its outputs.

    The routers of Llama 4 and Phi MoE are linears that give more.
    """
    try:
        _check_lora_target_modules_mamba(PeftLora(), model, name.rpartition(".")[2])
    except ValueError:
        return False
    if not type(linear).__module__.startswith(("transformers.models.", "transformers_modules.")):
        return True  # torch's, or a quantised one
    try:
        out = linear(linear.weight.new_zeros(1, linear.in_features))
    except (RuntimeError, TypeError, ValueError):
        return False
    return torch.is_tensor(out) and out.shape == (1, linear.out_features)


def names_of_experts(model: Any) -> set[str]:
    """Return the names that PEFT takes for those of experts in this model (peft 0.21, `_convert_peft_config_moe`)."""
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {}))


def target_paths(model: Any, lora: LoraConfig) -> set[str]:
    """Return the full names of the layers that `add_adapter` would adapt."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if lora.target_modules != "auto":
        ends = list(lora.target_modules)
        return {n for n, _ in model.named_modules() if any(n == end or n.endswith(f".{end}") for end in ends)}
    pattern = every_linear_of_text(model)
    if isinstance(pattern, list):
        return {name for name in linear if name.rpartition(".")[2] in pattern}
    if pattern == "all-linear":
        return {name for name, module in linear.items() if module is not find_head(model)}
    return {name for name in linear if re.fullmatch(pattern, name)}


def make_trainable_fp32(model: nn.Module) -> None:
    """Convert every trainable weight to fp32."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def describe_experts(model: nn.Module) -> str | None:
    """Describe what an adapter makes of experts that are stored as one tensor a layer; None for a model without them.

    transformers 5 stores experts so. PEFT adapts them for some families and passes them over for others, silently.
    """
    experts = {
        name.replace("base_layer.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and ".experts." in name and "modules_to_save" not in name
    }
    if not experts:
        return None
    size = format_count(sum(parameter.numel() for parameter in experts.values()))
    saved = [
        p.numel() for name, p in model.named_parameters() if p.requires_grad and ".experts.modules_to_save." in name
    ]
    if saved:
        where = "tuning.lora.modules_to_save"
        return f"{where}: experts train in full: a copy of {format_count(sum(saved))} weights in every checkpoint"
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    if not wrappers:
        return f"the experts ({size} weights) train nothing: the adapter is on the other layers only"
    # One wrapper lies in the other, so each pair is taken once.
    pairs = {p: p.numel() for module in wrappers for name, p in module.named_parameters() if "lora_" in name}
    share = f"{format_count(sum(pairs.values()))} of the weights that train are theirs"
    return f"PEFT adapts the experts and the router too: {share}; vLLM and SGLang serve such a run merged only"


def describe_parameters(model: nn.Module) -> dict[str, Any]:
    """Return the manifest's counts: parameters, trainable parameters, their dtypes, and real 4-bit layers."""
    parameters = list(model.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    sizes = (p.quant_state.shape if getattr(p, "quant_state", None) is not None else p for p in parameters)
    return {
        "parameters": sum(int(size.numel()) for size in sizes),
        "trainable_parameters": sum(p.numel() for p in trainable),
        "trainable_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in trainable}),
        # By weights, not by modules: PEFT wraps each 4-bit layer in one of its own of the same class name.
        "four_bit_layers": sum(getattr(p, "quant_state", None) is not None for p in parameters),
    }


def check_names(model: nn.Module, lora: LoraConfig) -> None:
    """Raise ConfigError, with the nearest name, where target_modules or modules_to_save names no module.

    target_modules may also name the layers that experts had in transformers 4, where PEFT knows them.
    """
    known = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
    full = [name for name, _ in model.named_modules()]
    targets = [] if lora.target_modules == "auto" else lora.target_modules
    others = names_of_experts(model)
    for key, names in (("target_modules", targets), ("modules_to_save", lora.modules_to_save)):
        for name in names:
            is_expert = key == "target_modules" and name in others
            if not is_expert and not any(path == name or path.endswith(f".{name}") for path in full):
                fix, near = suggest(name, known, f"use names such as {', '.join(sorted(known)[:8])}")
                what = f"no module of this model is called {name!r}"
                raise ConfigError(what, where=f"tuning.lora.{key}", fix=fix, nearest=near)
