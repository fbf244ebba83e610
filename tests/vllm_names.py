"""Run by the Python that has vLLM: build vLLM's own classes on `meta`, and say which adapter modules each one mounts.

Reads {name: config.json} from stdin, writes {name: {renames, modules}} to stdout. With `weights` in place of a config,
`[config, {tensor: shape}]`, it gives what the class makes of a checkpoint: {class, unloaded} or {error}.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import json
import math
import os
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


LARGE = 1 << 20
"""Numbers of a tensor."""


class TorchvisionStandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives an empty class for every name below `torchvision`, which image-text classes import and no text needs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_ours = name == "torchvision" or name.startswith("torchvision.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Part(types.ModuleType):
            __path__ = ()
            __version__ = "0"

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                modes = dict.fromkeys(
                    ("NEAREST", "BOX", "BILINEAR", "HAMMING", "BICUBIC", "LANCZOS", "NEAREST_EXACT"), 0
                )
                return type(name, (), {"__module__": spec.name} | modes)

        return Part(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is in it."""


def build(config: dict[str, Any]) -> Any:
    """Return vLLM's class for the config, on `meta`."""
    import torch
    from vllm.config import DeviceConfig, LoRAConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment, parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
        )
        cfg = VllmConfig(model_config=model, device_config=DeviceConfig("cpu"), lora_config=LoRAConfig(max_loras=1))
        with set_current_vllm_config(cfg):
            if not torch.distributed.is_initialized():
                rendezvous = "file://" + tempfile.mkstemp()[1] + ".first"
                init_distributed_environment(1, 0, rendezvous, 0, "gloo")
            parallel_state.destroy_model_parallel()  # a model with experts has a group more
            ensure_model_parallel_initialized(1, 1)
            with torch.device("meta"):
                return initialize_model(cfg)


def describe(model: Any) -> dict[str, Any]:
    """Return how the class renames an adapter's names, and the modules that a name can land on (any number is *)."""
    from vllm.lora.utils import get_supported_lora_modules, is_supported_lora_module, process_packed_modules_mapping

    supported, packed = get_supported_lora_modules(model), process_packed_modules_mapping(model)
    towers = model.get_mm_mapping() if hasattr(model, "get_mm_mapping") else None
    skipped = tuple([*towers.connector, *towers.tower_model] if towers else ())  # mounted on request only
    modules = set()
    for name, module in model.named_modules():
        if is_supported_lora_module(name, module, supported) and not (skipped and name.startswith(skipped)):
            parent, _, last = name.rpartition(".")
            for part in packed.get(last) or [last]:
                modules.add(re.sub(r"\.\d+(?=\.|$)", ".*", f"{parent}.{part}".lstrip(".")))
            if last == "experts" and getattr(model, "is_3d_moe_weight", False):
                modules.add(re.sub(r"\.\d+(?=\.|$)", ".*", f"{name}.base_layer"))
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    renames = []
    if mapper is not None:
        mapper = mapper.get_rename_mapper()
        renames += [["regex", getattr(old, "pattern", old), new] for old, new in mapper.orig_to_new_regex.items()]
        renames += [["part", old, new] for old, new in mapper.orig_to_new_substr.items()]
        renames += [["start", old, new] for old, new in mapper.orig_to_new_prefix.items()]
    return {"renames": renames, "modules": sorted(modules)}


def load(model: Any, shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Return what is left without a weight when the class reads a checkpoint of these names and shapes."""
    import torch

    def tensor(shape: list[int]) -> Any:
        """Experts have no data: classes stack and turn them, which would fill gigabytes. Few small ones are copied."""
        return torch.empty(shape, device="meta" if math.prod(shape) > LARGE else "cpu")

    loaded = model.load_weights((name, tensor(shape)) for name, shape in shapes.items())
    # The loaders of experts leave out a part of the name, those of GPT-OSS do not.
    every, found = (
        {name.replace(".routed_experts.", ".") for name in names}
        for names in ([name for name, _ in model.named_parameters()], loaded or ())
    )
    return {"class": type(model).__name__, "unloaded": sorted(every - found)}


def main() -> None:
    asked = json.load(sys.stdin)
    answers = {}
    with contextlib.redirect_stdout(sys.stderr):
        sys.meta_path.insert(0, TorchvisionStandIn())
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda run: run()
        for name, question in asked.items():
            config, shapes = question if isinstance(question, list) else (question, None)
            try:
                model = build(config)
                answers[name] = describe(model) if shapes is None else load(model, shapes)
            except Exception as error:  # noqa: BLE001 - the parent's test shows it
                answers[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
