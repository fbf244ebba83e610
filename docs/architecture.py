"""Write docs/architecture.md and README's picture: the floors, the paths of values and signals, who imports whom.

`make architecture` runs it; tests/test_structure.py holds the floors and the page by the same tables.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs" / "architecture.md", ROOT / "README.md"
BEGIN, END = "<!-- picture: written by `make architecture` -->", "<!-- end of picture -->"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "sftplay").rglob("*.py"))
}
"""Dotted name -> file, packages too."""

FLOORS = {
    0: [
        "errors",
        "log",
        "places",
        "units",
        "flags",
        "heartbeat",
        "signals",
        "atomic",
        "install",
        "startup",
        "tasks.__init__",
    ],
    1: [
        "config",
        "machine",
        "data.records",
        "sandbox",
        "data.problem",
    ],
    2: ["plan", "launch", "reward", "data"],
    3: ["reward.model_reward", "data.pipeline", "data.mixture", "data.load_prompts", "model", "environments"],
    4: ["generate", "data.inspect"],
    5: ["evaluate", "export"],
    6: ["report", "parity"],
    7: ["train", "runs"],
    8: ["tasks"],
    9: ["commands", "make_arguments", "cli", "__main__"],
}
"""Each module stands on the floor of the longest name here that it begins with."""


@cache
def floor_of(module: str) -> int:
    """The floor of a module; the kit's own package stands on the ground."""
    short = module.removeprefix("sftplay").lstrip(".")
    if short == "tasks":  # the table, which names modules and imports none
        return 0
    found = [
        (len(name), floor) for floor, names in FLOORS.items() for name in names if f"{short}.".startswith(f"{name}.")
    ]
    if not short:
        return 0
    assert found, f"{module} has no floor in docs/architecture.py"
    return max(found)[1]


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of the kit that a module imports anywhere in it, inside functions too; not those that only name types."""
    found = set()
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    skipped = {inner for node in for_types for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide where things come from"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name for name in found if name in MODULES)


def room_of(module: str) -> tuple[str, int]:
    """The folder of a module, and its floor: a folder whose modules stand on two floors is two rooms."""
    return str(MODULES[module].parent.relative_to(ROOT)), floor_of(module)


def subject_of(module: str) -> str:
    """The top folder a module lies in, or the file itself where it lies in none."""
    return module.split(".")[1] if "." in module else ""


def picture() -> str:
    """The subjects and who imports whom, as Mermaid; an arrow that others imply is left out."""
    names = sorted({subject_of(name) for name in MODULES if MODULES[name].parent.name != "sftplay"})
    edges = {name: set() for name in names}  # type: dict[str, set[str]]
    for module in MODULES:
        for imported in imports_of(module) - {"sftplay.tasks"}:
            one, two = subject_of(module), subject_of(imported)
            if one in edges and two in edges and one != two:
                edges[one].add(two)

    def reached(name: str) -> set[str]:
        return edges[name].union(*(reached(each) for each in edges[name]))

    lines = ["```mermaid", "flowchart TD"]
    for name in names:
        implied = set().union(*(reached(each) for each in edges[name]))
        if drawn := sorted(edges[name] - implied):
            lines.append(f"  {name} --> {' & '.join(drawn)}")
    return "\n".join([*lines, "```"])


def listing() -> str:
    """The floors, from the highest, as a table."""
    rows = [
        f"| {floor} | {', '.join(f'`{name}`' for name in names)} |" for floor, names in sorted(FLOORS.items())[::-1]
    ]
    return "\n".join(["| floor | modules |", "| --- | --- |", *rows])


INTRODUCTION = """<!-- Written by `make architecture`, held by a test: change docs/architecture.py or docstrings. -->
# Architecture

Ten floors, from what needs nothing (0) to the command line (9). A module imports only from lower floors, or from its
own top folder as long as neither modules nor folders import each other in a circle. README has
[the picture](../README.md#architecture) of who imports whom. `python benchmarks/walks.py` counts the files whose
functions run in what a user asks for; `--list` names them.
"""

PATHS = """## The path of a config value

1. `commands/train.py` calls `config/load.py`. `config/layers.py` lays file, includes and command line over each other,
   and remembers where every value was written.
2. `config/run.py` types it, with `config/cluster.py`, `config/data.py` and the module `section` of each task. The rules
   between keys are in `config/load.py` too, and `config/problems.py` shows problems.
3. `plan/sizing.py` replaces every `auto` by a value with its reason.
4. `config/resolved.py` writes all of it into the run folder with origins. Every rank reads that file.

## The path of a task

1. `tasks/__init__.py` is the table: `cfg.task` is the row of the config's task, with the facts that the trunk asks.
2. `config/section.py` finds the task's rules in its module `spec`; `plan/sizing.py` and `plan/report.py` find its
   answers in its module `plan`, else take those of sft.
3. In each process `tasks/worker.py` finds the module `task`, and `train/run_task.py` calls its functions in order.

## The path of a row

1. `data/read.py` finds files and yields raw rows with their place.
2. `data/layouts.py` turns a row into a canonical record of `data/records.py`, or says why it cannot.
3. `data/render/render.py` verifies the masks of the chat template and renders it; `data/render/masks.py` makes token
   ids and labels.
4. `data/tokenize.py` does this in worker processes, counts every record and keeps the rows on disk.
5. `data/pipeline.py` hands them to the task, and says in which order they are trained.
6. `train/exact_batch.py` gets a rank's rows of one optimizer step, `train/micro_batches.py` cuts them.

## The path of a document

1. `data/ingest/children.py` finds files, and forks a bounded child for each.
2. The child cleans what `data/ingest/extract/document.py` has found, block by block (`data/ingest/reading.py`).
3. `data/ingest/reading.py` makes rows with their pages; `data/ingest/ingest.py` finds repeated ones, writes the rest.

## The path of an out-of-memory event

1. `train/exact_batch.py` catches it in a micro-batch. All ranks agree by `model/out_of_memory.py`, run the same rows in
   smaller micro-batches and write an event.
2. Where a step cannot be run again, the run ends with 3, and `runs/start.py` starts it from its last checkpoint.

## The path of a stop signal, SIGUSR1 of a SLURM job among them

1. The parent (`launch/follow.py`) passes it to the ranks by their process ids.
2. Before the first step `signals.py` ends the rank. Later `train/guards.py` notes it, and all ranks agree at an edge.
3. The Trainer saves; `train/checkpointing.py` seals the checkpoint by `launch/checkpoints.py`.
4. `tasks/worker.py` writes state and code into `status.json`. The parent returns that code.
5. In a SLURM job `launch/slurm/request.py` asks for the signal, `launch/slurm/job.py` passes it on and at
   code 138 has the job queued again.

"""

FOLDERS = """A module stands on the floor of the longest name here that it begins with. The first line of a folder's
`__init__.py` and of a module says what it is: `head -1 sftplay/data/*.py`. README's table says where to begin.
"""


def page() -> str:
    """The whole text of docs/architecture.md."""
    return f"{INTRODUCTION}\n{PATHS}## The floors\n\n{FOLDERS}\n{listing()}\n"


def readme() -> str:
    """The text of README.md with today's picture between its two marks."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{picture()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and the picture in {README.relative_to(ROOT)}")
