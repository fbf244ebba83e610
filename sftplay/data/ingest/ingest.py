"""From documents to rows of text with a report: stages, near-duplicates, the files that are written."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay import log
from sftplay.atomic import read_object, whole_file, write_text
from sftplay.data.ingest.children import (
    ERRORS,
    NO_ROOM_CODE,
    STEPS,
    ChildEnd,
    ChildPool,
    ChildTask,
    Settings,
    WalkEntry,
    WorkFolder,
    answer_path,
    forget,
    read_answer,
    shown,
    walk,
)
from sftplay.data.ingest.duplicates import (
    PERMUTATIONS,
    DuplicatePair,
    Hashes,
    Signature,
    count_band_rows,
    find_candidates,
    find_near,
)
from sftplay.data.ingest.reading import EXAMPLES, LIBRARIES, RECORD, format_example, is_streamed, repeated, shard_path
from sftplay.errors import ConfigError, DataError, MachineError, RunError, error_from_json

STAGES = "sftplay.data.ingest.reading"
"""The module with what children do."""

CHUNK_BYTES, CHUNK_SHARDS = 16 << 20, 500
"""Shards that are finished together."""


@dataclass(frozen=True)
class IngestedFile:
    """A file, the stem of its result files, and the answer of its reader."""

    found: WalkEntry
    stem: str
    answer: dict[str, Any]


@dataclass(frozen=True)
class RecordChunk:
    """Finished records: the stem of their files, and the answer of the stage."""

    stem: str
    answer: dict[str, Any]


def read_all(
    files: Sequence[WalkEntry], settings: Settings, *, work: WorkFolder, pool: ChildPool
) -> list[IngestedFile]:
    """Read every file, or find the reason why not; results of an earlier command are used.
    Raise MachineError where a library is missing.
    """
    options = settings.reading_options()
    stems = [
        work.stem({
            "name": found.name, "size": found.size, "mtime": found.mtime_ns, "path": str(found.path.absolute()),
            "settings": options,
        })
        for found in files
    ]  # fmt: skip
    answers = [read_answer(stem) for stem in stems]
    places = {answer_path(stem): place for place, stem in enumerate(stems)}
    tasks = (_task(files[place], settings, stem=stems[place]) for place, known in enumerate(answers) if not known)
    done = sum(map(bool, answers))
    bad = sum(answer is not None and answer["status"] != "read" for answer in answers)
    if done:
        log.say(f"{done:,} of {len(files):,} files were read before; going on", "ingest")
    for end in pool.run(tasks):
        place = places[end.task.answer]
        answers[place] = answer = _collect_answer(end, stems[place])
        done, bad = done + 1, bad + (answer["status"] != "read")
        log.progress(done, len(files), what="files", text=f"{bad:,} unreadable" if bad else "", tag="ingest")
    return [IngestedFile(found, stem, answer or {}) for found, stem, answer in zip(files, stems, answers, strict=True)]


def finish_all(
    documents: Sequence[IngestedFile], settings: Settings, *, lines: list[int], work: WorkFolder, pool: ChildPool
) -> list[RecordChunk]:
    """Make the records of all documents, in order, in chunks of bounded size. Raise RunError where that failed."""
    listed = work.stem({"lines": lines})
    write_text(Path(listed), json.dumps(lines))
    planned = list(_plan_chunks(documents))
    options = settings.finishing_options()
    stems = [work.stem({"shards": shards, "lines": lines, "settings": options}) for shards in planned]
    known = [read_answer(stem) for stem in stems]
    tasks = (
        ChildTask(
            function=f"{STAGES}.finish", answer=answer_path(stem),
            arguments={"shards": shards, "stem": stem, "lines": listed, **options},
        )
        for shards, stem, answer in zip(planned, stems, known, strict=True)
        if not answer
    )  # fmt: skip
    done = sum(map(bool, known))
    for end in pool.run(tasks):
        _check_room(end)
        if end.exit_code:
            fix = f"see {work.folder / ERRORS}, free memory and disk; the same command goes on where this one stopped"
            raise RunError(f"a process that finishes records has ended ({_name_exit(end)})", where="ingest", fix=fix)
        done += 1
        log.progress(done, len(planned), what="parts finished", tag="ingest")
    return [RecordChunk(stem, read_answer(stem) or {}) for stem in stems]


def _task(found: WalkEntry, settings: Settings, *, stem: str) -> ChildTask:
    extra = 0.0
    with suppress(OSError):  # the child reports what is wrong with it
        extra = found.size / 4_000_000 if is_streamed(found.path, found.size) else 0.0  # 4 MB a second
    return ChildTask(
        function=f"{STAGES}.read_file", answer=answer_path(stem), limit_s=settings.limit_s + extra,
        memory_bytes=settings.memory_bytes, most_file_bytes=2 << 30,  # of any file that a reader or its library writes
        arguments={
            "path": str(found.path), "stem": stem, "size": found.size, "mtime_ns": found.mtime_ns,
            "encoding": settings.encoding, "cleaning": settings.reading_options()["cleaning"],
        },
    )  # fmt: skip


def _collect_answer(end: ChildEnd, stem: str) -> dict[str, Any]:
    """Return the child's answer. If the child died, write its cause of death as the answer."""
    _check_room(end)
    answer = read_answer(stem) if end.exit_code == 0 else None
    if answer is None:
        forget(stem)
        reason, detail = "crashed", f"its reader ended with {_name_exit(end)}"
        if end.killed_for == "timeout":
            reason, detail = "timeout", f"took longer than {end.task.limit_s:.0f} s"
        elif end.killed_for == "memory":
            reason, detail = "memory", f"its reader took more than {(end.task.memory_bytes or 0) / 1e6:,.0f} MB"
        answer = {"status": "unreadable", "reason": reason, "detail": detail}
        answer |= {"seconds": end.seconds, "peak_bytes": end.peak_bytes}
        write_text(Path(answer_path(stem)), json.dumps(answer))
    elif answer["status"] == "stopped":
        forget(stem)
        raise error_from_json(answer["error"])
    return answer


