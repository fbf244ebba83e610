"""Write a config as a reader wants it: a section after the other, each value with a comment on the reason for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sftplay.config.keys import all_keys
from sftplay.config.resolved import flow


def write_sections(lines: Mapping[str, tuple[Any, str]]) -> dict[str, list[str]]:
    """Return the lines of each section, in the order of the schema, from dotted key -> value and comment. Keys of no
    section are under ""."""
    sections: dict[str, list[str]] = {}
    order = list(all_keys())

    def find_place(key: str) -> int:
        return next(
            place for place, name in enumerate(order) if f"{name}.".startswith(f"{key}.") or key.startswith(f"{name}.")
        )

    for key in sorted(lines, key=find_place):
        value, comment = lines[key]
        section, _, rest = key.partition(".")
        *path, last = rest.split(".") if rest else [section]
        inside = sections.setdefault(section, [f"{section}:"]) if rest else sections.setdefault("", [])
        for depth, name in enumerate(path):
            opened = f"{'  ' * (depth + 1)}{name}:"
            if opened not in inside:
                inside.append(opened)
        indent, comment = "  " * (len(path) + 1) if rest else "", print_on_one_line(comment)
        inside += [*([] if rest else [""])]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inside += [f"{indent}# {comment}", f"{indent}{last}:", *(f"{indent}  - {flow(entry)}" for entry in value)]
            continue
        text = f"{indent}{last}: {flow(value)}"
        line = f"{text:<44} # {comment}"
        inside += [line if len(line) <= 120 else f"{indent}# {comment}\n{text}"]
    return sections


def join_sections(head: Sequence[str], sections: Mapping[str, Sequence[str]]) -> str:
    """Return the text of the file: the head, the keys of no section, then the sections."""
    first = [*head, *sections.get("", ())]
    return "\n".join([*first, *("\n" + "\n".join(lines) for name, lines in sections.items() if name)]) + "\n"


def print_on_one_line(text: str) -> str:
    """Return the text without line ends and other characters that do not print."""
    return "".join(character if character.isprintable() else " " for character in text)
