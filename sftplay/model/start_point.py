"""What a run starts from: earlier runs and adapters by name, as folders and bases; and digests of their weights.

It loads no weights and imports no heavy library, so that a wrong name is refused before anything starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object
from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.model.source import ADAPTER_CONFIG, BUILTIN, check_pickles, is_downloaded, is_hub_shaped

ADAPTER_KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "base_model_name_or_path": ((str,), "a name"),
    "peft_type": ((str,), "a name"),
    "r": ((int,), "a whole number"),
    "lora_alpha": ((int, float), "a number"),
    "modules_to_save": ((list, type(None)), "a list of names"),
    "revision": ((str, type(None)), "a name"),
}
"""Key of adapter_config.json -> its types, and their name for an error."""

NAME, ADAPTER, MERGE = "model.name", "model.adapter", "model.merge_adapter"


def resolve_names(cfg: RunConfig) -> RunConfig:
    """Return `cfg` with names of runs replaced: model.name by the base or model, model.adapter by the adapter's folder.

    A finished run as model.name means its `model/`, or its base and its adapter. Resolving twice changes nothing.

    Raises:
        ConfigError: a name means two things, or a run without a result; the adapter belongs to another base, has
            another shape than the config says, or cannot be used in this mode.
    """
    cfg = _resolve_adapter(_resolve_model(cfg))
    model, mode = cfg.model, cfg.tuning.mode
    if model.adapter is None:
        if model.merge_adapter:
            fix = f"name one with {ADAPTER}, or leave {MERGE} out"
            raise _error(cfg, MERGE, what="there is no adapter to merge", fix=fix)
        return cfg
    folder = Path(model.adapter)
    _refuse_score(cfg, ADAPTER, folder=folder)
    check_pickles(folder, cfg.describe_origin(ADAPTER), allow_pickle=model.allow_pickle)
    if not model.merge_adapter:
        if mode == "full":
            fix = f"set {MERGE}: true, which merges it first, or lora"
            raise _error(cfg, ADAPTER, what="tuning.mode full trains every weight, not an adapter", fix=fix)
        # What can be compared without the model; `adapter.continue_adapter` checks the layers.
        stored, lora = read_adapter(folder), cfg.tuning.lora
        if stored.get("peft_type") != "LORA":
            what = f"{folder} is an adapter of the kind {stored.get('peft_type')}"
            raise _error(cfg, ADAPTER, what=what, fix=f"only LoRA is continued; set {MERGE}: true")
        wanted = {
            "r": (lora.r, stored.get("r")),
            "alpha": (float(lora.alpha or 2 * lora.r), float(stored.get("lora_alpha") or 0)),
            "dora": (lora.dora, bool(stored.get("use_dora"))),
            "rslora": (lora.rslora, bool(stored.get("use_rslora"))),
            "modules_to_save": (sorted(lora.modules_to_save), sorted(stored.get("modules_to_save") or [])),
        }
        for key, (configured, found) in wanted.items():
            if configured != found:
                here, there = (f"{v:g}" if isinstance(v, float) else json.dumps(v) for v in (configured, found))
                what = f"{here} here, but the adapter {folder} that is continued has {there}"
                fix = f"write tuning.lora.{key}: {there}, or {MERGE}: true, which trains a new adapter of any shape"
                raise _error(cfg, f"tuning.lora.{key}", what=what, fix=fix)
        for key in ("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication"):
            if stored.get(key):
                what = f"the adapter {folder} has a {key}, which the config cannot say"
                raise _error(cfg, ADAPTER, what=what, fix=f"set {MERGE}: true")
    return cfg


def _refuse_score(cfg: RunConfig, key: str, *, folder: Path) -> None:
    """Refuse a reward model: it has no output head, and the head of scores would be lost."""
    is_adapter, config = (folder / ADAPTER_CONFIG).is_file(), None
    if not is_adapter:
        with suppress(OSError, ValueError, RecursionError):  # what is wrong with it is said where it is opened
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes = str(config.get("architectures")) if isinstance(config, dict) else ""
    if (is_adapter and read_adapter(folder).get("task_type") == "SEQ_CLS") or "ForSequenceClass" in classes:
        fix = "name the model that it was trained from; a reward names it: {use: model, path: ...}"
        raise _error(cfg, key, what=f"{folder} gives scores, and a run starts from a model that writes", fix=fix)


def _error(cfg: RunConfig, key: str, *, what: str, fix: str) -> ConfigError:
    return ConfigError(what, where=cfg.describe_origin(key), fix=fix)


def find_adapter_base(adapter: Path) -> tuple[str, str | None]:
    """Return the name or folder of the base that an adapter belongs to, and its revision: for the adapter of a run the
    commit of the hub that it was trained on."""
    stored = read_adapter(adapter)
    kept_base, is_run = adapter.parent / "base", (adapter.parent / RESOLVED).is_file()
    if is_run and kept_base.is_dir():
        model = load_config(adapter.parent / RESOLVED).model
        is_builtin = model.name.startswith(BUILTIN) and not model.merge_adapter
        return (model.name if is_builtin else str(kept_base.resolve())), None
    commit = read_object(adapter.parent / "manifest.json").get("base_commit") if is_run else None
    return str(stored.get("base_model_name_or_path")), commit or stored.get("revision")


def read_adapter(folder: Path) -> dict[str, Any]:
    """Return the settings of an adapter.

    Raises:
        ConfigError: the file holds something else.
    """
    where, fix = str(folder / ADAPTER_CONFIG), "copy the adapter again, or name another one"
    try:
        content: Any = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=where, fix=fix) from None
    if not isinstance(content, dict):
        raise ConfigError("holds no keys with values", where=where, fix=fix)
    if "base_model_name_or_path" not in content:
        raise ConfigError("names no base: base_model_name_or_path is missing", where=where, fix=fix)
    for key, (kinds, words) in ADAPTER_KEYS.items():
        if key in content and not (isinstance(content[key], kinds) and content[key] is not True):
            raise ConfigError(f"{key} is {content[key]!r}, not {words}", where=where, fix=fix)
    if any(not isinstance(name, str) for name in content.get("modules_to_save") or ()):
        raise ConfigError("modules_to_save holds something that is no name", where=where, fix=fix)
    return content


def _resolve_model(cfg: RunConfig) -> RunConfig:
    name = cfg.model.name
    found = None if name.startswith(BUILTIN) else _find(cfg, NAME, name=name)
    if found is not None:
        _refuse_score(cfg, NAME, folder=found)
    if found is None or not (found / RESOLVED).is_file():
        return cfg
    result = _find_result(found, cfg, key=NAME)
    if cfg.model.revision is not None:
        fix = "leave model.revision out; the run knows its base's"
        raise _error(cfg, NAME, what=f"model.name {name} is a run, which has no revision", fix=fix)
    origin = f"{cfg.origins.get(NAME, 'default')} (the run {found})"
    _refuse_score(cfg, NAME, folder=result)
    if result.name == "model":
        return cfg.with_values({NAME: str(result.resolve())}, origin)
    if cfg.model.adapter is not None:
        fix = f"leave {ADAPTER} out, or name the base as {NAME}"
        raise _error(cfg, NAME, what=f"{name} is a run with an adapter, and model.adapter names a second one", fix=fix)
    base, revision = find_adapter_base(result)
    return cfg.with_values({NAME: base, "model.revision": revision, ADAPTER: str(result.resolve())}, origin)


def _resolve_adapter(cfg: RunConfig) -> RunConfig:
    name = cfg.model.adapter
    if name is None:
        return cfg
    found = _find(cfg, ADAPTER, name=name)
    if found is None:
        fix = "name a finished run, its folder, or a folder with adapter_config.json"
        raise _error(cfg, ADAPTER, what=f"there is no run or adapter {name!r}", fix=fix)
    if (found / RESOLVED).is_file():
        found = _find_result(found, cfg, key=ADAPTER)
        if found.name == "model":
            what = f"{name} trained every weight, so it has a model and no adapter"
            raise _error(cfg, ADAPTER, what=what, fix=f"start from it with {NAME}: {name}")
    if not (found / ADAPTER_CONFIG).is_file():
        fix = "name a finished run, its folder, or a folder with adapter_config.json"
        raise _error(cfg, ADAPTER, what=f"{found} holds no adapter", fix=fix)
    if not any(found.glob("adapter_model*")):
        fix = "name a finished run, its folder, or a folder with adapter_model.safetensors"
        raise _error(cfg, ADAPTER, what=f"{found} holds no weights of an adapter", fix=fix)
    (base, revision), start = find_adapter_base(found), cfg.model.name
    if start != base and not (Path(start).is_dir() and Path(base).is_dir() and Path(start).samefile(base)):
        files = f"if that model only moved, correct base_model_name_or_path in its {ADAPTER_CONFIG}"
        what = f"the adapter {found} belongs to {base}, not to {start}"
        raise _error(cfg, NAME, what=what, fix=f"write model.name: {base}; {files}")
    is_on_hub, given = not Path(base).is_dir(), cfg.model.revision
    if is_on_hub and given not in (revision, read_adapter(found).get("revision")):
        what = f"the adapter {found} belongs to revision {revision} of {base}, not to {given}"
        raise _error(cfg, "model.revision", what=what, fix=f"write model.revision: {revision or 'null'}")
    values: dict[str, Any] = {ADAPTER: absolute} if (absolute := str(found.resolve())) != name else {}
    values |= {"model.revision": revision} if is_on_hub and given != revision else {}
    return cfg.with_values(values, f"{cfg.origins.get(ADAPTER, 'default')} ({name})") if values else cfg


def _find(cfg: RunConfig, key: str, *, name: str) -> Path | None:
    """Return the folder that a name means: one at that path, or the run of that name below output_dir."""
    here, run = Path(name), Path(cfg.output_dir) / name
    found = [here] if here.is_dir() else []
    # A run may be called like the model it starts from; it does not start from itself.
    if "/" not in name and name != cfg.run_name and (run / RESOLVED).is_file():
        found += [] if found and run.samefile(here) else [run]
    meanings = [f"the {'run' if (path / RESOLVED).is_file() else 'folder'} {path}" for path in found]
    if found and key == NAME and is_hub_shaped(name) and is_downloaded(name):
        meanings.append(f"the hub's model {name}, which was downloaded")
    if len(meanings) > 1:
        fix = f"write ./{found[0]} for that folder, or rename it" if not found[0].is_absolute() else "write its path"
        raise _error(cfg, key, what=f"{name!r} could be {' or '.join(meanings)}", fix=fix)
    if found and (found[0] / RESOLVED).is_file() and (found[0] / "config.json").is_file():
        fix = f"write {found[0]}/model or {found[0]}/adapter, or move config.json away"
        raise _error(cfg, key, what=f"{found[0]} holds both a run and a model", fix=fix)
    return found[0] if found else None


def _find_result(run: Path, cfg: RunConfig, *, key: str) -> Path:
    from sftplay.launch.run_folder import RunFolder

    folder = RunFolder(run)
    if folder.result is None:
        fix = f"{folder.remedy}, or name a run that is finished"
        raise _error(cfg, key, what=f"the run {run} has no result yet", fix=fix)
    return folder.result


WHOLE_BYTES = 2**31
"""Up to here a file of weights is read to its end, in a second or two; of a larger one only chunks are."""

CHUNKS, CHUNK_BYTES = 512, 2**20
"""Evenly spaced over a large file, with its two ends. Training changes every matrix, and so every chunk; weights
changed by hand in a few places can go unnoticed."""


def weights_digests(folder: str | None, *, whole_bytes: int = WHOLE_BYTES, chunks: int = CHUNKS) -> dict[str, str]:
    """Return path -> hex sha256 of each weight file in a folder; empty for a name on a hub, or None."""
    if folder is None or not Path(folder).is_dir():
        return {}
    # The files that say which numbers a run starts from.
    patterns = ("*.safetensors", "*.bin", "config.json", ADAPTER_CONFIG)
    files = {path for pattern in patterns for path in Path(folder).glob(pattern)}
    return {str(path): weights_digest(path, whole_bytes=whole_bytes, chunks=chunks) for path in sorted(files)}


def weights_digest(path: Path, *, whole_bytes: int = WHOLE_BYTES, chunks: int = CHUNKS) -> str:
    """Return the hex sha256 of the file's size and bytes; above `whole_bytes`, of `chunks` chunks of them."""
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    starts: Iterable[int] = range(0, size_bytes, CHUNK_BYTES)
    if size_bytes > whole_bytes:
        starts = ((size_bytes - CHUNK_BYTES) * n // (chunks - 1) for n in range(chunks))
    with path.open("rb") as handle:
        for start in starts:
            handle.seek(start)
            digest.update(handle.read(CHUNK_BYTES))
    return digest.hexdigest()


def digest_result(result: Path | None) -> str | None:
    """Return a short digest of the trained weights in a run's result folder; None where there are none."""
    files = [] if result is None else sorted(result.glob("*.safetensors"))
    return "-".join(weights_digest(path)[:16] for path in files) or None