def _check_room(end: ChildEnd) -> None:
    if end.exit_code == NO_ROOM_CODE:
        fix = "make room; the same command goes on where this one stopped"
        raise RunError("the disk is full", where=str(Path(end.task.answer).parent), fix=fix)


def _name_exit(end: ChildEnd) -> str:
    if end.exit_code >= 0:
        return f"code {end.exit_code}"
    name = signal.Signals(-end.exit_code).name
    return f"signal {name}" + (", as where the machine's memory is used up" if name == "SIGKILL" else "")


def _plan_chunks(documents: Sequence[IngestedFile]) -> Iterator[list[dict[str, Any]]]:
    """Yield the shards in order, in groups for one chunk each."""
    group: list[dict[str, Any]] = []
    n_bytes = 0
    for place, document in enumerate(documents):
        for number, size in enumerate(document.answer.get("shards", ())):
            name, digest = shown(document.found.name), document.answer["sha256"]
            path = shard_path(document.stem, number)
            group.append({"file": place, "name": name, "path": path, "file_sha256": digest})
            n_bytes += size
            if n_bytes >= CHUNK_BYTES or len(group) == CHUNK_SHARDS:
                yield group
                group, n_bytes = [], 0
    if group:
        yield group


REASONS = ("", "duplicate", "near_duplicate")
KEPT, DUPLICATE, NEAR_DUPLICATE = range(len(REASONS))


