"""YAML text to plain values by the rules of YAML 1.2, with the line of every key.

PyYAML finds the structure. What a plain word means is decided here, because PyYAML follows YAML 1.1: there `2e-4` is
text, `no` is false and `12:30` is 750. This module knows no key of the config.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from sftplay.errors import ConfigError, ConfigErrors

KeyPath = tuple[str | int, ...]  # where a value is in a document: keys, and positions in lists

MAX_VALUES = 20_000
"""Most values of one document with its aliases unfolded: a few lines of aliases can unfold into gigabytes."""

MAX_BYTES = 1_000_000  # most bytes of a config file. PyYAML reads about 100,000 a second, comments too.

_PLAIN = "plain"
_TAG = "tag:yaml.org,2002:"
_OTHER_INT = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """The values of one YAML text and the line (from 1) of each key and list item."""

    values: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)


def scalar(text: str) -> Any:
    """Return the value of a plain word by YAML 1.2's core schema (section 10.3.2 of the specification).

    A word that is no null, boolean or number is text: for example `no`, `on`, `1_000`, `12:30` and `2024-05-01`.
    """
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
        return text.lower() == "true"
    if len(text) > 4000:  # Python refuses to read integers of more than 4300 digits
        return text
    if re.fullmatch(r"[-+]?[0-9]+", text):
        return int(text)
    if _OTHER_INT.fullmatch(text):
        return int(text[2:], 8 if text[1] == "o" else 16)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def drop_below(paths: dict[KeyPath, Any], path: KeyPath) -> None:
    """Remove a path and everything below it."""
    for known in [known for known in paths if known[: len(path)] == path]:
        del paths[known]


def parse(text: str, name: str) -> Document:
    """Parse the document in `text`; `name` stands for it in messages.

    Raises:
        ConfigError: not YAML, a key given twice, a key that is no word, a tag that would build an object.
    """
    loader = None
    try:
        loader = Loader(text)
        node = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        what = f"holds the control character {ord(text[int(error.position)]):#04x}"
        raise ConfigError(what, where=f"{name}:{line}", fix="remove it, or write it as an escape in quotes") from None
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, name) from None
    except RecursionError:
        raise ConfigError("is nested too deeply", where=name, fix="flatten it") from None
    finally:
        if loader is not None:
            loader.dispose()
    if node is None:
        return Document(None)
    builder = _Builder(name)
    values = builder.value(node, ())
    if builder.problems:
        raise builder.problems[0] if len(builder.problems) == 1 else ConfigErrors(builder.problems)
    return Document(values, builder.lines)


def read(path: Path, name: str) -> Document:
    """Read the mapping in a YAML file; `name` stands for the file in messages.

    Raises:
        ConfigError: missing, unreadable, a folder, not UTF-8, empty, no mapping, or not YAML as `parse` says.
    """
    try:
        check_small_file(path, name)
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such file", where=name, fix="check the path; it starts at the current folder") from None
    except IsADirectoryError:
        raise ConfigError("is a folder, not a YAML file", where=name, fix="name the YAML file in it") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        what = f"is not UTF-8 text (byte {error.object[error.start]:#04x})"
        raise ConfigError(what, where=f"{name}:{line}", fix="save the file as UTF-8") from None
    except (OSError, ValueError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(what, where=name, fix="make it a readable file") from None
    document = parse(text, name)
    if document.values is None:
        raise ConfigError("the file is empty", where=name, fix="write at least model.name and data.train_path")
    if not isinstance(document.values, dict):
        kind = "a list" if isinstance(document.values, list) else "a single value"
        fix = "start with keys such as `model:` at the left margin"
        raise ConfigError(f"the file holds {kind} instead of keys with values", where=name, fix=fix)
    return document


def check_small_file(path: Path, name: str) -> None:
    """Refuse what could not be read to its end in a moment; what is missing is left to whoever reads it.

    Raises:
        ConfigError: a device, a pipe or a socket, or a file of more than MAX_BYTES.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        # Of these some never end, others wait for a writer, and none can be read a second time.
        fix = "write it into a file and name that"
        raise ConfigError("is a device, a pipe or a socket, not a file", where=name, fix=fix)
    if found.st_size > MAX_BYTES:
        what = f"has {found.st_size:,} bytes; a config has at most {MAX_BYTES:,}"
        raise ConfigError(what, where=name, fix="name the file that holds the settings")


