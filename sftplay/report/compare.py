"""Two runs side by side: what was set differently, what came out, and whether the figures may be compared at all.

It reads run folders only; nothing is trained or measured.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

from sftplay.launch.run_folder import RunFolder
from sftplay.report.figures import change, format_figure, name_of
from sftplay.report.history import RECENT_LOSS, as_number
from sftplay.report.mixture import anchors_of, held_out_sizes, source_figures, window_of
from sftplay.report.run_files import RunFiles, answer_rows, mapping, mappings, read_run_files

NOT_COMPARED = ("run_name", "output_dir", "train.resume")
"""Config keys that say nothing about what was trained."""

WIDTH = 34
"""Characters of a value in the table; longer ones are cut."""

Row = dict[str, Any]


def compare_runs(a: RunFolder, b: RunFolder) -> dict[str, Any]:
    """What differs between two runs, for `comparison_table` and for `--json`.

    `config` and `versions` list only what differs: `{key, a, b}`, null where a run lacks it. `figures` and `training`
    list every figure that one of them has: `{name, a, b, difference}`, the difference b - a or null. `same_held_out` is
    true, false, or null where it cannot be known; where it is not true, `warnings` says so.
    """
    one, two = read_run_files(a), read_run_files(b)
    same, doubts = _same_held_out(one, two)
    return {
        "runs": {"a": _run(one), "b": _run(two)},
        "config": _config(one, two),
        "figures": _figures(one, two),
        "training": _training(one, two),
        "data": _data(one, two),
        "same_held_out": same,
        "versions": _different(_versions(one), _versions(two)) if one.manifest and two.manifest else [],
        "warnings": [*doubts, *_warnings(one, two)],
    }


def comparison_table(comparison: dict[str, Any]) -> str:
    """The comparison for a terminal, figures rounded."""
    runs = comparison["runs"]
    lines = ["", "runs"]
    lines += [f"  {side}  {_run_text(runs[side])}" for side in ("a", "b")]
    lines += [
        f"\n  warning  {text}" if i == 0 else f"  warning  {text}" for i, text in enumerate(comparison["warnings"])
    ]
    for title in ("figures", "training"):
        rows = [_figure_cells(row) for row in comparison[title]]
        lines += _block(title, ["", "a", "b", "b - a"], rows=rows)
    for title in ("config", "data", "versions"):
        rows = [[row["key"], _brief(row["a"]), _brief(row["b"])] for row in comparison[title] if row["a"] != row["b"]]
        lines += _block(title, ["", "a", "b"], rows=rows) if rows else ["", f"{title}: no difference"]
    return "\n".join(lines[1:])


def _run(run: RunFiles) -> Row:
    path = str(run.folder.path)
    return {"name": run.folder.name, "path": path, "state": run.state, "step": run.step, "steps": run.steps}


def _run_text(run: Row) -> str:
    steps = f" of {run['steps']:,}" if run["steps"] else ""
    return f"{run['path']}  ({run['state']} at step {run['step']:,}{steps})"


def _config(one: RunFiles, two: RunFiles) -> list[Row]:
    sides = [{key: s.value for key, s in run.settings.items() if key not in NOT_COMPARED} for run in (one, two)]
    return _different(*sides)


def _different(one: dict[str, Any], two: dict[str, Any]) -> list[Row]:
    rows = [{"key": key, "a": one.get(key), "b": two.get(key)} for key in _union(one, two)]
    return [row for row in rows if not _equal(row["a"], row["b"])]


def _equal(one: object, two: object) -> bool:
    return type(one) is type(two) and one == two


def _figures(one: RunFiles, two: RunFiles) -> list[Row]:
    tags = [tag for tag in _union(one.evals, two.evals) if not tag.startswith(("step-", "perplexity"))]
    tags.sort(key=lambda tag: (tag not in ("after", "before"), tag))
    rows = []
    for tag in tags:
        sides = [run.evals.get(tag, {}) for run in (one, two)]
        rows += [_row(f"{tag} {name}", sides[0].get(name), two=sides[1].get(name)) for name in _union(*sides)]
    sides = [dict(source_figures(run)) for run in (one, two)]
    rows += [_row(name, sides[0].get(name), two=sides[1].get(name)) for name in _union(*sides)]
    return [row for row in rows if row["a"] is not None or row["b"] is not None]


def _union(one: dict[str, Any], two: dict[str, Any]) -> list[str]:
    return [*one, *(name for name in two if name not in one)]


def _row(name: str, one: object, *, two: object) -> Row:
    a, b = (_finite(as_number(value)) for value in (one, two))
    return {"name": name, "a": a, "b": b, "difference": None if a is None or b is None else b - a}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def _training(one: RunFiles, two: RunFiles) -> list[Row]:
    sides = [dict(_training_figures(run)) for run in (one, two)]
    rows = [_row(name, sides[0].get(name), two=sides[1].get(name)) for name in _union(*sides)]
    return [row for row in rows if row["a"] is not None or row["b"] is not None]


def _training_figures(run: RunFiles) -> Iterator[tuple[str, float | None]]:
    history = run.history
    yield "step", float(run.step)
    yield "last training_loss", (history.ends("loss") or (None, None))[1]
    yield "last held_out_loss", run.held_out[-1][1] if run.held_out else None
    yield "last grad_norm", (history.ends("grad_norm") or (None, None))[1]
    yield "median tokens_per_s", history.middle("tokens_per_s")
    yield "train_seconds", as_number(run.status.get("train_seconds"))
    for key in ("peak_bytes", "peak_rss_bytes"):
        yield key, history.largest(key)
    for name, own in history.sources.items():
        yield f"{name}: last training_loss", (own.ends(RECENT_LOSS) or (None, None))[1]
        yield f"{name}: label_tokens_share", (own.ends("share") or (None, None))[1]


def _data(one: RunFiles, two: RunFiles) -> list[Row]:
    facts = [_data_facts(run) for run in (one, two)]
    return [{"key": key, "a": facts[0][key], "b": facts[1][key]} for key in facts[0]]


def _data_facts(run: RunFiles) -> dict[str, Any]:
    data = run.data
    sides = mapping(data.get("sources"))
    return {
        "fingerprint": data.get("fingerprint"),
        "template_hash": data.get("template_hash"),
        "order_sha256": run.manifest.get("order_sha256"),
        "train examples": mapping(sides.get("train")).get("examples"),
        "train tokens": mapping(sides.get("train")).get("tokens"),
        "held_out examples": mapping(sides.get("held_out")).get("examples"),
        "held_out tokens": mapping(sides.get("held_out")).get("tokens"),
    }


def _same_held_out(one: RunFiles, two: RunFiles) -> tuple[bool | None, list[str]]:
    """Whether both were measured on the same rows, and the warnings when that is not sure.

    The fingerprint covers files, options and tokenizer: equal fingerprints mean equal rows. Otherwise the prompts and
    references that were answered, and the size of the documents, are compared.
    """
    fingerprint = one.data.get("fingerprint")
    limits = [run.value("eval.limit") for run in (one, two)]
    if fingerprint is not None and fingerprint == two.data.get("fingerprint") and limits[0] == limits[1]:
        return True, []
    digests = [_questions(run) for run in (one, two)]
    if not digests[0] or not digests[1]:
        return None, ["it is not known whether both were measured on the same held-out rows: compare with care"]
    if digests[0] != digests[1]:
        return False, ["the held-out rows differ: figures of one run do not compare with those of the other"]
    counts = [mapping(mapping(run.data.get("sources")).get("held_out")) for run in (one, two)]
    if counts[0].get("trainable_tokens") == counts[1].get("trainable_tokens"):
        return True, []
    return True, ["the same rows have other tokens in each run: loss and perplexity do not compare, answers do"]


def _questions(run: RunFiles) -> str:
    """A digest of what was measured: prompts with their references, and how large a source's documents are."""
    given: list[Any] = held_out_sizes(run)
    for tag in ("after", *(f"anchor-{name}-after" for name in anchors_of(run))):
        given += [[row.get("prompt"), row.get("reference")] for row in answer_rows(run.folder, tag)]
    return hashlib.sha256(json.dumps(given).encode()).hexdigest() if given else ""