class Records:
    """The records of all chunks, numbered from 0."""

    def __init__(self, chunks: Sequence[RecordChunk]) -> None:
        self._chunks = chunks
        self._starts = [0, *accumulate(chunk.answer["records"] for chunk in chunks)]
        tables = [np.fromfile(f"{chunk.stem}.table", RECORD) for chunk in chunks]
        self.table = np.concatenate([np.zeros(0, RECORD), *tables])
        self.signature = lru_cache(maxsize=1 << 16)(self._read_signature)  # 40 MB

    def __len__(self) -> int:
        return len(self.table)

    def lines(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            with Path(f"{chunk.stem}.jsonl").open("rb") as stream:
                yield from stream

    def record(self, number: int) -> dict[str, Any]:
        chunk, place = self._find(number)
        with Path(f"{chunk.stem}.jsonl").open("rb") as stream:
            stream.seek(int(self.table["end"][number - 1]) if place else 0)
            return dict(json.loads(stream.readline()))

    def bands(self, near: float) -> Iterator[Hashes]:
        """Yield for each band of the signatures the keys of all records: uint64 [records]."""
        sizes = [(chunk.stem, chunk.answer["records"]) for chunk in self._chunks if chunk.answer["records"]]
        for band in range(PERMUTATIONS // count_band_rows(near)):
            parts = [np.fromfile(f"{stem}.bands", np.uint64, n, offset=8 * band * n) for stem, n in sizes]
            yield np.concatenate(parts) if parts else np.zeros(0, np.uint64)

    def _read_signature(self, number: int) -> Signature:
        chunk, place = self._find(number)
        return np.fromfile(f"{chunk.stem}.signatures", np.uint32, PERMUTATIONS, offset=4 * PERMUTATIONS * place)

    def _find(self, number: int) -> tuple[RecordChunk, int]:
        """Return the chunk of a record, and its number in the chunk."""
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._chunks[at], number - self._starts[at]


def compare(records: Records, settings: Settings) -> tuple[NDArray[np.int64], list[DuplicatePair]]:
    """Find the records that repeat an earlier one, as far as the settings ask for it: for each record the one that it
    repeats exactly, or itself; and the pairs that are nearly the same.
    """
    repeats = np.arange(len(records))
    if settings.does("duplicates"):
        _, firsts, numbers = np.unique(records.table["key"], return_index=True, return_inverse=True)
        repeats = firsts[numbers]
    if not settings.does("near_duplicates"):
        return repeats, []
    candidates = find_candidates(records.bands(settings.near), repeats == np.arange(len(records)))
    found = find_near(
        candidates, near=settings.near, read_text=lambda number: records.record(number)["text"],
        read_signature=records.signature,
    )  # fmt: skip
    return repeats, list(found)


KEPT_EXAMPLES = 5


def build_report(
    documents: Sequence[IngestedFile], chunks: Sequence[RecordChunk], *, skipped: Sequence[WalkEntry],
    records: Records, reasons: NDArray[np.uint8], repeats: NDArray[np.int64], pairs: Sequence[DuplicatePair],
    settings: Settings,
) -> dict[str, Any]:  # fmt: skip
    """Return the report, without tokens. `reasons` are those of each record, as indices in REASONS."""
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
        "characters": int(records.table["chars"][reasons == KEPT].sum()),
        "by": settings.by,
        "steps": {step: "on" if settings.does(step) else "off" for step in STEPS},
        "cleaned_blocks": dict(sum((Counter(answer.get("cleaned", {})) for answer in answers), Counter())),
        "boilerplate": dict(sum((Counter(chunk.answer["taken"]) for chunk in chunks), Counter()).most_common(100)),
        "near_duplicate_pairs": [
            {"similarity": round(pair.similarity, 4), "kept": locate(pair.kept), "dropped": locate(pair.dropped)}
            for pair in pairs[:1000]  # all are counted below
        ],
        "near_duplicate_pairs_in_all": len(pairs),
        "examples": {
            "kept": [format_example(records.record(int(number))) for number in evenly_spaced],
            "dropped": _find_dropped_examples(documents, chunks, records=records, repeats=repeats, pairs=pairs),
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
    owners = records.table["file"].astype(np.int64)
    for code in (DUPLICATE, NEAR_DUPLICATE):
        for place, count in Counter(owners[reasons == code].tolist()).items():
            dropped[place][REASONS[code]] += count
    is_kept = reasons == KEPT
    kept = np.bincount(owners[is_kept], minlength=len(documents))
    characters = np.bincount(owners[is_kept], records.table["chars"][is_kept], minlength=len(documents))
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
    documents: Sequence[IngestedFile], chunks: Sequence[RecordChunk], *, records: Records,
    repeats: NDArray[np.int64], pairs: Sequence[DuplicatePair],
) -> list[Any]:  # fmt: skip
    """Return a few examples of each reason."""
    found = [
        {"source": shown(document.found.name), **example}
        for document in documents
        for example in document.answer.get("examples", ())
    ]
    found += [example for chunk in chunks for example in chunk.answer["examples"]]
    equal = np.flatnonzero(repeats != np.arange(len(records)))[:EXAMPLES].tolist()
    twins = [(number, int(repeats[number]), "duplicate", "the same text as") for number in equal]
    near = sorted(pairs[:EXAMPLES], key=lambda pair: pair.dropped)
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
    made_of = {"files": files, "settings": settings.all_options(), "tokenizer": settings.tokenizer}
    mark = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]
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
    kinds = sorted({entry.path.suffix.lower() for entry in files} & LIBRARIES.keys())
    warmed = [":".join([STAGES, *kinds, *settings.languages])]
    with ChildPool(settings.workers, warmed=warmed, errors=errors) as pool:
        documents = read_all(files, settings, work=work, pool=pool)
        # The lines of files of rows do not count: such files stay unchanged.
        read = [d for d in documents if d.answer["status"] == "read" and not d.answer["is_table"]]
        lines = repeated([Path(f"{d.stem}.lines") for d in read]) if settings.does("boilerplate") else []
        chunks = finish_all(documents, settings, lines=lines, work=work, pool=pool)
    log.status("comparing texts", "ingest")
    records = Records(chunks)
    repeats, pairs = compare(records, settings)
    reasons = (repeats != np.arange(len(repeats))).astype(np.uint8) * np.uint8(DUPLICATE)
    reasons[[pair.dropped for pair in pairs]] = NEAR_DUPLICATE
    skipped = [entry for entry in found if entry.reason]
    report = build_report(
        documents, chunks, skipped=skipped, records=records, reasons=reasons, repeats=repeats, pairs=pairs,
        settings=settings,
    )  # fmt: skip
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
    return report, records, reasons == KEPT


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
