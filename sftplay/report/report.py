"""Writes report.html: a run on one page that needs neither network nor server, from what lies in its folder.

It measures nothing and needs no model; a run in any state gets its page, and what is missing is named on it."""

from __future__ import annotations

import math
import time
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from sftplay import __version__
from sftplay.atomic import write_text
from sftplay.config.resolved import flow
from sftplay.launch.run_folder import RunFolder
from sftplay.report.figures import (
    as_bytes,
    as_number,
    capitalized,
    change,
    find_name,
    format_figure,
    interval,
    is_better,
    is_share,
)
from sftplay.report.learned import (
    Headline,
    build_charts,
    compare_memory,
    find_task_report,
    headlines,
    learned_table,
    learns_from_rewards,
    pick_answers,
    pick_tries,
    resumed_steps,
    reward_charts,
)
from sftplay.report.mixture import find_anchors, forgetting, mixture_tables, source_charts
from sftplay.report.page import Table, cut, render_page
from sftplay.report.remarks import find_remarks
from sftplay.report.run_files import RunFiles, mapping, mappings, read_run_files
from sftplay.units import format_bytes, format_count, format_seconds

MOST_SOURCES, MOST_TABLES, MOST_TOKENS = 40, 20, 700


Fact = tuple[str, Any]
"""A name with its value."""


class Bars(NamedTuple):
    """One metric: for each side its name, the width of its bar, its figure."""

    name: str
    rows: list[tuple[str, str, str]]


class Sample(NamedTuple):
    """One row as stretches of tokens: whether these are learned, and their texts. A long row is cut."""

    source: str
    stretches: list[tuple[bool, list[str]]]
    n_tokens: int
    n_learned: int


def evaluation_tables(run: RunFiles) -> list[Table]:
    """Return figures before and after in one table, then those of other evaluations."""
    pairs, others = _split_evaluations(run)
    groups = {_name_rows(prefix): _pair_rows(run, prefix) for prefix in pairs[:MOST_TABLES]}
    listed = [[name if n == 0 else "", *row] for name, rows in groups.items() for n, row in enumerate(rows)]
    first = int(len(groups) == 1)  # a first column says which rows were measured where more than one kind was
    note = "below a share its 95 % interval" if "<small>" in str(listed) else ""
    caption = "; ".join(filter(None, [*list(groups)[:first], note]))
    head = ["Rows", "Figure", "Before", "After", "Change"][first:]
    tables = [Table(head=head, rows=[row[first:] for row in listed], caption=caption, kinds="  nnn"[first:])]
    for name in others[:MOST_TABLES]:
        figures = list(_flat(run.evals[name]).items())[:60]
        cells = [
            (key, str(value) if as_number(value) is None else format_figure(key.rpartition(".")[2], value))
            for key, value in figures
        ]
        rows = [[cut(key, 80), cut(cell, 200)] for key, cell in cells]
        tables.append(Table(head=["Figure", "Value"], rows=rows, caption=f"eval/{name}.json", kinds=" n"))
    return [table for table in tables if table.rows]


def evaluation_bars(run: RunFiles) -> list[Bars]:
    """Return the metrics before and after side by side as bars: shares of 100 %, losses of the larger."""
    bars = []
    for prefix in _split_evaluations(run)[0]:
        sides = {side: run.evals.get(f"{prefix}{side}", {}) for side in ("before", "after")}
        for key in [*sides["after"], *(key for key in sides["before"] if key not in sides["after"])]:
            if not (is_share(key) or key == "loss"):
                continue
            values = {side: as_number(figures.get(key)) for side, figures in sides.items()}
            known = {side: value for side, value in values.items() if value is not None and 0 <= value < 1e9}
            whole = 1.0 if is_share(key) else max(known.values(), default=0.0)
            if known and whole:
                where = f"{_name_rows(prefix)}: " if prefix else ""
                rows = [
                    (side, f"{min(100.0, 100 * v / whole):.1f}%", format_figure(key, v)) for side, v in known.items()
                ]
                bars.append(Bars(cut(capitalized(f"{where}{find_name(key)}"), 80), rows))
    return bars[:MOST_TABLES]


def _split_evaluations(run: RunFiles) -> tuple[list[str], list[str]]:
    """The beginnings of names that end in before or after, and the other names."""
    pairs = {name for name in run.evals if name in ("before", "after") or name.endswith(("-before", "-after"))}
    others = sorted(name for name in set(run.evals) - pairs if not name.startswith(("step-", "perplexity")))
    return sorted({name.removesuffix("after").removesuffix("before") for name in pairs}), others


def _flat(figures: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in figures.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) and not above else {f"{above}{key}": value}
    return flat


def _name_rows(prefix: str) -> str:
    return {"": "Held-out rows", "test-": "Test rows"}.get(prefix, prefix.rstrip("-").replace("anchor-", "chats of "))


