"""Make FILE.jsonl, FILE.report.json and FILE.report.html from a folder: all stages, one after another.

Results of an interrupted command are used. FILE.jsonl has the same bytes then, and with any number of processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import read_object, whole_file, write_text
from sftplay.data.cache import fingerprint
from sftplay.data.ingest.children.pool import ChildPool
from sftplay.data.ingest.run.ingest_report import build_report
from sftplay.data.ingest.run.records import KEPT, Records, compare
from sftplay.data.ingest.run.stages import FINISH, READ, IngestedFile, finish_all, read_all, repeated_lines
from sftplay.data.ingest.run.walk import ERRORS, WalkEntry, WorkFolder, shown, walk
from sftplay.data.ingest.settings import CLEANING, Settings
from sftplay.data.ingest.steps import cleaning, language
from sftplay.errors import ConfigError, DataError

TEXTS_AT_ONCE = 64
"""Texts in one batch of the token count."""

NAMED_FILES = 5


@dataclass(frozen=True, kw_only=True)
class IngestCallbacks:
    """Functions of the caller, which may import more than this folder."""

    render_page: Callable[[dict[str, Any]], str]
    """Return the report as an HTML page."""

    count_tokens: Callable[[Sequence[str]], int] | None = None
    """Return the number of tokens of some texts together; None counts none."""


def report_paths(out: Path) -> tuple[Path, Path]:
    """Return the report's two files."""
    return out.with_suffix(".report.json"), out.with_suffix(".report.html")


def ingest(settings: Settings, callbacks: IngestCallbacks, *, replaces: bool = False) -> dict[str, Any]:
    """Write the rows of all documents to `settings.out` and the report next to it; return the report.

    An OUT made from the same files and settings stays as it is. If nothing is kept, OUT is not written.

    Raises:
        ConfigError: OUT cannot be written, or is a file of something else and `replaces` is False.
        DataError: there is no document.
        MachineError: a library is missing.
    """
    began = time.monotonic()
    _check(settings)
    found = walk(settings.source, (settings.out, *report_paths(settings.out)))
    files = [entry for entry in found if not entry.reason]
    if not files:
        raise DataError(_nothing(found), where=str(settings.source), fix="name a folder of documents with IN=")
    mark = _mark(settings, found)
    if old := _made_already(settings, mark, replaces=replaces):
        log.say(f"{settings.out} is up to date: files and settings are those it was made of", "ingest")
        return old
    work = WorkFolder(settings.out)
    with work.opened():
        report = _make(settings, found, work=work, callbacks=callbacks, mark=mark, began=began)
        work.remove()
    return report


def check_outcome(report: dict[str, Any], settings: Settings) -> None:
    """Raise DataError where nothing was kept, or where a file is unreadable and the settings call that an error."""
    where = str(report_paths(settings.out)[0])
    if not report["kept"]:
        what = f"no document was kept, and {settings.out} was not written: {_counts(report)}"
        raise DataError(what, where=where, fix="see that report for the reason of each file")
    bad = [file for file in report["files"] if file["status"] == "unreadable"]
    if bad and settings.bad_files == "error":
        named = "\n  ".join(f"{file['path']!r}: {file['reason']}, {file['detail']}" for file in bad[:NAMED_FILES])
        more = f"\n  and {len(bad) - NAMED_FILES:,} more" if len(bad) > NAMED_FILES else ""
        what = f"{len(bad):,} of {len(report['files']):,} files cannot be read\n  {named}{more}"
        raise DataError(what, where=where, fix="correct them, or allow them with --on-bad-file=report")


def _check(settings: Settings) -> None:
    if settings.out.suffix != ".jsonl":
        raise ConfigError("does not end in .jsonl", where=str(settings.out), fix="write OUT=file.jsonl")
    if settings.source.exists() and settings.out.exists() and settings.source.samefile(settings.out):
        raise ConfigError("is IN too", where=str(settings.out), fix="choose another OUT")
    cleaning.check_installed([step for step in CLEANING if settings.does(step)])
    if settings.languages:
        language.check_installed()


def _nothing(found: Sequence[WalkEntry]) -> str:
    others = f", only {len(found):,} other files or folders, such as {shown(found[0].name)!r}" if found else ""
    if len(found) == 1 and found[0].is_fault:
        return f"cannot be read: {found[0].reason}, {found[0].detail}"
    return f"holds no document{others}"


