"""Rules of the sections data, model and eval about texts."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from encodings.aliases import aliases
from pathlib import Path

from sftplay.config.read.layers import is_overlong
from sftplay.config.rules.problem import Problem
from sftplay.config.schema.cluster import SPLIT_WEIGHTS
from sftplay.config.schema.data import DataConfig
from sftplay.config.schema.keys import keys_in, list_keys, path_keys
from sftplay.config.schema.run import RunConfig
from sftplay.errors import nearest_names

COUNT, PATH = "tuning.new_tokens.count", "tuning.new_tokens.path"
KEYS = (COUNT, PATH)


def broken_new_token_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Two sources of terms, and settings under which the rows of new tokens would not train."""
    wanted = cfg.tuning.new_tokens
    if not wanted.is_on:
        return
    if wanted.count and wanted.path is not None:
        what = f"{wanted.count} terms are to be found, but {PATH} lists them"
        yield Problem(KEYS, what, fix="keep one of the two")
    if cfg.model.adapter is not None and not cfg.model.merge_adapter:
        what = "an adapter that is continued has no rows for new tokens"
        fix = "write model.merge_adapter: true, which trains a new adapter, or remove tuning.new_tokens"
        yield Problem((*_given(cfg), "model.adapter"), what, fix=fix)
    if not cfg.tuning.trains_single_rows:
        return
    if cfg.cluster.strategy in SPLIT_WEIGHTS:
        what = (
            f"the rows of new tokens train where each process has the whole matrix, which {cfg.cluster.strategy} splits"
        )
        fix = "write cluster.strategy: ddp or zero2, or tuning.mode: full"
        yield Problem(("cluster.strategy", *_given(cfg)), what, fix=fix)
    if cfg.train.loss_head == "liger":
        what = "liger was not tried with rows of new tokens, which PEFT puts into the head's weight at each step"
        yield Problem(("train.loss_head", *_given(cfg)), what, fix="write train.loss_head: chunked")


def idle_new_token_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    wanted, key = cfg.tuning.new_tokens, "tuning.new_tokens.min_count"
    if wanted.path is not None:
        yield key, PATH, f"{PATH} lists the terms"
    elif not wanted.count:
        yield key, COUNT, f"{COUNT} 0 finds no terms"


def _given(cfg: RunConfig) -> tuple[str, ...]:
    return (COUNT,) if cfg.tuning.new_tokens.count else (PATH,)


_CHOICES = {"train.resume": ("never", "auto"), "data.template": ("auto", "chatml")}
"""Key -> the words it takes beside a path. A near miss of a word would be taken for a path."""


def broken_text_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Every rule that a text of the config breaks."""
    yield from _characters(cfg)
    yield from _texts(cfg)
    yield from _homes(cfg)
    yield from _twins(cfg)


def _characters(cfg: RunConfig) -> Iterator[Problem]:
    """No path, name or text can hold a NUL or half of a character: files, processes and tokenizers refuse both."""
    for key, _ in keys_in(cfg):
        for place, text in _texts_in(cfg.value_of(key), key):
            if "\0" in text:
                yield Problem((place,), "holds a NUL character", fix="remove it")
            elif not _is_unicode(text):
                yield Problem((place,), f"{text!r} is not valid Unicode", fix="write it as UTF-8")
            elif key != "data.system" and is_overlong(text):
                yield Problem((place,), f"is longer than any name or path: {len(text):,} characters", fix="shorten it")


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


def _texts(cfg: RunConfig) -> Iterator[Problem]:
    name = cfg.run_name if cfg.run_name and _is_unicode(cfg.run_name) else None
    if name is not None and (name in (".", "..") or "/" in name or "\\" in name or not name.isprintable()):
        what = f"{name!r} is a path, not a name of a folder" if name.isprintable() else f"{name!r} is no folder's name"
        yield Problem(("run_name",), what, fix="write a plain name; output_dir says where run folders go")
    if name == "latest":
        yield Problem(("run_name",), "'latest' always points at the newest run", fix="choose another name")
    if name == ".set-aside":
        yield Problem(("run_name",), "'.set-aside' keeps starts that made no step", fix="choose another name")
    for key, field in keys_in(cfg):
        value = cfg.value_of(key)
        if isinstance(value, str) and not value.strip() and key != "data.delimiter":
            yield Problem((key,), "is empty", fix="give it a value, or leave the key out")
        elif isinstance(value, str) and value in ("None", "none") and field.default is None:
            yield Problem((key,), f"{value!r} is a word in YAML, not nothing", fix="write null, or leave the key out")
    for key, words in _CHOICES.items():
        value = cfg.value_of(key)
        near = nearest_names(value, words) if value not in words and not set("/.") & set(value) else []
        if near:
            fix = f"did you mean {near[0]!r}? A path of that name is written ./{value}"
            yield Problem((key,), f"{value!r} is neither {' nor '.join(words)}", fix=fix, nearest=tuple(near))


def _homes(cfg: RunConfig) -> Iterator[Problem]:
    for key in path_keys(cfg):
        value = cfg.value_of(key)
        if isinstance(value, str) and value.startswith("~"):
            what = f"{value!r}: this machine knows no home folder of {value.partition('/')[0]}"
            yield Problem((key,), what, fix=f"write the whole path, or ./{value} for a folder of that very name")


def _twins(cfg: RunConfig) -> Iterator[Problem]:
    """Entries of a list (`datasets`, `rewards`) that are named like one before them."""
    for outer in list_keys():
        first: dict[str, int] = {}
        for number, entry in enumerate(cfg.value_of(outer)):
            if first.setdefault(entry.name, number) != number:
                key, other = f"{outer}.{number}.name", f"{outer}.{first[entry.name]}.name"
                yield Problem((key, other), f"{entry.name!r} is the name of {other} too", fix="give each its own name")


_ESCAPES = {r"\t": r"\t", "tab": r"\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
"""What people write for a character that is hard to type -> how YAML spells it in double quotes."""

_NOT_OF_FILES = ("undefined", "idna", "punycode", "unicode_escape", "raw_unicode_escape")

_NO_CELLS = (".jsonl", ".ndjson", ".json", ".parquet")


def broken_data_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Every rule that the section `data` breaks."""
    yield from _folders(cfg)
    yield from _columns(cfg.data)
    yield from _encoding(cfg.data.encoding)
    yield from _delimiter(cfg.data.delimiter)


