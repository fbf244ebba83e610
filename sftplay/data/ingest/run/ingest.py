"""Make FILE.jsonl, FILE.report.json and FILE.report.html from a folder: all stages, one after another.

Results of an interrupted command are used. FILE.jsonl has the same bytes then, and with any number of processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import read_object, whole_file, write_text
from sftplay.data.cache import fingerprint
from sftplay.data.ingest.children.pool import ChildPool
from sftplay.data.ingest.run.ingest_report import build_report
from sftplay.data.ingest.run.records import KEPT, Records, compare
from sftplay.data.ingest.run.stages import FINISH, READ, finish_all, read_all, repeated_lines
from sftplay.data.ingest.run.walk import ERRORS, WalkEntry, WorkFolder, shown, walk
from sftplay.data.ingest.settings import Settings
from sftplay.errors import ConfigError, DataError, MachineError

NAMED_FILES = 5

Report = dict[str, Any]


def report_paths(out: Path) -> tuple[Path, Path]:
    return out.with_suffix(".report.json"), out.with_suffix(".report.html")


def ingest(
    settings: Settings, *, render_page: Callable[[Report], str],
    count_tokens: Callable[[Sequence[str]], int] | None = None, replaces: bool = False,
) -> Report:  # fmt: skip
    """Write the rows of all documents to `settings.out` and the report next to it; return the report.

    An OUT made from the same files and settings stays as it is. If nothing is kept, OUT is not written. `render_page`
    makes an HTML page of the report; `count_tokens` counts those of some texts together, None counts none.

    Raises:
        ConfigError: OUT cannot be written, or is a file of something else and `replaces` is False.
        DataError: there is no document.
        MachineError: a library is missing.
    """
    began = time.monotonic()
    source, out = settings.source, settings.out
    _check_settings(settings)
    as_json, as_page = report_paths(out)
    found = walk(source, (out, as_json, as_page))
    if all(entry.reason for entry in found):
        what = "holds no document"
        if len(found) == 1 and found[0].is_fault:
            what = f"cannot be read: {found[0].reason}, {found[0].detail}"
        elif found:
            what += f", only {len(found):,} other files or folders, such as {shown(found[0].name)!r}"
        raise DataError(what, where=str(source), fix="name a folder of documents with IN=")
    files = [[entry.name, entry.size, entry.mtime_ns, entry.reason] for entry in found]
    mark = fingerprint({"files": files, "settings": settings.all_options(), "tokenizer": settings.tokenizer})
    if (out.exists() or out.is_symlink()) and not replaces:
        old = read_object(as_json)
        if old.get("mark") == mark and old.get("out_bytes") == out.stat().st_size:
            log.say(f"{out} is up to date: files and settings are those it was made of", "ingest")
            return old
        what = "exists already" + (", made of other files or settings" if "mark" in old else "")
        fix = "write over it with ARGS=--replace, or choose another file with OUT="
        raise ConfigError(what, where=str(out), fix=fix)

    def write_report(report: Report) -> None:
        report["seconds"] = round(time.monotonic() - began, 1)
        write_text(as_json, json.dumps(report, ensure_ascii=False, indent=1) + "\n")
        write_text(as_page, render_page(report))

    with WorkFolder(out).opened() as work:
        report, records, is_kept = _make_records(settings, found, work=work)
        report = {"in": str(source), "out": str(out), "mark": mark, **report}
        if report["kept"]:
            with whole_file(out) as scratch:
                report["tokens"] = _write(records, is_kept, path=scratch, count_tokens=count_tokens)
                report["out_bytes"] = scratch.stat().st_size
                write_report(report)  # OUT never exists without it
        else:
            write_report(report)
    return report


def _check_settings(settings: Settings) -> None:
    source, out = settings.source, settings.out
    if out.suffix != ".jsonl":
        raise ConfigError("does not end in .jsonl", where=str(out), fix="write OUT=file.jsonl")
    if source.exists() and out.exists() and source.samefile(out):
        raise ConfigError("is IN too", where=str(out), fix="choose another OUT")
    if settings.does("encoding") and find_spec("ftfy") is None:
        fix = "make install EXTRAS=ingest, or leave that step out with --without=encoding"
        raise MachineError("the step `encoding` needs ftfy, which is not installed", where="ingest", fix=fix)
    if settings.languages and find_spec("py3langid") is None:
        fix = "make install EXTRAS=ingest, or leave out --language"
        raise MachineError("--language needs py3langid, which is not installed", where="ingest", fix=fix)


def check_outcome(report: Report, settings: Settings) -> None:
    """Raise DataError where nothing was kept, or where a file is unreadable and the settings call that an error."""
    where = str(report_paths(settings.out)[0])
    if not report["kept"]:
        reasons = {**report["dropped"], **report["unreadable"]}
        counts = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "there was none"
        what = f"no document was kept, and {settings.out} was not written: {counts}"
        raise DataError(what, where=where, fix="see that report for the reason of each file")
    bad = [file for file in report["files"] if file["status"] == "unreadable"]
    if bad and settings.bad_files == "error":
        named = "\n  ".join(f"{file['path']!r}: {file['reason']}, {file['detail']}" for file in bad[:NAMED_FILES])
        more = f"\n  and {len(bad) - NAMED_FILES:,} more" if len(bad) > NAMED_FILES else ""
        what = f"{len(bad):,} of {len(report['files']):,} files cannot be read\n  {named}{more}"
        raise DataError(what, where=where, fix="correct them, or allow them with --on-bad-file=report")


def _make_records(settings: Settings, found: Sequence[WalkEntry], *, work: WorkFolder) -> tuple[Report, Records, Any]:
    """Run all stages; return the report, the records, and for each of them whether it is kept."""
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
    report |= {"tokens": None, "tokenizer": settings.tokenizer or None, "out_bytes": 0, "tracebacks": None}
    traces = ((document.found.name, document.answer.get("traceback")) for document in documents)
    parts = [f"{shown(name)}\n{trace}" for name, trace in traces if trace]
    parts += [errors.read_text(encoding="utf-8", errors="replace")] if errors.exists() else []
    log_file = settings.out.with_suffix(".errors.log")
    if any(parts):  # tracebacks of readers that died
        write_text(log_file, "\n".join(filter(None, parts)))
        report["tracebacks"] = str(log_file)
    else:
        log_file.unlink(missing_ok=True)  # of an earlier command
    return report, records, duplicates.reasons() == KEPT


def _write(
    records: Records, is_kept: Any, *, path: Path, count_tokens: Callable[[Sequence[str]], int] | None
) -> int | None:
    """Write the kept records; return their tokens, None if they are not counted."""
    kept = (line for line, stays in zip(records.lines(), is_kept, strict=True) if stays)
    n_tokens, n_done, total = 0, 0, int(is_kept.sum())
    with path.open("wb") as stream:
        while lines := list(islice(kept, 64)):
            stream.writelines(lines)
            n_done += len(lines)
            if count_tokens is not None:
                n_tokens += count_tokens([json.loads(line)["text"] for line in lines])
                log.progress(n_done, total, what="texts counted", tag="ingest")
    return None if count_tokens is None else n_tokens
