"""Write the model card, README.md of an exported model: its base, training, measurements, and how to load it.

It states what the run's files say. Everything else is stated as unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.data.read import is_hub_name
from sftplay.export.adapter_card import card_template
from sftplay.export.adapter_names import FOR_ENGINES
from sftplay.export.parity_table import HEAD


@dataclass(frozen=True)
class PublicRun:
    """A run as it may be published: without paths of the machine, and without secrets."""

    name: str
    cfg: RunConfig
    hub_base: str | None
    """The base's name on the hub, None for a local one."""

    licence: str | None
    """The base's, where it is known."""

    data_report: Mapping[str, Any]
    manifest: Mapping[str, Any]
    figures: Mapping[str, Mapping[str, Any]]
    """Evaluation, by the name of its file."""

    has_adapter: bool
    """The adapter is next to the merged weights."""

    has_new_tokens: bool

    step: int | None = None
    """The last one that was trained; fewer than planned where the run stopped early."""

    engines: list[list[str]] = field(default_factory=list)
    """What the run was held against, as rows of `parity_table.HEAD`."""


def write_card(run: PublicRun, path: Path, *, gguf: Mapping[str, Any] | None = None) -> None:
    """Write the card for the model in the folder of `path`; its chat template decides the usage example.

    `gguf` is what was found of GGUF files there, None for a folder of plain transformers.
    """
    # Figures of tasks and of sources lie deeper in these; at their top are settings, which are no figures.
    flat = [name for name in run.figures if not name.endswith(("lm-eval", "perplexity"))]
    measurements = sorted(flat, key=lambda name: (name.removesuffix("before") == name, name))
    keys = dict.fromkeys(key for name in flat for key in run.figures[name])
    rows = [[key, *(_format(run.figures[name].get(key)) for name in measurements)] for key in keys]
    known = {name: run.manifest.get(key) for name, key in (("sft-play", "kit"), ("commit", "git_commit"))}
    known |= {"python": run.manifest.get("python"), **run.manifest.get("machine", {}).get("libraries", {})}
    text = card_template("model_card.md").render(
        run=run,
        gguf=gguf,
        gguf_rows=[
            [
                name,
                f"{file['same_tokens']} of {file['positions']}",
                *(f"{file[key]:.2g}" for key in ("mean_kl", "bound", "max_kl")),
            ]
            for name, file in (gguf or {"files": {}})["files"].items()
        ],
        cfg=run.cfg,
        method=_describe_method(run.cfg),
        has_chat_template=(path.parent / "chat_template.jinja").is_file(),
        has_engine_names=(path.parent / FOR_ENGINES).is_dir(),
        base=_name_base(run),
        sources=_sources(run.data_report),
        measurements=measurements,
        figures=[row for row in rows if set(row[1:]) != {"-"}],
        settings=list(_settings(run)),
        engines=_engines(run.engines),
        versions=[(name, version) for name, version in known.items() if version],
    )
    # The metadata for the hub: https://huggingface.co/docs/hub/model-cards; `unknown` is a valid licence.
    cfg = run.cfg
    paths = [source.path for source in cfg.datasets] or [cfg.rows_path]
    relation: dict[str, Any] = {"base_model": run.hub_base, "base_model_relation": "finetune"} if run.hub_base else {}
    front = ModelCardData(
        license=run.licence or "unknown",
        library_name="gguf" if gguf else "transformers",
        pipeline_tag="text-generation",
        tags=["sft-play", cfg.task_mode, cfg.tuning.mode, *(["gguf"] if gguf else [])],
        datasets=[path for path in paths if is_hub_name(path) and "/" in path] or None,
        **relation,
    )
    path.write_text(f"---\n{front.to_yaml()}\n---\n\n{text}", encoding="utf-8")


def update_card(path: Path, engines: Sequence[Sequence[str]]) -> None:
    """Replace the section on engines in a card that `write_card` has made; leave every other text alone."""
    text = path.read_text(encoding="utf-8")
    found = re.sub(r"(?<=\n## Engines\n\n).*?(?=\n## )", lambda _: _engines(engines), text, count=1, flags=re.DOTALL)
    write_text(path, found)


def _engines(rows: Sequence[Sequence[str]]) -> str:
    return card_template("engines.md").render(head=HEAD, rows=rows)


def _name_base(run: PublicRun) -> str:
    """Return the arguments that open the base on which the run was trained."""
    if run.hub_base is None:
        return repr(f"path/to/{run.cfg.model.name}")
    revision = f", revision={run.cfg.model.revision!r}" if run.cfg.model.revision else ""
    return f"{run.hub_base!r}{revision}"


def _describe_method(cfg: RunConfig) -> str:
    method = {
        "full": "every weight was trained",
        "lora": "an adapter was trained and merged into the base",
        "qlora": "an adapter was trained on the base in 4 bits, and merged into the base in full precision",
    }[cfg.tuning.mode]
    if cfg.model.adapter:
        before = "had been merged into the base before" if cfg.model.merge_adapter else "was trained on"
        method += f"; the adapter of an earlier run {before}"
    return method


def _sources(report: Mapping[str, Any]) -> list[list[str]]:
    named = report.get("sources", {})
    rows = []
    for name, source in {"all": report, **(named if len(named) > 1 else {})}.items():
        counts = [source.get(key, 0) for key in ("read", "kept", "cut", "dropped", "refused", "tokens")]
        cells = [f"{sum(count.values()) if isinstance(count, Mapping) else count:,}" for count in counts]
        rows.append([name, *cells, f"{source.get('trainable_token_share', 0.0):.1%}"])
    return rows


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "-"


def _settings(run: PublicRun) -> Iterator[tuple[str, Any]]:
    cfg = run.cfg
    yield "tuning", cfg.tuning.mode
    if cfg.tuning.mode != "full":
        lora = cfg.tuning.lora
        alpha = lora.alpha if lora.alpha is not None else 2 * lora.r
        kind = "".join(f", {name}" for name, on in (("DoRA", lora.dora), ("rsLoRA", lora.rslora)) if on)
        yield "adapter", f"r {lora.r}, alpha {alpha:g}, dropout {lora.dropout:g}{kind}"
        usual = "every linear layer but head and experts"
        targets = usual if lora.target_modules == "auto" else ", ".join(lora.target_modules)
        yield "layers", targets + "".join(f", {name} in full" for name in lora.modules_to_save)
    if run.has_new_tokens:
        yield "new tokens", "a list: terms of the data, among the added tokens"
    if cfg.tuning.mode == "qlora":
        yield "base while training", f"{cfg.tuning.quant_type}, double_quant {str(cfg.tuning.double_quant).lower()}"
    planned = run.manifest.get("steps", cfg.train.max_steps or f"{cfg.train.epochs:g} epochs")
    yield "steps", planned if run.step in (None, planned) else f"{run.step} of {planned}"
    yield "rows a step", cfg.train.effective_batch_size
    yield "learning rate", f"{cfg.train.peak_rate}, {cfg.train.lr_scheduler}, warm-up {cfg.train.warmup_ratio:g}"
    yield "precision", cfg.train.precision
    yield "longest row", f"{cfg.model.max_seq_len} tokens"
    yield "seed", cfg.seed
