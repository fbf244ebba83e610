"""Serve a finished run to OpenAI clients on this machine: a whole model, with the trained chat template.

The server is transformers' own, or vLLM; this module prepares the model for it.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

from transformers import GenerationConfig

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.export.merge import RECORD, adapter_digest, find_adapter, merge
from sftplay.export.server import ServerKind, build_server, choose_port, run_server
from sftplay.launch.run_folder import RunFolder
from sftplay.model.tokenizer import load_tokenizer, set_end_tokens

GENERATION = "generation_config.json"


def serve(cfg: RunConfig, folder: RunFolder, *, server: ServerKind, port: int) -> int:
    """Serve the run until a signal stops it; return the exit code. An adapter is merged once, into `merged/`.

    Clients ask for the model by the run's name. As with OpenAI's own service, an answer is sampled at the
    temperature the client asks for, 1 if it asks for none; `temperature: 0` gives the greedy answer.

    Raises:
        ConfigError: the run has no result, or `merged/` was made from another adapter.
        MachineError: the port is taken, or the merged model cannot be made.
        RunError: the server ended by itself.
    """
    port = choose_port(port)
    model = whole_model(cfg, folder)
    name = served_name(folder)
    with tempfile.TemporaryDirectory(prefix="sftplay-serve-") as cache:
        snapshot = make_hub_cache(Path(cache), model, config=server_config(cfg, model), name=name)
        log.say(f"starting the server ({server}); its own lines go to {folder.logs / 'serve.log'}", "serve")
        where = snapshot if server == "vllm" else Path(cache)
        launch = build_server(server, where, name=name, port=port, trusts_code=cfg.model.trust_remote_code)
        return run_server(launch, name, port=port, cwd=Path(cache), log_file=(folder.logs / "serve.log").resolve())


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


def server_config(cfg: RunConfig, model: Path) -> GenerationConfig:
    """Return the model's generation config for a server: training's end tokens, and sampling unless a client sends 0.

    A model with its own sampling settings keeps them. transformers' server changes the temperature of a config but
    never switches sampling on (5.17, `BaseHandler._build_generation_config`).
    """
    config = GenerationConfig.from_pretrained(model) if (model / GENERATION).is_file() else GenerationConfig()
    set_end_tokens(config, load_tokenizer(cfg.model, str(model)))
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
