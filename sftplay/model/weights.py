"""Opens a model's weights exactly as asked, or says why not: whole, from safetensors, without code of their own."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from sftplay import log
from sftplay.config.schema.cluster import SPLIT_WEIGHTS
from sftplay.config.schema.run import ModelConfig, RunConfig
from sftplay.errors import ConfigError, MachineError, SftplayError, out_of_ram, without_secrets
from sftplay.log import local_rank
from sftplay.model.hub import FOLDER_FIX, check_reachable, quieten_hub
from sftplay.model.source import PICKLE_FIX, REFUSED_PICKLE, SAFE_COPY, describe_pickle, is_local, read_shape
from sftplay.startup import end_imports

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def open_model(
    cfg: RunConfig, name: str, *, dtype: torch.dtype | None, revision: str | None = None, is_plain: bool = False
) -> Any:
    """The model in the folder or of the hub name `name`, in `dtype`, None for the one it is stored in.

    On this process's device and, for qlora, in 4 bits; `is_plain` leaves it on the CPU and never quantises it.

    Raises:
        MachineError: the weights cannot be read, or some are missing.
        ConfigError: it needs code that ships with it, which is not trusted.
    """
    end_imports()
    where = f"{cfg.origins.get('model.name', 'model')} model.name {name}"
    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": cfg.model.trust_remote_code,
        "dtype": dtype or "auto",
        "attn_implementation": cfg.model.attn,
    }
    if not is_plain:
        options["quantization_config"] = quantization(cfg) if cfg.tuning.mode == "qlora" else None
        options["device_map"] = {"": local_rank()} if torch.cuda.is_available() else None
    if not cfg.model.allow_pickle:
        options["use_safetensors"] = True
    if not check_reachable(name, revision, where=where):
        log.say(f"note: the hub does not answer; {name} is opened as it lies in the cache", "model")
        options["local_files_only"] = True
    announce_trust(cfg.model, f"the model {name}")
    quieten_hub()
    with refusing(lambda error: explain_failure(error, cfg.model, where=where)):
        model, found = AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(found["missing_keys"])
    if missing:  # transformers fills them with random numbers and goes on
        lack = f"{len(missing)} weights are missing, {missing[0]} for one"
        raise MachineError(f"the model cannot be loaded ({lack})", where=where, fix="check its files")
    keep_four_bit_exact(model)
    return model


@contextmanager
def refusing(explain: Callable[[Exception], SftplayError]) -> Iterator[None]:
    """Around a library that opens foreign files: what `explain` makes of its error, whose traceback goes to the log.

    Such a file can hold anything, and a library raises whatever it stumbles over: a KeyError, a TypeError.
    """
    try:
        yield
    except SftplayError:
        raise
    except Exception as error:
        # What torch says of a pickle advises to switch its check off: nobody shall read that.
        advises = isinstance(error, pickle.UnpicklingError) or REFUSED_PICKLE in str(error)
        if os.environ.get(log.FOLLOWED) == log.REDIRECTED and not advises:
            traceback.print_exc()
        raise (no_memory(error) or explain(error)) from error


def no_memory(error: Exception) -> MachineError | None:
    """The refusal where this process or its GPU has no room for what is opened; None for any other error."""
    if isinstance(error, torch.OutOfMemoryError):
        fix = "free memory on the GPU; `make plan` shows what would fit"
        return MachineError(f"out of memory ({reason_of(error)})", where="this GPU", fix=fix)
    return out_of_ram(error)


def reason_of(error: Exception) -> str:
    """What a library's error says, in a line; for one that says little by itself also what kind of error it is."""
    lines = [line.strip() for line in without_secrets(str(error)).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    speaks = isinstance(error, OSError | ValueError | RuntimeError | SafetensorError) and text
    return text if speaks else f"{type(error).__name__}: {text}".removesuffix(": ")


def explain_failure(error: Exception, model: ModelConfig, *, where: str) -> SftplayError:
    """The refusal for a library's `error` while it opened `model`, with what to do."""
    if refusal := refused_code(error, model):
        return refusal
    if isinstance(error, pickle.UnpicklingError) or REFUSED_PICKLE in str(error):
        return MachineError(f"the model's pickle {describe_pickle(error)}", where=where, fix=SAFE_COPY)
    fix = f"check the name, the connection and the files, {FOLDER_FIX}; the run's log says more"
    if is_local(model.name):
        fix = f"correct its files, or copy the model again{_guilty(model.name, error)}; the run's log says more"
    elif "safetensors" in str(error):
        fix = f"if it has pickled weights only: {PICKLE_FIX}"
    return MachineError(f"the model cannot be loaded ({reason_of(error)})", where=where, fix=fix)


def _guilty(folder: str, error: Exception) -> str:
    """The setting of config.json whose value a library did not find in a table of its own."""
    if not isinstance(error, KeyError | AttributeError):
        return ""
    words = {str(value): key for key, value in _settings(read_shape(folder)) if isinstance(value, str)}
    found = max((word for word in words if len(word) > 2 and word in str(error)), key=len, default="")
    return f": {words[found]} is {found!r} in its config.json" if found else ""


def _settings(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield key, value
        if isinstance(value, dict):
            yield from _settings(value)


def refused_code(error: Exception, model: ModelConfig) -> ConfigError | None:
    """The refusal of a model that runs only with its own code, None for any other error."""
    if model.trust_remote_code or "trust_remote_code" not in str(error):
        return None
    return ConfigError(
        f"{model.name} runs only with Python code that ships with it, which could do anything you can",
        where="model.trust_remote_code",
        fix="read that code; if you trust it, set model.trust_remote_code: true",
    )


def announce_trust(model: ModelConfig, what: str) -> None:
    """Say aloud that foreign code may run, where it was allowed."""
    if model.trust_remote_code:
        log.say(f"warning: model.trust_remote_code is true: Python code that ships with {what} may run here", "model")


def keep_four_bit_exact(model: Any) -> None:
    """Stop bitsandbytes from repacking 4-bit weights in evaluation mode on CPUs with AVX512-BF16.

    Repacking rounds the scales to bf16 for good, so that a run with evaluations would train on other weights than one
    without, and it fails where a layer's input width is no multiple of 64 (bitsandbytes 0.50, `Linear4bit.forward`).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def quantization(cfg: RunConfig) -> BitsAndBytesConfig:
    """How a qlora base is held: 4-bit codes, computed in the run's precision.

    A strategy that splits weights over processes needs them stored in the type it computes in: the 4-bit codes are then
    packed into numbers of that type.
    """
    splits = cfg.cluster.strategy in SPLIT_WEIGHTS
    return BitsAndBytesConfig(
        bnb_4bit_quant_storage=frozen_dtype(cfg) if splits else torch.uint8,
        load_in_4bit=True,
        bnb_4bit_quant_type=cfg.tuning.quant_type,
        bnb_4bit_use_double_quant=cfg.tuning.double_quant,
        bnb_4bit_compute_dtype=frozen_dtype(cfg),
    )


def frozen_dtype(cfg: RunConfig) -> torch.dtype:
    """The dtype of a base that does not train: the run's precision."""
    # fp16 bases overflow in the norm layers of several families; with autocast the weights can stay fp16 only if
    # nothing but the adapter trains, which is the only case that reaches here.
    return DTYPES[str(cfg.train.precision)]
