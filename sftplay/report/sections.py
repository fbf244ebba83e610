"""The parts of a run's report, each from its files, as the tables and lists that `templates/page.html` shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from markupsafe import Markup

from sftplay.report.figures import capitalized, change, format_figure, interval, is_better, is_share, name_of
from sftplay.report.history import as_bytes, as_number
from sftplay.report.learned import memory_of
from sftplay.report.page import Table, cut
from sftplay.report.run_files import RunFiles, Setting, mapping, mappings
from sftplay.units import format_bytes, format_count

MOST_SOURCES, MOST_TABLES, MOST_TOKENS = 40, 20, 700

BARRED = ("loss",)
"""Metrics that are no shares and are drawn as bars all the same."""

ELSEWHERE = ("hints", "diagnosis", "segments", "halting_q", "pass_at", "pass_at_partial")
"""What has a table of its own."""

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
    """Figures before and after in one table, then those of other evaluations."""
    pairs = sorted({name.removesuffix("after").removesuffix("before") for name in run.evals if _is_pair(name)})
    others = sorted(name for name in run.evals if not _is_pair(name) and not name.startswith(("step-", "perplexity")))
    tables = [_pairs_table(run, pairs[:MOST_TABLES])] if pairs else []
    for name in others[:MOST_TABLES]:
        rows = [[cut(k, 80), cut(_cell(k, v), 200)] for k, v in list(_flat(run.evals[name]).items())[:60]]
        tables.append(Table(head=["Figure", "Value"], rows=rows, caption=f"eval/{name}.json", kinds=" n"))
    return [table for table in tables if table.rows]


def evaluation_bars(run: RunFiles) -> list[Bars]:
    """The metrics of the evaluations before and after side by side as bars: shares of 100 %, losses of the larger."""
    bars = []
    for prefix in sorted({name.removesuffix("after").removesuffix("before") for name in run.evals if _is_pair(name)}):
        sides = {side: run.evals.get(f"{prefix}{side}", {}) for side in ("before", "after")}
        for key in [*sides["after"], *(key for key in sides["before"] if key not in sides["after"])]:
            if not (is_share(key) or key in BARRED):
                continue
            values = {side: as_number(figures.get(key)) for side, figures in sides.items()}
            known = {side: value for side, value in values.items() if value is not None and 0 <= value < 1e9}
            whole = 1.0 if is_share(key) else max(known.values(), default=0.0)
            if known and whole:
                where = f"{_rows_of(prefix)}: " if prefix else ""
                rows = [
                    (side, f"{min(100.0, 100 * v / whole):.1f}%", format_figure(key, v)) for side, v in known.items()
                ]
                bars.append(Bars(cut(capitalized(f"{where}{name_of(key)}"), 80), rows))
    return bars[:MOST_TABLES]


def _is_pair(name: str) -> bool:
    return name in ("before", "after") or name.endswith(("-before", "-after"))


def _flat(figures: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in figures.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, dict) and not above else {f"{above}{key}": value}
    return flat


def _cell(key: str, value: object) -> str:
    return str(value) if as_number(value) is None else format_figure(key.rpartition(".")[2], value)


def _pairs_table(run: RunFiles, prefixes: Sequence[str]) -> Table:
    """With a first column for the rows that were measured, where more than one kind was."""
    groups = {_rows_of(prefix): _pair_rows(run, prefix) for prefix in prefixes}
    listed = [[name if n == 0 else "", *row] for name, rows in groups.items() for n, row in enumerate(rows)]
    first = int(len(groups) == 1)
    told = "below a share its 95 % interval" if "<small>" in str(listed) else ""
    caption = "; ".join(filter(None, [*list(groups)[:first], told]))
    head = ["Rows", "Figure", "Before", "After", "Change"][first:]
    return Table(head=head, rows=[row[first:] for row in listed], caption=caption, kinds="  nnn"[first:])


def _rows_of(prefix: str) -> str:
    return {"": "Held-out rows", "test-": "Test rows"}.get(prefix, prefix.rstrip("-").replace("anchor-", "chats of "))


def _pair_rows(run: RunFiles, prefix: str) -> list[list[str]]:
    before, after = (run.evals.get(f"{prefix}{name}", {}) for name in ("before", "after"))
    rows = []
    for key in [key for key in (after | before) if key not in ELSEWHERE][:60]:
        better = is_better(key, before.get(key), after=after.get(key))
        moved = "" if key == "n" else change(key, before.get(key), after=after.get(key))
        verdict = {True: ' <b class="good">better</b>', False: ' <b class="bad">worse</b>', None: ""}[better]
        cells = [Markup("{}{}").format(format_figure(key, s.get(key)), _range(key, s)) for s in (before, after)]
        rows.append([cut(capitalized(name_of(key)), 80), *cells, Markup("{}" + verdict).format(moved)])
    return rows


def _range(key: str, figures: dict[str, Any]) -> Markup:
    """The 95 % interval of a share of answers."""
    share, count = as_number(figures.get(key)), as_number(figures.get("n"))
    if key != "exact_match" or share is None or count is None or not (0 <= share <= 1 and 1 <= count < 1e15):
        return Markup()
    low, high = interval(share, int(count))
    return Markup("<br><small>{:.1f} – {:.1f}</small>").format(100 * low, 100 * high)


def data_tables(run: RunFiles) -> list[Table]:
    """What became of every row, per source, and how long the rows are."""
    if not run.data:
        return []
    columns = ("read", "kept", "cut", "refused", "examples", "tokens")
    sources = list(mapping(run.data.get("sources")).items())[:MOST_SOURCES]
    rows = [_source_row(name, mapping(source), columns=columns) for name, source in [*sources, ("all", run.data)]]
    head = ["Source", "Read", "Kept", "Cut", "Refused", "Examples", "Tokens", "Dropped", "Learned"]
    return [Table(head=head, rows=rows, kinds=" nnnnnnnn")]


def data_facts(run: RunFiles) -> list[Fact]:
    """What else the data report says."""
    data = run.data
    counted = ("duplicates", "near_duplicates", "prompts_with_several_answers", "split_records", "typed_specials")
    rows: list[Fact] = [
        (f"{name}, file", mapping(source).get("path"))
        for name, source in list(mapping(data.get("sources")).items())[:MOST_SOURCES]
    ]
    rows += [
        (f"dropped: {why}".replace("_", " "), format_figure("n", n)) for why, n in mapping(data.get("dropped")).items()
    ]
    rows += [(name_of(key), format_figure("n", data[key])) for key in counted if as_number(data.get(key))]
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


def _source_row(name: str, source: dict[str, Any], *, columns: Sequence[str]) -> list[str]:
    dropped = sum(count for n in mapping(source.get("dropped")).values() if (count := as_number(n)) is not None)
    cells = [format_figure("n", source.get(key)) for key in columns]
    learned = format_figure("trainable_token_share", source.get("trainable_token_share"))
    return [cut(name.replace("_", " "), 80), *cells, format_figure("n", dropped), learned]


def histogram(run: RunFiles) -> Table | None:
    """How many rows there are of each length; None when that is not known."""
    counts = mapping(run.data.get("length_histogram"))
    bars = [(edge, n) for edge, count in counts.items() if (n := as_number(count)) is not None and 0 <= n < math.inf]
    most = max((n for _, n in bars), default=0)
    if not most:
        return None
    rows = [
        [cut(edge.replace("<=", "≤ "), 40), f"{100 * n / most:.1f}%", format_figure("n", n)] for edge, n in bars[:40]
    ]
    return Table(head=["Tokens a row", "", "Rows"], rows=rows, caption="Lengths before cutting", kinds=" bn")


def sample_of(run: RunFiles) -> Sample | None:
    """The row of samples/masked.json; None when there is none."""
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
    """What was chosen automatically, and why; the memory plan where there is one."""
    chosen = [
        [cut(d.get("key", ""), 100), cut(_yaml(d.get("value")), 200), cut(d.get("reason", ""), 400)]
        for d in mappings(run.plan.get("decisions"))[:100]
    ]
    sizes = [(k, as_bytes(v)) for k, v in mapping(run.plan.get("components")).items()]
    memory = [[cut(k.replace("_", " "), 80), format_bytes(n)] for k, n in sizes if n is not None]
    tables = [
        Table(head=["Key", "Value", "Why"], rows=chosen, kinds="cc", stacks=True),
        Table(
            head=["", "Planned", "Held", "Of the plan"],
            rows=_held(run),
            caption="Memory, planned and held",
            kinds=" nnn",
        ),
        Table(head=["Part", "Bytes of a process"], rows=memory[:60], caption="Memory as planned", kinds=" n"),
    ]
    return [table for table in tables if table.rows]


def _held(run: RunFiles) -> list[list[str]]:
    """The plan's limit beside the most that a process held; none where one of the two is not known."""
    memory = memory_of(run)
    if memory is None:
        return []
    sizes = [format_bytes(memory.planned), format_bytes(memory.held), f"{memory.held / memory.planned:.0%}"]
    return [[memory.what, *sizes]]


