"""Several runs on one page: what was set differently, what came of it, and their curves in the same charts.

It reads run folders only; nothing is trained or measured, and a run in any state has its row.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from sftplay import __version__
from sftplay.atomic import write_text
from sftplay.config.resolved import flow
from sftplay.errors import ConfigError
from sftplay.launch.cost import format_cost
from sftplay.launch.run_folder import RunFolder
from sftplay.report.chart import Chart, Curve, logged, measured
from sftplay.report.compare import UNTRAINED_KEYS, describe_versions, list_results, same_held_out
from sftplay.report.figures import as_size, capitalized, find_name, format_course, format_figure, is_share
from sftplay.report.page import Block, Remark, Section, Table, Tile, cut, render_page
from sftplay.report.report import held_out_losses, loss_unit
from sftplay.report.run_files import RunFiles
from sftplay.units import format_bytes, format_seconds

MOST_CURVES = 16
"""Curves of a chart; a page has eight colours, and the same eight dashed."""

MOST_SETTINGS, MOST_FIGURES, MOST_SHARES = 8, 12, 3
"""Columns of settings and of figures before and after; of the latter, those that the table of runs has too."""

NOTHING = "–"
NO_RESULT = ("n", "seconds", "step", "documents", "bytes", "tokens")

_FOOTER = re.compile(rb"<footer>Written [^<]{16} by SFT-Play [^<]+ from \d+ runs</footer>")
_SIDE = re.compile(r"(.*?)(before|after) (.+)")


def write_runs_page(
    folders: Sequence[RunFolder], path: Path, *, title: str, extra_sections: Sequence[Section] = ()
) -> Path:
    """Write the page of these runs, with `extra_sections` above its own; return its path.

    An older page of runs is written over. Raise ConfigError where another file lies there, and OSError where the page
    cannot be written. Nothing in the folders' files raises.
    """
    if (path.exists() or path.is_symlink()) and not _is_runs_page(path):
        raise ConfigError("is there, and is no page of several runs", where=str(path), fix="name another with OUT=")
    runs = [RunFiles(folder) for folder in folders]
    models = list(dict.fromkeys(str(run.value("model.name") or "a model that is not named") for run in runs))
    page = render_page(
        title,
        heading=title,
        lead=[[("", f"{len(runs)} runs of "), ("code", ", ".join(models))]],
        tiles=_tiles(runs),
        sections=[*extra_sections, *several_sections(runs)],
        footer=f"Written {time.strftime('%Y-%m-%d %H:%M')} by SFT-Play {__version__} from {len(runs)} runs",
    )
    write_text(path, page)
    return path


def _is_runs_page(path: Path) -> bool:
    with suppress(OSError):
        return bool(_FOOTER.search(path.read_bytes()))
    return False


def several_sections(runs: Sequence[RunFiles]) -> list[Section]:
    """Return what to know first, the table of runs, their figures before and after, and their curves."""
    names = name_runs(runs)
    charts = _draw(runs, names)
    curves: list[Block] = [("charts", charts)] if charts else [("text", "No step was logged yet.")]
    if len(runs) > MOST_CURVES:
        curves.append(("note", f"The curves of the first {MOST_CURVES} of {len(runs)} runs are drawn."))
    warnings: list[Remark] = [("warn", f"{text}.") for text in _warnings(runs, names)]
    return [
        Section("warnings", "What to know first", [("remarks", warnings or [("note", "Nothing to warn of.")])]),
        Section("runs", "Runs", _run_blocks(runs, names)),
        Section("figures", "Figures before and after", _figure_blocks(runs, names)),
        Section("curves", "Curves", curves),
    ]


def name_runs(runs: Sequence[RunFiles]) -> list[str]:
    """Return the runs' names; the folders of those that share one."""
    names = [run.folder.name for run in runs]
    return [str(run.folder.path) if names.count(run.folder.name) > 1 else run.folder.name for run in runs]


