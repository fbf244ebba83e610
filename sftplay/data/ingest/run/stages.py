"""Run the two stages in children: read files into shards, convert shards to records."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.data.ingest.children.fork_server import NO_ROOM_CODE
from sftplay.data.ingest.children.pool import ChildEnd, ChildPool, ChildTask
from sftplay.data.ingest.run.walk import ERRORS, WalkEntry, WorkFolder, answer_path, forget, read_answer, shown
from sftplay.data.ingest.settings import Settings
from sftplay.data.ingest.steps.cleaning import repeated
from sftplay.data.ingest.steps.finishing import Shard
from sftplay.data.ingest.steps.reading import is_streamed, shard_path
from sftplay.errors import RunError, error_from_json

READ, FINISH = "sftplay.data.ingest.steps.reading", "sftplay.data.ingest.steps.finishing"

STREAMED_BYTES_A_S = 4_000_000
"""A streamed file gets one second for so many bytes, in addition to the limit of all files."""

MOST_FILE_BYTES = 2 << 30
"""Of any file that a reader or its library writes."""

CHUNK_BYTES, CHUNK_SHARDS = 16 << 20, 500
"""Shards that are finished together."""


@dataclass(frozen=True)
class IngestedFile:
    """A file, the stem of its result files, and the answer of its reader."""

    found: WalkEntry
    stem: str
    answer: dict[str, Any]

    @property
    def is_read(self) -> bool:
        return self.answer["status"] == "read"


@dataclass(frozen=True)
class RecordChunk:
    """Finished records: the stem of their files, and the answer of the stage."""

    stem: str
    answer: dict[str, Any]


def read_all(
    files: Sequence[WalkEntry], settings: Settings, *, work: WorkFolder, pool: ChildPool
) -> list[IngestedFile]:
    """Read every file, or find the reason why not; results of an earlier command are used.

    Raises:
        MachineError: a library is missing.
    """
    stems = [_stem(found, settings, work=work) for found in files]
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
    counted = [document for document in documents if document.is_read and not document.answer["is_table"]]
    return repeated([Path(f"{document.stem}.lines") for document in counted])


def finish_all(
    documents: Sequence[IngestedFile], settings: Settings, *, lines: list[int], work: WorkFolder, pool: ChildPool
) -> list[RecordChunk]:
    """Make the records of all documents, in order, in chunks of bounded size.

    Raises:
        RunError: a chunk could not be made.
    """
    listed = work.stem({"lines": lines})
    write_text(Path(listed), json.dumps(lines))
    planned = list(_planned(documents))
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
        if not end.is_done:
            fix = f"see {work.folder / ERRORS}, free memory and disk; the same command goes on where this one stopped"
            raise RunError(f"a process that finishes records has ended ({_cause(end)})", where="ingest", fix=fix)
        done += 1
        log.progress(done, len(planned), what="parts finished", tag="ingest")
    return [RecordChunk(stem, read_answer(stem) or {}) for stem in stems]


def _stem(found: WalkEntry, settings: Settings, *, work: WorkFolder) -> str:
    facts = {"name": found.name, "size": found.size, "mtime": found.mtime_ns}
    return work.stem({**facts, "path": str(found.path.absolute()), "settings": settings.reading_options()})


def _task(found: WalkEntry, settings: Settings, *, stem: str) -> ChildTask:
    try:
        extra = found.size / STREAMED_BYTES_A_S if is_streamed(found.path, found.size) else 0.0
    except OSError:  # the child reports what is wrong with it
        extra = 0.0
    return ChildTask(
        function=f"{READ}.read_file", answer=answer_path(stem), limit_s=settings.limit_s + extra,
        memory_bytes=settings.memory_bytes, most_file_bytes=MOST_FILE_BYTES,
        arguments={
            "path": str(found.path), "stem": stem, "size": found.size, "mtime_ns": found.mtime_ns,
            "encoding": settings.encoding, "cleaning": settings.reading_options()["cleaning"],
        },
    )  # fmt: skip


def _collect_answer(end: ChildEnd, stem: str) -> dict[str, Any]:
    """Return the child's answer. If the child died, write its cause of death as the answer."""
    _check_room(end)
    answer = read_answer(stem) if end.is_done else None
    if answer is None:
        forget(stem)
        reason, detail = _death(end)
        answer = {"status": "unreadable", "reason": reason, "detail": detail}
        answer |= {"seconds": end.seconds, "peak_bytes": end.peak_bytes}
        write_text(Path(answer_path(stem)), json.dumps(answer))
    elif answer["status"] == "stopped":
        forget(stem)
        raise error_from_json(answer["error"])
    return answer


def _check_room(end: ChildEnd) -> None:
    if end.exit_code == NO_ROOM_CODE:
        where = str(Path(end.task.answer).parent)
        raise RunError(
            "the disk is full", where=where, fix="make room; the same command goes on where this one stopped"
        )


def _death(end: ChildEnd) -> tuple[str, str]:
    if end.killed_for == "timeout":
        return "timeout", f"took longer than {end.task.limit_s:.0f} s"
    if end.killed_for == "memory":
        return "memory", f"its reader took more than {(end.task.memory_bytes or 0) / 1e6:,.0f} MB"
    return "crashed", f"its reader ended with {_cause(end)}"


def _cause(end: ChildEnd) -> str:
    if end.exit_code >= 0:
        return f"code {end.exit_code}"
    name = signal.Signals(-end.exit_code).name
    return f"signal {name}" + (", as where the machine's memory is used up" if name == "SIGKILL" else "")


def _planned(documents: Sequence[IngestedFile]) -> Iterator[list[dict[str, Any]]]:
    """Yield the shards in order, in groups for one chunk each."""
    group: list[dict[str, Any]] = []
    n_bytes = 0
    for place, document in enumerate(documents):
        for number, size in enumerate(document.answer.get("shards", ())):
            shard = Shard(
                file=place, name=shown(document.found.name), path=shard_path(document.stem, number),
                file_sha256=document.answer["sha256"],
            )  # fmt: skip
            group.append(asdict(shard))
            n_bytes += size
            if n_bytes >= CHUNK_BYTES or len(group) == CHUNK_SHARDS:
                yield group
                group, n_bytes = [], 0
    if group:
        yield group
