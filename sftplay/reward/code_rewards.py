"""Programs in answers, and the reward for them: the tests that they pass in the sandbox, no value where that fails."""

from __future__ import annotations

import ast
import builtins
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from textwrap import dedent
from typing import TYPE_CHECKING, Any, Literal

from sftplay.errors import DataError
from sftplay.reward.table import RewardValues
from sftplay.sandbox.boxes.job import Job, Limits, Verdict
from sftplay.units import parse_bytes

if TYPE_CHECKING:
    from sftplay.config.data import SandboxConfig
    from sftplay.sandbox.pool import Sandbox

_THINK = re.compile(r"(?s:.*)</think(?:ing)?>|\s*<think(?:ing)?>(?s:.*)", re.IGNORECASE)
"""Reasoning up to its last end, or to the end of a text that breaks off in it."""

Completion = str | Sequence[Mapping[str, Any]]
"""A text, or the messages of a chat; TRL hands over the second form where the prompt is a chat."""


def read_text(completion: Completion) -> str:
    """Read what the model has written; of messages the content of the last one.

    >>> read_text([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def without_reasoning(text: str) -> str:
    """Return the text behind the last closing think tag; nothing of a text that ends in its reasoning; else all of it.

    >>> without_reasoning("<think>6 x 7</think> 42"), without_reasoning("<think>perhaps 42")
    (' 42', '')
    """
    reasoning = _THINK.match(text)
    return text[reasoning.end() :] if reasoning else text


_START = re.compile(
    r"[ \t]*(?:def |async def |class |@\w|import \w|from \S+ import |[A-Za-z_]\w*(?::[^=\n]*)? ?=(?!=))"
)
_PROMPT = re.compile(r"^(?:>>>|\.\.\.|In \[\d+\]:|[ \t]*\.\.\.:) ?")
_MARKUP = re.compile(r"</?(?:answer|code|pre|python|solution)\b[^>\n]*>|\\(?:begin|end)\{\w+\}", re.IGNORECASE)
MOST_STARTS, MOST_CUTS = 40, 10
"""Lines of a text at which a definition is looked for, and how often its end is looked for: each costs a parse."""

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
IMPORTS = (ast.Import, ast.ImportFrom)
SOLUTION = "Solution"
"""The class of the site LeetCode; one of its methods may be the answer."""


def parse_program(code: str) -> ast.Module | None:
    """Parse a model's text; None where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes and comparisons
            return ast.parse(code) if "\0" not in code else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def defined(tree: ast.Module, *, imports: bool = True, methods: bool = False) -> set[str]:
    """Find the names that a program defines at its top level; with `methods` also those in its class `Solution`.

    >>> sorted(defined(ast.parse("import os as a; b = 1\\ndef c(): d = 1")))
    ['a', 'b', 'c']
    """
    names = {name for statement in tree.body for name in _names(statement, imports=imports)}
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == SOLUTION and methods]
    return names | {name for node in found for inner in node.body for name in _names(inner)}


def _names(statement: ast.stmt, *, imports: bool = True) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
    if isinstance(statement, IMPORTS) and imports:
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    return set()


def complete(code: str, *, others: Sequence[str], entry_point: str) -> str:
    """Put the definitions of other blocks that a program lacks before it, and set a method `entry_point` free."""
    tree = parse_program(code)
    if tree is None:
        return code
    if entry_point and entry_point not in defined(tree) and entry_point in defined(tree, methods=True):
        code += f"\n{entry_point} = {SOLUTION}().{entry_point}\n"
    known = defined(tree)
    added: list[str] = []
    wanted = _free(tree) - known
    there = [(node, other) for other in others if (parsed := parse_program(other)) for node in parsed.body]
    while wanted:
        name = wanted.pop()
        found = next((pair for pair in reversed(there) if name in _names(pair[0])), None)
        known.add(name)
        if found:
            added.insert(0, _source(*found))
            known |= _names(found[0])
            wanted |= _free(found[0])
        wanted -= known
    return "\n".join([*added, code])


