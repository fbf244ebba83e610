"""One of several processes that answer questions. `ranks` starts it by a launcher and reads what it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.load import load_config
from sftplay.control.code_eval.questions import Questions, answer_share
from sftplay.control.code_eval.subject import Subject
from sftplay.errors import SftplayError
from sftplay.launch.run_folder import RunFolder
from sftplay.signals import die_with_parent

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
