"""Writes report.html: a run on one page that needs neither network nor server, from what lies in its folder.

It measures nothing and needs no model; a run in any state gets its page, and what is missing is named on it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sftplay import __version__
from sftplay.atomic import write_text
from sftplay.launch.run_folder import RunFolder
from sftplay.report import sections
from sftplay.report.answers import Answers, pick_answers
from sftplay.report.figures import capitalized, find_name, format_figure, is_share
from sftplay.report.history import as_bytes, as_number
from sftplay.report.learned import (
    Headline,
    build_charts,
    compare_memory,
    find_task_report,
    headlines,
    learned_table,
    learns_from_rewards,
    pick_tries,
    resumed_steps,
    reward_charts,
)
from sftplay.report.mixture import find_anchors, forgetting, mixture_tables, source_charts
from sftplay.report.page import render_page
from sftplay.report.remarks import find_remarks
from sftplay.report.run_files import RunFiles, mapping, mappings, read_run_files
from sftplay.units import format_count, format_seconds

NAME = "report.html"
COLOURS = {"done": "good", "failed": "bad", "interrupted": "bad"}
"""Colour of a run's state. Any other state is shown as a caution."""

Tile = tuple[str, str, str]
"""Name, value, a note below it."""


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run folder, over an older one; return its path.

    Raises:
        OSError: the page cannot be written. Nothing in the folder's files raises.
    """
    path = folder.path / NAME
    write_text(path, render(read_run_files(folder)))
    return path


def render(run: RunFiles) -> str:
    """Return the page as HTML."""
    part, resumed = find_task_report(run), resumed_steps(run)
    charts = build_charts(run)
    n_first = 0 if learns_from_rewards(run) else 1  # rewards stand before the loss, sources behind it
    sources = [] if learns_from_rewards(run) else source_charts(run, resumed)
    task = {"puzzles": None, "turns": None, **(part.build_sections(run, resumed) if part else {})}
    return render_page(
        title=f"{run.folder.name}: {run.state}",
        run=run,
        colour=COLOURS.get(run.state, "caution"),
        method=_describe_method(run),
        tiles=(tiles := _tiles(run)),
        columns=even_columns(len(tiles)),
        remarks=find_remarks(run),
        charts=[*reward_charts(run, resumed), *charts[:n_first], *sources, *charts[n_first:]],
        resumed=resumed,
        learned=[table] if (table := learned_table(run)) else [],
        evaluation=sections.evaluation_tables(run),
        bars=sections.evaluation_bars(run),
        **task,
        sources=mixture_tables(run),
        forgetting=forgetting(run),
        answers=_list_answers(run),
        tries=pick_tries(run),
        data=sections.data_tables(run),
        data_facts=sections.data_facts(run),
        histogram=sections.histogram(run),
        sample=sections.build_sample(run),
        choices=sections.choice_tables(run),
        config=sections.config_tables(run),
        versions=sections.version_facts(run),
        written=time.strftime("%Y-%m-%d %H:%M"),
        kit_version=__version__,
    )


def _list_answers(run: RunFiles) -> list[tuple[str, str, Answers]]:
    """Sets of answers, each with its anchor on the page and its title. Episodes have a table of their own."""
    if run.task and run.task.turns == 2:
        return []
    sets = [("answers", "Answers before and after", "")]
    sets += [(f"answers-{n}", f"Answers to {name}", f"anchor-{name}-") for n, name in enumerate(find_anchors(run), 1)]
    sets += [("test-answers", "Answers to the test rows", "test-")]
    return [(anchor, title, found) for anchor, title, prefix in sets if (found := pick_answers(run, prefix))]


def _describe_method(run: RunFiles) -> str:
    mode, task = (run.value(key) for key in ("tuning.mode", "task_mode"))
    if not isinstance(mode, str) or not isinstance(task, str):
        return "Training"
    modes = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA, base in 4 bits"}
    rank = f", rank {run.value('tuning.lora.r')}" if mode in ("lora", "qlora") else ""
    return f"{(run.task and run.task.title) or task}, {modes.get(mode, mode)}{rank},"


def _tiles(run: RunFiles) -> list[Tile]:
    """The figures one looks for first."""
    before, after = run.evals.get("before", {}), run.evals.get("after", {})
    tiles = [_headline_tile(headline) for headline in headlines(run)]
    for key in () if tiles else [*[key for key in after if is_share(key)][:2], "loss"]:
        if key in after:
            old = f"{format_figure(key, before[key])} →\u00a0" if key in before else ""
            n = f"on {format_figure('n', after.get('n'))} prompts" if key != "loss" else ""
            name = "Held-out loss" if key == "loss" else capitalized(find_name(key))
            tiles.append((name, old + format_figure(key, after[key]), n))
    history = run.history
    key, name = ("reward", "Sampled reward") if learns_from_rewards(run) else ("loss", "Training loss")
    if ends := history.ends(key):
        tiles.append(_headline_tile((key, name, *ends, None)))
    seconds = as_number(run.status.get("train_seconds"))
    if seconds is not None and 0 <= seconds < 1e12:
        tiles.append(("Training time", format_seconds(seconds), "the last attempt" if len(run.attempts) > 1 else ""))
    speed = history.middle("tokens_per_s")
    if speed is not None:
        tiles.append(("Tokens per second", format_figure("tokens", speed), "median"))
    memory = as_bytes(history.largest("peak_bytes") or history.largest("peak_rss_bytes"))
    if memory is not None:
        plan = compare_memory(run)
        note = f"of {format_figure('peak_bytes', plan.planned)} planned" if plan else "main process"
        tiles.append(("Peak memory", format_figure("peak_bytes", memory), note))
    return tiles + _size_tiles(run)


def _headline_tile(headline: Headline) -> Tile:
    key, name, first, last, count = headline
    n = f"on {count:,} prompts" if count is not None else ""
    return name, f"{format_figure(key, first)} →\u00a0{format_figure(key, last)}", n


def even_columns(count: int) -> int:
    """Return in how many columns so many tiles leave the fewest gaps in the last row; the most of equal ones."""
    return min(range(3, 7), key=lambda columns: (-count % columns, -columns))


def _size_tiles(run: RunFiles) -> list[Tile]:
    tiles = []
    model: dict[str, Any] = mapping(run.manifest.get("model"))
    whole, trained = (as_number(model.get(key)) for key in ("parameters", "trainable_parameters"))
    if whole and trained is not None and 0 < whole < 1e18 and 0 <= trained < 1e18:
        share = f"{100 * trained / whole:.2g} % of {format_count(whole)}"
        tiles.append(("Weights that train", format_count(trained), share))
    if machine := mapping(run.manifest.get("machine")):
        gpus = [str(gpu.get("name")) for gpu in mappings(machine.get("gpus"))]
        name = f"{len(gpus)} × {gpus[0]}" if gpus else f"CPU, {machine.get('cores', '?')} cores"
        tiles.append(("Hardware", name[:60], f"{run.plan.get('world_size', 1)} process(es)"[:60]))
    return tiles
