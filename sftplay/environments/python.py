"""A Python interpreter for models: each call is a program of its own in a box of the kit's sandbox.

Nothing of a call is left for the next one. So what a program returns hangs on nothing but its text, and a box that is
used up costs one call. The price: a model writes again what it defined before.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sftplay.errors import DataError
from sftplay.sandbox.boxes.job import Job, Limits
from sftplay.units import parse_bytes

if TYPE_CHECKING:
    from sftplay.sandbox.boxes.executors import Executor

SHELL = """
def run(source):
    import ast
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, "candidate.py")
        value = tree.body.pop().value if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "candidate.py", "exec"), names)
        shown = None if value is None else eval(compile(ast.Expression(value), "candidate.py", "eval"), names)
        if shown is not None:
            print(repr(shown))
    except SystemExit:
        pass
    except BaseException as error:
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        line, trace = getattr(error, "lineno", None), error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "candidate.py" and trace.tb_frame.f_code is not run.__code__:
                line = trace.tb_lineno
            trace = trace.tb_next
        print(f"{type(error).__name__}: {text[:500]}" + (f" (line {line})" if line else ""))
"""
"""What runs a program in its box, as an interpreter's prompt does: it shows the value of a last line, and what was
raised behind what was printed. It guards nothing; the box does."""

ENDS = {
    "timeout": "it ran longer than {timeout_s:g} s", "memory": "it needs more than {memory_bytes:,} bytes of memory",
    "output": "it printed more than {output_bytes:,} bytes", "killed": "its process ended",
    "tampered": "it wrote where the interpreter writes",
}  # fmt: skip
MOST_CHARACTERS = 20_000
"""Of a program."""


def python(
    code: str,
    *,
    timeout: float = 5.0,
    memory: str = "512MiB",
    packages: tuple[str, ...] | list[str] = (),
    executor: str = "auto",
) -> str:
    """Run a Python program and return what it prints. Nothing is kept from call to call.

    Args:
        code: The program. The value of its last line is printed too.
        timeout: Seconds that it may take.
        memory: What one of its processes may use.
        packages: What it may import besides Python's own.
        executor: The kind of box.
    """
    limits = Limits(timeout_s=timeout, test_timeout_s=timeout, memory_bytes=parse_bytes(memory))
    return run_python(code, executor=open_executor(executor, tuple(packages)), limits=limits)


@cache
def open_executor(name: str, packages: tuple[str, ...]) -> Executor:
    """Return what opens boxes. It keeps nothing running, so that processes which are forked from this one can use it.

    Raises:
        ConfigError: there is no such executor or package.
        MachineError: nothing here can box a program.
    """
    from sftplay.sandbox.pool import choose_executor

    return choose_executor(name, is_warm=False)(packages)


def prepare(
    *,
    timeout: float = 5.0,
    memory: str = "512MiB",
    packages: tuple[str, ...] | list[str] = (),
    executor: str = "auto",
) -> None:
    """Look at the options and test the boxes, once, before a call needs one.

    Raises:
        ConfigError, MachineError: as `open_executor`.
        DataError: the options are no limits.
    """
    try:
        Limits(timeout_s=timeout, memory_bytes=parse_bytes(memory))
    except ValueError as error:
        raise DataError(str(error), where="memory", fix="write 512MiB") from error
    open_executor(executor, tuple(packages))


vars(python)["prepare"] = prepare


def run_python(code: str, *, executor: Executor, limits: Limits) -> str:
    """Run a program in a box; return the end of what it prints, at most 2,000 bytes, and how it failed where it did.

    Raises:
        RuntimeError: the machinery failed, and nothing is known of the program.
    """
    from sftplay.sandbox.boxes.judge import judge

    if len(code) > MOST_CHARACTERS:
        return f"error: the program has more than {MOST_CHARACTERS:,} characters"
    verdict = judge(Job(code=f"{SHELL}\nrun({code!a})", limits=limits), executor)
    if verdict.status == "infra":
        raise RuntimeError(verdict.stderr)
    if verdict.status == "ok":
        return verdict.stderr or "(nothing was printed)"
    values: dict[str, Any] = {name: getattr(limits, name) for name in ("timeout_s", "memory_bytes", "output_bytes")}
    how = ENDS.get(verdict.status, verdict.status).format(**values)
    # Where nothing was printed, the verdict has words of its own there.
    printed = "" if verdict.status == verdict.stderr or verdict.status in ("killed", "output") else verdict.stderr
    return f"{printed}\nerror: {how}".strip()