def _syntax_error(error: yaml.MarkedYAMLError, name: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}" if mark else name
    what = f"not YAML: {error.problem or error.context}"
    if "\\t" in what or "'\t'" in what:
        return ConfigError(what, where=where, fix="indent with spaces")
    if "mapping values" in what:
        return ConfigError(what, where=where, fix="put the inner key on a line of its own, or quote a text with `: `")
    if "another document" in what or "single document" in (error.context or ""):
        return ConfigError("holds a second document", where=where, fix="keep one document: remove the `---` line")
    return ConfigError(what, where=where, fix="check indentation, quotes and brackets at this line")


class Loader(yaml.SafeLoader):
    """Marks plain words, which have neither quotes nor a tag, and leaves their meaning to `scalar`."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _TAG + "str"
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")


class _Builder:
    """Turns nodes into values, and collects their lines and all problems."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[ConfigError] = []
        self._open: set[int] = set()
        self._n_values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._n_values += 1
        if self._n_values > MAX_VALUES or len(path) > 50 or id(node) in self._open:
            raise ConfigError("unfolds without end", where=self._at(node), fix="remove the alias that causes it")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._open.add(id(node))
        built: Any = []
        if node.tag != _TAG + ("map" if isinstance(node, yaml.MappingNode) else "seq"):
            self._refuse_tag(node)
        if isinstance(node, yaml.MappingNode):
            built = self._mapping(node, path)
        else:
            for place, item in enumerate(node.value):
                self.lines[(*path, place)] = item.start_mark.line + 1
                built.append(self.value(item, (*path, place)))
        self._open.discard(id(node))
        return built

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == _PLAIN:
            return scalar(node.value)
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return node.value
        value = scalar(node.value)
        named: Any = {"int": int, "float": (int, float), "bool": bool, "null": type(None)}.get(kind)
        if named is None or not isinstance(value, named) or (kind in ("int", "float") and isinstance(value, bool)):
            self._refuse_tag(node)
        return float(value) if kind == "float" and isinstance(value, int) else value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merges = [pair for pair in node.value if pair[0].tag == _PLAIN and pair[0].value == "<<"]
        for _, value_node in merges:
            self._merge(value_node, path, into=values)
        lines: dict[str, int] = {}
        for key_node, value_node in (pair for pair in node.value if pair not in merges):
            key, line = self._key(key_node), key_node.start_mark.line + 1
            if key is None:
                continue
            if key in lines:
                what = f"the key {key!r} is given twice, first on line {lines[key]}"
                self._problem(key_node, what, fix="keep one of them")
                continue
            lines[key] = line
            if key in values:
                drop_below(self.lines, (*path, key))
            self.lines[(*path, key)] = line
            values[key] = self.value(value_node, (*path, key))
        return values

    def _merge(self, node: yaml.Node, path: KeyPath, *, into: dict[str, Any]) -> None:
        """Add the values of the mapping that `<<` names. In a list of mappings the first one wins."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in reversed(sources):
            if isinstance(source, yaml.MappingNode):
                into.update(self.value(source, path))
            else:
                what = "`<<` takes a mapping, or a list of mappings"
                self._problem(source, what, fix="name an anchor of a mapping")

    def _key(self, node: yaml.Node) -> str | None:
        if isinstance(node, yaml.ScalarNode) and isinstance(key := self._scalar(node), str):
            return key
        found = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
        self._problem(node, f"{found} stands where a key's name belongs", fix="write a name, or quote it")
        return None

    def _refuse_tag(self, node: yaml.Node) -> None:
        name = "!!" + node.tag.removeprefix(_TAG) if node.tag.startswith(_TAG) else node.tag
        self._problem(node, f"the tag {name} cannot be read here", fix="remove the tag")

    def _problem(self, node: yaml.Node, what: str, *, fix: str) -> None:
        if all((known.where, known.what) != (self._at(node), what) for known in self.problems):
            self.problems.append(ConfigError(what, where=self._at(node), fix=fix))

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"
