"""Export a finished run as a self-contained folder for plain libraries: weights, tokenizer, card, config, figures.

The folder holds no path of this machine, no secret and no row of the data. Nothing is uploaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from sftplay import __version__, log
from sftplay.atomic import check_target, read_object
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.export.adapter_names import export_adapter
from sftplay.export.merge import (
    RECORD,
    SHARD_BYTES,
    Dtype,
    find_base_file,
    merged_model,
    save_whole,
    size_bytes,
    write_folder,
)
from sftplay.export.model_card import PublicRun, write_card
from sftplay.export.parity_table import parity_rows
from sftplay.launch.run_folder import RunFolder
from sftplay.model.hub import first_line
from sftplay.model.merging import check_finite
from sftplay.model.source import BUILTIN, is_local
from sftplay.model.start_point import digest_result
from sftplay.model.tokenizer import load_tokenizer, set_end_tokens
from sftplay.model.weights import DTYPES

REMOVED = "(removed)"

_PATH = re.compile(r"(?<![\w./:~-])~?/(?:[^\s/:\"'`<>|,;()]+/)+([^\s/:\"'`<>|,;()]*)")
"""An absolute path of two parts or more inside a text; its last part is kept. `https://...` does not match."""

_SECRET_NAME = re.compile(r"(hub|api|access|auth)_?(token|key)|secret|password|passwd|credential", re.IGNORECASE)
_SECRET = re.compile(r"hf_\w{20,}|sk-[\w-]{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
"""Tokens of the hub, OpenAI, GitHub and AWS, and a user with a password in an address."""


def export(
    cfg: RunConfig, folder: RunFolder, *, out: Path, dtype: Dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write the run's model to `out`, for plain transformers. An adapter run's adapter is included.

    Weights in safetensors shards of at most `shard_bytes` (with an index where there are several), tokenizer with the
    trained chat template, generation config with the end tokens of training, README.md (the model card),
    config.resolved.yaml, data_report.json and the evaluation's figures. `dtype` None keeps the base's dtype for an
    adapter run and the result's for a full one. `out` appears whole or not at all.

    Raises:
        ConfigError: the run has no result, or `out` exists.
        MachineError: base or result cannot be read, or the disk is too small.
        RunError: adapter or result hold values that are not finite, or that do not fit `dtype`.
    """
    check_target(out)
    model, tokenizer = load_whole(cfg, folder, dtype=dtype)
    run = public_run(cfg, folder)
    names = ("adapter_config.json", "adapter_model.safetensors") if run.has_adapter else ()
    adapter_files = [folder.path / "adapter" / name for name in names]

    def fill(scratch: Path) -> None:
        log.status("writing", "export")
        save_whole(model, tokenizer, cfg=cfg, folder=folder, target=scratch, shard_bytes=shard_bytes)
        if adapter_files:
            settings_file, weights = adapter_files
            settings = json.loads(settings_file.read_text(encoding="utf-8"))
            settings |= {"base_model_name_or_path": run.cfg.model.name, "revision": run.cfg.model.revision}
            base_file = find_base_file(cfg, folder, name="config.json")
            base = json.loads(base_file.read_text(encoding="utf-8")) if base_file else None
            export_adapter(weights.parent, scratch, config=base, settings=Redactor()(settings))
        write_records(run, scratch)
        write_json(scratch / RECORD, {"dtype": str(model.dtype).removeprefix("torch."), "kit": __version__})
        write_card(run, scratch / "README.md")

    write_folder(out, size_bytes(model) + 2 * sum(path.stat().st_size for path in adapter_files), fill=fill)
    log.say(f"{out}: read README.md in it before you publish", "export")
    return out


def write_records(run: PublicRun, target: Path) -> None:
    """Write the run's config, its data report and the evaluation's figures."""
    (target / "config.resolved.yaml").write_text(dump_resolved(run.cfg), encoding="utf-8")
    write_json(target / "data_report.json", run.data_report)
    for name, figures in run.figures.items():
        (target / "eval").mkdir(exist_ok=True)
        write_json(target / "eval" / f"{name}.json", figures)


