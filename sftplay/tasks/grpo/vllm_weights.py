"""Weights that vLLM gets from the trained model: all of them, by TRL's way or over gloo; or the adapter, by files."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export.adapter_names import mountable_by_vllm
from sftplay.export.server import cpu_dtype, find_cache_bytes, find_lora_rank
from sftplay.train.upstream import (
    is_engine_fsdp,
    read_sent_weights,
    replace_sent_weights,
    replace_sync,
    vllm_replaced,
)

AT_ONCE = 8
"""Requests to a server at the same time, where prompts have different room; TRL's session keeps as many connections."""

TRAINED = "trained"
"""What the server calls the adapter."""


@contextmanager
def vllm_chosen(cfg: RunConfig, model: Any, args: Any) -> Iterator[None]:
    """Inside, TRL's trainer of `model` finds the vLLM that goes with `args`; on a GPU that is TRL's own choice. Raise
    MachineError where no server answers.
    """
    kind, is_cpu, names = cfg.grpo.generation, args.device.type == "cpu", dict[str, Any]()
    if kind == "vllm_server" and cfg.grpo.vllm.sync == "adapter":
        from trl.generation.vllm_client import VLLMClient

        # Files take the place of a group for weights.
        names["VLLMClient"] = type("AdapterClient", (VLLMClient,), {"init_communicator": lambda self, device: None})
    elif kind == "vllm_server" and is_cpu:
        from sftplay.tasks.grpo.vllm_cpu import GlooClient

        names["VLLMClient"] = GlooClient
    elif kind == "vllm_colocate" and is_cpu:
        from trl.generation.vllm_generation import LLM

        args.vllm_enable_sleep_mode = False
        cache = {"kv_cache_memory_bytes": find_cache_bytes(Path(model.name_or_path), args.vllm_max_model_length)}
        names["LLM"] = partial(LLM, dtype=cpu_dtype(cfg), enforce_eager=True, **cache)
    if kind == "vllm_server" and (cfg.grpo.environment or cfg.grpo.tools):
        from trl.generation.vllm_client import VLLMClient

        length = cfg.prompt_tokens + cfg.grpo.max_completion_length
        names["VLLMClient"] = within_length(names.get("VLLMClient", VLLMClient), length)
    try:
        with vllm_replaced(**names):
            yield
    except ConnectionError as error:
        fix = "start it (docs/grpo.md), or leave grpo.vllm.url out, and the run starts one"
        raise MachineError(str(error), where="grpo.vllm.url", fix=fix) from error


def within_length(client: type, length: int) -> Any:
    """Return a client that asks for no more tokens of a prompt than have room in `length` behind it: turns that go on
    have dialogues of different lengths, and vLLM's server refuses what would be longer than its longest sequence.
    """

    def generate(self: Any, prompts: Sequence[list[int]], *, max_tokens: int, **named: Any) -> dict[str, Any]:
        places = dict[int, list[int]]()
        for place, prompt in enumerate(prompts):
            places.setdefault(min(max_tokens, length - len(prompt)), []).append(place)

        def ask(room: int) -> Any:
            return client.generate(self, prompts=[prompts[n] for n in places[room]], max_tokens=room, **named)  # type: ignore[attr-defined]

        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(ask, places))
        order = [place for several in places.values() for place in several]
        found = dict[str, Any]()
        for key, value in answers[0].items():
            columns = [answer[key] for answer in answers]
            pairs = zip(order, (one for column in columns for one in column), strict=True) if value is not None else ()
            found[key] = None if value is None else [one for _, one in sorted(pairs, key=lambda pair: pair[0])]
        return found

    return type("TurnsClient", (client,), {"generate": generate})


def send_to_vllm(trainer: Any, cfg: RunConfig, folder: Path) -> None:
    """Make TRL's trainer send what vLLM needs; `folder` is one that the server can read."""
    generation, kind = trainer.vllm_generation, cfg.grpo.generation
    if kind == "vllm_server" and cfg.grpo.vllm.sync == "adapter":
        replace_sync(generation, partial(send_adapter, trainer, folder=folder))
        return
    if cfg.tuning.mode != "full":
        send_copies(generation)
    if kind == "vllm_colocate" and trainer.accelerator.device.type == "cpu":
        from sftplay.tasks.grpo.vllm_cpu import load_into

        replace_sync(generation, lambda: load_into(generation.llm, read_sent_weights(generation)))


def send_adapter(trainer: Any, *, folder: Path) -> None:
    """Write the adapter to `folder`, let the server load it instead of the one before, and forget what that one
    has computed.
    """
    if not trainer.accelerator.is_main_process:
        return
    model, client = trainer.accelerator.unwrap_model(trainer.model), trainer.vllm_generation.vllm_client
    model.save_pretrained(folder / "adapter")
    find_lora_rank(folder / "adapter")
    config = model.get_base_model().config.to_dict()
    shutil.rmtree(renamed := folder / "adapter-vllm", ignore_errors=True)  # that of the step before
    adapter = mountable_by_vllm(folder / "adapter", config, target=renamed).absolute()
    # In place also the first time: a server of the user's own holds that of an earlier run, or of before a resume.
    body = {"lora_name": TRAINED, "lora_path": str(adapter), "load_inplace": True}
    answer = client.session.post(f"{client.base_url}/v1/load_lora_adapter", json=body)
    if answer.status_code != 200:
        what = f"the generation server does not load the adapter ({answer.status_code}: {answer.text[:300]})"
        fix = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, where it sees the run's folder"
        raise RunError(what, where="grpo.vllm.sync", fix=f"{fix}; or write grpo.vllm.sync: full")
    client.model = TRAINED
    # A key in vLLM's prefix cache says which adapter computed it by its name, and the name stays.
    client.reset_prefix_cache()


def send_copies(generation: Any) -> None:
    """Make TRL's `VLLMGeneration` send merged copies of the weights. Raise ConfigError where the base is in 4 bits or
    sharded: copies of such layers cannot be merged one by one.
    """
    weights, problem = list(generation.model.parameters()), None
    if is_engine_fsdp(generation) or any(hasattr(weight, "ds_id") for weight in weights):
        problem = "sharded", "cluster.strategy=ddp"
    elif any(hasattr(weight, "quant_state") for weight in weights):
        problem = "held in 4 bits", "tuning.mode=lora"
    if problem:
        what, fix = f"vLLM cannot be sent an adapter whose base is {problem[0]}", f"set {problem[1]}"
        raise ConfigError(what, where="grpo.generation", fix=f"{fix}, or grpo.generation=transformers")
    replace_sent_weights(generation, lambda: merged_copies(generation.model))


def merged_copies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a PEFT model, merged with the adapter, by the base model's names; `model` is only read."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, layer in adapted.items():
        merged = copy.deepcopy(layer)
        merged.merge()
        for part, weight in merged.get_base_layer().named_parameters():
            yield f"{name}.{part}", weight.data

    prefixes = tuple(f"{layer}." for layer in adapted)
    for name, weight in base.named_parameters():
        before, _, after = name.partition(".modules_to_save.default.")
        if after:
            yield f"{before}.{after}", weight.data
        elif ".modules_to_save." not in name and ".original_module." not in name and not name.startswith(prefixes):
            yield name, weight.data
