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
from sftplay.atomic import read_object, write_text
from sftplay.config.load import dump_resolved, load_config
from sftplay.errors import RunError, SftplayError, error_from_json
from sftplay.launch.command.command import WORKER, Launch, Scale, build_launch
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.processes import end_launch
from sftplay.model.source import is_local
from sftplay.runs.code_eval import Questions, Subject, answer_share
from sftplay.signals import die_with_parent, popen_tied

CONFIG, TASK = "config.yaml", "questions.json"
"""Files of the folder that all ranks share. Rank N leaves rankN.json there."""


def main(folder: str) -> int:
    """Answer this rank's share, and leave answers or an error in `folder`/rankN.json; 0, or the error's exit code."""
    die_with_parent()
    here, rank = Path(folder), log.rank()
    task = json.loads((here / TASK).read_text(encoding="utf-8"))
    subject = Subject(load_config(here / CONFIG), RunFolder(Path(task["folder"])), run=task["run"], base=task["base"])
    questions = Questions(**{**task["questions"], "texts": tuple(task["questions"]["texts"])})
    note: dict[str, Any]
    try:
        note, code = {"answers": answer_share(subject, questions, rank=rank, world_size=log.world_size())}, 0
    except SftplayError as error:
        note, code = {"error": error.as_json()}, error.exit_code
    write_text(here / f"rank{rank}.json", json.dumps(note))
    return code


def answer_by_ranks(subject: Subject, questions: Questions, *, scale: Scale, has_gpu: bool) -> list[str]:
    """Return the answers in order; `scale` says how many processes of this node share the questions.

    Raises:
        SftplayError: what a rank has raised.
        RunError: a rank has died.
    """
    if scale.world_size == 1:
        answers = answer_share(subject, questions)
    else:
        with TemporaryDirectory(prefix="eval-code-") as name:
            folder = Path(name)
            task = {"folder": str(subject.folder.path), "run": subject.run, "base": subject.base}
            write_text(folder / CONFIG, dump_resolved(subject.cfg))
            write_text(folder / TASK, json.dumps({**task, "questions": asdict(questions)}))
            last_lines = _run(build_ranks(subject, folder, scale=scale, has_gpu=has_gpu))
            answers = gather(folder, scale.world_size, last_lines=last_lines)
    return [answers[number] for number in range(len(questions.texts) * questions.samples)]


def build_ranks(subject: Subject, folder: Path, *, scale: Scale, has_gpu: bool) -> Launch:
    """Return the command of a run of this scale that starts answering ranks instead of workers.

    Ranks exchange nothing, so DeepSpeed's launcher would add nothing to torchrun, and is not used.
    """
    launch = build_launch(
        folder, scale, has_gpu=has_gpu, is_offline=is_local(subject.cfg.model.name),
        launcher="accelerate" if subject.cfg.cluster.launcher == "accelerate" else "auto",
    )  # fmt: skip
    rank = "sftplay.runs.code_eval_ranks"  # this module
    return replace(launch, argv=tuple(rank if argument == WORKER else argument for argument in launch.argv))


def _run(launch: Launch) -> list[str]:
    """Run it to its end and show the ranks' own lines; return the last 20 of the others."""
    for path, text in launch.files.items():
        write_text(Path(path), text)
    console, unmarked = log.new_console(), deque[str](maxlen=20)
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
    """Return the answers of all ranks by their number; `last_lines` are the launcher's.

    Raises:
        SftplayError: what a rank has raised.
        RunError: a rank has died.
    """
    notes = [read_object(folder / f"rank{rank}.json") for rank in range(world_size)]
    for note in notes:
        if "error" in note:
            raise error_from_json(note["error"])
    if missing := [str(rank) for rank, note in enumerate(notes) if "answers" not in note]:
        log.show_error("\n".join(last_lines))
        fix = "look at the lines above; `make doctor` looks at this machine"
        raise RunError("ended without its answers", where=f"rank {', '.join(missing)}", fix=fix)
    return {int(number): answer for note in notes for number, answer in note["answers"].items()}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