def list_differences(runs: Sequence[RunFiles]) -> list[str]:
    """Return the keys that do not have one value in all runs; first those that a user has set in one of them."""
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.settings) if key not in UNTRAINED_KEYS]
    differing = [key for key in keys if len({repr(run.value(key)) for run in runs}) > 1]

    def is_decided(key: str) -> bool:
        return all(run.settings[key].origin in ("", "auto") for run in runs if key in run.settings)

    return sorted(differing, key=is_decided)


def _run_blocks(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Block]:
    pairs, keys = _pair_results(runs), list_differences(runs)
    shares = [figure for figure in pairs if is_share(figure.rpartition(" ")[2])][:MOST_SHARES]
    columns: list[tuple[str, str, Sequence[str]]] = [
        *((key, "c", [_setting(run, key) for run in runs]) for key in keys[:MOST_SETTINGS]),
        ("Training loss", "n", [format_figure("loss", run.history.newest("loss")) for run in runs]),
        ("Sampled reward", "n", [format_figure("reward", run.history.newest("reward")) for run in runs]),
        ("Held-out loss", "n", [format_figure("loss", _last_held_out(run)) for run in runs]),
        *((_title(figure), "n", [_course(figure, None, after) for _, after in pairs[figure]]) for figure in shares),
        ("State", " ", [run.state for run in runs]),
        ("Steps", "n", [f"{run.step:,}" + (f" of {run.steps:,}" if run.steps else "") for run in runs]),
        ("Time", "n", [_show(format_seconds, run.spent[0]) for run in runs]),
        ("Cost", "n", [_show(format_cost, run.spent[1]) for run in runs]),
        ("Peak memory", "n", [_show(format_bytes, _peak_bytes(run)) for run in runs]),
    ]
    known = [(title, kind, cells) for title, kind, cells in columns if kind == "c" or set(cells) != {NOTHING}]
    table = Table(
        head=["Run", *(title for title, _, _ in known)],
        rows=[[name, *(cells[n] for _, _, cells in known)] for n, name in enumerate(names)],
        kinds=" " + "".join(kind for _, kind, _ in known),
    )
    rest = [[key, *(_setting(run, key) for run in runs)] for key in keys]
    caption = f"All {len(keys)} settings that differ"
    folded = Table(head=["Key", *names], rows=rest, kinds="c" * (len(runs) + 1), caption=caption)
    return [("table", table), *([("folded", folded)] if len(keys) > MOST_SETTINGS else [])]


def _show(write: Callable[[float], str], value: float | None) -> str:
    return NOTHING if value is None else write(value)


def _title(figure: str) -> str:
    """Return a column's title for a figure such as `loss` or `anchor-chats exact_match`."""
    tag, _, key = figure.rpartition(" ")
    return capitalized(f"{tag} {find_name(key)}".strip())


def _course(figure: str, before: float | None, after: float | None) -> str:
    key = figure.rpartition(" ")[2]
    return format_figure(key, after) if before is None else format_course(key, before, last=after)


def _setting(run: RunFiles, key: str) -> str:
    return flow(run.value(key)) if key in run.settings else NOTHING


def _last_held_out(run: RunFiles) -> float | None:
    points = held_out_losses(run).points
    return points[-1][1] if points else None


def _peak_bytes(run: RunFiles) -> float | None:
    return as_size(run.history.largest("peak_bytes") or run.history.largest("peak_rss_bytes"))


def _pair_results(runs: Sequence[RunFiles]) -> dict[str, list[tuple[float | None, float | None]]]:
    """Return figure -> its value before and after in each run."""
    found: dict[str, list[dict[str, float]]] = {}
    for n, run in enumerate(runs):
        for name, value in list_results(run).items():
            match = _SIDE.fullmatch(name)
            figure = f"{match[1].rstrip('-')} {match[3]}".strip() if match else name
            if figure.rpartition(" ")[2] not in NO_RESULT:
                found.setdefault(figure, [{} for _ in runs])[n][match[2] if match else "after"] = value
    return {name: [(row.get("before"), row.get("after")) for row in rows] for name, rows in found.items()}


