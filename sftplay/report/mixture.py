"""The sources of a mixture in a run's report: shares asked and achieved, losses, perplexity, and what was forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sftplay.report.chart import ChartPlan, Curve
from sftplay.report.figures import as_number, capitalized, compare, format_figure
from sftplay.report.history import RECENT_LOSS, Point
from sftplay.report.page import Block, Table, cut
from sftplay.report.run_files import RunFiles, mapping, mappings

MOST_SOURCES = 40


def source_rows(run: RunFiles, key: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of perplexity.json below `sources` (of documents) or `anchor` (of chats)."""
    rows = mapping(mapping(run.evals.get("perplexity")).get(key))
    return [(name, mapping(row)) for name, row in rows.items()][:MOST_SOURCES]


def source_figures(run: RunFiles) -> Iterator[tuple[str, object]]:
    """Yield each figure of each source in perplexity.json, named as a comparison of runs names it."""
    for name, row in [*source_rows(run, "sources"), *source_rows(run, "anchor")]:
        for side in ("before", "after"):
            for key in ("perplexity", "bits_per_byte", "loss", "exact_match"):
                yield f"{name}: {side} {key}", row.get(f"{key}_{side}")
        yield f"{name}: forgetting_percent", row.get("forgetting_percent")


def plan(run: RunFiles) -> list[ChartPlan]:
    """Return charts of training loss, held-out loss and share of each source, at most four curves to a chart."""
    held_out: dict[str, list[Point]] = {}
    for step, figures in run.measured():
        for name, source in list(mapping(figures.get("sources")).items())[:MOST_SOURCES]:
            if (loss := as_number(mapping(source).get("loss"))) is not None:
                held_out.setdefault(name, []).append((step, loss))
    sources = run.history.sources
    losses, shares = ({n: source.curve(key) for n, source in sources.items()} for key in (RECENT_LOSS, "share"))
    plans: list[ChartPlan] = []
    for title, unit, points, dots in (
        ("Training loss of each source", "loss", losses, False),
        ("Held-out loss of each source", "loss", held_out, True),
        ("Share of each source", "label_tokens_share", shares, False),
    ):
        curves = [Curve(f"{unit} of {name}", cut(name, 40), few, dots=dots) for name, few in points.items() if few]
        plans += [(title, unit, curves[first : first + 4]) for first in range(0, len(curves), 4)]
    return plans


def build_blocks(run: RunFiles) -> list[Block]:
    """Return what each source is, how much of it was trained on, and how it is known before and after."""
    rows = mapping(mapping(run.evals.get("perplexity")).get("anchor")).values()
    words = [mapping(row).get("forgetting") for row in rows]
    forgotten = [f"{capitalized(text)}." for text in words if isinstance(text, str) and text][:MOST_SOURCES]
    tables = (_tabulate_shares(run), _tabulate_perplexity(run), _tabulate_anchors(run))
    return [*(("table", table) for table in tables), *(("text", text) for text in forgotten)]


def _tabulate_shares(run: RunFiles) -> Table:
    """A row for each source of the config, else of the log: asked and achieved at the newest logged step."""
    given = mappings(run.value("datasets"))
    weights = [as_number(source.get("weight")) or 0.0 for source in given]
    whole = sum(weights) or 1.0
    asked = [
        (str(source.get("name")), source.get("type"), format_figure("weight_share", weight / whole))
        for source, weight in zip(given, weights, strict=True)
    ]
    rows = []
    for name, kind, share in asked[:MOST_SOURCES] or [(name, "", "") for name in run.history.sources]:
        source = run.history.sources.get(name)
        names = (("label_tokens_share", "share"), ("n", "tokens"), ("n", "label_tokens"), ("loss", "loss"))
        newest = [format_figure(unit, source.newest(figure) if source else None) for unit, figure in names]
        rows.append([name, kind, share, *newest])
    head = ["Source", "Type", "Share asked", "Share achieved", "Tokens read", "Tokens learned", "Training loss"]
    by = "documents and chats" if run.value("cpt.weights_of") == "examples" else "tokens that are learned"
    return Table(head=head, rows=rows, kinds="  nnnnn", caption=f"Sources; shares are of {by}")


def _compare(row: dict[str, Any], key: str) -> list[str]:
    return compare(key, row.get(f"{key}_before"), after=row.get(f"{key}_after"))


def _tabulate_perplexity(run: RunFiles) -> Table:
    content = mapping(run.evals.get("perplexity"))
    compares = content.get("perplexity_compares") is not False
    rows = []
    for name, row in source_rows(run, "sources"):
        sizes, perplexity = (
            [format_figure("n", row.get(key)) for key in ("documents", "tokens")],
            _compare(row, "perplexity"),
        )
        perplexity[2] = perplexity[2] if compares else "not comparable"
        rows.append([name, *sizes, *perplexity, *_compare(row, "bits_per_byte")])
    head = ["Documents of", "Number", "Tokens", "Perplexity before", "after", "Change", "Bits per byte before", "after"]
    window, stride = (format_figure("n", content.get(key)) for key in ("window", "stride"))
    caption = f"Held-out documents: a window of {window} tokens slides by {stride}"
    if not compares:
        caption += "; the tokenizer was extended, so perplexity does not compare: bits per byte does"
    return Table(head=[*head, "Change"], rows=rows, kinds=" nnnnvnnv", caption=caption)


def _tabulate_anchors(run: RunFiles) -> Table:
    rows = []
    for name, row in source_rows(run, "anchor"):
        risen = as_number(row.get("forgetting_percent"))
        figures = [*_compare(row, "loss"), *_compare(row, "exact_match"), "–" if risen is None else f"{risen:+.1f} %"]
        rows.append([name, format_figure("n", row.get("n")), *figures])
    sides = ["after", "Change"]
    head = ["Chats of", "Prompts", "Loss before", *sides, "Exact match before", *sides, "Forgetting"]
    caption = "Held-out chats, the anchor; forgetting is the rise of their loss"
    return Table(head=head, rows=rows, kinds=" nnnvnnvn", caption=caption)
