"""The outcome of every file and document, for FILE.report.json: documents = kept + dropped + unreadable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sftplay.data.ingest.run.records import DUPLICATE, KEPT, NEAR_DUPLICATE, REASONS, Duplicates, Records
from sftplay.data.ingest.run.stages import IngestedFile, RecordChunk
from sftplay.data.ingest.run.walk import WalkEntry, shown
from sftplay.data.ingest.settings import STEPS, Settings
from sftplay.data.ingest.steps.finishing import EXAMPLES, format_example

MOST_PAIRS = 1000
"""Pairs of near-duplicates that are listed; all are counted."""

KEPT_EXAMPLES = 5


def build_report(
    documents: Sequence[IngestedFile], chunks: Sequence[RecordChunk], *, skipped: Sequence[WalkEntry],
    records: Records, duplicates: Duplicates, settings: Settings,
) -> dict[str, Any]:  # fmt: skip
    """Return the report, without tokens."""
    reasons = duplicates.reasons()
    files = _files(documents, chunks, records=records, reasons=reasons)
    rest = [_skipped(entry) for entry in skipped]
    unreadable = Counter(file["reason"] for file in [*files, *rest] if file["status"] == "unreadable")
    dropped = sum((Counter(file["dropped"]) for file in files), Counter())
    kept = int(np.count_nonzero(reasons == KEPT))
    return {
        "documents": kept + dropped.total() + unreadable.total(),
        "kept": kept,
        "dropped": dict(sorted(dropped.items())),
        "guessed_encodings": dict(sorted(_guessed(documents).items())),
        "unreadable": dict(sorted(unreadable.items())),
        "skipped": dict(sorted(Counter(file["reason"] for file in rest if file["status"] == "skipped").items())),
        "characters": int(records.column("chars")[reasons == KEPT].sum()),
        "by": settings.by,
        "steps": {step: "on" if settings.does(step) else "off" for step in STEPS},
        "cleaned_blocks": dict(sum((Counter(document.answer.get("cleaned", {})) for document in documents), Counter())),
        "boilerplate": dict(sum((Counter(chunk.answer["taken"]) for chunk in chunks), Counter()).most_common(100)),
        "near_duplicate_pairs": _pairs(records, duplicates),
        "near_duplicate_pairs_in_all": len(duplicates.pairs),
        "examples": {
            "kept": _kept(records, reasons),
            "dropped": _dropped(documents, chunks, records=records, duplicates=duplicates),
        },
        "files": sorted([*files, *rest], key=lambda file: file["path"].split("/")),
    }


def _files(
    documents: Sequence[IngestedFile], chunks: Sequence[RecordChunk], *, records: Records, reasons: Any
) -> list[Any]:
    dropped: list[Counter[str]] = [Counter(document.answer.get("dropped", {})) for document in documents]
    for chunk in chunks:
        for place, counts in chunk.answer["dropped"].items():
            dropped[int(place)].update(counts)
    owners = records.column("file").astype(np.int64)
    for code in (DUPLICATE, NEAR_DUPLICATE):
        for place, count in Counter(owners[reasons == code].tolist()).items():
            dropped[place][REASONS[code]] += count
    is_kept = reasons == KEPT
    kept = np.bincount(owners[is_kept], minlength=len(documents))
    sums = np.bincount(owners[is_kept], records.column("chars")[is_kept], minlength=len(documents))
    return [
        _file(document, dropped[place], kept=int(kept[place]), characters=int(sums[place]))
        for place, document in enumerate(documents)
    ]


def _guessed(documents: Sequence[IngestedFile]) -> Counter[str]:
    """Return encoding -> files that were read in it by a guess."""
    return Counter(name for document in documents if (name := document.answer.get("guessed_encoding")))


def _file(document: IngestedFile, dropped: Counter[str], *, kept: int, characters: int) -> dict[str, Any]:
    answer, found = document.answer, document.found
    details = {key: answer[key] for key in ("reason", "detail", "notes", "sha256") if answer.get(key)}
    return {
        "path": shown(found.name), "status": answer["status"], **details, "bytes": found.size, "kept": kept,
        "dropped": dict(dropped), "characters": characters, "seconds": round(answer["seconds"], 3),
        "peak_mb": round(answer["peak_bytes"] / 1e6),
    }  # fmt: skip


def _skipped(entry: WalkEntry) -> dict[str, Any]:
    status = "unreadable" if entry.is_fault else "skipped"
    return {"path": shown(entry.name), "status": status, "reason": entry.reason, "detail": shown(entry.detail)}


def _pairs(records: Records, duplicates: Duplicates) -> list[dict[str, Any]]:
    def place(number: int) -> dict[str, Any]:
        record = records.record(number)
        return {key: record[key] for key in ("source", "section", "row", "place")}

    return [
        {"similarity": round(pair.similarity, 4), "kept": place(pair.kept), "dropped": place(pair.dropped)}
        for pair in duplicates.pairs[:MOST_PAIRS]
    ]


def _kept(records: Records, reasons: Any) -> list[dict[str, Any]]:
    kept = np.flatnonzero(reasons == KEPT)
    evenly_spaced = kept[:: max(1, len(kept) // KEPT_EXAMPLES)][:KEPT_EXAMPLES]
    return [format_example(records.record(int(number))) for number in evenly_spaced]


def _dropped(
    documents: Sequence[IngestedFile], chunks: Sequence[RecordChunk], *, records: Records, duplicates: Duplicates
) -> list[Any]:
    """Return a few examples of each reason."""
    found = [
        {"source": shown(document.found.name), **example}
        for document in documents
        for example in document.answer.get("examples", ())
    ]
    found += [example for chunk in chunks for example in chunk.answer["examples"]]
    equal = np.flatnonzero(duplicates.repeats != np.arange(len(records)))[:EXAMPLES].tolist()
    twins = [(number, int(duplicates.repeats[number]), "duplicate", "the same text as") for number in equal]
    near = sorted(duplicates.pairs[:EXAMPLES], key=lambda pair: pair.dropped)
    twins += [(p.dropped, p.kept, "near_duplicate", f"{p.similarity:.1%} the same as") for p in near]
    for number, kept, reason, what in twins:
        detail = f"{what} {records.record(kept)['source']}"
        found.append({"reason": reason, "detail": detail, **format_example(records.record(number))})
    seen: Counter[str] = Counter()
    shown_ones = []
    for example in found:
        seen[example["reason"]] += 1
        if seen[example["reason"]] <= EXAMPLES:
            shown_ones.append(example)
    return shown_ones