def load_whole(cfg: RunConfig, folder: RunFolder, *, dtype: Dtype | None = None) -> tuple[Any, Any]:
    """Return the run's whole model on the CPU, an adapter merged into its base, and the tokenizer.

    `dtype` None keeps the base's dtype for an adapter run and the result's for a full one. Raise MachineError where it
    cannot be read whole, RunError where it holds values that are not finite, or that do not fit `dtype`.
    """
    result = folder.path / "model"
    if not result.is_dir():
        return merged_model(cfg, folder, dtype=dtype)
    tokenizer = load_tokenizer(cfg.model, str(result))
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            result, dtype=DTYPES[dtype] if dtype else "auto", output_loading_info=True,
            trust_remote_code=cfg.model.trust_remote_code,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = f"the result cannot be loaded ({first_line(error)})"
        raise MachineError(what, where=str(result), fix="check its files") from error
    if missing := loading["missing_keys"]:
        what = f"the result lacks {len(missing)} weights, {min(missing)} for one"
        raise MachineError(what, where=str(result), fix="check its files")
    check_finite(model, where=str(result), fix="export with the result's own dtype, or in bf16")
    set_end_tokens(model.generation_config, tokenizer)
    return model.eval(), tokenizer


def public_run(cfg: RunConfig, folder: RunFolder) -> PublicRun:
    """Return the part of the run that may be published: its files without paths of this machine and without secrets."""
    # step-N.json measures the weights at a step of the training, not the result.
    measured = sorted(path for path in folder.eval.glob("*.json") if not path.stem.startswith("step-"))
    figures = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in measured}
    clean = Redactor([*_strings(cfg.model_dump()), str(folder.path.resolve())])
    public_cfg = RunConfig.model_validate(clean(cfg.model_dump()))
    public_cfg.origins.update(clean(cfg.origins))
    is_named = not (is_local(cfg.model.name) or PurePosixPath(cfg.model.name).is_absolute())
    is_builtin = cfg.model.name.startswith(BUILTIN)
    card = None if is_builtin else find_base_file(cfg, folder, name="README.md")
    return PublicRun(
        name=folder.path.resolve().name,
        cfg=public_cfg,
        hub_base=cfg.model.name if is_named else None,
        # The builtin models are made from this kit's own text.
        licence="apache-2.0" if is_builtin else read_licence(card.read_text(encoding="utf-8") if card else ""),
        data_report=clean(folder.read_json("data_report.json")),
        manifest=clean(folder.read_json("manifest.json")),
        figures=clean(figures),
        # With merge_adapter the base is a merged model that others cannot get, so the adapter alone is of no use.
        has_adapter=(folder.path / "adapter").is_dir() and not cfg.model.merge_adapter,
        has_new_tokens=(folder.path / "new_tokens.json").is_file(),
        step=folder.read_json("status.json").get("step"),
        engines=clean(parity_rows(read_object(folder.path / "parity.json"), digest_result(folder.result))),
    )


def read_licence(card: str) -> str | None:
    """Return the licence in a model card's front matter, None if there is none."""
    front = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    licence = re.search(r"^license:\s*[\"']?([\w.-]+)[\"']?\s*$", front[1], re.MULTILINE) if front else None
    return licence[1] if licence and licence[1] != "unknown" else None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file for people."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class Redactor:
    """Removes paths of this machine and secrets from JSON values. Some of the strings in `known` are such paths."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        paths = {path for path in known if _is_path(path) and path.strip("/")}
        self.known = sorted(paths, key=len, reverse=True)  # the longer of two with the same beginning comes first

    def __call__(self, value: Any) -> Any:
        """Return a copy with absolute paths cut to their last part, and without secrets."""
        if isinstance(value, Mapping):
            return {
                self(key): REMOVED if isinstance(inner, str) and _SECRET_NAME.search(str(key)) else self(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self(inner) for inner in value]
        if not isinstance(value, str):
            return value
        text = _SECRET.sub(REMOVED, value)
        if _is_path(text):
            return text.rstrip("/").rpartition("/")[2]
        for path in self.known:
            text = text.replace(path, path.rstrip("/").rpartition("/")[2])
        return _PATH.sub(lambda match: match[1] or REMOVED, text)


def _is_path(text: str) -> bool:
    return PurePosixPath(text).is_absolute() and "\n" not in text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _strings(inner)
