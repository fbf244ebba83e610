"""Python between other text: definitions in prose, an interpreter's session, helpers in another block of an answer."""

from __future__ import annotations

import ast
import builtins
import re
import warnings
from collections.abc import Sequence
from textwrap import dedent

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