def _figure_blocks(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Block]:
    pairs = _pair_results(runs)
    shown = list(pairs)[:MOST_FIGURES]
    rows = [[name, *(_course(figure, *pairs[figure][n]) for figure in shown)] for n, name in enumerate(names)]
    table = Table(head=["Run", *map(_title, shown)], rows=rows if shown else [], kinds=" " + "n" * len(shown))
    more = f"{len(pairs) - len(shown)} more are in the runs' own reports." if len(pairs) > len(shown) else ""
    return [("table", table), ("note", more)]


def _draw(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Chart]:
    """Return the charts in which a run has a point, with a curve for each of these runs."""
    labels = all(run.learns_from_rewards for run in runs)
    shares = dict.fromkeys(key for run in runs for _, figures in run.measured() for key in figures if is_share(key))
    headlines = {key: name for run in runs if run.task for key, name in run.task.headlines}
    plans: list[tuple[str, str, Callable[[RunFiles], Curve]]] = [
        ("Training loss", loss_unit(runs), lambda run: logged(run, "loss")),
        ("Held-out loss", loss_unit(runs), held_out_losses),
        ("Sampled reward", "reward", lambda run: logged(run, "reward")),
        *(
            (capitalized(headlines.get(key, find_name(key))), key, lambda run, key=key: measured(run, key, name=key))
            for key in [*headlines, *(key for key in shares if key not in headlines)][:6]
        ),
        ("Learning rate", "learning_rate", lambda run: logged(run, "learning_rate")),
    ]
    charts = []
    for title, unit, find in plans[labels:]:
        found = [(n, name, find(run)) for n, (run, name) in enumerate(zip(runs[:MOST_CURVES], names, strict=False))]
        curves = [
            replace(curve, key=f"run-{n + 1}", name=cut(name, 60), dashed=n >= MOST_CURVES // 2, colour=n)
            for n, name, curve in found
            if curve.points
        ]
        if any(value for curve in curves for _, value in curve.points):
            charts.append(Chart(title=title, unit=unit, curves=curves, last_step=max(run.step for run in runs)))
    return charts


def _warnings(runs: Sequence[RunFiles], names: Sequence[str]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        doubts = same_held_out(runs[0], run)[1] if run is not runs[0] else []
        final = [] if run.state == "done" else [f"{run.state}, so figures are not final"]
        for text in (*final, *run.troubles, *(f"next to {names[0]}, {text}" for text in doubts)):
            found.setdefault(text, []).append(name)
    for text, concerned in found.items():
        yield f"{', '.join(concerned)}: {text}"
    if len({describe_versions(run)["machine"] for run in runs}) > 1:
        yield "The machines differ or are not known: speed, time and memory do not compare"


def _compares(runs: Sequence[RunFiles]) -> bool:
    """Return whether there are losses, and none is known to be of other rows, of other tokens or of another task."""
    doubts = (same_held_out(runs[0], run) for run in runs[1:])
    is_one_task = len({run.value("task_mode") for run in runs}) == 1
    return is_one_task and not any(same is not None and texts for same, texts in doubts)


def _tiles(runs: Sequence[RunFiles]) -> list[Tile]:
    done = [(run, name) for run, name in zip(runs, name_runs(runs), strict=True) if run.state == "done"]
    tiles = [("Runs", str(len(runs)), f"{len(done)} done")]
    found = [(loss, name, run) for run, name in done if (loss := _last_held_out(run)) is not None]
    losses = [(loss, name) for loss, name, _ in found]
    if _compares([run for _, _, run in found]) and not all(run.learns_from_rewards for run in runs):
        tiles.append(("Lowest held-out loss", format_figure("loss", min(losses)[0]), cut(min(losses)[1], 60)))
    for title, n, write in (("Time in all", 0, format_seconds), ("Cost in all", 1, format_cost)):
        known = [spent for run in runs if (spent := run.spent[n]) is not None]
        if known:
            tiles.append(
                (title, write(sum(known)), "" if len(known) == len(runs) else f"of {len(known)} of {len(runs)} runs")
            )
    return tiles