def _warnings(one: RunFiles, two: RunFiles) -> Iterator[str]:
    for side, run in (("a", one), ("b", two)):
        if run.state != "done":
            yield f"run {side} is {run.state}: its figures are not final"
        if len(run.attempts) > 1:
            yield f"run {side} was resumed: its train_seconds are those of the last attempt"
        for trouble in run.troubles:
            yield f"run {side}: {trouble}"
    windows = [window_of(run) for run in (one, two)]
    if None not in windows and windows[0] != windows[1]:
        yield "the windows differ in which perplexity was measured: perplexity and bits per byte do not compare"
    machines = [_versions(run).get("machine") for run in (one, two)]
    for side, machine in zip("ab", machines, strict=True):
        if machine is None:
            yield f"it is not known on which machine run {side} ran: speed, seconds and memory may not compare"
    if None not in machines and machines[0] != machines[1]:
        yield "the machines differ: speed, seconds and memory do not compare"


def _versions(run: RunFiles) -> dict[str, Any]:
    machine = mapping(run.manifest.get("machine"))
    gpus = [str(gpu.get("name")) for gpu in mappings(machine.get("gpus"))]
    hardware = ", ".join(gpus) or (f"CPU, {machine.get('cores')} cores" if machine else None)
    own = {key: run.manifest.get(key) for key in ("kit", "git_commit", "python")}
    return {
        "machine": hardware,
        "system": machine.get("system"),
        "processes": run.plan.get("world_size"),
        **own,
        **mapping(machine.get("libraries")),
    }


def _figure_cells(row: Row) -> list[str]:
    key = row["name"].rpartition(" ")[2]
    cells = [format_figure(key, row[side]) for side in ("a", "b")]
    return [f"{row['name'].removesuffix(key)}{name_of(key)}", *cells, change(key, row["a"], after=row["b"])]


def _brief(value: object) -> str:
    text = "–" if value is None else str(value)
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _block(title: str, head: list[str], *, rows: list[list[str]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [[title, *head[1:]], *rows]
    widths[0] = max(widths[0], len(title) - 2)
    shown_lines = []
    for n, cells in enumerate(lines):
        first = cells[0].ljust(widths[0] + 2 * (n == 0))
        rest = "  ".join(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
        shown_lines.append(f"{'  ' * (n > 0)}{first}  {rest}".rstrip())
    return ["", *shown_lines]
