"""Which module each name of an adapter lands on, in PEFT, vLLM and SGLang; and names that land, where they must change.

A LoRA trained on the text class of a model (`Qwen3_5ForCausalLM`) names its modules otherwise than the class that
config.json names (`Qwen3_5ForConditionalGeneration`), which engines serve. vLLM then mounts nothing and answers as the
base without an error (https://github.com/vllm-project/vllm/issues/34186).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from sftplay import log
from sftplay.errors import ConfigError

Engine = Literal["peft", "vllm", "sglang"]

ENGINE_NAMES: dict[Engine, str] = {"peft": "PEFT", "vllm": "vLLM", "sglang": "SGLang"}
FOR_ENGINES = "adapter-vllm"
"""The folder of an export with the adapter under the names that vLLM and SGLang mount, where PEFT needs other ones."""

_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.(?P<pair>lora_[AB](?:\.weight)?|[^.]+(?:\.weight)?)")
_BEFORE_LAYERS = ("model.language_model.", "model.", "language_model.model.", "language_model.")
"""What can stand before `layers.N` in a name."""

WEIGHTS = "adapter_model.safetensors"

MERGED = "serve the merged model"


@dataclass(frozen=True)
class Mounted:
    """What an engine makes of an adapter."""

    matched: int
    total: int
    """Modules of the adapter."""

    first_unmatched: str | None = None
    """The first module that lands nowhere."""

    fix: str = ""
    """Why it lands nowhere and what helps; empty where all are mounted."""

    is_known: bool = True
    """False where the class stands in no table, so that nothing can be said before it is served."""

    @property
    def mounts_all(self) -> bool:
        return self.is_known and self.matched == self.total > 0


@cache
def served_names() -> dict[str, Any]:
    return yaml.safe_load((Path(__file__).parent / "served_names.yaml").read_text(encoding="utf-8"))


def served_class(config: Mapping[str, Any]) -> str:
    """The class that engines serve: the first of `architectures` in config.json."""
    return str((config.get("architectures") or ["none"])[0])


def find_mounted(config: Mapping[str, Any], keys: Iterable[str], engine: Engine) -> Mounted:
    """Return how many modules of an adapter the engine mounts.

    `config` is the config.json of the base, `keys` are the names in adapter_model.safetensors. PEFT is asked by the
    class that AutoModelForCausalLM opens, or else AutoModelForImageTextToText; that class is built on `meta`.
    """
    keys = list(keys)
    modules = _modules(keys)
    table = {} if engine == "peft" else served_names()[engine]["classes"].get(served_class(config), {})
    if engine != "peft" and not table:
        version, name = served_names()[engine]["version"], served_class(config)
        fix = f"{name} is in no table of {ENGINE_NAMES[engine]} {version}; {MERGED}, or see what `make parity` says"
        return Mounted(0, len(modules), None, fix, is_known=False)
    landed = {
        "peft": lambda: _land_in_peft(config, modules),
        "vllm": lambda: _land_in_vllm(table, modules),
        "sglang": lambda: _land_in_sglang(table, modules),
    }[engine]()
    lost = [name for name in modules if name not in landed]
    if not lost:
        return Mounted(len(landed), len(modules))
    merged_only = [name for name in lost if modules[name] != "pair"] + [name for name in lost if ".experts" in name]
    first = (merged_only or lost)[0]
    return Mounted(len(landed), len(modules), first, _explain(config, keys, modules, first, landed, engine))


def rename_for_vllm(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, list[str]] | None:
    """Return for each key the names under which vLLM mounts all of the adapter; None where no names do.

    Only what stands before the layers changes, except for `gate_up_proj` where vLLM knows its halves: two names then.
    """
    table = served_names()["vllm"]["classes"].get(served_class(config))
    if table is None:
        return None
    keys = list(keys)
    in_layer = table["in_layer"]
    halves = "mlp.gate_up_proj" not in in_layer and "mlp.gate_proj" in in_layer
    for before in ("", *_BEFORE_LAYERS):
        renamed = {}
        for key in keys:
            name = (
                re.sub(r"^base_model\.model\..*?(?=layers\.\d+\.)", f"base_model.model.{before}", key)
                if before
                else key
            )
            split = halves and ".mlp.gate_up_proj." in name
            parts = ("gate_proj", "up_proj") if split else ("gate_up_proj",)
            renamed[key] = [name.replace("gate_up_proj", part) for part in parts]
        modules = _modules(name for names in renamed.values() for name in names)
        if modules and len(_land_in_vllm(table, modules)) == len(modules):
            return renamed
    return None


def export_adapter(
    source: Path, target: Path, *, config: Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> None:
    """Copy the adapter in `source` to `target`/adapter, and write it a second time where vLLM needs other names.

    `target`/adapter is what was trained, for PEFT; `settings` are its adapter_config.json without paths, `config` is
    the config.json of the base. Log what an engine does not mount: it can be given the merged model only.
    """
    weights = source / WEIGHTS
    keys = _read_keys(weights)
    # SGLang refuses a pattern, and takes the last part of each name; full names keep PEFT out of an image tower.
    listed = dict(settings)
    if isinstance(settings.get("target_modules"), str):
        listed["target_modules"] = sorted(name for name, kind in _modules(keys).items() if kind == "pair")
    _write(target / "adapter", listed)
    shutil.copyfile(weights, target / "adapter" / WEIGHTS)
    if config is None:
        log.say("note: the base's config.json is not at hand, so that no engine's names were checked", "export")
        return
    mounted, renamed = find_mounted(config, keys, "vllm"), None
    if not mounted.mounts_all and (renamed := rename_for_vllm(config, keys)):
        _write_renamed(weights, target / FOR_ENGINES, renamed=renamed, settings=listed)
        log.say(f"{FOR_ENGINES}: the adapter as vLLM and SGLang name modules; adapter/ is for PEFT", "export")
        keys = [name for names in renamed.values() for name in names]
    for engine in ("vllm", "sglang"):
        found = find_mounted(config, keys, engine)
        if not found.mounts_all:
            count = (
                f"mounts {found.matched} of {found.total} modules of the adapter" if found.is_known else "is not known"
            )
            log.say(f"note: {ENGINE_NAMES[engine]} {count}: {found.fix}", "export")


def mountable_by_vllm(adapter: Path, config: Mapping[str, Any], *, target: Path) -> Path:
    """Return `adapter` where vLLM mounts all of it on the base of `config`, else a copy in the new folder `target`
    under names that are mounted.

    Raises:
        ConfigError: vLLM would serve the base, or the base with a part of the adapter.
    """
    keys = _read_keys(adapter / WEIGHTS)
    mounted = find_mounted(config, keys, "vllm")
    if mounted.mounts_all:
        return adapter
    if not mounted.is_known:
        log.say(f"note: whether vLLM mounts this adapter is not known: {mounted.fix}", "serve")
        return adapter
    if (renamed := rename_for_vllm(config, keys)) is None:
        count = f"{mounted.matched} of {mounted.total} modules of this adapter"
        what = f"vLLM mounts {count}, first not {mounted.first_unmatched}"
        raise ConfigError(what, where=str(adapter), fix=f"leave --weights out ({mounted.fix})")
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    _write_renamed(adapter / WEIGHTS, target, renamed=renamed, settings=settings)
    log.say("the adapter is served under the names of the class that vLLM serves", "serve")
    return target


def _read_keys(weights: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        return list(file.keys())


def _write_renamed(
    weights: Path, target: Path, *, renamed: Mapping[str, list[str]], settings: Mapping[str, Any]
) -> None:
    """Write the adapter to the new folder `target` under the names that `rename_for_vllm` gave."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    for key, tensor in load_file(weights).items():
        names = renamed[key]
        shares = tensor.chunk(len(names)) if "lora_B" in key else (tensor,) * len(names)
        tensors |= {name: share.clone() for name, share in zip(names, shares, strict=True)}
    _write(target, {**settings, "target_modules": sorted({name.rpartition(".")[2] for name in _modules(tensors)})})
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})


