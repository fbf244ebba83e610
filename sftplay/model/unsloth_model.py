"""Open a base and put an adapter on it with unsloth, as `weights` and `adapter` do with the plain libraries.

It checks afterwards that unsloth did what was asked, and refuses the model when it did not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, machine_refusal
from sftplay.model.adapter import check_names, describe_parameters, make_trainable_fp32, target_paths
from sftplay.model.hub import announce_trust, check_reachable, explain_failure, first_line, quieten_hub, refusing
from sftplay.model.recomputation import recomputation
from sftplay.model.weights import frozen_dtype, keep_four_bit_exact


def open_by_unsloth(cfg: RunConfig, name: str, *, revision: str | None = None) -> Any:
    """Open the base in the folder or of the hub name `name`, in the run's precision, in 4 bits for qlora.

    `libraries.import_unsloth` must have been called. Unsloth also opens the tokenizer, which is not used.

    Raises:
        MachineError: the weights cannot be read, some are missing, or they are not held as asked.
        ConfigError: the model needs code that ships with it, which is not trusted.
    """
    from unsloth import FastLanguageModel

    where = f"{cfg.describe_origin('model.name', unset='model')} {name}"
    reachable = check_reachable(name, revision, where=where)
    announce_trust(cfg.model, f"the model {name}")
    quieten_hub()
    options = {} if reachable else {"local_files_only": True}
    options |= {} if cfg.model.allow_pickle else {"use_safetensors": True}
    with refusing(lambda error: explain_failure(error, cfg.model, where=where)), _missing_weights() as missing:
        model, _ = FastLanguageModel.from_pretrained(
            model_name=name, revision=revision, max_seq_length=cfg.model.max_seq_len, dtype=frozen_dtype(cfg),
            load_in_4bit=cfg.tuning.mode == "qlora", use_gradient_checkpointing=_checkpointing(cfg),
            trust_remote_code=cfg.model.trust_remote_code, attn_implementation=cfg.model.attn, random_state=cfg.seed,
            use_exact_model_name=True,  # else it opens its own copy under another name
            fix_tokenizer=False, **options,
        )  # fmt: skip
    # unsloth falls back to other numbers with a printed line, where the kit promised to stop.
    if missing:
        raise MachineError(f"the model cannot be loaded ({missing[0]})", where=where, fix="check its files")
    four_bit = describe_parameters(model)["four_bit_layers"] > 0
    if four_bit != (cfg.tuning.mode == "qlora"):
        what = "unsloth opened it in 4 bits" if four_bit else "unsloth could not hold this model in 4 bits"
        raise MachineError(what, where=where, fix="write tuning.mode: lora, or tuning.backend: bnb")
    dtype, wanted = next(p.dtype for p in model.parameters() if p.is_floating_point()), frozen_dtype(cfg)
    if dtype != wanted:
        fix = f"write train.precision for {dtype}, or tuning.backend: bnb"
        raise MachineError(f"unsloth opened the model in {dtype}, not in {wanted}", where=where, fix=fix)
    keep_four_bit_exact(model)
    return model


def adapt_by_unsloth(model: Any, cfg: RunConfig) -> Any:
    """Return `model` as a PeftModel with a new fp32 adapter on the layers that the config means.

    Raises:
        ConfigError: unsloth would not adapt exactly these layers, or a name fits no module.
    """
    from unsloth import FastLanguageModel

    lora = cfg.tuning.lora
    check_names(model, lora)
    wanted = target_paths(model, lora)
    try:
        adapted = FastLanguageModel.get_peft_model(
            model, r=lora.r, lora_alpha=lora.alpha if lora.alpha is not None else 2 * lora.r, lora_dropout=lora.dropout,
            target_modules=sorted({path.rpartition(".")[2] for path in wanted}), bias="none", use_dora=lora.dora,
            modules_to_save=list(lora.modules_to_save) or None, use_rslora=lora.rslora, random_state=cfg.seed,
            use_gradient_checkpointing=_checkpointing(cfg), max_seq_length=cfg.model.max_seq_len,
        )  # fmt: skip
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        what = f"unsloth cannot put this adapter on the model ({first_line(error)})"
        refusal = ConfigError(what, where="tuning.lora", fix="change tuning.lora, or write tuning.backend: bnb")
        raise (machine_refusal(error) or refusal) from error
    found = {name for name, module in adapted.get_base_model().named_modules() if hasattr(module, "lora_A")}
    if found != wanted:
        other = sorted(found ^ wanted)
        what = f"unsloth would adapt {len(found)} layers where {len(wanted)} are meant, {other[0]} for one"
        raise ConfigError(what, where="tuning.lora.target_modules", fix="name other layers, or tuning.backend: bnb")
    make_trainable_fp32(adapted)
    return adapted


def _checkpointing(cfg: RunConfig) -> str | bool:
    # "unsloth" keeps activations in the machine's memory while a GPU computes; on a CPU it is plain recomputation.
    return "unsloth" if cfg.train.gradient_checkpointing else False


@contextmanager
def _missing_weights() -> Iterator[list[str]]:
    """Yield a list that gets a line for each weight in no file; transformers fills these with random numbers."""
    seen: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.extend(line.strip() for line in record.getMessage().splitlines() if "MISSING" in line)

    # This logger lists weights missing from the files; unsloth returns no loading information.
    listener, logger = Listener(logging.WARNING), logging.getLogger("transformers.modeling_utils")
    logger.addHandler(listener)
    try:
        yield seen
    finally:
        logger.removeHandler(listener)
        for line in seen:
            log.say(line, "model")


def check_arguments(given: dict[str, Any], taken: Any) -> None:
    """Refuse a run when unsloth has changed one of its arguments while TRL's config was made.

    On a CPU it switches off 16-bit numbers, and optimizers and kernels that it thinks a CPU has not.

    Raises:
        ConfigError: naming the first such argument, as given and as taken.
    """
    for key in ("bf16", "fp16", "optim", "dataloader_pin_memory", recomputation()):  # what the kit decides
        found = getattr(taken, key)
        found = getattr(found, "value", found)
        if key in given and found != given[key]:
            from sftplay.config.other_kits import kit_answer

            answer = kit_answer(key)
            assert answer, f"{key} is decided by no key"
            what = f"unsloth turns {key} from {given[key]} into {found} on this machine"
            raise ConfigError(what, where=answer.key, fix=f"write another {answer.key}, or tuning.backend: bnb")
