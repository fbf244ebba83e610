"""Two runs side by side: what was set differently, what came out, and whether the figures may be compared at all.

It reads run folders only; nothing is trained or measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from sftplay.config.resolved import flow
from sftplay.launch.run_folder import RunFolder
from sftplay.report.figures import as_number, change, find_name, format_figure
from sftplay.report.history import RECENT_LOSS
from sftplay.report.mixture import source_figures, source_rows
from sftplay.report.page import Table
from sftplay.report.run_files import RunFiles, mapping, mappings

Row = dict[str, Any]

UNTRAINED_KEYS = ("run_name", "output_dir", "train.resume")
"""Config keys that say nothing about what was trained."""

ASKED = ("prompt", "problem", "reference", "chosen", "rejected")
"""What a line of answers says of the row that was asked."""


def compare_runs(a: RunFolder, b: RunFolder) -> dict[str, Any]:
    """Return what differs between two runs, for `comparison_table` and for `--json`.

    `config` and `versions` list only what differs: `{key, a, b}`, null where a run lacks it. `figures` and `training`
    list every figure that one of them has: `{name, a, b, difference}`, the difference b - a or null. `same_held_out` is
    true, false, or null where it cannot be known; where it is not true, `warnings` says so.
    """
    runs = one, two = RunFiles(a), RunFiles(b)
    same, doubts = same_held_out(one, two)
    about = [
        {"name": r.folder.name, "path": str(r.folder.path), "state": r.state, "step": r.step, "steps": r.steps}
        for r in runs
    ]
    values = [{key: s.value for key, s in run.settings.items() if key not in UNTRAINED_KEYS} for run in runs]
    facts = [_data_facts(run) for run in runs]
    versions = [describe_versions(run) for run in runs]
    return {
        "runs": {"a": about[0], "b": about[1]},
        "config": _list_differences(*values),
        "figures": _list_figures(list_results(one), list_results(two)),
        "training": _list_figures(*(dict(_training_figures(run)) for run in runs)),
        "data": [{"key": key, "a": facts[0][key], "b": facts[1][key]} for key in facts[0]],
        "same_held_out": same,
        "versions": _list_differences(*versions) if one.manifest and two.manifest else [],
        "warnings": [*doubts, *_warnings(one, two)],
    }


def list_results(run: RunFiles) -> dict[str, float]:
    """Return what was measured before, after or by hand, under names such as `after loss`; finite figures alone."""
    tags = [tag for tag in run.evals if not tag.startswith(("step-", "perplexity"))]
    found: dict[str, Any] = {}
    for tag in sorted(tags, key=lambda tag: (tag not in ("after", "before"), tag)):
        found |= {f"{tag} {key}": value for key, value in run.evals[tag].items() if key not in ("step", "seconds")}
    found |= dict(source_figures(run))
    numbers = {name: as_number(value) for name, value in found.items()}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def comparison_table(comparison: dict[str, Any]) -> str:
    """Return the comparison for a terminal, figures rounded."""
    lines = ["runs"]
    for side, run in comparison["runs"].items():
        steps = f" of {run['steps']:,}" if run["steps"] else ""
        lines.append(f"  {side}  {run['path']}  ({run['state']} at step {run['step']:,}{steps})")
    lines += [f"{'' if i else chr(10)}  warning  {text}" for i, text in enumerate(comparison["warnings"])]
    for title in ("figures", "training"):
        rows = []
        for row in comparison[title]:
            key = row["name"].rpartition(" ")[2]
            cells = [format_figure(key, row["a"]), format_figure(key, row["b"]), change(key, row["a"], after=row["b"])]
            rows.append([f"  {row['name'].removesuffix(key)}{find_name(key)}", *cells])
        lines += ["", Table(head=[title, "a", "b", "b - a"], rows=rows).format()] if rows else []
    for title in ("config", "data", "versions"):
        write = flow if title == "config" else _show
        rows = [
            [f"  {row['key']}", *(_shorten(write(row[side])) for side in "ab")]
            for row in comparison[title]
            if type(row["a"]) is not type(row["b"]) or row["a"] != row["b"]
        ]
        lines += ["", Table(head=[title, "a", "b"], rows=rows).format() if rows else f"{title}: no difference"]
    return "\n".join(lines)


def _list_differences(one: dict[str, Any], two: dict[str, Any]) -> list[Row]:
    rows = [{"key": key, "a": one.get(key), "b": two.get(key)} for key in one | two]
    return [row for row in rows if type(row["a"]) is not type(row["b"]) or row["a"] != row["b"]]


def _list_figures(one: dict[str, Any], two: dict[str, Any]) -> list[Row]:
    """The figures that one of them has as a finite number."""
    rows = []
    for name in one | two:
        numbers = [as_number(side.get(name)) for side in (one, two)]
        a, b = (number if number is not None and math.isfinite(number) else None for number in numbers)
        if a is not None or b is not None:
            rows.append({"name": name, "a": a, "b": b, "difference": None if a is None or b is None else b - a})
    return rows


def _training_figures(run: RunFiles) -> Iterator[tuple[str, float | None]]:
    history, held_out, measured = run.history, run.curve("loss"), run.measured()
    yield "step", float(run.step)
    if run.learns_from_rewards:  # its loss says nothing
        from sftplay.report.rewards import reward_ends

        for key, ends in reward_ends(run).items():
            yield from zip((f"first sampled {key}", f"last sampled {key}"), ends, strict=True)
    else:
        yield "last training_loss", history.newest("loss")
    yield "last held_out_loss", held_out[-1][1] if held_out else None
    for key, value in measured[-1][1].items() if measured and not run.stands_for else ():
        if key not in ("step", "n", "seconds", "loss"):
            yield f"last held-out {key}", as_number(value)
    yield "last grad_norm", history.newest("grad_norm")
    yield "median tokens_per_s", history.middle("tokens_per_s")
    yield "train_seconds", as_number(run.status.get("train_seconds"))
    for key in ("peak_bytes", "peak_rss_bytes"):
        yield key, history.largest(key)
    for name, source in history.sources.items():
        yield f"{name}: last training_loss", source.newest(RECENT_LOSS)
        yield f"{name}: label_tokens_share", source.newest("share")


def _data_facts(run: RunFiles) -> dict[str, Any]:
    sources = mapping(run.data.get("sources"))
    return {
        "fingerprint": run.data.get("fingerprint"),
        "template_hash": run.data.get("template_hash"),
        "order_sha256": run.manifest.get("order_sha256"),
        **{
            f"{source} {key}": mapping(sources.get(source)).get(key)
            for source in ("train", "held_out")
            for key in ("examples", "tokens")
        },
    }


def same_held_out(one: RunFiles, two: RunFiles) -> tuple[bool | None, list[str]]:
    """Return whether both were measured on the same rows, and the warnings when that is not sure.

    The fingerprint covers files, options and tokenizer: equal fingerprints mean equal rows, unless `make eval` has
    measured one of the two on others since. Otherwise the prompts and references that were answered, and the size of
    the documents, are compared.
    """
    fingerprint, asked = one.data.get("fingerprint"), [_list_asked(run) for run in (one, two)]
    limits = [run.value("eval.limit") for run in (one, two)]
    if fingerprint is not None and fingerprint == two.data.get("fingerprint") and limits[0] == limits[1]:
        if all(asked[0][tag] == asked[1][tag] for tag in asked[0].keys() & asked[1].keys()):
            return True, []
    elif not one.evals or not two.evals:
        return None, ["one of the two has no held-out figures: there is nothing to compare them with"]
    if not asked[0] or not asked[1]:
        return None, ["it is not known whether both were measured on the same held-out rows: compare with care"]
    if [*asked[0].values()] != [*asked[1].values()]:
        return False, ["the held-out rows differ: figures of one run do not compare with those of the other"]
    counts = [mapping(mapping(run.data.get("sources")).get("held_out")) for run in (one, two)]
    if counts[0].get("trainable_tokens") == counts[1].get("trainable_tokens"):
        return True, []
    return True, ["the same rows have other tokens in each run: loss and perplexity do not compare, answers do"]


def _list_asked(run: RunFiles) -> dict[str, list[Any]]:
    """Name of a file in eval/ -> what its figures were measured on, where that is known."""
    sizes = [[name, row.get("documents"), row.get("bytes")] for name, row in source_rows(run, "sources")]
    found: dict[str, list[Any]] = {"perplexity": sizes} if sizes else {}
    newest = "after" if "after" in run.evals else next((f"step-{n:.0f}" for n, _ in run.measured()[::-1]), "")
    for tag in (newest, *(f"anchor-{name}-after" for name, _ in source_rows(run, "anchor"))):
        if asked := [[row.get(key) for key in ASKED] for row in run.answers(tag)]:
            found[tag] = [run.evals.get(tag, {}).get("n"), *asked]
    return found


def _warnings(one: RunFiles, two: RunFiles) -> Iterator[str]:
    tables = [run.evals.get("perplexity") for run in (one, two)]
    windows = [(table.get("window"), table.get("stride")) if table else None for table in tables]
    machines = [describe_versions(run)["machine"] for run in (one, two)]
    for side, run, machine in zip("ab", (one, two), machines, strict=True):
        if run.state != "done":
            yield f"run {side} is {run.state}: its figures are not final"
        if len(run.attempts) > 1:
            yield f"run {side} was resumed: its train_seconds are those of the last attempt"
        for trouble in run.troubles:
            yield f"run {side}: {trouble}"
        if machine is None:
            yield f"it is not known on which machine run {side} ran: speed, seconds and memory may not compare"
    yield from _compare_rewards(one, two)
    if None not in windows and windows[0] != windows[1]:
        yield "the windows differ: perplexity and bits per byte do not compare"
    if None not in machines and machines[0] != machines[1]:
        yield "the machines differ: speed, seconds and memory do not compare"


def _compare_rewards(one: RunFiles, two: RunFiles) -> Iterator[str]:
    """Say where figures of one name are those of different rewards."""
    a, b = ({str(row.get("name")): row for row in mappings(run.value("rewards"))} for run in (one, two))
    said = ("use", "path", "options", "judges")
    others = [name for name in a if name in b and any(a[name].get(key) != b[name].get(key) for key in said)]
    for name in others:
        yield f"{name} is another reward in each run: its figures do not compare"
    if not (one.learns_from_rewards and two.learns_from_rewards):
        return
    if others or a.keys() != b.keys():
        yield "the rewards differ: neither reward, their sum, nor pass compares"
    elif any(a[name].get("weight") != b[name].get("weight") for name in a):
        yield "the weights of the rewards differ: reward, their sum, does not compare"


def describe_versions(run: RunFiles) -> dict[str, Any]:
    """Return what a run ran on, and the versions of the kit and its libraries."""
    machine = mapping(run.manifest.get("machine"))
    gpus = [str(gpu.get("name")) for gpu in mappings(machine.get("gpus"))]
    return {
        "machine": ", ".join(gpus) or (f"CPU, {machine.get('cores')} cores" if machine else None),
        "system": machine.get("system"),
        "processes": run.plan.get("world_size"),
        **{key: run.manifest.get(key) for key in ("kit", "git_commit", "python")},
        **mapping(machine.get("libraries")),
    }


def _show(value: object) -> str:
    return "–" if value is None else "".join(c if c.isprintable() else "?" for c in str(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 34 else f"{text[:33]}…"
