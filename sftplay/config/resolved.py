"""The whole config as YAML text, with the origin of every value that is not a default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sftplay.config import layers
from sftplay.config.keys import REMOVED_KEYS, RENAMED_KEYS, find_entry_section, find_section
from sftplay.config.layers import ALL_VALUES, SET_VALUES, Layer
from sftplay.config.run import RunConfig
from sftplay.config.section import Section

_MARK = "  # "
_BARE = re.compile(r"[A-Za-z_/.][A-Za-z0-9_./@+-]*[A-Za-z0-9_/]|[A-Za-z]")


def dump_resolved(cfg: RunConfig) -> str:
    """Write YAML in the order of the schema that `load_config` reads back to an equal config.

    A comment names the origin of a value that was set: `epochs: 1  # configs/run.yaml:7`.
    """
    lines = [ALL_VALUES, *(line + _comment(cfg.origins.get(key)) for key, line in _lines(cfg, ""))]
    return "\n".join(lines) + "\n"


def dump_given(cfg: RunConfig) -> str:
    """Write YAML of the values that were set, each with its origin; `load_config` reads it back to an equal config."""

    def indent(line: str) -> int:
        return len(line) - len(line.lstrip())

    kept: list[str] = []
    set_keys = [f"{key}." for key in cfg.origins]
    for key, line in reversed(list(_lines(cfg, ""))):
        is_set = any(given.startswith(f"{key}.") or f"{key}.".startswith(given) for given in set_keys)
        # A section without anything that was set is left out.
        if (key and is_set) or (not key and kept and indent(kept[-1]) > indent(line)):
            kept.append(line + _comment(cfg.origins.get(key)))
    return "\n".join([SET_VALUES, *reversed(kept)]) + "\n"


def with_new_names(layer: Layer) -> Layer:
    """Return the layer with the keys that were renamed by their new names, and without those that were removed.

    A file with both names keeps both.
    """
    values, locations = dict(layer.values), dict(layer.locations)
    for old, new in RENAMED_KEYS.items():
        before, after = tuple(old.split(".")), tuple(new.split("."))
        if before in locations and after not in locations:
            section = dict(values[before[0]])
            section[after[1]] = section.pop(before[1])
            values[before[0]] = section
            locations = {after + path[2:] if path[:2] == before else path: at for path, at in locations.items()}
    for path in (tuple(removed.split(".")) for removed in REMOVED_KEYS):
        if path in locations:
            values = _without(values, path)
            del locations[path]
    return Layer(values, locations)


def _without(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    changed = {name: _without(values[name], tuple(rest))} if rest else {}
    return {key: changed.get(key, value) for key, value in values.items() if key != name or rest}


def read_origins(cfg: RunConfig, text: str) -> dict[str, str]:
    """Read dotted key -> origin from the comments of the text that `dump_resolved` made of `cfg`.

    A line that was edited by hand has no origin.
    """
    origins, old_names = {}, {new: old for old, new in RENAMED_KEYS.items()}
    removed = {key.rpartition(".")[2] for key in REMOVED_KEYS}
    all_written = iter(text.split("\n")[1:])
    for key, line in _lines(cfg, ""):
        written = next(all_written, "")
        while (name := written.strip().partition(":")[0]) in removed and name != line.strip().partition(":")[0]:
            written = next(all_written, "")
        old_line = line.replace(key.rpartition(".")[2], old_names.get(key, key).rpartition(".")[2], 1)
        comment = written.removeprefix(old_line if written.startswith(old_line) else line)
        if comment != written and comment.startswith(_MARK):
            origins[key] = comment.removeprefix(_MARK)
    return origins


def _lines(section: Section, prefix: str) -> Iterator[tuple[str, str]]:
    """Each line without its comment, and the dotted key whose value it holds."""
    indent = "  " * prefix.count(".")
    for name, field in type(section).model_fields.items():
        value, dotted = getattr(section, name), prefix + name
        if find_section(field):
            yield "", f"{indent}{name}:"
            yield from _lines(value, f"{dotted}.")
        elif find_entry_section(field) and value:
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
    """Write a value on one line, in the form that YAML 1.2 reads back as the same value and type."""
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
    return value if _BARE.fullmatch(value) and layers.scalar(value) == value else quoted(value)


def quoted(text: str) -> str:
    """Write the text between double quotes, as YAML reads it back to the character."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    written = (escapes.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text)
    return f'"{"".join(written)}"'


def _comment(origin: str | None) -> str:
    return _MARK + "".join(c if c.isprintable() else "?" for c in origin) if origin else ""
