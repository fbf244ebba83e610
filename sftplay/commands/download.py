"""The verb that fetches a model from the hub into its cache."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.command import cache_environment, quiet_environment
from sftplay.machine.releases import hub_client
from sftplay.model.hub import CONNECT_S, first_line, unreachable
from sftplay.model.source import PICKLE_FIX, is_hub_shaped, is_local
from sftplay.runs.inputs import ask_hub
from sftplay.units import format_bytes

INDEX = "model.safetensors.index.json"
SMALL_FILES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Endings of the files next to the weights: configs, tokenizer, chat template."""

SLACK_BYTES = 64 * 2**20


def download_model(args: Namespace) -> int:
    """`download-model`: fetch the files that open the model into the hub's cache; weights as safetensors only."""
    name, revision = args.model, args.revision
    if is_local(name):
        raise ConfigError(f"{name} lies on this machine already", where="--model", fix="use it as model.name")
    if not is_hub_shaped(name):
        raise ConfigError(f"{name!r} is no hub name", where="--model", fix="write org/model, without an address")
    os.environ.update(quiet_environment() | cache_environment())
    where = f"hub model {name}"
    if not ask_hub(name, revision, where=where):
        raise unreachable(name, ConnectionError("no answer; some of it lies in the cache here"), where=where)
    commit, sizes = _needed(name, revision, where=where)
    total = sum(sizes.values())
    log.say(f"{name}: {len(sizes)} files, {format_bytes(total)}", "download")
    folder = _fetch(name, revision, sizes=sizes, where=where)
    log.say(f"done: {folder}; model.name: {name} opens it without a connection", "download")
    if args.json:
        facts = {"model": name, "revision": commit, "folder": str(folder), "files": sorted(sizes), "bytes": total}
        print(json.dumps(facts))
    return 0


def _needed(name: str, revision: str | None, *, where: str) -> tuple[str, dict[str, int]]:
    """The commit, and file -> bytes of the files that transformers opens."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        info: Any = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=CONNECT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings if "/" not in file.rfilename}
        weights = {"model.safetensors"} & set(sizes)
        if not weights and INDEX in sizes:
            index = json.loads(Path(hf_hub_download(name, INDEX, revision=revision)).read_text(encoding="utf-8"))
            weights = set(index["weight_map"].values())
    except (hub_client().HTTPError, OSError, ValueError) as error:
        raise unreachable(name, error, where=where) from error
    if not weights:
        pickled = sorted(file for file in sizes if file.endswith((".bin", ".pt", ".pth")))
        what = f"{name} has no weights in safetensors" + (f", only pickles ({pickled[0]})" if pickled else "")
        raise MachineError(what, where=where, fix=PICKLE_FIX if pickled else "check the name")
    small_files = {file for file in sizes if file.endswith(SMALL_FILES) and not file.endswith(".index.json")}
    index_file = {INDEX} & set(sizes) if "model.safetensors" not in weights else set()
    return str(info.sha), {file: sizes.get(file, 0) for file in sorted(small_files | index_file) + sorted(weights)}


def _fetch(name: str, revision: str | None, *, sizes: dict[str, int], where: str) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    present = {file for file in sizes if isinstance(try_to_load_from_cache(name, file, revision=revision), str)}
    needed = sum(size for file, size in sizes.items() if file not in present) + SLACK_BYTES
    if (free := shutil.disk_usage(cache).free) < needed:
        what = f"{format_bytes(needed)} ({needed} bytes) are needed and {format_bytes(free)} are free"
        raise MachineError(what, where=str(cache), fix="make room, or set HF_HOME to a folder on another disk")
    done, total, folder = 0, sum(sizes.values()), cache
    try:
        for number, (file, size) in enumerate(sizes.items(), 1):
            so_far = f"{format_bytes(done)} of {format_bytes(total)}"
            log.status(f"{number}/{len(sizes)} files, {so_far}: {file}", "download")
            folder = Path(hf_hub_download(name, file, revision=revision)).parent
            done += size
    except (hub_client().HTTPError, OSError) as error:
        what = f"{file} could not be fetched ({first_line(error)})"
        fix = "run the same command again; it continues where this one stopped"
        raise MachineError(what, where=where, fix=fix) from error
    return folder
