"""What the schema refuses, in plain words: where it stands, what is wrong, one action, the nearest name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from pydantic import ValidationError

from sftplay.config.keys import (
    REMOVED_KEYS,
    RENAMED_KEYS,
    all_homes,
    all_keys,
    all_sections,
    list_keys,
    node_at,
    required_below,
    section_at,
)
from sftplay.config.layers import KeyPath, Layer, LocatedProblem, SourceLocation, scalar, walk
from sftplay.config.manual import accepts, described, list_choices
from sftplay.errors import MOST_PROBLEMS, ConfigError, nearest_names, suggest

_MEANT = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


class _Explanation(NamedTuple):
    """The names are those that a key or its value may have meant."""

    what: str
    fix: str
    nearest: Sequence[str] = ()


def translated(error: ValidationError, merged: Layer, *, file: str) -> list[LocatedProblem]:
    """Return a problem for each key that pydantic refuses; `file` is named for keys that are missing."""
    from sftplay.config.other_kits import keys_below

    refused, nowhere = _by_key(error.errors(), merged.values), SourceLocation(0, 0, file)
    forbidden = (path for path, kind in refused.items() if kind == "extra_forbidden")
    unknown = (key for path in forbidden for key in keys_below(path, _value_at(path, merged.values)))
    # A problem looks for near names, which takes a millisecond: only those that are shown do.
    problems = [
        _problem(key, merged.find_location_within(key) or nowhere, explanation=_unknown(key))
        for key in islice(unknown, MOST_PROBLEMS)
    ]
    if sum("is another kit's name" in problem.error.what for problem in problems) > 5:
        fix = f"make import-config IN={file} OUT=run.yaml turns all of it into a config of this kit"
        what = "seems to be a config of another kit"
        problems.insert(0, LocatedProblem(nowhere, ConfigError(what, where=file, fix=fix)))
    guessed = {name for problem in problems for name in problem.error.nearest}
    for path, kind in refused.items():
        if kind == "missing":
            for key in required_below(_dotted(path)):
                # A misspelt `modle:` also leaves model.name missing; one message is enough.
                if not any(f"{key}.".startswith(f"{guess}.") for guess in guessed):
                    problems.append(missing_key(key, merged, file=file, path=path))
        elif kind != "extra_forbidden":
            location = merged.find_location_within(path) or merged.find_location(path) or nowhere
            problems.append(_problem(path, location, explanation=_wrong_value(path, merged.values)))
    return problems


def missing_key(key: str, merged: Layer, *, file: str, path: KeyPath = ()) -> LocatedProblem:
    """Return the problem that a required key is not given; `path` leads to it where it is one of a list's entry."""
    at = path if any(isinstance(part, int) for part in path) else tuple(key.split("."))
    about = (all_keys()[key].description or described(node_at(key))).split(". ")[0].rstrip(".")
    explanation = _Explanation("required, but not given", f"add {key}: {about[0].lower()}{about[1:]}")
    return _problem(at, merged.find_location(at) or SourceLocation(0, 0, file), explanation=explanation)


def _by_key(errors: Iterable[Any], values: dict[str, Any]) -> dict[KeyPath, str]:
    """Path -> kind of problem. A union gives one error for each of its forms; they become one."""
    found: dict[KeyPath, str] = {}
    for error in errors:
        # The part of pydantic's location that is in the file; the rest names forms of a union.
        path: list[str | int] = []
        value: Any = values
        for part in error["loc"]:
            if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
                value = value[part]
                path.append(part)
        if error["type"] == "string_unicode" and not isinstance(value, str):
            # A key with half of a character, which pydantic cannot read and does not name.
            keys = (key for key, _ in walk(values) if key and any("\ud800" <= c <= "\udfff" for c in str(key[-1])))
            found |= dict.fromkeys(keys, "extra_forbidden")
            continue
        named = error["type"] in ("extra_forbidden", "missing")
        found.setdefault(error["loc"] if named else tuple(path), error["type"])
    lists = {path[:-1] for path in found if isinstance(path[-1], int)}
    return {path: kind for path, kind in found.items() if path not in lists}


def _value_at(path: KeyPath, values: Any) -> Any:
    for part in path:
        values = values[part]
    return values


