"""One value changed in a config file's text, while every other byte of it stays.

It changes what it understands and refuses the rest; whether the new value may be used is `load`'s business.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from sftplay.config.load import load_config
from sftplay.config.read import yaml12
from sftplay.config.read.resolved import quoted
from sftplay.errors import ConfigError

BOM = "\ufeff"


class Unclear(Exception):
    """The text is written in a way that is not understood here."""


def amend_file(path: Path, dotted: str, value: str) -> None:
    """Set `dotted`, a section and a key, to a text in the YAML file `path`, or leave the file as it was.

    The file is replaced in one step, after the changed one has been loaded and found equal but for this value.

    Raises:
        ConfigError: the file is written in a way in which this cannot be done safely; the line to add is named.
    """
    wished = load_config(path).with_values({dotted: value}, "").model_dump()
    scratch = path.with_name(f".{path.name}.{os.getpid()}")  # beside it, where its includes are found
    try:
        _write(scratch, amended(path.read_bytes().decode("utf-8"), dotted, value))
        if load_config(scratch).model_dump() != wished:
            raise Unclear
        target = path.resolve()  # a link stays a link
        shutil.copymode(target, scratch)
        scratch.replace(target)
    except (Unclear, ConfigError):
        section, _, name = dotted.partition(".")
        what = f"is written in a way in which {dotted} cannot be set without touching anything else"
        fix = f"below `{section}:` write this line yourself: {name}: {quoted(value)}"
        raise ConfigError(what, where=str(path), fix=fix) from None
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(what, where=str(path), fix="make the file and its folder writable") from error
    finally:
        scratch.unlink(missing_ok=True)


def amended(text: str, dotted: str, value: str) -> str:
    """The YAML text with `dotted` set: its value replaced, else a line added below its section, else a section added.

    Raises:
        Unclear: neither can be done, or something else would change too.
        ConfigError: it would not be YAML any more.
    """
    section, _, name = dotted.partition(".")
    wished = _values(text)
    changed = _changed(text, section, name, quoted(value))
    wished[section] = {**(wished.get(section) or {}), name: value}
    if _values(changed) != wished:
        raise Unclear
    return changed


def _changed(text: str, section: str, name: str, value: str) -> str:
    shift = len(BOM) if text.startswith(BOM) else 0
    root = _mapping(_composed(text[shift:]))
    newline = "\r\n" if "\r\n" in text else "\n"
    found = _child(root, section)
    if found is None:
        return _with_section(text, f"{section}:{newline}  {name}: {value}{newline}", newline)
    key, body = found
    inner = _child(body, name) if isinstance(body, yaml.MappingNode) else None
    if inner is not None:
        start, end = (shift + index for index in _place(*inner))
        return text[:start] + (" " if text[start - 1] == ":" else "") + value + text[end:]
    indent = _mapping(body).value[0][0].start_mark.column if not _is_empty(body) else 2
    at = text.find("\n", shift + key.end_mark.index) + 1
    if at == 0:
        text, at = text + newline, len(text) + len(newline)
    return f"{text[:at]}{' ' * indent}{name}: {value}{newline}{text[at:]}"


def _composed(text: str) -> yaml.Node | None:
    loader = yaml12.Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
        return node
    finally:
        loader.dispose()


def _mapping(node: yaml.Node | None) -> yaml.MappingNode:
    """A mapping of one key a line with something in it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return node
    raise Unclear


def _child(node: yaml.MappingNode, name: str) -> tuple[yaml.ScalarNode, yaml.Node] | None:
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value == name:
            return key, value
    return None


def _place(key: yaml.ScalarNode, value: yaml.Node) -> tuple[int, int]:
    """Where a value stands that is one word or text on the line of its key."""
    start, end = value.start_mark, value.end_mark
    is_here = key.end_mark.line == start.line == end.line and key.end_mark.index < start.index
    if not isinstance(value, yaml.ScalarNode) or not is_here or value.style in ("|", ">"):
        raise Unclear  # an alias, for one, stands where its anchor is
    return start.index, end.index


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.start_mark.index == node.end_mark.index


def _with_section(text: str, lines: str, newline: str) -> str:
    return text + ("" if text.endswith("\n") else newline) + lines


def _values(text: str) -> dict[str, Any]:
    return dict(yaml12.parse(text.removeprefix(BOM), "").values)


def _write(path: Path, text: str) -> None:
    with path.open("wb") as file:
        file.write(text.encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())
