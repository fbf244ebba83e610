"""The whole config as YAML text, with the origin of every value that is not a default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sftplay.config.read import yaml12
from sftplay.config.schema.keys import entry_of, section_of
from sftplay.config.schema.run import RunConfig, Section

_HEAD = "# Every key of the run; a comment names where a value comes from, all others are defaults."
_GIVEN = "# The values of the run that were set; a comment names where each comes from."
_MARK = "  # "
_BARE = re.compile(r"[A-Za-z_/.][A-Za-z0-9_./@+-]*[A-Za-z0-9_/]|[A-Za-z]")


def dump_resolved(cfg: RunConfig) -> str:
    """YAML in the order of the schema that `load_config` reads back to an equal config.

    A comment names the origin of a value that was set: `epochs: 1  # configs/run.yaml:7`.
    """
    lines = [_HEAD, *(line + _comment(cfg.origins.get(key)) for key, line in _lines(cfg, ""))]
    return "\n".join(lines) + "\n"


def dump_given(cfg: RunConfig) -> str:
    """YAML of the values that were set, each with its origin; `load_config` reads it back to an equal config."""

    def is_given(key: str) -> bool:
        return not key or any(f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.") for one in cfg.origins)

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    kept: list[str] = []
    for key, line in reversed([each for each in _lines(cfg, "") if is_given(each[0])]):
        if key or (kept and indent(kept[-1]) > indent(line)):  # a section of which nothing was set is left out
            kept.append(line + _comment(cfg.origins.get(key)))
    return "\n".join([_GIVEN, *reversed(kept)]) + "\n"


def read_origins(cfg: RunConfig, text: str) -> dict[str, str]:
    """Dotted key -> origin, from the comments of the text that `dump_resolved` made of `cfg`.

    A line that was edited by hand has no origin.
    """
    origins = {}
    for (key, line), written in zip(_lines(cfg, ""), text.split("\n")[1:], strict=False):
        comment = written.removeprefix(line)
        if comment != written and comment.startswith(_MARK):
            origins[key] = comment.removeprefix(_MARK)
    return origins


def _lines(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    """Each line without its comment, and the dotted key whose value it holds."""
    indent = "  " * prefix.count(".")
    for name, field in type(section).model_fields.items():
        value, dotted = getattr(section, name), prefix + name
        if section_of(field):
            yield "", f"{indent}{name}:"
            yield from _lines(value, f"{dotted}.")
        elif entry_of(field) and value:
            yield dotted, f"{indent}{name}:"
            for number, entry in enumerate(value):
                for line, (key, text) in enumerate(_lines(entry, f"{dotted}.{number}.")):
                    yield key, text if line else f"{text[: len(indent) + 2]}- {text.lstrip()}"
        elif isinstance(value, dict) and value:
            yield "", f"{indent}{name}:"
            for key, inner in value.items():
                yield f"{dotted}.{key}", f"{indent}  {flow(key)}: {flow(inner)}"
        else:
            yield dotted, f"{indent}{name}: {flow(value)}"


def flow(value: Any) -> str:
    """A value on one line, in the form that YAML 1.2 reads back as the same value and type."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return repr(value).replace("inf", ".inf").replace("nan", ".nan")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(flow(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{flow(key)}: {flow(inner)}' for key, inner in value.items())}}}"
    return value if _BARE.fullmatch(value) and yaml12.scalar(value) == value else quoted(value)


def quoted(text: str) -> str:
    """The text between double quotes, as YAML reads it back to the character."""
    return f'"{"".join(_escaped(character) for character in text)}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character in "\n\t":
        return {"\n": "\\n", "\t": "\\t"}[character]
    return character if character.isprintable() else f"\\U{ord(character):08x}"


def _comment(origin: str | None) -> str:
    return _MARK + "".join(c if c.isprintable() else "?" for c in origin) if origin else ""
