"""The sources of a mixture in a run's report: shares asked and achieved, losses, perplexity, and what was forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sftplay.report.figures import RECENT_LOSS, as_number, capitalized, change, format_figure, is_better
from sftplay.report.page import Chart, Curve, Table, cut
from sftplay.report.run_files import RunFiles, mapping, mappings

COLOURS = "abcd"
MOST_SOURCES = 40


def mixture_tables(run: RunFiles) -> list[Table]:
    """Return what each source is, how much of it was trained on, and how it is known before and after; may be empty."""
    return [table for table in (_shares(run), _perplexity(run), _anchors(run)) if table.rows]


def forgetting(run: RunFiles) -> list[str]:
    """Return a sentence for each chat source: how much of it was forgotten."""
    rows = mapping(mapping(run.evals.get("perplexity")).get("anchor")).values()
    words = [mapping(row).get("forgetting") for row in rows]
    return [f"{capitalized(text)}." for text in words if isinstance(text, str) and text][:MOST_SOURCES]


def find_anchors(run: RunFiles) -> list[str]:
    """Return the sources of chats that were measured after training."""
    return [name for name, _ in _rows(run, "anchor")]


def source_figures(run: RunFiles) -> Iterator[tuple[str, object]]:
    """Yield each figure of each source in perplexity.json, named as a comparison of runs names it."""
    for name, row in [*_rows(run, "sources"), *_rows(run, "anchor")]:
        for side in ("before", "after"):
            for key in ("perplexity", "bits_per_byte", "loss", "exact_match"):
                yield f"{name}: {side} {key}", row.get(f"{key}_{side}")
        yield f"{name}: forgetting_percent", row.get("forgetting_percent")


def held_out_sizes(run: RunFiles) -> list[list[Any]]:
    """Return name, number and bytes of each source's held-out documents: equal where two runs had the same."""
    return [[name, row.get("documents"), row.get("bytes")] for name, row in _rows(run, "sources")]


def find_window(run: RunFiles) -> tuple[Any, Any] | None:
    """Return window and stride with which documents were measured; None where none were."""
    content = mapping(run.evals.get("perplexity"))
    return (content.get("window"), content.get("stride")) if content else None


def source_charts(run: RunFiles, resumed: Sequence[float]) -> list[Chart]:
    """Return training loss, held-out loss and share of each source over the steps, at most four curves to a chart."""
    losses, shares = (
        {name: source.curve(figure) for name, source in run.history.sources.items()}
        for figure in (RECENT_LOSS, "share")
    )
    charts = []
    for title, unit, curves, dots in (
        ("Training loss of each source", "loss", losses, False),
        ("Held-out loss of each source", "loss", run.held_out_sources, True),
        ("Share of each source", "label_tokens_share", shares, False),
    ):
        drawn = [(name, points) for name, points in curves.items() if points]
        for first in range(0, len(drawn), len(COLOURS)):
            few = [
                Curve(f"{unit} of {name}", cut(name, 40), points, colour, dots=dots)
                for colour, (name, points) in zip(COLOURS, drawn[first : first + len(COLOURS)], strict=False)
            ]
            is_loss = unit == "loss"
            charts.append(
                Chart(title=title, unit=unit, last_step=run.step, resumed=resumed, may_be_log=is_loss, curves=few)
            )
    return charts


def _shares(run: RunFiles) -> Table:
    """One row for each source of the config, else of the log: asked and achieved at the newest logged step."""
    given = mappings(run.value("datasets"))
    weights = [as_number(source.get("weight")) or 0.0 for source in given]
    whole = sum(weights) or 1.0
    asked = [
        (str(source.get("name")), cut(source.get("type"), 20), format_figure("weight_share", weight / whole))
        for source, weight in zip(given, weights, strict=True)
    ]
    rows = []
    for name, kind, share in asked[:MOST_SOURCES] or [(name, "", "") for name in run.history.sources]:
        source = run.history.sources.get(name)
        names = (("label_tokens_share", "share"), ("n", "tokens"), ("n", "label_tokens"), ("loss", "loss"))
        ends = [(unit, source.ends(figure) if source else None) for unit, figure in names]
        rows.append([cut(name, 80), kind, share, *(format_figure(unit, pair and pair[1]) for unit, pair in ends)])
    head = ["Source", "Type", "Share asked", "Share achieved", "Tokens read", "Tokens learned", "Training loss"]
    by = "documents and chats" if run.value("cpt.weights_of") == "examples" else "tokens that are learned"
    return Table(head=head, rows=rows, kinds="  nnnnn", caption=f"Sources; shares are of {by}")


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
        for name, row in _rows(run, "sources")
    ]
    head = ["Documents of", "Number", "Tokens", "Perplexity before", "after", "Change", "Bits per byte before", "after"]
    window, stride = (format_figure("n", content.get(key)) for key in ("window", "stride"))
    caption = f"Held-out documents: a window of {window} tokens slides by {stride}"
    if not compares:
        caption += "; the tokenizer was extended, so perplexity does not compare: bits per byte does"
    return Table(head=[*head, "Change"], rows=rows, kinds=" " + 8 * "n", caption=caption)


def _anchors(run: RunFiles) -> Table:
    rows = []
    for name, row in _rows(run, "anchor"):
        risen = as_number(row.get("forgetting_percent"))
        figures = [*_pair(row, "loss"), *_pair(row, "exact_match"), "–" if risen is None else f"{risen:+.1f} %"]
        rows.append([cut(name, 80), format_figure("n", row.get("n")), *figures])
    sides = ["after", "Change"]
    head = ["Chats of", "Prompts", "Loss before", *sides, "Exact match before", *sides, "Forgetting"]
    caption = "Held-out chats, the anchor; forgetting is the rise of their loss"
    return Table(head=head, rows=rows, kinds=" " + 8 * "n", caption=caption)


def _rows(run: RunFiles, key: str) -> list[tuple[str, dict[str, Any]]]:
    rows = mapping(mapping(run.evals.get("perplexity")).get(key))
    return [(name, mapping(row)) for name, row in rows.items()][:MOST_SOURCES]


def _pair(row: dict[str, Any], key: str, *, compares: bool = True) -> list[str]:
    """Before, after, and the change with its verdict."""
    sides = [row.get(f"{key}_{side}") for side in ("before", "after")]
    cells = [format_figure(key, value) for value in sides]
    if not compares:
        return [*cells, "not comparable"]
    verdict = {True: " better", False: " worse", None: ""}[is_better(key, sides[0], after=sides[1])]
    return [*cells, f"{change(key, sides[0], after=sides[1])}{verdict}"]
