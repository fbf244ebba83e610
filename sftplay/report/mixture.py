"""The sources of a mixture in a run's report: shares asked and achieved, losses, perplexity, and what was forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sftplay.report.charts import Chart, Curve
from sftplay.report.figures import change, format_figure, is_better
from sftplay.report.history import RECENT_LOSS, Point, as_number
from sftplay.report.page import Table, cut
from sftplay.report.run_files import RunFiles, mapping, mappings

COLOURS = "abcd"
MOST_SOURCES = 40

Figures = dict[str, Any]


def mixture_tables(run: RunFiles) -> list[Table]:
    """What each source is, what of it was trained on, and how it is known before and after; empty without sources."""
    tables = [_shares(run), _perplexity(run), _anchors(run)]
    return [table for table in tables if table.rows]


def forgetting(run: RunFiles) -> list[str]:
    """A sentence for each chat source: how much of it was forgotten."""
    rows = mapping(mapping(run.evals.get("perplexity")).get("anchor")).values()
    words = [mapping(row).get("forgetting") for row in rows]
    return [f"{text[:1].upper()}{text[1:]}." for text in words if isinstance(text, str) and text][:MOST_SOURCES]


def anchors_of(run: RunFiles) -> list[str]:
    """The sources of chats that were measured after training."""
    return list(mapping(mapping(run.evals.get("perplexity")).get("anchor")))[:MOST_SOURCES]


def source_figures(run: RunFiles) -> Iterator[tuple[str, object]]:
    """Each figure of each source in perplexity.json, named as a comparison of runs names it."""
    content = mapping(run.evals.get("perplexity"))
    for name, row in [*_rows(content, "sources"), *_rows(content, "anchor")]:
        for side in ("before", "after"):
            for key in ("perplexity", "bits_per_byte", "loss", "exact_match"):
                yield f"{name}: {side} {key}", row.get(f"{key}_{side}")
        yield f"{name}: forgetting_percent", row.get("forgetting_percent")


def held_out_sizes(run: RunFiles) -> list[list[Any]]:
    """Name, number and bytes of each source's held-out documents: equal where two runs were measured on the same."""
    rows = _rows(mapping(run.evals.get("perplexity")), "sources")
    return [[name, row.get("documents"), row.get("bytes")] for name, row in rows]


def window_of(run: RunFiles) -> tuple[Any, Any] | None:
    """Window and stride with which documents were measured; None where none were."""
    content = mapping(run.evals.get("perplexity"))
    return (content.get("window"), content.get("stride")) if content else None


def source_charts(run: RunFiles, resumed: Sequence[float]) -> list[Chart]:
    """Training loss, held-out loss and share of each source over the steps, at most four curves to a chart."""
    history = run.history.sources
    kinds = [
        (
            "Training loss of each source",
            "loss",
            {name: own.curve(RECENT_LOSS) for name, own in history.items()},
            False,
        ),
        ("Held-out loss of each source", "loss", run.held_out_sources, True),
        ("Share of each source", "label_tokens_share", {n: own.curve("share") for n, own in history.items()}, False),
    ]
    return [
        Chart(
            title=title, unit=unit, last_step=run.step, resumed=resumed, may_be_log=unit == "loss",
            curves=[
                Curve(f"{unit} of {name}", cut(name, 40), points, colour, dots=dots)
                for colour, (name, points) in zip(COLOURS, few, strict=False)
            ],
        )
        for title, unit, curves, dots in kinds
        for few in _groups(curves)
    ]  # fmt: skip


def _groups(curves: Mapping[str, list[Point]]) -> list[list[tuple[str, list[Point]]]]:
    """The curves that have points, four at a time."""
    drawn = [(name, points) for name, points in curves.items() if points]
    return [drawn[first : first + len(COLOURS)] for first in range(0, len(drawn), len(COLOURS))]


