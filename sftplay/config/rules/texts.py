"""Rules about texts of the config: characters, empty values, names of runs and of entries, and the homes of paths."""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.read.layers import is_overlong
from sftplay.config.rules.violation import Violation
from sftplay.config.schema.keys import keys_in, list_keys, path_keys
from sftplay.config.schema.run import RunConfig
from sftplay.errors import nearest_names

_WORDS = {"train.resume": ("never", "auto"), "data.template": ("auto", "chatml")}
"""Key -> the words it takes beside a path. A near miss of a word would be taken for a path."""


def broken_text_rules(cfg: RunConfig) -> Iterator[Violation]:
    """Every rule that a text of the config breaks."""
    yield from _characters(cfg)
    yield from _texts(cfg)
    yield from _homes(cfg)
    yield from _twins(cfg)


def _characters(cfg: RunConfig) -> Iterator[Violation]:
    """No path, name or text can hold a NUL or half of a character: files, processes and tokenizers refuse both."""
    for key, _ in keys_in(cfg):
        for place, text in _texts_in(cfg.value_of(key), key):
            if "\0" in text:
                yield Violation((place,), "holds a NUL character", fix="remove it")
            elif not _is_unicode(text):
                yield Violation((place,), f"{text!r} is not valid Unicode", fix="write it as UTF-8")
            elif key != "data.system" and is_overlong(text):
                yield Violation(
                    (place,), f"is longer than any name or path: {len(text):,} characters", fix="shorten it"
                )


def _texts_in(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner, key)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts_in(inner, f"{key}.{name}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(cfg: RunConfig) -> Iterator[Violation]:
    name = cfg.run_name if cfg.run_name and _is_unicode(cfg.run_name) else None
    if name is not None and (name in (".", "..") or "/" in name or "\\" in name or not name.isprintable()):
        what = f"{name!r} is a path, not a name of a folder" if name.isprintable() else f"{name!r} is no folder's name"
        yield Violation(("run_name",), what, fix="write a plain name; output_dir says where run folders go")
    if name == "latest":
        yield Violation(("run_name",), "'latest' always points at the newest run", fix="choose another name")
    if name == ".set-aside":
        yield Violation(("run_name",), "'.set-aside' keeps starts that made no step", fix="choose another name")
    for key, field in keys_in(cfg):
        value = cfg.value_of(key)
        if isinstance(value, str) and not value.strip() and key != "data.delimiter":
            yield Violation((key,), "is empty", fix="give it a value, or leave the key out")
        elif isinstance(value, str) and value in ("None", "none") and field.default is None:
            yield Violation((key,), f"{value!r} is a word in YAML, not nothing", fix="write null, or leave the key out")
    for key, words in _WORDS.items():
        value = cfg.value_of(key)
        near = nearest_names(value, words) if value not in words and not set("/.") & set(value) else []
        if near:
            fix = f"did you mean {near[0]!r}? A path of that name is written ./{value}"
            yield Violation((key,), f"{value!r} is neither {' nor '.join(words)}", fix=fix, nearest=tuple(near))


def _homes(cfg: RunConfig) -> Iterator[Violation]:
    for key in path_keys(cfg):
        value = cfg.value_of(key)
        if isinstance(value, str) and value.startswith("~"):
            what = f"{value!r}: this machine knows no home folder of {value.partition('/')[0]}"
            yield Violation((key,), what, fix=f"write the whole path, or ./{value} for a folder of that very name")


def _twins(cfg: RunConfig) -> Iterator[Violation]:
    """Entries of a list (`datasets`, `rewards`) that are named like one before them."""
    for outer in list_keys():
        first: dict[str, int] = {}
        for number, entry in enumerate(cfg.value_of(outer)):
            if first.setdefault(entry.name, number) != number:
                key, other = f"{outer}.{number}.name", f"{outer}.{first[entry.name]}.name"
                yield Violation(
                    (key, other), f"{entry.name!r} is the name of {other} too", fix="give each its own name"
                )
