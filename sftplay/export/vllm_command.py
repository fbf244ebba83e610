"""Build the command of vLLM's server for a model folder, or for a base with an adapter that is not merged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftplay.atomic import read_object
from sftplay.errors import ConfigError, MachineError
from sftplay.export import gate
from sftplay.machine.gpu import ram_free_bytes
from sftplay.machine.probe import usable_cores
from sftplay.places import find_python

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig

MODULE = "vllm.entrypoints.launchers.api_server.entry"
"""The server without `vllm serve`, whose other commands make a start longer (vLLM 0.31)."""

BASE = "-base"
"""Ends the name of the base next to an adapter; vLLM needs a name for it, which the gate does not list."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of --max-lora-rank (vLLM 0.31, config/lora.py, `MaxLoRARanks`)."""

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_API_KEY": "",  # the gate asks for the kit's own token
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "False",
}
"""Nothing is reported, and no variable of the user opens more of vLLM."""

SMALL_MACHINE_CORES = 8

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Widths of heads that vLLM 0.31 computes with on a CPU (backends/cpu_attn.py, `get_supported_head_sizes`)."""

SEQUENCES, LEAST_CACHE_BYTES, MOST_CACHE_BYTES = 16, 2**28, 4 * 2**30
"""Without a GPU the cache of keys and values takes memory, and its zeros time, from the start on."""


def vllm_command(
    folder: Path,
    *,
    name: str,
    adapter: Path | None = None,
    tokenizer: Path | None = None,
    generation: Path | None = None,
    max_model_len: int | None = None,
    has_gpu: bool = False,
    is_gated: bool = True,
) -> list[str]:
    """Return the command that serves the model in `folder` as `name`, up to where it listens.

    With `adapter`, that adapter on the base in `folder` answers as `name`, and the base as `name` + BASE. `tokenizer`
    is a folder with tokenizer and chat template, `generation` one with generation_config.json; None takes the model's.
    `max_model_len` None takes the model's own, or what the memory holds. `is_gated` False leaves every endpoint of vLLM
    open.

    Raises:
        ConfigError: vLLM cannot serve such an adapter without a merge.
        MachineError: there is no environment with vLLM, or its attention on a CPU does not know the model's heads.
    """
    python = find_python()
    if python is None:
        raise MachineError("vLLM is not installed", where=".venv-vllm", fix="make install-vllm")
    if not has_gpu:
        check_heads(folder)
    # The server has another working folder.
    folder, adapter = folder.absolute(), adapter and adapter.absolute()
    words_from = (tokenizer or folder).absolute()
    served = ["--served-model-name", name]
    if adapter:
        rank = next(rank for rank in RANKS if rank >= find_lora_rank(adapter))
        served = ["--served-model-name", name + BASE, "--enable-lora", "--lora-modules", f"{name}={adapter}"]
        served += ["--max-lora-rank", str(rank)]
    served += ["--tokenizer", str(words_from), "--generation-config", str((generation or folder).absolute())]
    template = words_from / "chat_template.jinja"
    served += ["--chat-template", str(template)] if template.is_file() else []
    served += ["--max-model-len", str(max_model_len or -1), "--language-model-only"]
    served += ["--dtype", find_dtype(folder, has_gpu=has_gpu)]
    served += (
        [] if has_gpu else ["--enforce-eager", "--kv-cache-memory-bytes", str(find_cache_bytes(folder, max_model_len))]
    )
    served += ["--middleware", f"{gate.__name__}.Gate"] if is_gated else []
    # -P: do not import from the working folder.
    return [str(python), "-P", "-m", MODULE, "--model", str(folder), *served]


def find_lora_rank(adapter: Path) -> int:
    """Return the adapter's rank. Raise ConfigError where vLLM would serve it wrongly, or not at all."""
    config = read_object(adapter / "adapter_config.json")
    unsupported = {
        "use_dora": "it is a DoRA",
        "modules_to_save": "it holds modules that were trained in full",
        "trainable_token_indices": "it trains rows of new tokens",
        "rank_pattern": "its layers have several ranks",
        "alpha_pattern": "its layers have several scales",
        "lora_bias": "it has biases",
    }
    found = [why for key, why in unsupported.items() if config.get(key)]
    found += ["it has biases"] if config.get("bias", "none") != "none" else []
    rank = config.get("r", 0)
    found += [f"its rank is {rank}"] if not 0 < rank <= RANKS[-1] else []
    if found:
        what = f"vLLM cannot serve this adapter unmerged: {', '.join(found)}"
        raise ConfigError(what, where=str(adapter), fix="leave --weights out, and the merged model is served")
    return int(rank)


def find_dtype(folder: Path, *, has_gpu: bool) -> str:
    """Return the dtype of the model in `folder`; float32 on a CPU without bf16, which would compute it in software."""
    config = read_object(folder / "config.json")
    text = config.get("text_config") or {}
    stored = next((part[key] for part in (config, text) for key in ("dtype", "torch_dtype") if part.get(key)), None)
    if not has_gpu and not cpu_has_bf16():
        return "float32"
    return str(stored) if stored in ("float32", "float16", "bfloat16") else "auto"


def cpu_dtype(cfg: RunConfig) -> str:
    """Return the dtype in which vLLM samples for a trainer without a GPU: that in which the trainer computes."""
    return "bfloat16" if cfg.train.precision == "bf16" else "float32"


def cpu_has_bf16() -> bool:
    """Return whether this machine's CPU computes bf16 itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(text.split())


def small_machine_environment() -> dict[str, str]:
    """Lets a CPU of few cores compute inside the engine's process, and not in a third one whose threads are bound to
    all cores but one. A start took 31 CPU seconds instead of 49, and 0.7 GB less. The user's own settings stay.
    """
    cores = usable_cores()
    if cores > SMALL_MACHINE_CORES:
        return {}
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": str(cores)}
    return {key: value for key, value in settings.items() if key not in os.environ}


def check_heads(folder: Path) -> None:
    """Raise MachineError where vLLM's attention on a CPU does not know the width of the model's heads: the server would
    start, and end at the first request.
    """
    config = read_object(folder / "config.json")
    width = find_head_width(config.get("text_config") or config)
    if width and width not in CPU_HEADS:
        what = (
            f"vLLM computes on a CPU with heads of {', '.join(map(str, CPU_HEADS))}, and this model's are {width} wide"
        )
        raise MachineError(what, where=str(folder), fix="ENGINE=transformers")


def find_head_width(config: Mapping[str, Any]) -> int:
    """Return the width of a head by config.json, 0 where it does not say."""
    heads = config.get("num_attention_heads") or 0
    return int(config.get("head_dim") or (config.get("hidden_size") or 0) // max(heads, 1))


def find_cache_bytes(folder: Path, max_model_len: int | None) -> int:
    """Return the size of the cache of keys and values on a machine without a GPU: SEQUENCES of the longest, in fp32."""
    config = read_object(folder / "config.json")
    config = config.get("text_config") or config
    heads, width = config.get("num_attention_heads") or 0, find_head_width(config)
    layers, kv_heads = config.get("num_hidden_layers") or 0, config.get("num_key_value_heads") or heads
    tokens = max_model_len or config.get("max_position_embeddings") or 0
    wanted = 2 * 4 * layers * kv_heads * width * tokens * SEQUENCES
    return max(LEAST_CACHE_BYTES, min(wanted or MOST_CACHE_BYTES, MOST_CACHE_BYTES, ram_free_bytes() // 4))
