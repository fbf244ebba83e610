"""Writes report.html: a run on one page that needs neither network nor server, from what lies in its folder.

It measures nothing and needs no model; a run in any state gets its page, and what is missing is named on it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sftplay import __version__
from sftplay.atomic import write_text
from sftplay.deliver.report import sections
from sftplay.deliver.report.answers import show_answers
from sftplay.deliver.report.figures import capitalized, escaped, format_figure, is_share, name_of
from sftplay.deliver.report.history import as_number
from sftplay.deliver.report.page import folded, frame, section
from sftplay.deliver.report.remarks import find_remarks
from sftplay.deliver.report.run_files import RunFiles, mapping, mappings, read_run_files
from sftplay.launch.run_folder import RunFolder
from sftplay.units import format_count, format_seconds

NAME = "report.html"
STATES = {
    "done": ("done", "good"),
    "running": ("running", "caution"),
    "stopped": ("stopped", "caution"),
    "failed": ("failed", "bad"),
    "interrupted": ("interrupted", "bad"),
}


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run folder, over an older one; the file's path.

    Raises:
        OSError: the page cannot be written. Nothing that is found in the folder raises.
    """
    path = folder.path / NAME
    try:
        write_text(path, render(read_run_files(folder)))
    except OSError:
        for half in folder.path.glob(f".{NAME}.*"):  # on a full disk it would keep the room that a resumed run needs
            half.unlink(missing_ok=True)
        raise
    return path


def render(found: RunFiles) -> str:
    """The page as HTML."""
    parts = [
        ("warnings", "What to know first", sections.show_remarks(find_remarks(found))),
        ("curves", "Curves", sections.show_curves(found)),
        ("evaluation", "Evaluation", sections.show_evaluation(found)),
        ("answers", "Answers before and after", show_answers(found)),
        ("test-answers", "Answers to the test rows", show_answers(found, "test-")),
        ("data", "Data", sections.show_data(found)),
        ("sample", "What is learned of a row", sections.show_sample(found)),
        ("samples", "Samples", folded("Texts in samples/", sections.show_samples(found))),
        ("choices", "Chosen automatically", sections.show_choices(found)),
        ("config", "Config", sections.show_config(found)),
        ("facts", "Versions and machine", sections.show_facts(found)),
        ("repeat", "How to repeat it", sections.show_repeat(found)),
    ]
    body = "".join(section(*part) for part in parts)
    links = "".join(f'<a href="#{anchor}">{escaped(title)}</a>' for anchor, title, inner in parts if inner)
    written = time.strftime("%Y-%m-%d %H:%M")
    footer = f"<footer>Written {written} by SFT-Play {__version__} from {escaped(found.folder.path)}</footer>"
    title = f"{found.folder.name}: {STATES.get(found.state, (found.state, ''))[0]}"
    return frame(title, f'{_head(found)}\n<nav aria-label="Contents">{links}</nav>\n<main>{body}</main>\n{footer}')


def _head(found: RunFiles) -> str:
    word, colour = STATES.get(found.state, (found.state, "caution"))
    steps = f" of {found.steps:,}" if found.steps else ""
    model = found.value("model.name") or "a model that is not named"
    return (
        f"<header><h1>{escaped(found.folder.name)}</h1><p>{escaped(_method(found), 300)} on <code>{escaped(model, 300)}"
        f'</code></p><p><span class="state {colour}">{escaped(word, 40)}</span> at step {found.step:,}{steps}</p>'
        f'<dl class="keys">{"".join(_tile(*tile) for tile in _tiles(found))}</dl></header>'
    )


def _method(found: RunFiles) -> str:
    mode, task = (found.value(key) for key in ("tuning.mode", "task_mode"))
    tasks = {"sft": "Supervised fine-tuning", "cpt": "Continued pretraining", "grpo": "Reinforcement learning (GRPO)"}
    modes = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA, base in 4 bits"}
    known = isinstance(mode, str) and isinstance(task, str)
    if not known:
        return "Training"
    rank = f", rank {found.value('tuning.lora.r')}" if mode in ("lora", "qlora") else ""
    return f"{tasks.get(task, task)}, {modes.get(mode, mode)}{rank},"


def _tile(name: str, value: str, more: str = "") -> str:
    return (
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}{f'<small>{escaped(more)}</small>' * bool(more)}</dd></div>"
    )


def _tiles(found: RunFiles) -> list[tuple[str, str, str]]:
    """The figures one looks for first: name, value, a word below it."""
    before, after = found.evals.get("before", {}), found.evals.get("after", {})
    tiles = []
    for key in [*[key for key in after if is_share(key)][:2], "loss"]:
        if key in after:
            old = f"{format_figure(key, before[key])} →\u00a0" if key in before else ""
            n = f"on {format_figure('n', after.get('n'))} prompts" if key != "loss" else ""
            name = "Held-out loss" if key == "loss" else capitalized(name_of(key))
            tiles.append((name, old + format_figure(key, after[key]), n))
    history = found.history
    if losses := history.ends("loss"):
        tiles.append(
            ("Training loss", f"{format_figure('loss', losses[0])} →\u00a0{format_figure('loss', losses[1])}", "")
        )
    seconds = as_number(found.status.get("train_seconds"))
    if seconds is not None and 0 <= seconds < 1e12:
        tiles.append(("Training time", format_seconds(seconds), "the last attempt" if len(found.attempts) > 1 else ""))
    speed = history.middle("tokens_per_s")
    if speed is not None:
        tiles.append(("Tokens per second", format_figure("tokens", speed), "median"))
    memory = history.largest("peak_bytes") or history.largest("peak_rss_bytes")
    if memory is not None and memory < 2**60:
        tiles.append(("Peak memory", format_figure("peak_bytes", memory), "main process"))
    return tiles + _size_tiles(found)


def _size_tiles(found: RunFiles) -> list[tuple[str, str, str]]:
    tiles = []
    model: dict[str, Any] = mapping(found.manifest.get("model"))
    whole, trained = (as_number(model.get(key)) for key in ("parameters", "trainable_parameters"))
    if whole and trained is not None and 0 < whole < 1e18 and 0 <= trained < 1e18:
        tiles.append(
            ("Weights that train", format_count(trained), f"{100 * trained / whole:.2g} % of {format_count(whole)}")
        )
    machine = mapping(found.manifest.get("machine"))
    gpus = [str(gpu.get("name")) for gpu in mappings(machine.get("gpus"))]
    if machine:
        name = f"{len(gpus)} × {gpus[0]}" if gpus else f"CPU, {machine.get('cores', '?')} cores"
        tiles.append(("Hardware", name[:60], f"{found.plan.get('world_size', 1)} process(es)"[:60]))
    return tiles
