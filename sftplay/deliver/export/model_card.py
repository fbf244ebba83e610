"""The model card, README.md of an exported model: what it was made from, how, what was measured, how to load it.

It states what the run's own files say, and says of everything else that it is not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.data.read.sources import is_hub_name

LOAD = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
messages = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""

LOAD_TEXT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on the hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
inputs = tokenizer("Once", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64, do_sample=False)[0], skip_special_tokens=True))
"""

LOAD_ADAPTER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, "adapter")
"""


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
    """The adapter lies beside the merged weights."""


def write_card(run: PublicRun, path: Path) -> None:
    """Write the card for the model in the folder of `path`, whose chat template decides how it is asked."""
    talks = (path.parent / "chat_template.jinja").is_file()
    parts = [_front_matter(run), _opening(run), _loading(run, talks), _data(run), _evaluation(run)]
    parts += [_training(run), _versions(run)]
    path.write_text("\n".join(parts), encoding="utf-8")


def _front_matter(run: PublicRun) -> str:
    """YAML as the hub reads it (https://huggingface.co/docs/hub/model-cards), where `unknown` is a licence too."""
    mode = run.cfg.tuning.mode
    lines = ["---", f"license: {run.licence or 'unknown'}", "library_name: transformers"]
    lines += ["pipeline_tag: text-generation", "tags:"]
    lines += [f"- {tag}" for tag in ("sft-play", run.cfg.task_mode, mode)]
    if run.hub_base:
        lines += [f"base_model: {json.dumps(run.hub_base)}", "base_model_relation: finetune"]
    if is_hub_name(run.cfg.data.train_path) and "/" in run.cfg.data.train_path:
        lines += ["datasets:", f"- {json.dumps(run.cfg.data.train_path)}"]
    return "\n".join([*lines, "---", ""])


def _opening(run: PublicRun) -> str:
    cfg = run.cfg
    revision = f" (revision {cfg.model.revision})" if cfg.model.revision else ""
    how = {
        "full": "every weight was trained",
        "lora": "an adapter was trained and merged into the base",
        "qlora": "an adapter was trained on the base in 4 bits, and merged into the base in full precision",
    }[cfg.tuning.mode]
    if cfg.model.adapter:
        before = "had been merged into the base before" if cfg.model.merge_adapter else "was trained on"
        how += f"; the adapter of an earlier run {before}"
    licence = (
        f"Its base says {run.licence}; what the data allows is for you to know."
        if run.licence
        else "Not known: neither base nor data said one here. Find out what both allow before you pass this model on."
    )
    return (
        f"# {run.name}\n\n`{cfg.model.name}`{revision}, tuned with SFT-Play (task `{cfg.task_mode}`): {how}.\n\n"
        f"**Licence.** {licence}\n\n"
        "**Limits.** Nothing was measured but what stands below: no safety, no other tasks.\n"
    )


def _loading(run: PublicRun, talks: bool) -> str:
    text = f"## Load it\n\n```python\n{LOAD if talks else LOAD_TEXT}```\n"
    if not run.has_adapter:
        return text
    base = json.dumps(run.hub_base or f"path/to/{run.cfg.model.name}")
    return f"{text}\nThe adapter alone, beside its base:\n\n```python\n{LOAD_ADAPTER.format(base=base)}```\n"


def _data(run: PublicRun) -> str:
    report = run.data_report
    if not report:
        return "## Data\n\nThe run left no data report.\n"
    sources = {"all": report, **report.get("sources", {})} if len(report.get("sources", {})) > 1 else {"all": report}
    rows = [
        (name, *(_count(source, key) for key in ("read", "kept", "cut", "dropped", "refused", "tokens")),
         f"{source.get('trainable_token_share', 0.0):.1%}")
        for name, source in sources.items()
    ]  # fmt: skip
    table = _table(("source", "read", "kept", "cut", "dropped", "refused", "tokens", "of them learned"), rows)
    end = f"The end of turn is learned in {report.get('eos_in_loss_share', 0.0):.1%} of the examples."
    return f"## Data\n\n{table}\n\n{end} Every figure: `data_report.json`.\n"


def _count(source: Mapping[str, Any], key: str) -> str:
    value = source.get(key, 0)
    return f"{sum(value.values()) if isinstance(value, dict) else value:,}"


def _evaluation(run: PublicRun) -> str:
    if not run.figures:
        return "## Evaluation\n\nNot measured.\n"
    names = sorted(run.figures, key=lambda name: (name.removesuffix("before") == name, name))
    keys = list(dict.fromkeys(key for figures in run.figures.values() for key in figures))
    numbers = (int, float)
    keys = [key for key in keys if any(isinstance(run.figures[name].get(key), numbers) for name in names)]
    table = _table(("", *names), [(key, *(_figure(run.figures[name].get(key)) for name in names)) for key in keys])
    measured = run.cfg.eval
    how = f"Held-out rows; answers are greedy, at most {measured.max_new_tokens} tokens; `before` is the untuned base."
    return f"## Evaluation\n\n{table}\n\n{how}\n"


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else "-"


def _training(run: PublicRun) -> str:
    return f"## Training\n\n{_table(('setting', 'value'), list(_settings(run)))}\n\nAll: `config.resolved.yaml`.\n"


def _settings(run: PublicRun) -> Iterator[tuple[str, Any]]:
    cfg = run.cfg
    yield "tuning", cfg.tuning.mode
    if cfg.tuning.mode != "full":
        lora = cfg.tuning.lora
        alpha = lora.alpha if lora.alpha is not None else 2 * lora.r
        kind = "".join(f", {name}" for name, on in (("DoRA", lora.dora), ("rsLoRA", lora.rslora)) if on)
        yield "adapter", f"r {lora.r}, alpha {alpha:g}, dropout {lora.dropout:g}{kind}"
        targets = "every linear layer but the head" if lora.target_modules == "auto" else ", ".join(lora.target_modules)
        yield "layers", targets + "".join(f", {name} in full" for name in lora.modules_to_save)
    if cfg.tuning.mode == "qlora":
        yield "base while training", f"{cfg.tuning.quant_type}, double_quant {str(cfg.tuning.double_quant).lower()}"
    yield "steps", run.manifest.get("steps", cfg.train.max_steps or f"{cfg.train.epochs:g} epochs")
    yield "rows a step", cfg.train.effective_batch_size
    yield "learning rate", f"{cfg.train.peak_rate}, {cfg.train.lr_scheduler}, warm-up {cfg.train.warmup_ratio:g}"
    yield "precision", cfg.train.precision
    yield "longest row", f"{cfg.model.max_seq_len} tokens"
    yield "seed", cfg.seed


def _versions(run: PublicRun) -> str:
    manifest = run.manifest
    known = {"sft-play": manifest.get("kit"), "commit": manifest.get("git_commit"), "python": manifest.get("python")}
    known |= manifest.get("machine", {}).get("libraries", {})
    rows = [(name, version) for name, version in known.items() if version]
    return f"## Versions\n\n{_table(('', 'version'), rows)}\n" if rows else "## Versions\n\nNot recorded.\n"


def _table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
