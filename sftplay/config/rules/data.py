"""Rules about the section `data`: columns, encodings and delimiters that cannot work.

Whether a file has a column of that name is checked when the file is read.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from encodings.aliases import aliases
from pathlib import Path

from sftplay.config.rules.violation import Violation
from sftplay.config.schema.data import DataConfig
from sftplay.config.schema.run import RunConfig
from sftplay.errors import nearest_names

_ESCAPES = {r"\t": r"\t", "tab": r"\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
"""What people write for a character that is hard to type -> how YAML spells it in double quotes."""

_NOT_OF_FILES = ("undefined", "idna", "punycode", "unicode_escape", "raw_unicode_escape")

_NO_CELLS = (".jsonl", ".ndjson", ".json", ".parquet")


def broken_data_rules(cfg: RunConfig) -> Iterator[Violation]:
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


def _folders(cfg: RunConfig) -> Iterator[Violation]:
    """A folder of rows is read with everything below it, except hidden files and folders."""
    written = (("data.processed_dir", cfg.data.processed_dir), ("output_dir", cfg.output_dir))
    for name, path in row_paths(cfg):
        for key, folder in written:
            if _is_read_with(path, folder):
                what = f"{folder!r} lies in the folder of rows {path!r}: what is written there would be read as rows"
                yield Violation((key, name), what, fix="name a folder outside of it, or one that is hidden")


def _is_read_with(path: str, folder: str) -> bool:
    above, below = Path(path).absolute(), Path(folder).absolute()
    return below.is_relative_to(above) and not any(part.startswith(".") for part in below.relative_to(above).parts)


def _columns(data: DataConfig) -> Iterator[Violation]:
    first: dict[str, str] = {}
    for name, column in data.columns.items():
        key = f"data.columns.{name}"
        if not column.strip():
            yield Violation((key,), "is empty", fix="name a column of your file, or leave the key out")
        elif column in first:
            what = f"the column {column!r} is given to {first[column]!r} already"
            yield Violation((key, f"data.columns.{first[column]}"), what, fix="keep it in one of the two")
        else:
            first[column] = name


def _encoding(name: str) -> Iterator[Violation]:
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
    yield Violation(("data.encoding",), what, fix=fix, nearest=tuple(near))


def _near_encodings(name: str) -> list[str]:
    plain = name.lower().replace("-", "_").replace(" ", "_")
    known = {"auto", *aliases, *aliases.values()} - {"mbcs", "dbcs", "ansi", "oem"}  # these exist on Windows only
    return nearest_names(plain, sorted(known))


def _delimiter(text: str) -> Iterator[Violation]:
    if text == "auto" or (len(text) == 1 and text not in '"\r\n\0'):
        return
    key = ("data.delimiter",)
    if text.lower() in _ESCAPES:
        yield Violation(
            key, f"{text!r} is not one character", fix=f'write it in double quotes: "{_ESCAPES[text.lower()]}"'
        )
    elif len(text) == 1:
        yield Violation(key, f"{text!r} cannot stand between cells", fix="write another character, or auto")
    else:
        near = tuple(nearest_names(text, ["auto"]))
        fix = "did you mean 'auto'?" if near else "write the one character between two cells, or auto"
        yield Violation(key, f"{text!r} is {'no' if not text else 'not one'} character", fix=fix, nearest=near)
