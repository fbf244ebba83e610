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

KEPT_EXAMPLES = 5


def build_report(
    documents: Sequence[IngestedFile], chunks: Sequence[RecordChunk], *, skipped: Sequence[WalkEntry],
    records: Records, duplicates: Duplicates, settings: Settings,
) -> dict[str, Any]:  # fmt: skip
    """Return the report, without tokens."""
    reasons = duplicates.reasons()
    answers = [document.answer for document in documents]
    files = _list_files(documents, chunks, records=records, reasons=reasons)
    rest = [
        {
            "path": shown(entry.name), "status": "unreadable" if entry.is_fault else "skipped",
            "reason": entry.reason, "detail": shown(entry.detail),
        }
        for entry in skipped
    ]  # fmt: skip
    unreadable = Counter(file["reason"] for file in [*files, *rest] if file["status"] == "unreadable")
    dropped = sum((Counter(file["dropped"]) for file in files), Counter())
    guessed = Counter(name for answer in answers if (name := answer.get("guessed_encoding")))
    kept = np.flatnonzero(reasons == KEPT)
    evenly_spaced = kept[:: max(1, len(kept) // KEPT_EXAMPLES)][:KEPT_EXAMPLES]

    def locate(number: int) -> dict[str, Any]:
        record = records.record(number)
        return {key: record[key] for key in ("source", "section", "row", "place")}

    return {
        "documents": len(kept) + dropped.total() + unreadable.total(),
        "kept": len(kept),
        "dropped": dict(sorted(dropped.items())),
        "guessed_encodings": dict(sorted(guessed.items())),
        "unreadable": dict(sorted(unreadable.items())),
        "skipped": dict(sorted(Counter(file["reason"] for file in rest if file["status"] == "skipped").items())),
        "characters": int(records.column("chars")[reasons == KEPT].sum()),
        "by": settings.by,
        "steps": {step: "on" if settings.does(step) else "off" for step in STEPS},
        "cleaned_blocks": dict(sum((Counter(answer.get("cleaned", {})) for answer in answers), Counter())),
        "boilerplate": dict(sum((Counter(chunk.answer["taken"]) for chunk in chunks), Counter()).most_common(100)),
        "near_duplicate_pairs": [
            {"similarity": round(pair.similarity, 4), "kept": locate(pair.kept), "dropped": locate(pair.dropped)}
            for pair in duplicates.pairs[:1000]  # all are counted below
        ],
        "near_duplicate_pairs_in_all": len(duplicates.pairs),
        "examples": {
            "kept": [format_example(records.record(int(number))) for number in evenly_spaced],
            "dropped": _find_dropped_examples(documents, chunks, records=records, duplicates=duplicates),
        },
        "files": sorted([*files, *rest], key=lambda file: file["path"].split("/")),
    }


def _list_files(
    documents: Sequence[IngestedFile], chunks: Sequence[RecordChunk], *, records: Records, reasons: Any
) -> list[dict[str, Any]]:
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
    characters = np.bincount(owners[is_kept], records.column("chars")[is_kept], minlength=len(documents))
    files = []
    for place, document in enumerate(documents):
        answer, found = document.answer, document.found
        details = {key: answer[key] for key in ("reason", "detail", "notes", "sha256") if answer.get(key)}
        files.append({
            "path": shown(found.name), "status": answer["status"], **details, "bytes": found.size,
            "kept": int(kept[place]), "dropped": dict(dropped[place]), "characters": int(characters[place]),
            "seconds": round(answer["seconds"], 3), "peak_mb": round(answer["peak_bytes"] / 1e6),
        })  # fmt: skip
    return files


def _find_dropped_examples(
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
    by_reason: Counter[str] = Counter()
    few = []
    for example in found:
        by_reason[example["reason"]] += 1
        few += [example] if by_reason[example["reason"]] <= EXAMPLES else []
    return few
