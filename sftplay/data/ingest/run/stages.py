"""Run the two stages in children: read files into shards, convert shards to records."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.data.ingest.children.fork_server import NO_ROOM_CODE
from sftplay.data.ingest.children.pool import ChildEnd, ChildPool, ChildTask
from sftplay.data.ingest.run.walk import ERRORS, WalkEntry, WorkFolder, answer_path, forget, read_answer, shown
from sftplay.data.ingest.settings import Settings
from sftplay.data.ingest.steps.cleaning import repeated
from sftplay.data.ingest.steps.reading import is_streamed, shard_path
from sftplay.errors import RunError, error_from_json

READ, FINISH = "sftplay.data.ingest.steps.reading", "sftplay.data.ingest.steps.finishing"

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


def repeated_lines(documents: Sequence[IngestedFile], settings: Settings) -> list[int]:
    """Return the keys of lines that occur in too many documents. Files of rows do not count: they stay unchanged."""
    if not settings.does("boilerplate"):
        return []
    read = [document for document in documents if document.answer["status"] == "read"]
    return repeated([Path(f"{document.stem}.lines") for document in read if not document.answer["is_table"]])


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
            function=f"{FINISH}.finish", answer=answer_path(stem),
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
        function=f"{READ}.read_file", answer=answer_path(stem), limit_s=settings.limit_s + extra,
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