def _yaml(value: object) -> str:
    return Setting("", value, "").text if isinstance(value, str | int | float | bool | None) else str(value)


def config_tables(run: RunFiles) -> tuple[Table, Table]:
    """Every value that was set, with its origin; and the defaults."""
    rows = [[cut(s.key, 120), cut(s.text, 400), cut(s.origin, 200)] for s in run.settings.values()]
    own, rest = [row for row in rows if row[2]], [row[:2] for row in rows if not row[2]]
    return (
        Table(head=["Key", "Value", "Set by"], rows=own, kinds="cc", stacks=True),
        Table(head=["Key", "Value"], rows=rest, kinds="cc", stacks=True),
    )


def version_facts(run: RunFiles) -> list[Fact]:
    """What one needs to know to repeat the run: versions, machine, hashes."""
    manifest, machine = run.manifest, mapping(run.manifest.get("machine"))
    gpus = [str(gpu.get("name", gpu)) for gpu in mappings(machine.get("gpus"))]
    model = mapping(manifest.get("model"))
    ram = as_bytes(machine.get("ram_bytes"))
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
        ("number format of those", ", ".join(map(str, model.get("trainable_dtypes") or []))
         if isinstance(model.get("trainable_dtypes"), list) else None),
        ("order of the rows, sha256", manifest.get("order_sha256")),
        ("template, sha256", manifest.get("template_sha256")),
    ]  # fmt: skip
    rows += [(name, version) for name, version in mapping(machine.get("libraries")).items()][:60]
    return _without_empty(rows) if manifest else []


def _count(value: object) -> str | None:
    number = as_number(value)
    return None if number is None or not math.isfinite(number) else f"{format_count(number)} ({number:,.0f})"