def _write(folder: Path, settings: Mapping[str, Any]) -> None:
    folder.mkdir()
    text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def _modules(keys: Iterable[str]) -> dict[str, str]:
    """Module -> what is stored of it, in order: `pair` for a low-rank pair, else the name of what no engine mounts."""
    modules: dict[str, str] = {}
    for key in keys:
        found = _KEY.fullmatch(key)
        name, kind = (found["module"], found["pair"]) if found else (key, key)
        is_pair = kind.startswith(("lora_A", "lora_B"))
        if not is_pair or name not in modules:
            modules[name] = "pair" if is_pair else kind
    return modules


def _land_in_peft(config: Mapping[str, Any], modules: Mapping[str, str]) -> set[str]:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    known = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    opens = AutoModelForCausalLM if type(known) in AutoModelForCausalLM._model_mapping else AutoModelForImageTextToText
    with torch.device("meta"):
        names = {name for name, _ in opens.from_config(known).named_modules()}
    return {name for name in modules if name.replace(".base_layer", "") in names}


def _land_in_vllm(table: Mapping[str, Any], modules: Mapping[str, str]) -> set[str]:
    places = {f"{table['layer']}.*.{name}" for name in table["in_layer"]} | set(table.get("outside", ()))
    landed = set()
    for name, kind in modules.items():
        renamed = f"{name}.lora_A.weight"
        for how, old, new in table.get("renames", ()):
            if how == "start":
                renamed = new + renamed.removeprefix(old) if renamed.startswith(old) else renamed
            else:
                renamed = re.sub(old, new, renamed) if how == "regex" else renamed.replace(old, new, 1)
        place = re.sub(r"\.\d+(?=\.)", ".*", renamed.removesuffix(".lora_A.weight"))
        if kind == "pair" and place in places:
            landed.add(name)
    return landed


