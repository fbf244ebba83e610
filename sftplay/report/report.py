"""Write report.html: a run on one page, from what lies in its folder.

It measures nothing and needs no model; a run in any state gets its page, and what is missing is named on it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby
from pathlib import Path

from sftplay import __version__
from sftplay.atomic import write_text
from sftplay.config.resolved import flow
from sftplay.launch.run_folder import RunFolder
from sftplay.report.chart import Chart, ChartPlan, Curve, draw, logged
from sftplay.report.figures import (
    as_number,
    as_size,
    capitalized,
    find_name,
    format_course,
    format_figure,
    is_share,
)
from sftplay.report.page import Block, Section, Table, Tile, cut, list_facts, render_page
from sftplay.report.remarks import compare_memory, find_remarks, headlines
from sftplay.report.run_files import RunFiles, mapping, mappings
from sftplay.units import format_bytes, format_count, format_seconds

NAME = "report.html"
MOST_SOURCES, MOST_TOKENS = 40, 700

REPEAT = (
    "The command of the run, with the resolved config next to this page. The same config, data and versions on one"
    " machine give the same weights."
)

COLOURS = {"done": "good", "failed": "bad", "died": "bad"}
"""Colour of a run's state. Any other state is shown as a caution."""


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` into the run folder, over an older one; return its path. Raise OSError where the page cannot
    be written. Nothing in the folder's files raises.
    """
    path = folder.path / NAME
    write_text(path, render(RunFiles(folder)))
    return path


def render(run: RunFiles) -> str:
    """Return the page as HTML."""
    mode, task = (run.value(key) for key in ("tuning.mode", "task_mode"))
    method = "Training"
    if isinstance(mode, str) and isinstance(task, str):
        modes = {"full": "all weights", "lora": "LoRA", "qlora": "QLoRA, base in 4 bits"}
        rank = f", rank {run.value('tuning.lora.r')}" if mode in ("lora", "qlora") else ""
        method = f"{(run.task and run.task.title) or task}, {modes.get(mode, mode)}{rank},"
    steps = f" of {run.steps:,}" if run.steps else ""
    return render_page(
        f"{run.folder.name}: {run.state}",
        heading=run.folder.name,
        lead=[
            [("", f"{method} on "), ("code", run.value("model.name") or "a model that is not named")],
            [(COLOURS.get(run.state, "caution"), run.state), ("", f" at step {run.step:,}{steps}")],
        ],
        tiles=_tiles(run),
        sections=build_sections(run),
        footer=f"Written {time.strftime('%Y-%m-%d %H:%M')} by SFT-Play {__version__} from {run.folder.path}",
    )


def build_sections(run: RunFiles) -> list[Section]:
    """Return the sections of the page; what not every run has is imported for these runs alone."""
    top = [
        Section("warnings", "What to know first", [("remarks", find_remarks(run) or [("note", "Nothing to warn of.")])])
    ]
    below: list[Section] = []
    rewarded: list[ChartPlan] = []
    mixed: list[ChartPlan] = []
    if run.is_evaluated:
        from sftplay.report import evaluation

        below += evaluation.build_sections(run)
    if run.value("datasets") or run.history.sources or "perplexity" in run.evals:
        from sftplay.report import mixture

        below.append(Section("sources", "Sources", mixture.build_blocks(run)))
        mixed = mixture.plan(run)
    if run.learns_from_rewards or "reward" in run.history.values:
        from sftplay.report import rewards

        top.append(Section("learned", "What was learned", [("table", rewards.learned_table(run))]))
        below.append(Section("tries", "What the model tried, and its rewards", rewards.try_blocks(run)))
        if blocks := rewards.list_turns(run):
            below.append(Section("turns", "Turns", blocks))
        rewarded = rewards.plan(run)
    if run.parity:
        from sftplay.report import engines

        below.append(Section("engines", "Engines", engines.build_blocks(run)))
    part = run.task.part("report") if run.task else None
    part_sections: list[Section] = part.build_sections(run) if part else []
    shown = [
        chart for section in part_sections for kind, found in section.blocks if kind == "charts" for chart in found
    ]
    charts = draw(run, rewarded)
    charts += draw_curves(run, mixed, drawn={curve.key for chart in (*charts, *shown) for curve in chart.curves})
    marks = [
        "Thick lines: means over stretches of steps." if run.history.trend("loss") else "",
        f"Dashed lines: resumed after step {', '.join(f'{step:,.0f}' for step in run.resumed)}." if run.resumed else "",
        "Red bars: values that are not finite." if run.history.bad_steps else "",
    ]
    curves: list[Block] = [("charts", charts), ("note", " ".join(filter(None, marks)))]
    repeat: list[Block] = [("text", REPEAT), ("code", run.launch)] if run.launch else []
    return [
        *top,
        *part_sections,
        Section("curves", "Curves", curves if charts else [("text", "No step was logged yet.")]),
        *below,
        Section("data", "Data", data_blocks(run)),
        Section("sample", "What is learned of a row", sample_blocks(run)),
        Section("choices", "Chosen automatically", choice_blocks(run)),
        Section("config", "Config", config_blocks(run)),
        Section("facts", "Versions and machine", [("facts", list_facts(run.manifest, ("origins", "data")))]),
        Section("repeat", "How to repeat it", repeat),
    ]


CURVES = (
    ("Learning rate", "learning_rate", ("learning_rate",)),
    ("Gradient norm", "grad_norm", ("grad_norm",)),
    ("Speed", "tokens", ("tokens_per_s", "padded_tokens_per_s")),
    ("Time of a step", "step_s", ("step_s", "communication_max_s")),
    ("Memory of the main process", "_bytes", ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_rss_bytes")),
)
"""Title of a chart, its unit, and the figures of metrics.jsonl that it shows."""

UNDRAWN = (
    "loss", "held_out_reward", "held_out_pass", "label_tokens", "tokens_seen", "label_tokens_seen", "samples_per_s",
)  # fmt: skip
"""Figures that are part of another chart; and counts that only rise."""


def draw_curves(run: RunFiles, mixed: Sequence[ChartPlan], *, drawn: Collection[str]) -> list[Chart]:
    """Return loss, learning rate, gradient norm, speed and memory over the steps, then whatever else was logged.

    Figures that are `drawn` elsewhere and charts of zeros alone are left out.
    """
    values = run.history.values
    # These say nothing of a single process, or where nothing is padded.
    unneeded = ["exposed_communication_share", "communication_max_s"] if run.plan.get("world_size", 1) == 1 else []
    unneeded += ["padded_tokens_per_s"] if values.get("padded_tokens_per_s") == values.get("tokens_per_s") else []
    main = [(title, unit, [logged(run, key) for key in keys if key not in unneeded]) for title, unit, keys in CURVES]
    memory = main[-1][2]
    steps = [step for curve in memory for step, _ in curve.points]
    if steps and (compared := compare_memory(run)):
        level = [(step, compared[1]) for step in sorted({min(steps), max(steps)})]
        memory.append(Curve("planned_bytes", "planned at most", level, dashed=True))
    known = {*unneeded, *drawn, *UNDRAWN, *(key for _, _, keys in CURVES for key in keys)}
    others = [key for key in values if not (key in known or key.startswith(("reward/", "eval_")))][:8]
    main += [(capitalized(find_name(key)), key, [logged(run, key)]) for key in others]
    training = logged(run, "loss", name="training")
    plans: list[ChartPlan] = [("Loss", loss_unit([run]), [training, held_out_losses(run)]), *mixed, *main]
    if run.learns_from_rewards:
        plans = [*main, ("Loss of the update, near 0 by construction", "update_loss", [training])]
    return draw(run, [plan for plan in plans if any(value for curve in plan[2] for _, value in curve.points)])


def loss_unit(runs: Sequence[RunFiles]) -> str:
    """Return the unit of a chart of these runs' losses."""
    units = {"row_loss" if run.task and (run.task.compares_answers or run.task.gives_score) else "loss" for run in runs}
    return units.pop() if len(units) == 1 else "task_loss"


def held_out_losses(run: RunFiles) -> Curve:
    """Return held-out losses over the steps, that of the untrained model at step 0 included."""
    points = dict(run.curve("loss"))
    # Before and after, a sliding window measures documents otherwise than while training.
    if "perplexity" not in run.evals:
        before, after = (as_number(run.evals.get(side, {}).get("loss")) for side in ("before", "after"))
        if before is not None:
            points.setdefault(0.0, before)
        # With the best weights kept, the result is not that of the last step.
        keeps_best = run.value("train.best_metric") or run.value("train.early_stopping")
        if after is not None and run.state == "done" and not keeps_best:
            points.setdefault(float(run.step), after)
    return Curve("held_out_loss", "held-out", sorted(points.items()), dots=True)


def data_blocks(run: RunFiles) -> list[Block]:
    """Return what became of every row, per source, what else the data report says, and how long the rows are."""
    data, keys = run.data, ("read", "kept", "cut", "refused", "examples", "tokens", "trainable_token_share")
    if not data:
        return []
    rows = []
    for name, given in [*list(mapping(data.get("sources")).items())[:MOST_SOURCES], ("all", data)]:
        source = mapping(given)
        lost = [count for n in mapping(source.get("dropped")).values() if (count := as_number(n)) is not None]
        figures = [format_figure(key, source.get(key)) for key in keys]
        rows.append([name, source.get("path", ""), *figures, format_figure("n", sum(lost))])
    head = ["Source", "File", "Read", "Kept", "Cut", "Refused", "Examples", "Tokens", "Learned", "Dropped"]
    facts = list_facts(data, (*keys, "path", "sources", "length_histogram", "notes", "warnings", "files"))
    lengths = mapping(data.get("length_histogram")).items()
    counts = [(edge, n) for edge, count in lengths if (n := as_number(count)) is not None and 0 <= n < math.inf]
    most = max((n for _, n in counts), default=0.0)
    bars = [[edge.replace("<=", "≤ "), f"{n / most:.1%}", format_figure("n", n)] for edge, n in counts[:40] if most]
    histogram = Table(head=["Tokens a row", "", "Rows"], rows=bars, caption="Lengths before cutting", kinds=" bn")
    return [("table", Table(head=head, rows=rows, kinds=" cnnnnnnnn")), ("facts", facts), ("table", histogram)]


def sample_blocks(run: RunFiles) -> list[Block]:
    """Return the row of samples/masked.json as stretches of tokens that are learned or not; a long row is cut."""
    given = run.sample.get("tokens")
    pairs = [p for p in given if isinstance(p, list) and len(p) == 2] if isinstance(given, list) else []
    if not pairs:
        return []
    tokens = [(bool(learned), cut(text, 200).replace("\n", "⏎\n")) for text, learned in pairs]
    stretches = groupby(tokens[:MOST_TOKENS], key=lambda token: token[0])
    source = f"{cut(run.sample['source'], 300)}: " if run.sample.get("source") else ""
    counts = f"{len(tokens):,} tokens, {sum(learned for learned, _ in tokens):,} of them learned (marked, bold and"
    shown = f" The first {MOST_TOKENS} are shown." if len(tokens) > MOST_TOKENS else ""
    return [
        ("text", f"{source}{counts} underlined); all else is only read.{shown}"),
        ("tokens", [(learned, [text for _, text in stretch]) for learned, stretch in stretches]),
    ]


def choice_blocks(run: RunFiles) -> list[Block]:
    """Return what was chosen automatically, and why; the memory plan where there is one."""
    chosen = [
        [decision.get("key", ""), flow(decision.get("value")), decision.get("reason", "")]
        for decision in mappings(run.plan.get("decisions"))[:100]
    ]
    sizes = [(k.replace("_", " "), as_size(v)) for k, v in mapping(run.plan.get("components")).items()]
    rows = [[name, format_bytes(size), "", ""] for name, size in sizes if size is not None]
    if compared := compare_memory(run):
        what, planned, most = compared
        rows.insert(0, [what, format_bytes(planned), format_bytes(most), f"{most / planned:.0%}"])
    head = ["", "Planned", "Held", "Of the plan"]
    return [
        ("table", Table(head=["Key", "Value", "Why"], rows=chosen, kinds="cc", stacks=True)),
        ("table", Table(head=head, rows=rows, caption="Memory, planned and held", kinds=" nnn")),
    ]


def config_blocks(run: RunFiles) -> list[Block]:
    """Return every value that was set, with its origin; and the defaults."""
    rows = [[key, flow(setting.value), setting.origin] for key, setting in run.settings.items()]
    given, rest = [row for row in rows if row[2]], [row[:2] for row in rows if not row[2]]
    caption = f"{len(rest)} values at their default"
    return [
        ("table", Table(head=["Key", "Value", "Set by"], rows=given, kinds="cc", stacks=True)),
        ("folded", Table(head=["Key", "Value"], rows=rest, kinds="cc", stacks=True, caption=caption)),
    ]


def _tiles(run: RunFiles) -> list[Tile]:
    """The figures one looks for first."""

    def show(key: str, name: str, *, ends: tuple[object, object], n: object = None) -> Tile:
        text = format_figure(key, ends[1]) if ends[0] is None else format_course(key, ends[0], last=ends[1])
        return name, text.replace("→ ", "→\u00a0"), "" if n is None else f"on {format_figure('n', n)} prompts"

    before, after = run.evals.get("before", {}), run.evals.get("after", {})
    tiles = [show(key, name, ends=(first, last), n=n) for key, name, first, last, n in headlines(run)]
    for key in () if tiles else [*[key for key in after if is_share(key)][:2], "loss"]:
        if key in after:
            name = "Held-out loss" if key == "loss" else capitalized(find_name(key))
            n = None if key == "loss" else after.get("n")
            tiles.append(show(key, name, ends=(before.get(key), after[key]), n=n))
    history = run.history
    key, name = ("reward", "Sampled reward") if run.learns_from_rewards else ("loss", "Training loss")
    if key in history.values:
        tiles.append(show(key, name, ends=(history.values[key][0], history.values[key][-1])))
    seconds = as_size(run.status.get("train_seconds"))
    if seconds is not None:
        tiles.append(("Training time", format_seconds(seconds), "the last attempt" if len(run.attempts) > 1 else ""))
    if any("price_per_hour" in attempt for attempt in run.attempts):
        from sftplay.launch.cost import format_cost

        spent, cost = run.spent
        if spent is not None and cost is not None:
            tiles.append(("Cost", format_cost(cost), f"of {format_seconds(spent)}, loading included"))
    speed = history.middle("tokens_per_s")
    if speed is not None:
        tiles.append(("Tokens per second", format_figure("tokens", speed), "median"))
    memory = as_size(history.largest("peak_bytes") or history.largest("peak_rss_bytes"))
    if memory is not None:
        compared = compare_memory(run)
        note = f"of {format_bytes(compared[1])} planned" if compared else "main process"
        tiles.append(("Peak memory", format_bytes(memory), note))
    model = mapping(run.manifest.get("model"))
    whole, trained = (as_size(model.get(key)) for key in ("parameters", "trainable_parameters"))
    if whole and trained is not None:
        percent = 100 * trained / whole
        share = f"{f'{percent:.2g}' if percent < 99.5 else '100'} % of {format_count(whole)}"
        tiles.append(("Weights that train", format_count(trained), share))
    if machine := mapping(run.manifest.get("machine")):
        gpus = Counter(str(gpu.get("name")) for gpu in mappings(machine.get("gpus")))
        name = ", ".join(f"{n} × {kind}" for kind, n in gpus.items()) or f"CPU, {machine.get('cores', '?')} cores"
        tiles.append(("Hardware", name[:60], f"{run.plan.get('world_size', 1)} process(es)"[:60]))
    return tiles