def _unknown(path: KeyPath) -> _Explanation:
    from sftplay.config.other_kits import action_for, find_key, read_foreign_keys

    inside, name, dotted = _dotted(path[:-1]), str(path[-1]), _dotted(path)
    section = section_at(tuple(part for part in path[:-1] if isinstance(part, str)))
    siblings = list(section.model_fields) if section else []
    what = f"no {'key' if inside else 'key or section'} called {name!r}{f' in {inside}' if inside else ''}"
    if (written := RENAMED_KEYS.get(name, name)) in all_keys():
        fix = f"dots are for the command line: write {' / '.join(written.split('.'))}, each one indented"
        return _Explanation(what, fix, [written])
    if renamed := RENAMED_KEYS.get(dotted):
        return _Explanation(what, f"write {renamed}: it was renamed", [renamed])
    if removed := REMOVED_KEYS.get(dotted):
        return _Explanation(what, removed)
    if guide_action := action_for(path):
        return _Explanation(f"{name!r} is the name of a guide", f"write {guide_action}", [find_key(guide_action)])
    foreign = read_foreign_keys()
    if inside == "cluster" and name in foreign.cluster:
        return _Explanation(f"{name!r} is another kit's name", foreign.cluster[name])
    if homes := [home for home in all_homes().get(name, []) if home != dotted]:
        return _Explanation(what, f"it belongs elsewhere: write {' or '.join(homes)}", homes)
    if action := foreign.names.get(_plain(name)):
        return _Explanation(f"{name!r} is another kit's name", f"write {action}", [find_key(action)])
    if near := nearest_names(_plain(name), [*siblings, *(() if inside else ("include",))]):
        return _Explanation(what, f"did you mean {near[0]!r}?", [f"{inside}.{known}".lstrip(".") for known in near])
    if far := nearest_names(_plain(name), list(all_homes())):
        homes = all_homes()[far[0]]
        return _Explanation(what, f"did you mean {' or '.join(homes)}?", homes)
    return _Explanation(what, f"remove it; {inside or 'the config'} has {', '.join(siblings)}")


def _wrong_value(path: KeyPath, values: Any) -> _Explanation:
    key = _dotted(part for part in path if isinstance(part, str))
    value = _value_at(path, values)
    outer, _, inner = key.rpartition(".")
    if outer in all_keys():  # it takes names of its own
        node = node_at(outer)
        names = node.get("propertyNames", {}).get("enum", [])
        if not names or inner in names:
            form = node.get("additionalProperties", {})
            return _Explanation(f"{_as_yaml(value)} is not {described(form)}", _value_fix(value, form))
        fix, near = suggest(_plain(inner), names, f"{outer} has {', '.join(names)}")
        return _Explanation(f"{outer} has no field called {inner!r}", fix, [f"{outer}.{one}" for one in near])
    if key not in all_keys():
        if key in list_keys() and path[-1] == key:
            fix = f"write a list: each entry is - {required_below(f'{key}.0')[0].rpartition('.')[2]}: ..., and its keys"
            return _Explanation(f"{_as_yaml(value)} stands where a list belongs", fix)
        names = list(all_sections()[key].model_fields) if key in all_sections() else []
        fix = f"write its keys below it, indented: {', '.join(names)}"
        return _Explanation(f"{_as_yaml(value)} stands where a section belongs", fix)
    node = node_at(key)
    if isinstance(value, str):
        from sftplay.config.other_kits import read_foreign_keys

        if refused := read_foreign_keys().choices.get(key, {}).get(_plain(value)):
            return _Explanation(f"{value!r} {refused[0]}", refused[1])
        if choices := list_choices(node):
            return _wrong_word(key, value, choices=choices, in_list=isinstance(path[-1], int))
    return _Explanation(f"{_as_yaml(value)} is not {described(node)}", _value_fix(value, node))


def _wrong_word(key: str, word: str, *, choices: list[str], in_list: bool) -> _Explanation:
    node = node_at(key)
    if in_list and word == "none":
        return _Explanation("'none' stands in a list", f"write {key}: none, or remove it from the list")
    only_words = all("enum" in form or "const" in form or list_choices(form) for form in node.get("anyOf", [node]))
    noun = "task" if key == "task_mode" else key.rpartition(".")[2].replace("_", " ")
    what = f"no {noun} called {word!r}" if only_words else f"{word!r} is not {described(node)}"
    near = nearest_names(_plain(word), choices)
    if not near:
        return _Explanation(what, _value_fix(word, node))
    return _Explanation(what, f"did you mean {near[0]!r}?", near)


def _value_fix(value: Any, node: dict[str, Any]) -> str:
    if isinstance(value, str):
        if accepts(node, "boolean") and value.lower() in _MEANT:
            return f"write {_MEANT[value.lower()]}"
        if accepts(node, "null") and value.lower() == "none":
            return "write null"
        number = scalar(value.replace("_", "").replace(",", ""))
        if isinstance(number, int | float) and not isinstance(number, bool):
            return f"write {number}" if number != scalar(value) else "remove the quotes"
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**63
    if whole and accepts(node, "integer") and value >= 1:
        return f"write {int(value)}"
    is_word = "text" in described(node).split(", ") and isinstance(value, int | float)
    quotes = """; in quotes it is text, on the command line '"007"'""" if is_word else ""
    return f"write {described(node)}{quotes}"


def _as_yaml(value: Any) -> str:
    """A value as the YAML file spells it, cut to a readable length."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _problem(path: KeyPath, location: SourceLocation, *, explanation: _Explanation) -> LocatedProblem:
    what, fix, nearest = explanation
    return LocatedProblem(location, ConfigError(what, where=f"{location} {_dotted(path)}", fix=fix, nearest=nearest))


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))