def _pair_rows(run: RunFiles, prefix: str) -> list[list[str]]:
    sides = before, after = [run.evals.get(f"{prefix}{name}", {}) for name in ("before", "after")]
    rows = []
    elsewhere = ("hints", "diagnosis", "segments", "halting_q", "pass_at", "pass_at_partial")  # each has a table
    for key in [key for key in (after | before) if key not in elsewhere][:60]:
        cells = []
        for figures in sides:
            share, count, note = as_number(figures.get(key)), as_number(figures.get("n")), Markup()
            if key == "exact_match" and share is not None and count is not None and 0 <= share <= 1 <= count < 1e15:
                low, high = interval(share, int(count))  # of 95 %
                note = Markup("<br><small>{:.1f} – {:.1f}</small>").format(100 * low, 100 * high)
            cells.append(Markup("{}{}").format(format_figure(key, figures.get(key)), note))
        better = is_better(key, before.get(key), after=after.get(key))
        moved = "" if key == "n" else change(key, before.get(key), after=after.get(key))
        verdict = {True: ' <b class="good">better</b>', False: ' <b class="bad">worse</b>', None: ""}[better]
        rows.append([cut(capitalized(find_name(key)), 80), *cells, Markup("{}" + verdict).format(moved)])
    return rows


def data_tables(run: RunFiles) -> list[Table]:
    """Return what became of every row, per source, and how long the rows are."""
    if not run.data:
        return []
    rows = []
    for name, given in [*list(mapping(run.data.get("sources")).items())[:MOST_SOURCES], ("all", run.data)]:
        source = mapping(given)
        dropped = sum(count for n in mapping(source.get("dropped")).values() if (count := as_number(n)) is not None)
        counts = [source.get(key) for key in ("read", "kept", "cut", "refused", "examples", "tokens")]
        cells = [format_figure("n", count) for count in (*counts, dropped)]
        learned = format_figure("trainable_token_share", source.get("trainable_token_share"))
        rows.append([cut(name.replace("_", " "), 80), *cells, learned])
    head = ["Source", "Read", "Kept", "Cut", "Refused", "Examples", "Tokens", "Dropped", "Learned"]
    return [Table(head=head, rows=rows, kinds=" nnnnnnnn")]


def data_facts(run: RunFiles) -> list[Fact]:
    """Return what else the data report says."""
    data = run.data
    counted = ("duplicates", "near_duplicates", "prompts_with_several_answers", "split_records", "typed_specials")
    sources, dropped = list(mapping(data.get("sources")).items())[:MOST_SOURCES], mapping(data.get("dropped"))
    rows: list[Fact] = [(f"{name}, file", mapping(source).get("path")) for name, source in sources]
    rows += [(f"dropped: {why}".replace("_", " "), format_figure("n", n)) for why, n in dropped.items()]
    rows += [(find_name(key), format_figure("n", data[key])) for key in counted if as_number(data.get(key))]
    rows += [
        ("end of turn is learned in", format_figure("eos_share", data.get("eos_in_loss_share"))),
        ("longest row, tokens", format_figure("n", data.get("longest_tokens"))),
        ("limit, tokens", format_figure("n", data.get("max_seq_len"))),
        ("mask found by", data.get("mask_method")),
        ("template, sha256", data.get("template_hash")),
        ("rows and options, fingerprint", data.get("fingerprint")),
    ]
    return _without_empty(rows[:80]) if data else []


def _without_empty(rows: list[Fact]) -> list[Fact]:
    return [(name, value) for name, value in rows if value not in (None, "", [], {})]


def histogram(run: RunFiles) -> Table | None:
    """Return how many rows there are of each length; None when that is not known."""
    counts = mapping(run.data.get("length_histogram"))
    bars = [(edge, n) for edge, count in counts.items() if (n := as_number(count)) is not None and 0 <= n < math.inf]
    most = max((n for _, n in bars), default=0)
    if not most:
        return None
    rows = [
        [cut(edge.replace("<=", "≤ "), 40), f"{100 * n / most:.1f}%", format_figure("n", n)] for edge, n in bars[:40]
    ]
    return Table(head=["Tokens a row", "", "Rows"], rows=rows, caption="Lengths before cutting", kinds=" bn")


def build_sample(run: RunFiles) -> Sample | None:
    """Return the row of samples/masked.json; None when there is none."""
    given = run.sample.get("tokens")
    pairs = [p for p in given if isinstance(p, list) and len(p) == 2] if isinstance(given, list) else []
    if not pairs:
        return None
    tokens = [(bool(learned), cut(text, 200).replace("\n", "⏎\n")) for text, learned in pairs]
    stretches = groupby(tokens[:MOST_TOKENS], key=lambda token: token[0])
    return Sample(
        source=cut(run.sample.get("source") or "", 300),
        stretches=[(learned, [text for _, text in stretch]) for learned, stretch in stretches],
        n_tokens=len(tokens),
        n_learned=sum(learned for learned, _ in tokens),
    )


