"""What Ollama does with a Modelfile: its grammar (parser/parser.go of ollama/ollama) and the part of Go's text/template
that templates of chats use."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COMMANDS = "FROM PARAMETER TEMPLATE SYSTEM ADAPTER DRAFT RENDERER PARSER REQUIRES LICENSE MESSAGE".split()  # noqa: SIM905
PARAMETERS = {
    "stop": str, "temperature": float, "top_p": float, "top_k": float, "min_p": float, "repeat_penalty": float,
    "num_ctx": int,
}  # fmt: skip


def parse_modelfile(text: str) -> list[tuple[str, str]]:
    """Return its commands; a parameter's name is PARAMETER and its own. ValueError: it breaks the grammar."""
    found, rest = [], text
    while rest := rest.lstrip(" \t\r\n"):
        if rest.startswith("#"):
            rest = rest.partition("\n")[2]
            continue
        match = re.match(r"([A-Za-z]+)[ \t]+", rest)
        if match is None or match[1].upper() not in COMMANDS:
            raise ValueError(f"no command: {rest[:40]!r}")
        name, rest = match[1].upper(), rest[match.end() :]
        if name == "PARAMETER":
            match = re.match(r"([A-Za-z0-9_]+)[ \t]+", rest)
            if match is None or match[1] not in PARAMETERS:
                raise ValueError(f"no parameter: {rest[:40]!r}")
            name, rest = f"{name} {match[1]}", rest[match.end() :]
        # A value ends at a line's end, or at the white space behind the quotes that closes it.
        patterns = {'"""': r'"""(.*?)"""(?=\s|$)', '"': r'"([^"\n]*)"(?=\s|$)', "": r"([^\n]*)"}
        pattern = next(pattern for quote, pattern in patterns.items() if rest.startswith(quote))
        match = re.match(pattern, rest, re.DOTALL)
        if match is None:
            raise ValueError(f"a value has no end: {rest[:40]!r}")
        value = "".join(letter for letter in match[1] if letter.isprintable() or letter in "\n\t")
        if name.startswith("PARAMETER "):
            PARAMETERS[name.split()[1]](value)
        found.append((name, value))
        rest = rest[match.end() :]
    if sum(name == "FROM" for name, _ in found) != 1:
        raise ValueError("no FROM")
    return found


def render_go(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Return the text of the template for the messages, with the variables that Ollama sets."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    parts = iter(re.split(r"(\{\{.*?\}\})", template, flags=re.DOTALL))
    block, closed = _read_block(parts)
    assert closed == ""
    return _run(block, {".System": system, ".Messages": messages})


def _read_block(parts: Iterator[str]) -> tuple[list[Any], str]:
    """Return the nodes up to `end` or `else`, and the word that ended them."""
    nodes: list[Any] = []
    for part in parts:
        if not part.startswith("{{"):
            nodes.append(part)
            continue
        action = part[2:-2].strip()
        if action == "end" or action.split()[0] == "else":
            return nodes, action
        if action.split()[0] not in ("if", "range"):
            nodes.append(("do", action))
            continue
        word, condition = action.split(" ", 1)
        branches = []
        while True:
            inner, closed = _read_block(parts)
            branches.append((condition, inner))
            if closed == "end":
                break
            condition = closed.removeprefix("else").strip().removeprefix("if").strip() or "true"
        nodes.append((word, branches))
    return nodes, ""


def _run(nodes: Sequence[Any], names: dict[str, Any]) -> str:
    text = ""
    for node in nodes:
        if isinstance(node, str):
            text += node
        elif node[0] == "do":
            match = re.fullmatch(r"(\$\w+) :?= (.*)", node[1])
            if match:
                names[match[1]] = _value(match[2], names)
            else:
                text += _value(node[1], names)
        elif node[0] == "range":
            [(over, inner)] = node[1]
            for message in _value(over, names):
                names |= {".Role": message["role"], ".Content": message["content"]}
                text += _run(inner, names)
        else:
            inner = next((inner for condition, inner in node[1] if condition == "true" or _value(condition, names)), [])
            text += _run(inner, names)
    return text


def _value(word: str, names: Mapping[str, Any]) -> Any:
    if word.startswith("eq "):
        _, a, b = word.split(" ")
        return _value(a, names) == _value(b, names)
    if word.startswith("`"):
        return word[1:-1]
    if word.startswith('"'):
        return json.loads(re.sub(r"\\U([0-9a-f]{8})", lambda match: json.dumps(chr(int(match[1], 16)))[1:-1], word))
    return names[word]
