"""Programs in the tasks of lm-evaluation-harness: judged in the kit's sandbox, never in this process."""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any

import evaluate  # Hugging Face's library of metrics
import lm_eval

from sftplay.config.data import SandboxConfig
from sftplay.errors import ConfigError, RunError
from sftplay.evaluate.code import measuring_limits, pass_at_k
from sftplay.sandbox.boxes.job import Job
from sftplay.sandbox.pool import Sandbox

EXECUTING = {"exec", "eval", "Popen", "parse_expr", "sympify"}
EXECUTING_MODULES: dict[str, tuple[str, ...]] = {
    "subprocess": ("",), "os": ("system", "popen", "exec", "spawn", "posix_spawn"), "builtins": ("exec", "eval"),
    "runpy": ("",), "sympy": ("parse_expr", "sympify"),
}  # fmt: skip
"""Names, and beginnings of the names in a module, of what runs a text as a program. sympy reads formulas by eval."""

TASKS = "lm_eval.tasks."


class BoxedCodeEval:
    """Stands for the metric `code_eval` of Hugging Face's evaluate, which runs programs in a fork of this process.

    The sandbox opens with the first program. MachineError where nothing here can box one.
    """

    def __init__(self, config: SandboxConfig) -> None:
        if config.executor == "none":
            fix = "leave it out: ARGS=sandbox.executor=auto"
            raise ConfigError("programs of a model are not run without a box here", where="sandbox.executor", fix=fix)
        self._config, self._limits = config, measuring_limits(config)
        self._sandbox: Sandbox | None = None
        self.statuses = Counter[str]()
        """How the programs ended."""

    @property
    def executor(self) -> str | None:
        """What the boxes are made of; None where no program has run."""
        return self._sandbox.version if self._sandbox else None

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,), **_: Any
    ) -> tuple[dict[str, float], dict[int, list[tuple[int, dict[str, Any]]]]]:
        """Return `pass@k` over the problems, and what became of each program, in the form of `code_eval`.

        A program passes where its reference, Python that calls it, raises nothing.
        Raise RunError where the sandbox fails twice for a program: its verdict would be a guess.
        """
        if self._sandbox is None:
            self._sandbox = Sandbox(self._config.executor, packages=self._config.packages)
        details: dict[int, list[tuple[int, dict[str, Any]]]] = {}
        for number, (reference, programs) in enumerate(zip(references, predictions, strict=True)):
            jobs = [Job(code=code, tests=(reference,), limits=self._limits) for code in programs]
            verdicts = self._sandbox.run(jobs)
            for at, verdict in enumerate(verdicts):
                if verdict.status == "infra":
                    verdict = self._sandbox.run_again(jobs[at])
                if verdict.status == "infra":
                    fix = "`make sandbox ARGS=--self-test` says what is wrong with it"
                    raise RunError(f"the sandbox failed ({verdict.stderr})", where=self._sandbox.executor, fix=fix)
                self.statuses[verdict.status] += 1
                result = {"passed": verdict.status == "ok", "result": verdict.status, "completion_id": at}
                details.setdefault(number, []).append((at, {"task_id": number, **result}))
        figures = {}
        for wanted in k:
            right = [(len(rows), sum(row["passed"] for _, row in rows)) for rows in details.values()]
            if right and all(n >= wanted for n, _ in right):
                values = [pass_at_k(wanted, n=n, right=passed) for n, passed in right]
                figures[f"pass@{wanted}"] = sum(values) / len(values)
        return figures, details

    def close(self) -> None:
        """End everything that runs."""
        if self._sandbox is not None:
            self._sandbox.close()


@contextmanager
def boxed_code_eval(config: SandboxConfig) -> Iterator[BoxedCodeEval]:
    """Let `evaluate.load("code_eval")` give the stand-in within the block; other metrics are loaded as ever.

    The only place where the kit changes the harness: its code tasks load that metric when their module is imported.
    """
    boxed, load = BoxedCodeEval(config), evaluate.load

    def load_boxed(path: str, *args: Any, **options: Any) -> Any:
        return boxed if Path(path).stem == "code_eval" else load(path, *args, **options)  # evaluate-metric/code_eval

    evaluate.load = load_boxed
    try:
        yield boxed
    finally:
        evaluate.load = load
        boxed.close()
        for name, module in list(sys.modules.items()):  # the harness keeps the modules of tasks
            if any(value is boxed for value in list(getattr(module, "__dict__", {}).values())):
                del sys.modules[name]


def find_unboxed(task: Any, boxed: BoxedCodeEval) -> str:
    """Say why a task of the harness may run a model's programs outside the box; empty where no reason is seen.

    Tasks that are marked as unsafe must use the stand-in. The Python files next to a task's functions are read: some
    tasks execute answers without the mark, and some by functions of another task of the harness. A file that hides what
    it executes is not found out.
    """
    functions = list(_find_functions(vars(task.config)))
    metrics = [getattr(metric, "__self__", None) for metric in getattr(task, "_metric_fn_list", {}).values()]
    held = [*metrics, *(value for function in functions for value in function.__globals__.values())]
    uses_box = any(value is boxed for value in held)
    if getattr(task, "UNSAFE_CODE", False) and not uses_box:
        return "it is marked as unsafe, and runs answers by other means than the metric code_eval"
    library = Path(lm_eval.__file__).parent
    borrowed = [value for value in held if isinstance(value, FunctionType) and value.__module__.startswith(TASKS)]
    files = {Path(function.__code__.co_filename).resolve() for function in (*functions, *borrowed)}
    files.add(Path(inspect.getfile(type(task))).resolve())
    folders = {file.parent for file in files if library not in file.parents or library / "tasks" in file.parents}
    for file in sorted(file for folder in folders for file in folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if word := _find_execution(node):
                return f"{file}, line {node.lineno}, {word}, perhaps for what the model wrote"  # type: ignore[attr-defined]
    return ""


def _find_functions(value: Any) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _find_functions(part)
    elif isinstance(function := getattr(value, "func", None), FunctionType):  # functools.partial
        yield function
    elif type(value).__module__.startswith("lm_eval.config"):
        yield from _find_functions(vars(value))


def _find_execution(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and node.id in EXECUTING:
        return f"uses {node.id}"
    if isinstance(node, ast.Attribute) and isinstance(module := node.value, ast.Name):
        return f"uses {module.id}.{node.attr}" if node.attr.startswith(EXECUTING_MODULES.get(module.id) or ()) else ""
    if isinstance(node, ast.ImportFrom):
        beginnings = EXECUTING_MODULES.get(str(node.module).partition(".")[0]) or ()
        word = next((found.name for found in node.names if found.name.startswith(beginnings)), "")
        return f"imports {node.module}.{word}" if word else ""
    if isinstance(node, ast.Import):  # a module that does nothing else, by whatever name
        word = next((found.name for found in node.names if "" in EXECUTING_MODULES.get(found.name, ())), "")
        return f"imports {word}" if word else ""
    return ""