def choice_tables(run: RunFiles) -> list[Table]:
    """Return what was chosen automatically, and why; the memory plan where there is one."""
    chosen = []
    for decision in mappings(run.plan.get("decisions"))[:100]:
        value = decision.get("value")
        text = flow(value) if isinstance(value, str | int | float | bool | None) else str(value)
        chosen.append([cut(decision.get("key", ""), 100), cut(text, 200), cut(decision.get("reason", ""), 400)])
    held = []
    if memory := compare_memory(run):
        share = f"{memory.held / memory.planned:.0%}"
        held = [[memory.what, format_bytes(memory.planned), format_bytes(memory.held), share]]
    sizes = [(k, as_bytes(v)) for k, v in mapping(run.plan.get("components")).items()]
    parts = [[cut(k.replace("_", " "), 80), format_bytes(n)] for k, n in sizes if n is not None]
    head = ["", "Planned", "Held", "Of the plan"]
    tables = [
        Table(head=["Key", "Value", "Why"], rows=chosen, kinds="cc", stacks=True),
        Table(head=head, rows=held, caption="Memory, planned and held", kinds=" nnn"),
        Table(head=["Part", "Bytes of a process"], rows=parts[:60], caption="Memory as planned", kinds=" n"),
    ]
    return [table for table in tables if table.rows]


def config_tables(run: RunFiles) -> tuple[Table, Table]:
    """Return every value that was set, with its origin; and the defaults."""
    rows = [[cut(s.key, 120), cut(s.text, 400), cut(s.origin, 200)] for s in run.settings.values()]
    given, rest = [row for row in rows if row[2]], [row[:2] for row in rows if not row[2]]
    return (
        Table(head=["Key", "Value", "Set by"], rows=given, kinds="cc", stacks=True),
        Table(head=["Key", "Value"], rows=rest, kinds="cc", stacks=True),
    )


def version_facts(run: RunFiles) -> list[Fact]:
    """Return what one needs to know to repeat the run: versions, machine, hashes."""
    manifest, machine = run.manifest, mapping(run.manifest.get("machine"))
    gpus = [str(gpu.get("name", gpu)) for gpu in mappings(machine.get("gpus"))]
    model = mapping(manifest.get("model"))
    ram, dtypes = as_bytes(machine.get("ram_bytes")), model.get("trainable_dtypes")
    rows: list[Fact] = [
        ("kit", manifest.get("kit")),
        ("git commit of the kit", manifest.get("git_commit")),
        ("python", manifest.get("python")),
        ("system", machine.get("system")),
        ("GPUs", ", ".join(gpus[:64]) or f"none: {machine.get('gpu_reason', 'not known')}"),
        ("cores", machine.get("cores")),
        ("memory", format_bytes(ram) if ram is not None else None),
        ("processes", run.plan.get("world_size")),
        ("seed", manifest.get("seed")),
        ("weights", _count(model.get("parameters"))),
        ("weights that train", _count(model.get("trainable_parameters"))),
        ("number format of those", ", ".join(map(str, dtypes)) if isinstance(dtypes, list) else None),
        ("order of the rows, sha256", manifest.get("order_sha256")),
        ("template, sha256", manifest.get("template_sha256")),
    ]
    rows += [(name, version) for name, version in mapping(machine.get("libraries")).items()][:60]
    return _without_empty(rows) if manifest else []


def _count(value: object) -> str | None:
    number = as_number(value)
    return None if number is None or not math.isfinite(number) else f"{format_count(number)} ({number:,.0f})"


NAME = "report.html"
COLOURS = {"done": "good", "failed": "bad", "interrupted": "bad"}
"""Colour of a run's state. Any other state is shown as a caution."""

Tile = tuple[str, str, str]
"""Name, value, a note below it."""


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run folder, over an older one; return its path. Raise OSError where the page cannot
    be written. Nothing in the folder's files raises.
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
    sets = [("answers", "Answers before and after", "")]
    sets += [(f"answers-{n}", f"Answers to {name}", f"anchor-{name}-") for n, name in enumerate(find_anchors(run), 1)]
    sets += [("test-answers", "Answers to the test rows", "test-")]
    if run.task and run.task.turns == 2:  # episodes have a table of their own
        sets = []
    answers = [(anchor, title, found) for anchor, title, prefix in sets if (found := pick_answers(run, prefix))]
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
        evaluation=evaluation_tables(run),
        bars=evaluation_bars(run),
        **task,
        sources=mixture_tables(run),
        forgetting=forgetting(run),
        answers=answers,
        tries=pick_tries(run),
        data=data_tables(run),
        data_facts=data_facts(run),
        histogram=histogram(run),
        sample=build_sample(run),
        choices=choice_tables(run),
        config=config_tables(run),
        versions=version_facts(run),
        written=time.strftime("%Y-%m-%d %H:%M"),
        kit_version=__version__,
    )


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


def _headline_tile(headline: Headline) -> Tile:
    key, name, first, last, count = headline
    n = f"on {count:,} prompts" if count is not None else ""
    return name, f"{format_figure(key, first)} →\u00a0{format_figure(key, last)}", n


def even_columns(count: int) -> int:
    """Return in how many columns so many tiles leave the fewest gaps in the last row; the most of equal ones."""
    return min(range(3, 7), key=lambda columns: (-count % columns, -columns))