def _mark(settings: Settings, found: Sequence[WalkEntry]) -> str:
    """Return a digest that changes when OUT would."""
    files = [[entry.name, entry.size, entry.mtime_ns, entry.reason] for entry in found]
    return fingerprint({"files": files, "settings": settings.all_options(), "tokenizer": settings.tokenizer})


def _made_already(settings: Settings, mark: str, *, replaces: bool) -> dict[str, Any]:
    """Return the report of an OUT that is up to date; empty if it must be made.

    Raises:
        ConfigError: OUT is something else.
    """
    out = settings.out
    if not (out.exists() or out.is_symlink()) or replaces:
        return {}
    old = read_object(report_paths(out)[0])
    if old.get("mark") == mark and old.get("out_bytes") == out.stat().st_size:
        return old
    what = "exists already" + (", made of other files or settings" if "mark" in old else "")
    raise ConfigError(what, where=str(out), fix="write over it with ARGS=--replace, or choose another file with OUT=")


def _make(
    settings: Settings,
    found: Sequence[WalkEntry],
    *,
    work: WorkFolder,
    callbacks: IngestCallbacks,
    mark: str,
    began: float,
) -> dict[str, Any]:
    files = [entry for entry in found if not entry.reason]
    errors = work.folder / ERRORS
    kinds = sorted({entry.path.suffix.lower() for entry in files} - {""})
    warmed = [":".join([READ, *kinds]), ":".join([FINISH, *settings.languages])]
    with ChildPool(settings.workers, warmed=warmed, errors=errors) as pool:
        documents = read_all(files, settings, work=work, pool=pool)
        lines = repeated_lines(documents, settings)
        chunks = finish_all(documents, settings, lines=lines, work=work, pool=pool)
    log.status("comparing texts", "ingest")
    records = Records(chunks)
    duplicates = compare(records, settings)
    skipped = [entry for entry in found if entry.reason]
    report = build_report(documents, chunks, skipped=skipped, records=records, duplicates=duplicates, settings=settings)
    report = {"in": str(settings.source), "out": str(settings.out), "mark": mark, **report}
    report |= {"tokens": None, "tokenizer": settings.tokenizer or None, "out_bytes": 0}
    report["tracebacks"] = _keep_errors(documents, errors, log_file=settings.out.with_suffix(".errors.log"))
    if report["kept"]:
        with whole_file(settings.out) as scratch:
            report["tokens"] = _write(records, duplicates.reasons() == KEPT, path=scratch, callbacks=callbacks)
            report["out_bytes"] = scratch.stat().st_size
            _write_report(report, settings, callbacks=callbacks, began=began)  # OUT never exists without it
    else:
        _write_report(report, settings, callbacks=callbacks, began=began)
    return report


def _keep_errors(documents: Sequence[IngestedFile], errors: Path, *, log_file: Path) -> str | None:
    """Write the tracebacks of readers that died; return the file's name, None if none died."""
    traces = ((document.found.name, document.answer.get("traceback")) for document in documents)
    parts = [f"{shown(name)}\n{trace}" for name, trace in traces if trace]
    parts += [errors.read_text(encoding="utf-8", errors="replace")] if errors.exists() else []
    if not any(parts):
        log_file.unlink(missing_ok=True)  # of an earlier command
        return None
    write_text(log_file, "\n".join(filter(None, parts)))
    return str(log_file)


def _write_report(report: dict[str, Any], settings: Settings, *, callbacks: IngestCallbacks, began: float) -> None:
    report["seconds"] = round(time.monotonic() - began, 1)
    as_json, as_page = report_paths(settings.out)
    write_text(as_json, json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    write_text(as_page, callbacks.render_page(report))


def _write(records: Records, is_kept: Any, *, path: Path, callbacks: IngestCallbacks) -> int | None:
    """Write the kept records; return their tokens, None if they are not counted."""
    kept = (line for line, stays in zip(records.lines(), is_kept, strict=True) if stays)
    n_tokens, n_done, total = 0, 0, int(is_kept.sum())
    with path.open("wb") as stream:
        for lines in _batches(kept):
            stream.writelines(lines)
            n_done += len(lines)
            if callbacks.count_tokens is not None:
                n_tokens += callbacks.count_tokens([json.loads(line)["text"] for line in lines])
                log.progress(n_done, total, what="texts counted", tag="ingest")
    return None if callbacks.count_tokens is None else n_tokens


def _batches(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    while batch := list(islice(lines, TEXTS_AT_ONCE)):
        yield batch


def _counts(report: dict[str, Any]) -> str:
    counts = {**report["dropped"], **report["unreadable"]}
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items()) or "there was none"