def _shares(run: RunFiles) -> Table:
    """One row for each source of the config: asked and achieved."""
    given = mappings(run.value("datasets"))
    weights = [as_number(source.get("weight")) or 0.0 for source in given]
    whole = sum(weights) or 1.0
    rows = []
    for source, weight in list(zip(given, weights, strict=True))[:MOST_SOURCES]:
        name = str(source.get("name"))
        rows.append([cut(name, 80), cut(source.get("type"), 20), format_figure("weight_share", weight / whole),
                     *_trained(run, name)])  # fmt: skip
    if not rows:
        rows = [[cut(name, 80), "", "", *_trained(run, name)] for name in run.history.sources]
    head = ["Source", "Type", "Share asked", "Share achieved", "Tokens read", "Tokens learned", "Training loss"]
    by = "documents and chats" if run.value("cpt.weights_of") == "examples" else "tokens that are learned"
    return Table(head=head, rows=rows, kinds="  nnnnn", caption=f"Sources; shares are of {by}")


def _trained(run: RunFiles, name: str) -> list[str]:
    """Share, tokens, learned tokens and loss of a source at the newest logged step."""
    own = run.history.sources.get(name)
    newest = {key: own.ends(key) if own else None for key in ("share", "tokens", "label_tokens", "loss")}
    shown = {key: pair[1] if pair else None for key, pair in newest.items()}
    return [
        format_figure("label_tokens_share", shown["share"]),
        format_figure("n", shown["tokens"]),
        format_figure("n", shown["label_tokens"]),
        format_figure("loss", shown["loss"]),
    ]


def _perplexity(run: RunFiles) -> Table:
    content = mapping(run.evals.get("perplexity"))
    compares = content.get("perplexity_compares") is not False
    rows = [
        [
            cut(name, 80),
            *(format_figure("n", row.get(key)) for key in ("documents", "tokens")),
            *_pair(row, "perplexity", compares=compares),
            *_pair(row, "bits_per_byte"),
        ]
        for name, row in _rows(content, "sources")
    ]
    head = ["Documents of", "Number", "Tokens", "Perplexity before", "after", "Change", "Bits per byte before", "after"]
    window, stride = (format_figure("n", content.get(key)) for key in ("window", "stride"))
    caption = f"Held-out documents: a window of {window} tokens slides by {stride}"
    if not compares:
        caption += "; the tokenizer was extended, so perplexity does not compare: bits per byte does"
    return Table(head=[*head, "Change"], rows=rows, kinds=" " + 8 * "n", caption=caption)


def _anchors(run: RunFiles) -> Table:
    rows = [
        [
            cut(name, 80),
            format_figure("n", row.get("n")),
            *_pair(row, "loss"),
            *_pair(row, "exact_match"),
            "–" if (risen := as_number(row.get("forgetting_percent"))) is None else f"{risen:+.1f} %",
        ]
        for name, row in _rows(mapping(run.evals.get("perplexity")), "anchor")
    ]
    head = [
        "Chats of",
        "Prompts",
        "Loss before",
        "after",
        "Change",
        "Exact match before",
        "after",
        "Change",
        "Forgetting",
    ]
    caption = "Held-out chats, the anchor; forgetting is the rise of their loss"
    return Table(head=head, rows=rows, kinds=" " + 8 * "n", caption=caption)


def _rows(content: Figures, key: str) -> list[tuple[str, Figures]]:
    return [(name, mapping(row)) for name, row in mapping(content.get(key)).items()][:MOST_SOURCES]


def _pair(row: Figures, key: str, *, compares: bool = True) -> list[str]:
    """Before, after, and the change with its verdict."""
    sides = [row.get(f"{key}_{side}") for side in ("before", "after")]
    cells = [format_figure(key, value) for value in sides]
    if not compares:
        return [*cells, "not comparable"]
    verdict = {True: " better", False: " worse", None: ""}[is_better(key, sides[0], after=sides[1])]
    return [*cells, f"{change(key, sides[0], after=sides[1])}{verdict}"]
