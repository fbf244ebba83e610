"""What the schema refuses, said in plain words: where it stands, what is wrong, one action, the nearest name.

It translates; it decides nothing about what is valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from sftplay.config.explain.other_kits import OTHER_KITS, PLANNED_CHOICES, PLANNED_KEYS, REFUSED_CHOICES, key_of
from sftplay.config.read.layers import Layer, Place, Problem
from sftplay.config.read.yaml12 import KeyPath, scalar
from sftplay.config.schema.describe import accepts, choices_of, described, described_key
from sftplay.config.schema.keys import all_keys, all_sections, homes_of, node_at, required_below, section_at
from sftplay.errors import ConfigError, nearest_names

_At = tuple[Place, str]
_MEANT = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def translated(error: ValidationError, merged: Layer, file: str) -> list[Problem]:
    """One problem for each key that pydantic refuses; `file` is named for keys that are missing."""
    refused = _by_key(error.errors(include_url=False), merged.values)
    unknown = [path for path, kind in refused.items() if kind == "extra_forbidden"]
    problems = [_unknown(path, merged) for path in unknown]
    guessed = {name for problem in problems for name in problem.error.nearest}
    for path, kind in refused.items():
        if kind == "missing":
            # A misspelt `modle:` also leaves model.name missing; one message is enough.
            dotted = [key for key in required_below(_dotted(path)) if not _covered(key, guessed)]
            problems += [_missing(key, merged, file) for key in dotted]
        elif kind != "extra_forbidden":
            problems.append(_wrong_value(path, merged))
    return problems


def offending_keys(problems: Iterable[Problem]) -> set[str]:
    """The dotted keys that problems are about, those an unknown name may have meant among them."""
    found: set[str] = set()
    for _, error in problems:
        found |= {error.where.rsplit(" ", 1)[-1], *error.nearest}
    return found


def as_yaml_value(value: Any) -> str:
    """A value as the YAML file spells it, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _by_key(errors: Iterable[Any], values: dict[str, Any]) -> dict[KeyPath, str]:
    """Path -> kind of problem. A union gives one error for each of its forms; they become one."""
    found: dict[KeyPath, str] = {}
    for error in errors:
        path = _real_path(error["loc"], values, error["type"])
        found.setdefault(path, error["type"])
    items = {path[:-1] for path in found if isinstance(path[-1], int)}
    return {path: kind for path, kind in found.items() if path not in items}


def _real_path(loc: KeyPath, values: Any, kind: str) -> KeyPath:
    """The part of pydantic's location that is in the file; the rest names forms of a union."""
    if kind in ("extra_forbidden", "missing"):
        return loc
    path: list[str | int] = []
    for part in loc:
        if isinstance(values, dict) and part in values:
            values = values[str(part)]
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part]
        else:
            continue
        path.append(part)
    return tuple(path)


def _unknown(path: KeyPath, merged: Layer) -> Problem:
    place = merged.places[path]
    inside, name = _dotted(path[:-1]), str(path[-1])
    dotted = _dotted(path)
    own = section_at(tuple(map(str, path[:-1])))
    siblings = list(own.model_fields) if own else []
    what = f"no {'key' if inside else 'key or section'} called {name!r}{f' in {inside}' if inside else ''}"
    nearest: list[str] = []
    if dotted in PLANNED_KEYS:
        what, fix = f"{dotted} is planned but not part of this version", "remove it"
    elif name in all_keys():
        nearest, fix = [name], f"dots are for the command line: write {' / '.join(name.split('.'))}, each one indented"
    elif homes := [home for home in homes_of(name) if home != dotted]:
        nearest, fix = homes, f"it belongs elsewhere: write {' or '.join(homes)}"
    elif action := OTHER_KITS.get(name.lower().replace("-", "_")):
        what = f"{name!r} is another kit's name"
        nearest, fix = [key_of(action)], f"write {action}"
    elif names := _nearest(name, [*siblings, *(() if inside else ("include",))]):
        nearest, fix = [f"{inside}.{near}".lstrip(".") for near in names], f"did you mean {names[0]!r}?"
    elif far := _nearest(name, (key.rsplit(".", 1)[-1] for key in [*all_keys(), *all_sections()] if key)):
        nearest = homes_of(far[0])
        fix = f"did you mean {' or '.join(nearest)}?"
    else:
        fix = f"remove it; {inside or 'the config'} has {', '.join(siblings)}"
    return _problem((place, dotted), what, fix, nearest)


def _missing(dotted: str, merged: Layer, file: str) -> Problem:
    place = merged.place_of(tuple(dotted.split("."))) or Place(0, 0, file)
    about = (all_keys()[dotted].description or described_key(dotted)).split(". ")[0].rstrip(".")
    about = about[0].lower() + about[1:]
    return _problem((place, dotted), "required, but not given", f"add {dotted}: {about}")


