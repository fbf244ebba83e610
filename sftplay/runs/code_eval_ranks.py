"""Share the questions to a model over several processes, and merge their answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.load import dump_resolved, load_config
from sftplay.errors import RunError, SftplayError, error_from_json
from sftplay.launch.command.command import WORKER, Launch, Scale, build_launch
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.processes import end_launch
from sftplay.model.source import is_local
from sftplay.runs.code_eval import Questions, Subject, answer_share
from sftplay.signals import die_with_parent, popen_tied

CONFIG, TASK = "config.yaml", "questions.json"
"""Files of the folder that all ranks share."""


def main(folder: str) -> int:
    """Answer this rank's share, and leave answers or an error in `folder`/rankN.json; 0, or the error's exit code."""
    die_with_parent()
    here = Path(folder)
    task = json.loads((here / TASK).read_text(encoding="utf-8"))
    subject = Subject(
        load_config(here / CONFIG), RunFolder(Path(task["folder"])), run=task["run"], base=task["base"]
    )  # fmt: skip
    questions = Questions(**{**task["questions"], "texts": tuple(task["questions"]["texts"])})
    try:
        answers = answer_share(subject, questions, rank=log.rank(), world_size=log.world_size())
    except SftplayError as error:
        write_text(here / note_of(log.rank()), json.dumps({"error": error.as_json()}))
        return error.exit_code
    write_text(here / note_of(log.rank()), json.dumps({"answers": answers}))
    return 0


def note_of(rank: int) -> str:
    """Name of the file that a rank leaves."""
    return f"rank{rank}.json"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))


RANK = "sftplay.runs.code_eval_ranks"

LAST_LINES = 20
"""Lines of a launcher that are shown where a rank has died without a word."""


def answer_by_ranks(subject: Subject, questions: Questions, *, scale: Scale, has_gpu: bool) -> list[str]:
    """The answers in order; `scale` says how many processes of this node share the questions.

    Raises:
        SftplayError: what a rank has raised.
        RunError: a rank has died.
    """
    one = scale.world_size == 1
    answers = answer_share(subject, questions) if one else _shared(subject, questions, scale=scale, has_gpu=has_gpu)
    return [answers[number] for number in range(len(questions.texts) * questions.samples)]


def _shared(subject: Subject, questions: Questions, *, scale: Scale, has_gpu: bool) -> dict[int, str]:
    """The answers of several processes by their number."""
    with TemporaryDirectory(prefix="eval-code-") as name:
        folder = Path(name)
        task = {"folder": str(subject.folder.path), "run": subject.run, "base": subject.base}
        write_text(folder / CONFIG, dump_resolved(subject.cfg))
        write_text(folder / TASK, json.dumps({**task, "questions": asdict(questions)}))
        last_lines = _run(build_ranks(subject, folder, scale=scale, has_gpu=has_gpu))
        return gather(folder, scale.world_size, last_lines=last_lines)


def build_ranks(subject: Subject, folder: Path, *, scale: Scale, has_gpu: bool) -> Launch:
    """The command of a run of this scale, with the answering rank in the worker's place.

    Ranks exchange nothing, so DeepSpeed's launcher would add nothing to torchrun, and is not used.
    """
    launch = build_launch(
        folder, scale, has_gpu=has_gpu, is_offline=is_local(subject.cfg.model.name),
        launcher="accelerate" if subject.cfg.cluster.launcher == "accelerate" else "auto",
    )  # fmt: skip
    return replace(launch, argv=tuple(RANK if argument == WORKER else argument for argument in launch.argv))


def _run(launch: Launch) -> list[str]:
    """Run it to its end and show the ranks' own lines; the last of the others."""
    for path, text in launch.files.items():
        write_text(Path(path), text)
    console, unmarked = log.new_console(), deque[str](maxlen=LAST_LINES)
    process = popen_tied(launch.argv, output=subprocess.PIPE, env=launch.env)
    assert process.stdout is not None
    try:
        for raw in process.stdout:
            text = raw.decode("utf-8", "replace").rstrip("\n")
            if not log.show_marked(text, console=console):
                unmarked.append(text)
        process.wait()
    finally:
        console.close()
        process.stdout.close()
        if process.poll() is None:
            end_launch(process.pid)
            process.wait()
    return list(unmarked)


def gather(folder: Path, world_size: int, *, last_lines: list[str]) -> dict[int, str]:
    """The answers of all ranks by their number; `last_lines` are the launcher's.

    Raises:
        SftplayError: what a rank has raised.
        RunError: a rank has died.
    """
    notes: list[dict[str, Any]] = []
    for rank in range(world_size):
        path = folder / note_of(rank)
        notes.append(json.loads(path.read_text(encoding="utf-8")) if path.exists() else {})
    for note in notes:
        if "error" in note:
            raise error_from_json(note["error"])
    missing = [str(rank) for rank, note in enumerate(notes) if "answers" not in note]
    if missing:
        log.show_error("\n".join(last_lines))
        fix = "look at the lines above; `make doctor` looks at this machine"
        raise RunError("ended without its answers", where=f"rank {', '.join(missing)}", fix=fix)
    return {int(number): answer for note in notes for number, answer in note["answers"].items()}
