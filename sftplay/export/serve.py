"""Serve a finished run to OpenAI clients on this machine: a whole model, with the trained chat template.

The server is transformers' own, or vLLM; this module prepares the model for it.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Literal

from transformers import GenerationConfig

from sftplay import log
from sftplay.atomic import is_locked, read_object
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.export.adapter_names import FOR_ENGINES, mountable_by_vllm
from sftplay.export.merge import RECORD, adapter_digest, find_adapter, find_base_file, merge
from sftplay.export.server import ServerKind, build_server, choose_port, find_lora_rank, run_server
from sftplay.launch.run_folder import RunFolder
from sftplay.model.tokenizer import load_tokenizer, set_end_tokens

GENERATION = "generation_config.json"


Weights = Literal["merged", "adapter"]


def serve(
    cfg: RunConfig,
    folder: RunFolder,
    *,
    server: ServerKind,
    port: int,
    weights: Weights = "merged",
    has_gpu: bool = False,
) -> int:
    """Serve the run until a signal stops it; return the exit code.

    An adapter is merged once, into `merged/`; by `weights` adapter vLLM serves it on its base. Clients ask for the
    model by the run's name. As with OpenAI's own service, an answer is sampled at the temperature the client asks for,
    1 if it asks for none; `temperature: 0` gives the greedy answer.

    Raises:
        ConfigError: the run has no result, `merged/` was made from another adapter, or the adapter has to be merged.
        MachineError: the port is taken, the merged model cannot be made, or the base is not on this machine.
        RunError: the server ended by itself.
    """
    port = choose_port(port)
    adapter = find_adapter(cfg, folder) if weights == "adapter" else None
    if adapter:
        find_lora_rank(adapter)
    model = base_folder(cfg, folder) if adapter else whole_model(cfg, folder)
    name = served_name(folder)
    log_file = folder.logs / ("serve.log" if not is_locked(folder.logs / "serve.log") else f"serve-{port}.log")
    with tempfile.TemporaryDirectory(prefix="sftplay-serve-") as scratch:
        words = adapter or model
        config, where = server_config(cfg, model, words=words), Path(scratch)
        if adapter:
            adapter = mountable_by_vllm(adapter, read_object(model / "config.json"), target=where / FOR_ENGINES)
        if server == "vllm":
            config.save_pretrained(where)
            launch = build_server(
                server, model, name=name, port=port, trusts_code=cfg.model.trust_remote_code, adapter=adapter,
                tokenizer=words, generation=where, has_gpu=has_gpu,
            )  # fmt: skip
            wait = "; its start takes a minute"
        else:
            make_hub_cache(where, model, config=config, name=name)
            launch = build_server(server, where, name=name, port=port, trusts_code=cfg.model.trust_remote_code)
            wait = ""
        log.say(f"starting the server ({server}){wait}; its own lines go to {log_file}", "serve")
        return run_server(launch, name, port=port, cwd=where, log_file=log_file.resolve())


def base_folder(cfg: RunConfig, folder: RunFolder) -> Path:
    """Return the folder of the base on this machine, never in 4 bits. Raise MachineError where it is not here, or only
    as a pickle.
    """
    config = find_base_file(cfg, folder, name="config.json")
    if config is None or not any(config.parent.glob("*.safetensors")):
        what = "the base's weights are not on this machine as safetensors"
        fix = "`make download-model` fetches them; or leave --weights out, and the merged model is served"
        raise MachineError(what, where=cfg.model.name, fix=fix)
    if cfg.tuning.mode == "qlora":
        text = "note: trained on the base in 4 bits; the adapter is served on the base in full precision, as a merge is"
        log.say(text, "serve")
    return config.parent


def whole_model(cfg: RunConfig, folder: RunFolder) -> Path:
    """Return the folder of the run's whole model: `model/`, or `merged/`, which is made if it is missing. Raise
    ConfigError where the run has no result, or `merged/` does not belong to its adapter.
    """
    if (folder.path / "model").is_dir():
        return folder.path / "model"
    find_adapter(cfg, folder)
    merged = folder.path / "merged"
    if not merged.exists():
        log.say(f"a server needs one whole model: merging the adapter into {merged}", "serve")
        return merge(cfg, folder, out=merged)
    try:
        digest = json.loads((merged / RECORD).read_text(encoding="utf-8"))["adapter_sha256"]
    except (OSError, ValueError, KeyError):
        digest = None
    if digest != adapter_digest(folder):
        fix = "remove it; `make serve` makes it again"
        raise ConfigError("was not merged from this run's adapter", where=str(merged), fix=fix)
    return merged


def served_name(folder: RunFolder) -> str:
    """Return the run's name as a valid hub name: letters, digits, and single `.`, `-` or `_` between them."""
    full = folder.path.resolve().name
    name = re.sub(r"-{2,}|\.{2,}", "-", re.sub(r"[^A-Za-z0-9._-]", "-", full))[:96].strip("-._").removesuffix(".git")
    if name != full:
        log.say(f"note: clients ask for {name or 'run'!r}; {full!r} cannot be a model's name", "serve")
    return name or "run"


def server_config(cfg: RunConfig, model: Path, *, words: Path | None = None) -> GenerationConfig:
    """Return the model's generation config for a server: training's end tokens, and sampling unless a client sends 0.
    `words` is the folder of the tokenizer, None for the model's.

    A model with its own sampling settings keeps them. transformers' server changes the temperature of a config but
    never switches sampling on (5.17, `BaseHandler._build_generation_config`).
    """
    config = GenerationConfig.from_pretrained(model) if (model / GENERATION).is_file() else GenerationConfig()
    set_end_tokens(config, load_tokenizer(cfg.model, str(words or model)))
    if not config.do_sample:
        config.do_sample, config.temperature, config.top_p, config.top_k = True, 1.0, 1.0, 0
    return config


def make_hub_cache(cache: Path, model: Path, *, config: GenerationConfig, name: str) -> Path:
    """Make a hub cache at `cache` that holds only `model`, as links, under `name`; return the model's folder in it.

    The server's list of models is then this one name: transformers' server lists what the cache holds, and fails
    without a cache.
    """
    home, revision = cache / f"models--{name}", "0" * 40  # a hub cache files a model under a commit; this has none
    snapshot = home / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(revision)
    for file in model.iterdir():
        if file.is_file() and file.name != GENERATION:
            (snapshot / file.name).symlink_to(file.resolve())
    config.save_pretrained(snapshot)
    return snapshot
