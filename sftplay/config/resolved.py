"""The whole config as YAML text, with the origin of every value that is not a default."""

from __future__ import annotations

import re
from typing import Any

from sftplay.config import yaml12
from sftplay.config.keys import section_of
from sftplay.config.schema import RunConfig, Section

_BARE = re.compile(r"[A-Za-z_/.][A-Za-z0-9_./@+-]*[A-Za-z0-9_/]|[A-Za-z]")


def dump_resolved(cfg: RunConfig) -> str:
    """YAML in the order of the schema that `load_config` reads back to an equal config.

    A value that was set somewhere carries where, as a comment: `epochs: 1  # configs/run.yaml:7`.
    """
    lines = ["# Every key of the run; a comment names where a value comes from, all others are defaults."]
    _add_section(lines, cfg, cfg.origins, "")
    return "\n".join(lines) + "\n"


def _add_section(lines: list[str], section: Section, origins: dict[str, str], prefix: str) -> None:
    indent = "  " * prefix.count(".")
    for name, field in type(section).model_fields.items():
        value, dotted = getattr(section, name), prefix + name
        if section_of(field):
            lines.append(f"{indent}{name}:")
            _add_section(lines, value, origins, f"{dotted}.")
        elif isinstance(value, dict) and value:
            lines.append(f"{indent}{name}:")
            for key, inner in value.items():
                lines.append(f"{indent}  {flow(key)}: {flow(inner)}{_comment(origins.get(f'{dotted}.{key}'))}")
        else:
            lines.append(f"{indent}{name}: {flow(value)}{_comment(origins.get(dotted))}")


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
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _comment(origin: str | None) -> str:
    return "  # " + "".join(c if c.isprintable() else "?" for c in origin) if origin else ""
