"""The keys of the config by their dotted names: what sections there are, and what each holds.

All of it is read from the schema; nothing here knows a single key.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from sftplay.config.schema.run import RunConfig, Section
from sftplay.config.schema.section import WITH_HOME, UserPath


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section a field opens, or None for a field that holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def entry_of(field: FieldInfo) -> type[Section] | None:
    """The section that each entry of a field's list is, or None for any other field."""
    inner = get_args(field.annotation)[:1] if get_origin(field.annotation) is list else ()
    return inner[0] if inner and isinstance(inner[0], type) and issubclass(inner[0], Section) else None


def general_key(dotted: str) -> str:
    """The key of a list's entry without the entry's number: `datasets.weight` for `datasets.0.weight`."""
    return ".".join(part for part in dotted.split(".") if not part.isdecimal())


def section_at(path: tuple[str, ...]) -> type[Section] | None:
    """The section at a path without numbers; RunConfig at the empty one, None where no section is."""
    section: type[Section] | None = RunConfig
    for name in path:
        field = section.model_fields.get(name) if section else None
        section = (section_of(field) or entry_of(field)) if field else None
    return section


@cache
def all_sections() -> dict[str, type[Section]]:
    """Dotted name -> section, the whole config first under "", in the order of the schema.

    A list of sections is one of them: `datasets` is the section that each of its entries is.
    """
    return {"": RunConfig, **dict(_walk_sections(RunConfig, ""))}


@cache
def all_keys() -> dict[str, FieldInfo]:
    """Dotted name -> field of every key that holds a value, in the order of the schema."""
    found = {}
    for dotted, section in all_sections().items():
        for name, field in section.model_fields.items():
            if section_of(field) is None and entry_of(field) is None:
                found[f"{dotted}.{name}".lstrip(".")] = field
    return found


@cache
def list_keys() -> list[str]:
    """The keys that hold a list of sections."""
    return [name for name, field in RunConfig.model_fields.items() if entry_of(field)]


def keys_in(cfg: RunConfig) -> Iterator[tuple[str, FieldInfo]]:
    """`all_keys` for one config: each entry of a list has keys of its own, such as `datasets.0.weight`."""
    for key, field in all_keys().items():
        outer, _, name = key.partition(".")
        if outer in list_keys():
            yield from ((f"{outer}.{number}.{name}", field) for number in range(len(cfg.value_of(outer))))
        else:
            yield key, field


def path_keys(cfg: RunConfig) -> list[str]:
    """The keys of a config that take a path, or a name in its place."""
    return [key for key, field in keys_in(cfg) if WITH_HOME in field.metadata or UserPath in get_args(field.annotation)]


def required_below(dotted: str) -> list[str]:
    """The required keys at `dotted`: itself if it holds a value, else those of the section ("" is the config)."""
    start = f"{general_key(dotted)}." if dotted else ""
    lists = () if start else tuple(f"{key}." for key in list_keys())
    return [
        key
        for key, field in all_keys().items()
        if field.is_required() and f"{key}.".startswith(start) and not key.startswith(lists)
    ]


@cache
def homes_of(name: str) -> list[str]:
    """The dotted keys and sections whose last part is `name`; keys of a list's entries are not among them."""
    names = [*all_keys(), *all_sections()]
    entries = tuple(f"{key}." for key in list_keys())
    return [dotted for dotted in names if dotted.rpartition(".")[2] == name and not dotted.startswith(entries)]


@cache
def json_schema() -> dict[str, Any]:
    """pydantic's JSON schema of the config; not to be changed by callers."""
    return RunConfig.model_json_schema()


def node_at(dotted: str) -> dict[str, Any]:
    """The JSON schema of one key, without the name of its section."""
    node = json_schema()
    for name in general_key(dotted).split("."):
        node = node.get("items", node)
        reference = node.get("$ref", "")
        node = json_schema()["$defs"][reference.rpartition("/")[2]] if reference else node
        node = node["properties"][name]
    return node


def _walk_sections(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    for name, field in section.model_fields.items():
        inner = section_of(field) or entry_of(field)
        if inner:
            yield prefix + name, inner
            yield from _walk_sections(inner, f"{prefix}{name}.")