def _free(tree: ast.AST) -> set[str]:
    """Find the names that are read somewhere and bound nowhere in the tree."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {name for node in ast.walk(tree) if isinstance(node, ast.stmt) for name in _names(node)}
    return {node.id for node in names if node.id not in bound and not hasattr(builtins, node.id)}


def _source(statement: ast.stmt, code: str) -> str:
    first = min([statement.lineno, *(node.lineno for node in getattr(statement, "decorator_list", []))])
    return "\n".join(code.split("\n")[first - 1 : statement.end_lineno])


def from_session(code: str) -> str:
    """Read the program of an interpreter's session: what stands behind its prompts. Other text as it is.

    >>> from_session(">>> def f():\\n...     return 1\\n>>> f()\\n1")
    'def f():\\n    return 1\\nf()'
    """
    lines = code.split("\n")
    if any(_PROMPT.match(line) for line in lines):
        lines = [_PROMPT.sub("", line) for line in lines if _PROMPT.match(line)]
    elif any(re.match(r"[%!]", line) for line in lines):  # orders to the notebook
        lines = [line for line in lines if not re.match(r"[%!]", line)]
    return "\n".join(lines)


def find_definitions(text: str, entry_point: str = "") -> str:
    """Find the imports, assignments, functions and classes between prose; empty unless they define the function.

    A definition in which a line is no Python counts for nothing.
    """
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text)
    text = re.sub(r":[ \t]+(?=(?:async )?def \w+\()", ":\n", _MARKUP.sub("\n", text))
    if any(re.match(r"[ \t]*>>> ", line) for line in text.split("\n")):
        text = from_session("\n".join(line.lstrip() for line in text.split("\n")))
    lines, at, found = text.split("\n"), 0, []
    n_starts = 0
    while at < len(lines) and n_starts < MOST_STARTS:
        if not _START.match(lines[at]):
            at += 1
            continue
        n_starts += 1
        code, n_lines = _definitions(lines[at:])
        found += code
        at += max(1, n_lines)
    for program in ["\n".join(found), *reversed(inline)]:
        tree = parse_program(program)
        names = defined(tree, methods=True) if tree else set()
        functions = tree is not None and any(isinstance(node, DEFINITIONS[:3]) for node in tree.body)
        if entry_point in names if entry_point else functions:
            return program
    return ""


def _definitions(lines: list[str]) -> tuple[list[str], int]:
    """Return the definitions with which these lines begin, and how many lines they take."""
    margin = len(lines[0]) - len(lines[0].lstrip())
    inside = [not line.strip() or len(line) - len(line.lstrip()) >= margin for line in lines]
    lines = lines[: inside.index(False)] if False in inside else lines
    for _ in range(MOST_CUTS):
        code = dedent("\n".join(lines))
        tree = parse_program(code)
        if tree is not None:
            kept = [node for node in tree.body if isinstance(node, (*DEFINITIONS, *IMPORTS))]
            return [_source(node, code) for node in kept], len(lines)
        try:
            ast.parse(code)
            break
        except SyntaxError as error:
            at = min(max((error.lineno or 1) - 1, 0), len(lines) - 1)
        except (ValueError, MemoryError, RecursionError):
            break
        while at and (not lines[at].strip() or len(lines[at]) - len(lines[at].lstrip()) > margin):
            at -= 1
        lines = lines[:at]  # up to the statement that is no Python
    return [], 0


How = Literal["labelled", "unlabelled", "unclosed", "whole_text", "none"]

LONGEST_CODE = 64 << 10
"""Characters of a program; a longer one counts as none."""

PYTHON_LABELS = ("python", "py", "python3")
"""Labels that the reward `format` asks for."""

_PYTHON_LABEL = re.compile(r"(?:i?python|py|pycon|sage|jupyter|\S+\.py)[\d.]*(?:[-_]?(?:repl|code))?", re.IGNORECASE)
_NO_LANGUAGE = ("", "text", "txt", "plaintext", "plain", "code", "console", "repl", "none", "output", "markdown", "md")
_OPENING = re.compile(
    r"^(?P<before>[ \t>*+-]*|[ \t>]*\d+[.)][ \t]*|.*?(?=(?:`{3,}|~{3,})[ \t]*[\w.+-]*[ \t]*$))"
    r"(?P<fence>`{3,}|~{3,})[ \t]*\{?[ \t]*\.?(?P<label>[\w+.-]*)(?P<rest>[^\n`]*)$",
    re.MULTILINE,
)
_CLOSING = re.compile(r"(?P<before>^[ \t>]*)?(?P<fence>`{3,}|~{3,})(?P<rest>[^\n]*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fenced:
    """A fenced block of a Markdown text."""

    label: str
    code: str
    end: int
    """Where the text behind the block begins."""

    is_closed: bool


@dataclass(frozen=True, slots=True)
class CodeAnswer:
    """The program of a completion; empty where there is none."""

    code: str
    how: How


def find_code(completion: Completion, entry_point: str = "") -> CodeAnswer:
    """Find the program that the completion gives as its answer, behind the reasoning.

    Blocks labelled as Python go before those without a language. The last counts that parses and defines `entry_point`,
    else the last, with the functions that it calls and other blocks define. Without a block the whole text counts, or
    its definitions between the prose.

    >>> find_code("Here:\\n```python\\ndef f(): return 1\\n```", "f").how
    'labelled'
    """
    text = without_reasoning(read_text(completion)).replace("\r\n", "\n").replace("\r", "\n")
    blocks = fenced_blocks(text)
    labelled = [block for block in blocks if _PYTHON_LABEL.fullmatch(block.label)]
    found = labelled + [block for block in blocks if block.label.lower() in _NO_LANGUAGE]
    if found:
        best, code = _best(labelled, entry_point) or _best(found, entry_point) or (None, "")
        if best is None:
            best = (labelled or found)[-1]
            code = best.code if best.is_closed else find_definitions(best.code, entry_point) or best.code
        code = complete(code, others=[block.code for block in found if block is not best], entry_point=entry_point)
        how: How = "unclosed" if not best.is_closed else "labelled" if best in labelled else "unlabelled"
        return _bounded(code, how)
    if blocks or len(text) > LONGEST_CODE or "\0" in text:
        return CodeAnswer("", "none")
    whole = text if text.strip() and is_program(text, entry_point) else find_definitions(text, entry_point)
    if not whole:
        return CodeAnswer("", "none")
    return _bounded(complete(whole, others=[], entry_point=entry_point), "whole_text")


def _best(blocks: list[Fenced], entry_point: str) -> tuple[Fenced, str] | None:
    """Find the last block that defines the function, else that imports it, else one with it in a `Solution`."""
    for imports, methods in ((False, False), (True, False), (True, True)):
        for block in reversed(blocks):
            tree = parse_program(block.code)
            if tree and (not entry_point or entry_point in defined(tree, imports=imports, methods=methods)):
                return block, block.code
    return None


def fenced_blocks(text: str) -> list[Fenced]:
    """Return the fenced blocks of a Markdown text, without the indentation and the quote marks around them.

    A fence ends a block of Python where what lies between is Python, so that one in a docstring ends nothing. The last
    block may lack its closing fence.
    """
    blocks: list[Fenced] = []
    at = 0
    while opening := _OPENING.search(text, at):
        # A model may write thousands of fences: after some blocks only the first end is tried.
        blocks.append(_read_block(text, opening, most_ends=20 if len(blocks) < 50 else 1))
        at = blocks[-1].end
    return blocks


def _read_block(text: str, opening: re.Match[str], *, most_ends: int) -> Fenced:
    begin, label = min(opening.end() + 1, len(text)), opening["label"]
    closings = (found for found in _CLOSING.finditer(text, begin) if found["fence"].startswith(opening["fence"]))
    near = list(islice(closings, 2 * most_ends))
    whole = [found for found in near if found["before"] is not None and not found["rest"].strip()]
    for closing in [*whole, *(found for found in near if found not in whole)]:
        code = _strip_marks(text[begin : closing.start()], opening)
        if parse_program(code):
            return Fenced(label, code, closing.end("fence"), True)
    end = whole[0].start() if whole else len(text)
    code = _strip_marks(text[begin:end], opening)
    return Fenced(label, code, whole[0].end("fence") if whole else end, bool(whole))


def _strip_marks(code: str, opening: re.Match[str]) -> str:
    """Return the lines of a block without what its place in the text put before them, and without prompts."""
    if quotes := opening["before"].count(">"):
        code = re.sub(rf"^(?:[ \t]*>[ ]?){{1,{quotes}}}", "", code, flags=re.MULTILINE)
    code = dedent(code)
    return code if parse_program(code) else from_session(code)


def is_program(code: str, entry_point: str = "") -> bool:
    """Say whether this is Python that parses and, where one is named, defines `entry_point` at its top level.

    >>> is_program("def f(): return 1", "f"), is_program("f = 1", "g")
    (True, False)
    """
    tree = parse_program(code) if len(code) <= LONGEST_CODE else None
    return tree is not None and (not entry_point or entry_point in defined(tree))


def _bounded(code: str, how: How) -> CodeAnswer:
    return CodeAnswer(code, how) if len(code) <= LONGEST_CODE and "\0" not in code else CodeAnswer("", "none")


MACHINERY = "infra"
"""The status that says nothing of the program."""

NO_CODE = "no_code"
"""The status of an answer in which no program was found."""


@dataclass(frozen=True, slots=True)
class Tried:
    """An answer's program, and what became of it."""

    found: CodeAnswer
    verdict: Verdict | None
    """None where there was no program."""

    @property
    def status(self) -> str:
        """The verdict's status, or NO_CODE."""
        return self.verdict.status if self.verdict else NO_CODE

    @property
    def passed(self) -> bool:
        """Whether there are tests and all of them passed."""
        return self.verdict is not None and 0 < self.verdict.total == self.verdict.passed and self.status == "ok"

    def as_json(self) -> dict[str, Any]:
        """Return it as it is written next to an answer."""
        verdict = self.verdict.as_dict() if self.verdict else {"status": NO_CODE}
        return {"how": self.found.how, **verdict}


