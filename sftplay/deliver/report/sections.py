"""The parts of a run's report, each from what was found in its folder; empty where there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sftplay.deliver.report.charts import Chart, Curve, draw
from sftplay.deliver.report.findings import Remark
from sftplay.deliver.report.history import Point, as_number
from sftplay.deliver.report.page import folded
from sftplay.deliver.report.run_files import RunFiles, Setting, mapping, mappings
from sftplay.deliver.report.wording import (
    change,
    escaped,
    facts,
    format_figure,
    headed,
    interval,
    is_better,
    name_of,
    table,
)
from sftplay.units import format_bytes, format_count

MEMORY = ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_rss_bytes")
SEEN = ("label_tokens", "tokens_seen", "label_tokens_seen")
TIMES = ("tokens_per_s", "padded_tokens_per_s", "samples_per_s", "step_s", "communication_max_s")
MAIN = ("loss", "learning_rate", "grad_norm", *TIMES, *SEEN, *MEMORY)
"""Figures with a chart of their own, or with none on purpose."""

MOST_OTHERS, MOST_SOURCES, MOST_TABLES, MOST_TOKENS = 8, 40, 20, 700
MOST_CHARACTERS = 200
"""Of one token."""

WORDS = {"stop": "Problem", "warn": "Warning", "note": "Note"}


def show_findings(findings: Sequence[Remark]) -> str:
    """What should not be missed, the gravest first."""
    if not findings:
        return "<p>Nothing to warn of.</p>"
    classes = {"stop": "bad", "warn": "caution", "note": "soft"}
    items = "".join(
        f'<li class="{f.weight}"><b class="{classes[f.weight]}">{WORDS[f.weight]}</b>{escaped(f.text, 600)}</li>'
        for f in findings[:100]
    )
    more = f"<p>and {len(findings) - 100:,} more</p>" if len(findings) > 100 else ""
    return f'<ul class="findings">{items}</ul>{more}'


def show_curves(found: RunFiles) -> str:
    """Loss, learning rate, gradient norm, speed and memory over the steps, then whatever else was logged."""
    history = found.history
    resumed = [step for a in found.attempts[1:] if (step := as_number(a.get("from_step"))) is not None and step >= 0]
    resumed = [step for step in resumed if step <= found.step][:50]

    def chart(title: str, unit: str, lines: list[Curve]) -> str:
        spans_powers = unit in ("loss", "grad_norm")
        return draw(Chart(title, unit, lines, max(found.step, 1), resumed, unit == "loss", spans_powers))

    def line(key: str, name: str, kind: str = "a") -> Curve:
        return Curve(key, name, history.curve(key), kind, trend=history.trend(key))

    losses = [line("loss", "training"), Curve("held_out_loss", "held-out", held_out_points(found), "b", dots=True)]
    memory = [Curve(k, name_of(k), history.curve(k), c) for k, c in zip(MEMORY, "cdab", strict=True)]
    padded = Curve("padded_tokens_per_s", "padding included", history.curve("padded_tokens_per_s"), "b")
    waiting = Curve("communication_max_s", "between processes", history.curve("communication_max_s"), "b")
    drawn = [
        chart("Loss", "loss", losses),
        chart("Learning rate", "learning_rate", [Curve("learning_rate", "rate", history.curve("learning_rate"), "c")]),
        chart("Gradient norm", "grad_norm", [line("grad_norm", "norm", "d")]),
        chart("Tokens per second", "tokens", [line("tokens_per_s", "all processes"), padded]),
        chart("Seconds of a step", "step_s", [line("step_s", "in all"), waiting]),
        chart("Memory of the main process", "_bytes", memory),
    ]
    others = [name for name in history.values if name not in MAIN][:MOST_OTHERS]
    drawn += [chart(headed(name_of(k)), k, [line(k, name_of(k), "c")]) for k in others]
    if not any(drawn):
        return "<p>No step was logged yet.</p>"
    marks = f"Dashed lines: resumed after step {', '.join(f'{s:,.0f}' for s in resumed)}. " if resumed else ""
    bad = "Red bars: values that are not finite. " if history.bad_steps else ""
    trend = "Thick lines: means over stretches of steps. " if history.trend("loss") else ""
    return f'<div class="charts">{"".join(drawn)}</div><p class="soft">{trend}{marks}{bad}</p>'


def held_out_points(found: RunFiles) -> list[Point]:
    """Held-out losses over the steps, that of the untrained model at step 0 included."""
    points = dict(found.held_out)
    before = as_number(found.evals.get("before", {}).get("loss"))
    if before is not None:
        points.setdefault(0.0, before)
    after = as_number(found.evals.get("after", {}).get("loss"))
    # With the best weights kept, the result is not that of the last step.
    keeps_best = found.value("train.best_metric") or found.value("train.early_stopping")
    if after is not None and found.state == "done" and not keeps_best:
        points.setdefault(float(found.step), after)
    return sorted(points.items())


def show_evaluation(found: RunFiles) -> str:
    """Figures before and after side by side, then those of other evaluations."""
    pairs = sorted({name.removesuffix("after").removesuffix("before") for name in found.evals if _is_pair(name)})
    tables = [_pair_table(found, prefix) for prefix in pairs[:MOST_TABLES]]
    others = sorted(name for name in found.evals if not _is_pair(name) and not name.startswith("step-"))
    for name in others[:MOST_TABLES]:
        rows = [[escaped(k, 80), escaped(_cell(k, v), 200)] for k, v in list(_flat(found.evals[name]).items())[:60]]
        tables.append(table(["Figure", "Value"], rows, caption=f"eval/{name}.json", kinds=" n") if rows else "")
    return "".join(tables)


def _is_pair(name: str) -> bool:
    return name in ("before", "after") or name.endswith(("-before", "-after"))


def _flat(figures: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in figures.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) and not above else {f"{above}{key}": value}
    return flat


def _cell(key: str, value: object) -> str:
    return str(value) if as_number(value) is None else format_figure(key.rpartition(".")[2], value)


def _pair_table(found: RunFiles, prefix: str) -> str:
    before, after = (found.evals.get(f"{prefix}{name}", {}) for name in ("before", "after"))
    rows = []
    for key in [*after, *(key for key in before if key not in after)][:60]:
        better = is_better(key, before.get(key), after.get(key))
        moved = "" if key == "n" else escaped(change(key, before.get(key), after.get(key)))
        word = "" if better is None else ' <b class="good">better</b>' if better else ' <b class="bad">worse</b>'
        cells = [escaped(format_figure(key, side.get(key))) + _range(key, side) for side in (before, after)]
        rows.append([escaped(headed(name_of(key)), 80), *cells, moved + word])
    where = {"": "Held-out rows", "test-": "Test rows"}.get(prefix, prefix.rstrip("-"))
    where += "; below a share its 95 % interval" if "<small>" in str(rows) else ""
    return table(["Figure", "Before", "After", "Change"], rows, caption=where, kinds=" nnn") if rows else ""


def _range(key: str, figures: dict[str, Any]) -> str:
    """The 95 % interval of a share of answers."""
    share, count = as_number(figures.get(key)), as_number(figures.get("n"))
    if key != "exact_match" or share is None or count is None or not (0 <= share <= 1 and 1 <= count < 1e15):
        return ""
    low, high = interval(share, int(count))
    return f"<br><small>{100 * low:.1f} – {100 * high:.1f}</small>"


def show_data(found: RunFiles) -> str:
    """What became of every row, per source, with the lengths."""
    data = found.data
    if not data:
        return ""
    columns = ("read", "kept", "cut", "refused", "examples", "tokens")
    sources = list(mapping(data.get("sources")).items())[:MOST_SOURCES]
    rows = [_source_row(name, mapping(source), columns) for name, source in [*sources, ("all", data)]]
    head = ["Source", "Read", "Kept", "Cut", "Refused", "Examples", "Tokens", "Dropped", "Learned"]
    accounting = table(head, rows, kinds=" nnnnnnnn")
    counted = ("duplicates", "near_duplicates", "prompts_with_several_answers", "split_records", "typed_specials")
    lines: list[tuple[str, Any]] = [(f"{name}, file", mapping(s).get("path")) for name, s in sources]
    lines += [
        (f"dropped: {why}".replace("_", " "), format_figure("n", n)) for why, n in mapping(data.get("dropped")).items()
    ]
    lines += [(name_of(key), format_figure("n", data[key])) for key in counted if as_number(data.get(key))]
    lines += [
        ("end of turn is learned in", format_figure("eos_share", data.get("eos_in_loss_share"))),
        ("longest row, tokens", format_figure("n", data.get("longest_tokens"))),
        ("limit, tokens", format_figure("n", data.get("max_seq_len"))),
        ("mask found by", data.get("mask_method")),
        ("template, sha256", data.get("template_hash")),
        ("rows and options, fingerprint", data.get("fingerprint")),
    ]
    return accounting + facts(lines[:80]) + _histogram(mapping(data.get("length_histogram")))


def _source_row(name: str, source: dict[str, Any], columns: Sequence[str]) -> list[str]:
    dropped = sum(count for n in mapping(source.get("dropped")).values() if (count := as_number(n)) is not None)
    cells = [format_figure("n", source.get(key)) for key in columns]
    learned = format_figure("trainable_token_share", source.get("trainable_token_share"))
    return [escaped(name.replace("_", " "), 80), *cells, format_figure("n", dropped), learned]


def _histogram(counts: dict[str, Any]) -> str:
    bars = [(edge, n) for edge, count in counts.items() if (n := as_number(count)) is not None and 0 <= n < math.inf]
    most = max((n for _, n in bars), default=0)
    if not most:
        return ""
    rows = [
        [escaped(edge.replace("<=", "≤ "), 40), f'<span class="bar" style="width:{100 * n / most:.1f}%"></span>',
         format_figure("n", n)]
        for edge, n in bars[:40]
    ]  # fmt: skip
    bars_table = table(["Tokens a row", "", "Rows"], rows, caption="Lengths before cutting", kinds="  n")
    return f'<div class="bars">{bars_table}</div>'


def show_sample(found: RunFiles) -> str:
    """One row as tokens; what is learned is marked by colour, weight and a line below."""
    given = found.sample.get("tokens")
    pairs = [p for p in given if isinstance(p, list) and len(p) == 2] if isinstance(given, list) else []
    if not pairs:
        return ""
    parts, open_mark = [], False
    for text, learned in pairs[:MOST_TOKENS]:
        if bool(learned) != open_mark:
            open_mark = bool(learned)
            parts.append("<mark>" if open_mark else "</mark>")
        parts.append(f"<i>{escaped(str(text), MOST_CHARACTERS).replace(chr(10), '⏎' + chr(10))}</i>")
    parts.append("</mark>" if open_mark else "")
    n_learned = sum(bool(learned) for _, learned in pairs)
    more = f" The first {MOST_TOKENS:,} are shown." if len(pairs) > MOST_TOKENS else ""
    source = found.sample.get("source")
    where = f"<code>{escaped(source, 300)}</code>: " if source else ""
    return (
        f"<p>{where}{len(pairs):,} tokens, {n_learned:,} of them learned (marked, bold and underlined); "
        f'all else is only read.{more}</p><div class="tokens text">{"".join(parts)}</div>'
    )


def show_choices(found: RunFiles) -> str:
    """What was chosen automatically, and why; the memory plan where there is one."""
    decisions = mappings(found.plan.get("decisions"))[:100]
    rows = [
        [f"<code>{escaped(d.get('key', ''), 100)}</code>", f"<code>{escaped(_yaml(d.get('value')), 200)}</code>",
         escaped(d.get("reason", ""), 400)]
        for d in decisions
    ]  # fmt: skip
    chosen = table(["Key", "Value", "Why"], rows, stacks=True) if rows else ""
    sizes = [(k, as_number(v)) for k, v in mapping(found.plan.get("components")).items()]
    memory = [[escaped(k.replace("_", " "), 80), format_bytes(n)] for k, n in sizes if n is not None and abs(n) < 2**60]
    planned = table(["Part", "Bytes per GPU"], memory[:60], caption="Memory as planned", kinds=" n") if memory else ""
    return chosen + planned


def _yaml(value: object) -> str:
    return Setting("", value, "").text if isinstance(value, str | int | float | bool | None) else str(value)


def show_config(found: RunFiles) -> str:
    """Every value that is no default with its origin; the defaults behind them."""
    settings = list(found.settings.values())
    rows = [
        [f"<code>{escaped(s.key, 120)}</code>", f"<code>{escaped(s.text, 400)}</code>", escaped(s.origin, 200)]
        for s in settings
    ]
    own = [row for row, setting in zip(rows, settings, strict=True) if setting.origin]
    rest = [row[:2] for row, setting in zip(rows, settings, strict=True) if not setting.origin]
    shown_own = table(["Key", "Value", "Set by"], own[:300], stacks=True) if own else ""
    defaults = table(["Key", "Value"], rest[:300], stacks=True) if rest else ""
    return shown_own + folded(f"{len(rest)} values at their default", defaults)


def show_facts(found: RunFiles) -> str:
    """What one needs to know to repeat the run: versions, machine, hashes."""
    manifest, machine = found.manifest, mapping(found.manifest.get("machine"))
    if not manifest:
        return ""
    gpus = [str(gpu.get("name", gpu)) for gpu in mappings(machine.get("gpus"))]
    model = mapping(manifest.get("model"))
    ram = as_number(machine.get("ram_bytes"))
    rows: list[tuple[str, Any]] = [
        ("kit", manifest.get("kit")),
        ("git commit of the kit", manifest.get("git_commit")),
        ("python", manifest.get("python")),
        ("system", machine.get("system")),
        ("GPUs", ", ".join(gpus[:64]) or f"none: {machine.get('gpu_reason', 'not known')}"),
        ("cores", machine.get("cores")),
        ("memory", format_bytes(ram) if ram is not None and 0 <= ram < 2**60 else None),
        ("processes", found.plan.get("world_size")),
        ("seed", manifest.get("seed")),
        ("weights", _count(model.get("parameters"))),
        ("weights that train", _count(model.get("trainable_parameters"))),
        ("number format of those", ", ".join(map(str, model.get("trainable_dtypes") or []))
         if isinstance(model.get("trainable_dtypes"), list) else None),
        ("order of the rows, sha256", manifest.get("order_sha256")),
        ("template, sha256", manifest.get("template_sha256")),
    ]  # fmt: skip
    rows += [(name, version) for name, version in mapping(machine.get("libraries")).items()][:60]
    return facts(rows)


def _count(value: object) -> str | None:
    number = as_number(value)
    return None if number is None or not math.isfinite(number) else f"{format_count(number)} ({number:,.0f})"


def show_samples(found: RunFiles) -> str:
    """Texts the run left in samples/."""
    return "".join(f"<h3>{escaped(name, 200)}</h3><pre>{escaped(text, 3000)}</pre>" for name, text in found.samples)


def show_repeat(found: RunFiles) -> str:
    """The command that was started, and how to go on from here."""
    if not found.launch:
        return ""
    text = "The command of the run, with the resolved config beside this page. The same config, data and versions on "
    text += "one machine give the same weights."
    return f"<p>{text}</p><pre>{escaped(found.launch, 8000)}</pre>"