def row_paths(cfg: RunConfig) -> Iterator[tuple[str, str]]:
    """Key and path of all rows that the run reads."""
    keys = ["data.train_path", "data.val_path", "data.test_path"]
    keys += [f"datasets.{number}.{name}" for number in range(len(cfg.datasets)) for name in ("path", "val_path")]
    yield from ((key, path) for key in keys if (path := cfg.value_of(key)))


def idle_data_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    if all(path.lower().removesuffix(".gz").endswith(_NO_CELLS) for _, path in row_paths(cfg)):
        yield "data.delimiter", "data.train_path", "no csv or tsv file is named"


def _folders(cfg: RunConfig) -> Iterator[Problem]:
    """A folder of rows is read with everything below it, except hidden files and folders."""
    written = (("data.processed_dir", cfg.data.processed_dir), ("output_dir", cfg.output_dir))
    for name, path in row_paths(cfg):
        for key, folder in written:
            if _is_read_with(path, folder):
                what = f"{folder!r} lies in the folder of rows {path!r}: what is written there would be read as rows"
                yield Problem((key, name), what, fix="name a folder outside of it, or one that is hidden")


def _is_read_with(path: str, folder: str) -> bool:
    above, below = Path(path).absolute(), Path(folder).absolute()
    return below.is_relative_to(above) and not any(part.startswith(".") for part in below.relative_to(above).parts)


def _columns(data: DataConfig) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for name, column in data.columns.items():
        key = f"data.columns.{name}"
        if not column.strip():
            yield Problem((key,), "is empty", fix="name a column of your file, or leave the key out")
        elif column in first:
            what = f"the column {column!r} is given to {first[column]!r} already"
            yield Problem((key, f"data.columns.{first[column]}"), what, fix="keep it in one of the two")
        else:
            first[column] = name


def _encoding(name: str) -> Iterator[Problem]:
    if name == "auto" or not name.strip() or "\0" in name:
        return
    near = _near_encodings(name)
    try:
        # A codec such as base64 or zip turns bytes into bytes; those of _NOT_OF_FILES are no encodings of files.
        found = codecs.lookup(name)
        if found._is_text_encoding and found.name not in _NOT_OF_FILES:
            return
        what, near = f"{name!r} is no encoding of text", []
    except (LookupError, ValueError):
        what = f"Python knows no encoding called {name!r}"
    fix = f"did you mean {near[0]!r}?" if near else "write auto, or a name such as utf-8, cp1252 or shift_jis"
    yield Problem(("data.encoding",), what, fix=fix, nearest=tuple(near))


def _near_encodings(name: str) -> list[str]:
    plain = name.lower().replace("-", "_").replace(" ", "_")
    known = {"auto", *aliases, *aliases.values()} - {"mbcs", "dbcs", "ansi", "oem"}  # these exist on Windows only
    return nearest_names(plain, sorted(known))


def _delimiter(text: str) -> Iterator[Problem]:
    if text == "auto" or (len(text) == 1 and text not in '"\r\n\0'):
        return
    key = ("data.delimiter",)
    if text.lower() in _ESCAPES:
        yield Problem(
            key, f"{text!r} is not one character", fix=f'write it in double quotes: "{_ESCAPES[text.lower()]}"'
        )
    elif len(text) == 1:
        yield Problem(key, f"{text!r} cannot stand between cells", fix="write another character, or auto")
    else:
        near = tuple(nearest_names(text, ["auto"]))
        fix = "did you mean 'auto'?" if near else "write the one character between two cells, or auto"
        yield Problem(key, f"{text!r} is {'no' if not text else 'not one'} character", fix=fix, nearest=near)
