"""One value changed in a config file's text, while every other byte of it stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from sftplay.atomic import whole_file
from sftplay.config import layers
from sftplay.config.load import load_config
from sftplay.config.resolved import quoted
from sftplay.errors import ConfigError

BOM = "\ufeff"


class Unclear(Exception):
    """The text is written in a way that is not understood here."""


def amend_file(path: Path, dotted: str, *, value: str) -> None:
    """Set `dotted`, a section and a key, to a text in the YAML file `path`, or leave the file as it was.

    Raises:
        ConfigError: the config or the value is refused, or this cannot be done safely; then the line to add is named.
    """
    load_config(path, [f"{dotted}={quoted(value)}"])
    try:
        content = amended(path.read_bytes().decode("utf-8"), dotted, value=value).encode("utf-8")
        with whole_file(path.resolve()) as scratch:  # a link stays a link
            scratch.write_bytes(content)
            shutil.copymode(path, scratch)
    except (Unclear, ConfigError):
        section, _, name = dotted.partition(".")
        what = f"is written in a way in which {dotted} cannot be set without touching anything else"
        fix = f"open it in an editor and give the key {name} of the section {section} this value: {quoted(value)}"
        raise ConfigError(what, where=str(path), fix=fix) from None
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise ConfigError(what, where=str(path), fix="make the file and its folder writable") from error


def amended(text: str, dotted: str, *, value: str) -> str:
    """Return the YAML text with `dotted` set: its value replaced, else a line added, else a section.

    Raises:
        Unclear: none of these can be done, or something else would change too.
        ConfigError: it would not be YAML any more.
    """
    section, _, name = dotted.partition(".")
    bom = BOM if text.startswith(BOM) else ""
    text = text.removeprefix(BOM)
    wanted = dict(layers.parse(text, "").values)
    wanted[section] = {**(wanted.get(section) or {}), name: value}
    start, end, inserted = _edit(text, section, name=name, value=quoted(value))
    changed = text[:start] + inserted + text[end:]
    if layers.parse(changed, "").values != wanted:
        raise Unclear
    return bom + changed


def _edit(text: str, section: str, *, name: str, value: str) -> tuple[int, int, str]:
    """Start and end of what is replaced, and the text that takes its place."""
    newline = "\r\n" if "\r\n" in text else "\n"
    loader = layers.Loader(text)
    try:
        root = loader.get_single_node()
    finally:
        loader.dispose()
    if not isinstance(root, yaml.MappingNode):
        raise Unclear
    found = _child(root, section)
    if found is None:
        _check_block(root)
        before = "" if text.endswith("\n") else newline
        return len(text), len(text), f"{before}{section}:{newline}  {name}: {value}{newline}"
    key, body = found
    if isinstance(body, yaml.MappingNode) and (inner := _child(body, name)):
        # Its value is replaced where it is one word or text on the line of its key.
        start, end = inner[1].start_mark, inner[1].end_mark
        is_here = inner[0].end_mark.line == start.line == end.line and inner[0].end_mark.index < start.index
        if not isinstance(inner[1], yaml.ScalarNode) or not is_here or inner[1].style in ("|", ">"):
            raise Unclear  # an alias, for one, stands where its anchor is
        return start.index, end.index, (" " if text[start.index - 1] == ":" else "") + value
    if isinstance(body, yaml.MappingNode) and body.flow_style:
        at = body.start_mark.index + 1
        is_json = any(known.style == '"' for known, _ in body.value)
        return at, at, f"{quoted(name) if is_json else name}: {value}{', ' if body.value else ''}"
    is_empty = isinstance(body, yaml.ScalarNode) and body.start_mark.index == body.end_mark.index
    indent = 2 if is_empty else _check_block(body).value[0][0].start_mark.column
    line = f"{' ' * indent}{name}: {value}{newline}"
    at = text.find("\n", key.end_mark.index) + 1
    return (at, at, line) if at else (len(text), len(text), newline + line)


def _check_block(node: yaml.Node) -> yaml.MappingNode:
    """Return the node, a mapping of one key a line with something in it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return node
    raise Unclear


def _child(node: yaml.MappingNode, name: str) -> tuple[yaml.ScalarNode, yaml.Node] | None:
    for key, value in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value == name:
            return key, value
    return None