def _wrong_value(path: KeyPath, merged: Layer) -> Problem:
    place = merged.place_of(path) or Place(0, 0, "config")
    dotted, key = _dotted(path), _dotted([part for part in path if isinstance(part, str)])
    value = _value_at(merged.values, path)
    outer, _, inner = key.rpartition(".")
    if outer in all_keys():
        return _wrong_entry((place, dotted), outer, (inner, value))
    if key not in all_keys():
        what = f"{as_yaml_value(value)} stands where a section belongs"
        fix = f"write its keys below it, indented: {', '.join(_names_in(key))}"
        return _problem((place, dotted), what, fix)
    node = node_at(key)
    planned = PLANNED_CHOICES.get(key, ())
    if isinstance(value, str) and value.lower() in planned:
        what = f"{_noun(key)} {value!r} is planned but not part of this version"
        return _problem((place, dotted), what, f"write {key}: {' or '.join(choices_of(node))}")
    if isinstance(value, str) and (refused := REFUSED_CHOICES.get((key, value.lower().replace("-", "_")))):
        return _problem((place, dotted), f"{value!r} {refused[0]}", refused[1])
    if isinstance(value, str) and choices_of(node):
        return _wrong_word((place, dotted), key, value)
    what = f"{as_yaml_value(value)} is not {described(node)}"
    return _problem((place, dotted), what, _value_fix(value, node))


def _wrong_entry(at: _At, key: str, entry: tuple[str, Any]) -> Problem:
    """A name or a value below a key that takes names of its own."""
    (name, value), node = entry, node_at(key)
    names = node.get("propertyNames", {}).get("enum", [])
    if not names or name in names:
        form = node.get("additionalProperties", {})
        return _problem(at, f"{as_yaml_value(value)} is not {described(form)}", _value_fix(value, form))
    near = _nearest(name, names)
    fix = f"did you mean {near[0]!r}?" if near else f"{key} has {', '.join(names)}"
    return _problem(at, f"{key} has no field called {name!r}", fix, [f"{key}.{one}" for one in near])


def _wrong_word(at: _At, key: str, word: str) -> Problem:
    node = node_at(key)
    choices, planned = choices_of(node), PLANNED_CHOICES.get(key, ())
    what = f"no {_noun(key)} called {word!r}" if _only_words(node) else f"{word!r} is not {described(node)}"
    if at[1] != key and word == "none":
        return _problem(at, "'none' stands in a list", f"write {key}: none, or remove it from the list")
    near = _nearest(word, [*choices, *planned])
    if not near:
        return _problem(at, what, _value_fix(word, node))
    fix = f"did you mean {near[0]!r}?"
    if near[0] in planned:
        fix += f" It is planned but not part of this version; write {' or '.join(choices)}"
    return _problem(at, what, fix, near)


def _value_fix(value: Any, node: dict[str, Any]) -> str:
    if isinstance(value, str):
        if accepts(node, "boolean") and value.lower() in _MEANT:
            return f"write {_MEANT[value.lower()]}"
        if accepts(node, "null") and value.lower() == "none":
            return "write null"
        plain = scalar(value.replace("_", "").replace(",", ""))
        if isinstance(plain, int | float) and not isinstance(plain, bool):
            return f"write {plain}" if plain != scalar(value) else "remove the quotes"
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    if whole and accepts(node, "integer") and value >= 1:
        return f"write {int(value)}"
    return f"write {described(node)}"


def _problem(at: _At, what: str, fix: str, nearest: Sequence[str] = ()) -> Problem:
    place, dotted = at
    return Problem(place, ConfigError(what, where=f"{place} {dotted}", fix=fix, nearest=nearest))


def _nearest(name: str, known: Iterable[str]) -> list[str]:
    return nearest_names(name.lower().replace("-", "_"), known)


def _noun(key: str) -> str:
    return "task" if key == "task_mode" else key.rsplit(".", 1)[-1].replace("_", " ")


def _only_words(node: dict[str, Any]) -> bool:
    return all("enum" in form or "const" in form or choices_of(form) for form in node.get("anyOf", [node]))


def _names_in(dotted: str) -> list[str]:
    return list(all_sections()[dotted].model_fields) if dotted in all_sections() else []


def _covered(key: str, guessed: set[str]) -> bool:
    return any(f"{key}.".startswith(f"{guess}.") for guess in guessed)


def _value_at(values: Any, path: KeyPath) -> Any:
    for part in path:
        values = values[part]
    return values


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))