def try_programs(
    completions: Sequence[Completion],
    *,
    sandbox: Sandbox,
    tests: Sequence[Sequence[str] | None],
    setup: Sequence[str | None] | None = None,
    entry_point: Sequence[str | None] | None = None,
    limits: Limits | None = None,
    within_s: float | None = None,
    **_: Any,
) -> list[Tried]:
    """Find the program of each completion and run it against the tests of its row, in the order of the completions.

    The columns are those of `data.load_problems.collect_reward_columns`. What has no verdict after `within_s` is
    `infra`. Raise DataError where a test or a setup is no Python.
    """
    n = len(completions)
    points, before = entry_point or [None] * n, setup or [None] * n
    found = [find_code(completion, point or "") for completion, point in zip(completions, points, strict=True)]
    limits = limits or Limits()
    jobs = [
        Job(code=answer.code, tests=tuple(row or ()), setup=first or "", entry_point=point or None, limits=limits)
        for answer, row, first, point in zip(found, tests, before, points, strict=True)
        if answer.code.strip()
    ]
    verdicts = iter(sandbox.run(jobs, within_s=within_s))
    return [Tried(answer, next(verdicts) if answer.code.strip() else None) for answer in found]


def passes_tests(
    tried: Sequence[Tried],
    *,
    shown: Sequence[int | None] | None = None,
    mode: Literal["fraction", "all"] = "fraction",
    shown_weight: float = 0.5,
) -> list[float | None]:
    """Return the share of its row's tests that each program passes; with `mode: all` 1 for all of them, else 0.

    The first `shown` tests of a row stood in its prompt, so that they can be passed by heart: they count `shown_weight`
    each, the others 1. A completion without a program gets 0. None where the sandbox failed, or without tests.

    >>> ok = Verdict(status="wrong", per_test=("ok", "wrong", "ok"), passed=2, total=3)
    >>> passes_tests([Tried(CodeAnswer("...", "labelled"), ok)], shown=[1])
    [0.6]
    """
    scores: list[float | None] = []
    for program, n_shown in zip(tried, shown or [0] * len(tried), strict=True):
        verdict = program.verdict
        if verdict is None:
            scores.append(0.0)
        elif verdict.status == MACHINERY or not verdict.total:
            scores.append(None)
        elif mode == "all":
            scores.append(float(verdict.passed == verdict.total))
        else:
            weights = [shown_weight if at < (n_shown or 0) else 1.0 for at in range(len(verdict.per_test))]
            passed = sum(weight for weight, status in zip(weights, verdict.per_test, strict=True) if status == "ok")
            scores.append(passed / sum(weights) if sum(weights) else 0.0)
    return scores


