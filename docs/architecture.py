"""Writes docs/architecture.md and README's picture from the code: floors, folders, modules, who imports whom.

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
        "data.order",
        "sandbox",
        "data.problem",
    ],
    2: ["plan", "launch", "reward", "data"],
    3: ["data.pipeline", "data.mixture", "data.load_prompts", "model"],
    4: ["generate", "data.inspect"],
    5: ["evaluate", "export"],
    6: ["report"],
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


def first_sentence(module: str) -> str:
    """What a module says it is: its docstring up to the end of the first paragraph."""
    text = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


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
    """Each folder in one line, and below it each of its modules in one line."""
    parts: list[str] = []
    folders = sorted({path.parent for path in MODULES.values()})
    for folder in folders:
        package = ".".join(folder.relative_to(ROOT).parts)
        parts.append(f"\n**`{folder.relative_to(ROOT)}/`** {first_sentence(package)}\n")
        for module, path in MODULES.items():
            if path.parent == folder and path.name != "__init__.py":
                parts.append(f"- `{path.name}` ({floor_of(module)}) {first_sentence(module)}")
    return "\n".join(parts)


INTRODUCTION = """<!-- Written by `make architecture`, held by a test: change docs/architecture.py or docstrings. -->
# Architecture

Ten floors. A module imports only from lower floors, or from its own top folder as long as neither modules nor folders
import each other in a circle. The figure behind a module's name is its floor.

| floor | what stands there |
| --- | --- |
{floors}
"""

PATHS = """## The path of a config value

1. `commands/train.py` calls `config/load.py`. `config/layers.py` reads the file, and lays includes and
   command line over each other. Every value remembers where it was written.
2. `config/run.py` types it, with the sections in `config/data.py`, `config/train.py`, `config/cluster.py`,
   `config/rewards.py`, and of each task in its module `section`; `config/problems.py` says what is refused. A section's
   rules stand in its file, those of several sections in `config/rules.py`.
3. `plan/sizing.py` replaces every `auto` by a number or a name, with its reason.
4. `config/resolved.py` writes all of it into the run folder with the origin of each value. Every rank reads that
   file.

## The path of a task

1. `tasks/__init__.py` is the table: `cfg.task` is the row of the config's task, with the facts that the trunk asks.
2. `config/section.py` finds the task's rules in its module `spec`, `plan/task_sizing.py` and
   `plan/report.py` what it answers to the plan in its module `plan`. Without such a module the
   answers are those of sft.
3. In each process `tasks/worker.py` finds the module `task`, and `train/run_task.py` calls its functions in order.

## The path of a row

1. `data/read.py` finds files and yields raw rows with their place.
2. `data/layouts.py` turns a row into a canonical record of `data/records.py`, or says why it cannot.
3. `data/render/render.py` verifies the masks of the chat template and renders it;
   `data/render/labels.py` makes token ids and labels of it.
4. `data/tokenize.py` does this in worker processes, counts every record and keeps the rows on disk.
5. `data/pipeline.py` hands them to the task, in the order of `data/order.py`.
6. `train/exact_batch.py` gets a rank's rows of one optimizer step, `train/micro_batches.py` cuts them.

## The path of a document

1. `data/ingest/walk.py` finds files; `data/ingest/children.py` has a child forked for each, within bounds.
2. In the child `data/ingest/reading.py` cleans what `data/ingest/by_kind.py` has found, block by block, and
   writes it down.
3. `data/ingest/cleaning.py` makes rows with their pages of it, without the lines that stand everywhere.
4. `data/ingest/ingest.py` finds rows that repeat others and writes the rest.

## The path of an out-of-memory event

1. `train/exact_batch.py` catches it in a micro-batch; all ranks agree by `model/out_of_memory.py`.
2. `train/exact_batch.py` runs the same rows again in smaller micro-batches and writes an event.
3. Where a step cannot be run again, the run ends with code 3 and the size to go on with. `runs/start.py` starts it
   again from its last checkpoint.

## The path of a stop signal

1. The parent (`launch/follow.py`) passes it to the ranks by their process ids.
2. Before the first step `signals.py` ends the rank at once. Behind it `train/guards.py` notes it, and all ranks agree
   at a step's edge.
3. The Trainer saves; `train/checkpointing.py` seals the checkpoint by `launch/checkpoints.py`.
4. `tasks/worker.py` writes the state and the code into `status.json`. The parent returns that code.
"""


def page() -> str:
    """The whole text of docs/architecture.md."""
    rows = "\n".join(f"| {floor} | {', '.join(names)} |" for floor, names in FLOORS.items())
    introduction = INTRODUCTION.format(floors=rows)
    return f"{introduction}\n{picture()}\n\n{PATHS}\n## Folders and modules\n{listing()}\n"


def readme() -> str:
    """The text of README.md with today's picture between its two marks."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{picture()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)} and the picture in {README.relative_to(ROOT)}")