def _land_in_sglang(table: Mapping[str, Any], modules: Mapping[str, str]) -> set[str]:
    joined, wraps = served_names()["sglang"]["joined"], table.get("wraps", ())
    landed = set()
    for name, kind in modules.items():
        layer, _, last = name.rpartition(".")
        # It joins q, k and v by the name of q, and fills in zeros for k only (lora.py, normalize_qkv_proj).
        needed = {"qkv_proj": ("q_proj", "v_proj"), "gate_up_proj": ("gate_proj",)}.get(joined.get(last, ""), ())
        is_whole = all(f"{layer}.{part}" in modules for part in needed)
        is_in_layer = re.search(r"layers\.\d+\.", name) is not None and ".experts" not in name
        if kind == "pair" and is_in_layer and is_whole and joined.get(last, last) in wraps:
            landed.add(name)
    return landed


def _explain(
    config: Mapping[str, Any],
    keys: Iterable[str],
    modules: Mapping[str, str],
    lost: str,
    landed: Iterable[str],
    engine: Engine,
) -> str:
    name, kind = ENGINE_NAMES[engine], modules[lost]
    if kind != "pair":
        return f"{name} mounts low-rank pairs only, not {kind} of {lost}; {MERGED}"
    if engine == "peft":
        return "the names are those of another class; use the adapter/ of the run or of `make export`"
    if engine == "sglang" and (why := served_names()["sglang"]["classes"][served_class(config)].get("refused")):
        return f"{served_class(config)} is refused: {why}; {MERGED}"
    if ".experts" in lost:
        return f"{name} does not mount experts that were trained as one tensor on this class; {MERGED}"
    if engine == "vllm" and rename_for_vllm(config, keys):
        return (
            f"the names are those of another class than {served_class(config)}; serve {FOR_ENGINES}/ of `make export`"
        )
    placed = {module.rpartition(".")[2] for module in landed}
    without = sorted({module.rpartition(".")[2] for module in modules} - placed)
    advice = f", or train with tuning.lora.target_modules: [{', '.join(sorted(placed))}]" if placed else ""
    return f"{name} has no place for {', '.join(without)}; {MERGED}{advice}"