def passes_hidden(tried: Tried, *, tests: int, shown: int) -> bool | None:
    """Say whether a program passes all of its row's `tests` but the first `shown`, which stood in the prompt.

    None where the sandbox failed, or where all of them stood there.

    >>> known = Verdict(status="wrong", per_test=("wrong", "ok", "ok"), passed=2, total=3)
    >>> passes_hidden(Tried(CodeAnswer("...", "labelled"), known), tests=3, shown=1)
    True
    """
    if tests <= shown or tried.status == MACHINERY:
        return None
    rest = tried.verdict.per_test[shown:] if tried.verdict else ()
    return len(rest) == tests - shown and set(rest) == {"ok"}


def read_limits(config: SandboxConfig) -> Limits:
    """Read the limits of a program from the config."""
    memory = parse_bytes(str(config.memory))
    return Limits(timeout_s=config.timeout, test_timeout_s=config.test_timeout, memory_bytes=memory)


class CodeTests:
    """The reward code_tests, called as a `RewardWorker` is; programs run in boxes instead of a process."""

    use = "code_tests"

    def __init__(self, options: Mapping[str, Any], *, sandbox: Sandbox, limits: Limits, deadline_s: float) -> None:
        """`deadline_s` is for one completion. A box ends each program in time; the deadline is for boxes that hang."""
        self.options, self.deadline_s = dict(options), deadline_s
        self._sandbox, self._limits = sandbox, limits

    def __call__(self, completions: Sequence[Any], /, **columns: Any) -> RewardValues:
        """Score the completions; `columns` are aligned with them. The values come with verdicts."""
        turns = math.ceil(len(completions) / self._sandbox.workers)
        names = ("tests", "setup", "entry_point")  # rows may have a column `limits`
        read = {name: columns[name] for name in names if name in columns}
        shown = columns.get("shown") or [0] * len(completions)
        try:
            tried = try_programs(
                completions, sandbox=self._sandbox, limits=self._limits, within_s=self.deadline_s * turns, **read
            )
        except DataError as error:
            failed = [{"status": MACHINERY} for _ in completions]
            return RewardValues([None] * len(completions), [str(error)], failed)
        verdicts = [program.verdict for program in tried if program.verdict]
        reasons = [f"the sandbox failed: {verdict.stderr}" for verdict in verdicts if verdict.status == MACHINERY]
        reasons += ["a row has no tests" for found in verdicts if found.status != MACHINERY and not found.total]
        lines = [
            {**program.as_json(), "hidden_pass": passes_hidden(program, tests=len(tests or ()), shown=n_shown or 0)}
            for program, tests, n_shown in zip(tried, columns["tests"], shown, strict=True)
        ]
        return RewardValues(passes_tests(tried, shown=shown, **self.options), list(dict.fromkeys(reasons)), lines)
