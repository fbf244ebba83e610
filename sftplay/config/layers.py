"""Read YAML 1.2 with the place of every value, and lay includes, files and overrides over each other."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sftplay.errors import ConfigError, ConfigErrors, suggest

KeyPath = tuple[str | int, ...]  # where a value is in a document: keys, and positions in lists

MAX_VALUES = 20_000
"""Most values of one document with its aliases unfolded: a few lines of aliases can unfold into gigabytes."""

MAX_BYTES = 1_000_000  # most bytes of a config file. PyYAML reads about 100,000 a second, comments too.

RESOLVED = "config.resolved.yaml"  # name of the file in a run's folder

# First lines of the files that `resolved` writes, those in the folders of older runs too.
ALL_VALUES = "# Every key of the run; a comment names where a value comes from, all others are defaults."
SET_VALUES = "# The values of the run that were set; a comment names where each comes from."

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


def is_written_by_kit(path: Path) -> bool:
    """Return whether `resolved` wrote the file into a run's folder: its first line says so."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().rstrip("\n") in (ALL_VALUES, SET_VALUES)


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
            # In a list of mappings the first one wins.
            for source in reversed(value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]):
                if isinstance(source, yaml.MappingNode):
                    values.update(self.value(source, path))
                else:
                    what = "`<<` takes a mapping, or a list of mappings"
                    self._problem(source, what, fix="name an anchor of a mapping")
        lines: dict[str, int] = {}
        for key_node, value_node in (pair for pair in node.value if pair not in merges):
            key, line = None, key_node.start_mark.line + 1
            if isinstance(key_node, yaml.ScalarNode):
                key = self._scalar(key_node)
            if not isinstance(key, str):
                found = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                what = f"{found} stands where a key's name belongs"
                self._problem(key_node, what, fix="write a name, or quote it")
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

    def _refuse_tag(self, node: yaml.Node) -> None:
        name = "!!" + node.tag.removeprefix(_TAG) if node.tag.startswith(_TAG) else node.tag
        self._problem(node, f"the tag {name} cannot be read here", fix="remove the tag")

    def _problem(self, node: yaml.Node, what: str, *, fix: str) -> None:
        if all((known.where, known.what) != (self._at(node), what) for known in self.problems):
            self.problems.append(ConfigError(what, where=self._at(node), fix=fix))

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}"


COMMAND_LINE = "command line"
MAX_FILES = 100  # most files of one config: 24 files that each include two others would be read 16 million times

_FIRST_OVERRIDE = 1_000_000  # its rank comes after that of any file

LONGEST_NAME_BYTES, LONGEST_PATH = 255, 4000
"""What file systems take: bytes of one name, and less than the characters of a whole path."""


class SourceLocation(NamedTuple):
    """Where a value was written. Places sort as a reader meets them: the file, its includes, the command line."""

    rank: int
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}:{self.line}" if self.line else self.name


class LocatedProblem(NamedTuple):
    """A config problem and the place it is listed at."""

    location: SourceLocation
    error: ConfigError


@dataclass(frozen=True)
class Layer:
    """A tree of values and the place of every key in it."""

    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, SourceLocation] = field(default_factory=dict)

    def find_location(self, path: KeyPath) -> SourceLocation | None:
        """Find the place of a key, or of the nearest section around it that was written down."""
        sections = (path[:length] for length in range(len(path), 0, -1))
        return next((self.locations[section] for section in sections if section in self.locations), None)

    def find_location_within(self, path: KeyPath) -> SourceLocation | None:
        """Find the place of a key, or of the first one below it: an override names no section by itself."""
        return self.locations.get(path) or next(
            (at for known, at in self.locations.items() if known[: len(path)] == path), None
        )


def read_layers(path: str | Path) -> list[Layer]:
    """Read the layers of a file: its includes, lowest first, and then the file itself.

    Raises:
        ConfigError: a file that cannot be read, an include that is no path, or one that leads back to itself.
    """
    files = list(islice(_read_files(Path(path), os.fspath(path), including=[]), MAX_FILES + 1))
    if len(files) > MAX_FILES:
        what = f"includes more than {MAX_FILES} files; each counts as often as it is included"
        raise ConfigError(what, where=f"{os.fspath(path)} include", fix="put what they share into one file")
    layers = []
    for order, (name, document) in enumerate(files, start=1):
        rank = len(files) - order
        values = {key: value for key, value in document.values.items() if key != "include"}
        lines = {path: SourceLocation(rank, line, name) for path, line in document.lines.items() if path[0] in values}
        layers.append(Layer(values, lines))
    return layers


def read_overrides(overrides: Sequence[str]) -> tuple[Layer, list[LocatedProblem]]:
    """Read the layer of `a.b=value` texts, where later ones win, and a problem for each that cannot be read.

    A value that starts with a bracket, a brace or a quote is read as YAML. Any other is one plain word: a number, a
    boolean or null of YAML 1.2, else the text as it stands. So `model.name=a: b` and `run_name=#1` are texts.
    """
    merged, problems = Layer(), []
    for order, text in enumerate(overrides):
        location = SourceLocation(_FIRST_OVERRIDE + order, 0, COMMAND_LINE)
        try:
            merged = merge([merged, _override(text, location)])
        except ConfigError as error:
            problems.append(LocatedProblem(location, error))
    return merged, problems


def merge(layers: Sequence[Layer]) -> Layer:
    """Merge all layers: sections key by key, every other value taken from the highest layer that has it.

    Keys by the name or the number of an entry of a list below change that entry alone; ConfigError if there is none.
    """
    merged = Layer()
    for layer in layers:
        locations = dict(merged.locations)
        values = _overlaid(merged.values, layer.values, layer=layer, locations=locations)
        given = {_by_number(path, merged.values, layer=layer): at for path, at in layer.locations.items()}
        merged = Layer(values, locations | given)
    return merged


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """Build the tree in which only that key is set."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return dict(value)


def _overlaid(
    below: dict[Any, Any],
    above: dict[Any, Any],
    *,
    layer: Layer,
    locations: dict[KeyPath, SourceLocation],
    path: KeyPath = (),
) -> dict[Any, Any]:
    """`below` with the values of `above`, a part of `layer`. Places of replaced values are removed from `locations`."""
    values = dict(below)
    for key, value in above.items():
        inner, old = (*path, key), below.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            values[key] = _overlaid(old, value, layer=layer, locations=locations, path=inner)
        elif isinstance(old, list) and isinstance(value, dict):
            changes = {_entry_number(name, old, layer=layer, path=inner): change for name, change in value.items()}
            changed = _overlaid(dict(enumerate(old)), changes, layer=layer, locations=locations, path=inner)
            values[key] = list(changed.values())
        elif not isinstance(old, dict) or value is not None:  # a section with all keys commented out changes nothing
            values[key] = value
            drop_below(locations, inner)
    return values


def _by_number(path: KeyPath, below: Any, *, layer: Layer) -> KeyPath:
    """The path of a change by `layer`, with the numbers of list entries in the place of their names."""
    found: KeyPath = ()
    for part in path:
        if isinstance(below, list) and isinstance(part, str):
            part = _entry_number(part, below, layer=layer, path=found)
        is_there = part in below if isinstance(below, dict) else isinstance(below, list) and int(part) < len(below)
        below = below[part] if is_there else None
        found = (*found, part)
    return found


def _entry_number(name: str, entries: list[Any], *, layer: Layer, path: KeyPath) -> int:
    """The place in the list at `path` of the entry that has this name, or else this number."""
    names = [str(entry.get("name", n) if isinstance(entry, dict) else n) for n, entry in enumerate(entries)]
    if name in names:
        return names.index(name)
    if name.isdecimal() and int(name) < len(entries):
        return int(name)
    key = ".".join(map(str, path))
    where = f"{layer.find_location_within((*path, name)) or ''} {key}.{name}".strip()
    fix, near = suggest(name, names, f"{key} has {', '.join(names) or 'no entries'}")
    nearest = [f"{key}.{known}" for known in near]
    raise ConfigError(f"{key} has no entry called {name!r}", where=where, fix=fix, nearest=nearest)


def _read_files(path: Path, name: str, *, including: list[Path], at: str = "") -> Iterator[tuple[str, Document]]:
    """Every included file and then the file itself, each with the name that messages give it; `at` is the place of the
    include that leads here."""
    try:
        document = read(path, name)
    except ConfigError as error:
        if not at or error.where != name:
            raise
        raise ConfigError(f"{name}: {error.what}", where=at, fix=error.fix) from None
    opened = [*including, _real(path)]
    given = document.values.get("include", [])
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(path, str) and _is_path(path) for path in listed):
        what = f"{'null' if given is None else repr(given)} is no path and no list of paths"
        raise ConfigError(what, where=f"{name}:{document.lines['include',]} include", fix="name a YAML file")
    for order, included in enumerate(listed):
        line = document.lines.get(("include", order), document.lines["include",])
        inner = path.parent / os.path.expanduser(included)  # noqa: PTH111 - an unknown user's `~` stays as it is
        here, shown = f"{name}:{line} include", _display_name(inner)
        if _real(inner) in opened:
            chain = " -> ".join(_display_name(file) for file in [*opened, _real(inner)])
            raise ConfigError(f"leads back to itself: {chain}", where=here, fix="remove one of these includes")
        try:
            inner.stat()
        except FileNotFoundError:
            fix = "correct the path; it starts at the folder of the including file"
            if Path(included).exists():
                relative = os.path.relpath(included, opened[-1].parent)
                fix = f"paths start at the including file: write include: {relative}"
            raise ConfigError(f"no such file: {shown}", where=here, fix=fix) from None
        except OSError:
            pass  # reading it says why
        yield from _read_files(inner, shown, including=opened, at=here)
    yield name, document


def _real(path: Path) -> Path:
    """The path without links; unlike `Path.resolve` it takes links that lead to themselves."""
    return Path(os.path.realpath(path))


def is_overlong(text: str) -> bool:
    """Whether no file can have that path, and no model that name."""
    return max(map(len, os.fsencode(text).split(b"/"))) > LONGEST_NAME_BYTES or len(text) > LONGEST_PATH


def _is_path(text: str) -> bool:
    try:
        return bool(text) and not is_overlong(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _display_name(path: Path) -> str:
    """The path as messages print it: relative to the current folder where it lies below it."""
    tidy = Path(os.path.normpath(path))
    return str(tidy.relative_to(Path.cwd()) if tidy.is_relative_to(Path.cwd()) else tidy)


def _override(text: str, location: SourceLocation) -> Layer:
    key, sign, value = text.removeprefix("--").partition("=")
    key = key.strip()
    if not sign or not all(key.split(".")):
        what = f"{text!r} is not of the form key=value"
        raise ConfigError(what, where=COMMAND_LINE, fix="write it like train.max_steps=100, without spaces around =")
    if key == "include":
        raise ConfigError("include works in a file only", where=COMMAND_LINE, fix="put it into the YAML file")
    value = value.strip()
    try:
        is_yaml = value.startswith(("[", "{", '"', "'"))
        parsed = parse(value, COMMAND_LINE).values if is_yaml else scalar(value)
    except ConfigError as error:
        what = f"the value {value!r} is {error.what}"
        raise ConfigError(what, where=f"{COMMAND_LINE} {key}", fix="check its quotes and brackets") from None
    return Layer(nested(key, parsed), {path: location for path, _ in walk(parsed, tuple(key.split(".")))})


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield a value with its path, and everything in it."""
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from walk(below, (*path, key))


SPELLINGS = ("bf16", "fp16")


def resolve_precision(layers: Sequence[Layer]) -> tuple[list[Layer], list[LocatedProblem]]:
    """Replace the switches `train.bf16` and `train.fp16` by `train.precision`; return what contradicts too."""
    resolved, problems = [], []
    decided: Any = None
    undecided: list[LocatedProblem] = []
    for layer in layers:
        train = layer.values.get("train")
        if not isinstance(train, dict):
            resolved.append(layer)
            continue
        allowed, name, found = _read_switches(layer, train)
        problems += found
        given, location = train.get("precision"), layer.locations.get(("train", name))
        if allowed and location:
            said = allowed[0] if len(allowed) == 1 else f"not {name}"
            if given is None and len(allowed) == 1:
                given = allowed[0]
            elif given is not None and given not in allowed:
                what = f"says {said}, but train.precision says {given}"
                problems.append(_problem(location, f"train.{name}", what=what, fix="keep train.precision alone"))
        if given is not None:
            decided, undecided = given, []
        elif allowed and location and decided not in allowed:
            fix = f"write train.precision: {' or '.join(allowed)}"
            what = "false says what not to use, and nothing says what to use"
            undecided = [_problem(location, f"train.{name}", what=what, fix=fix)]
        kept = {key: value for key, value in train.items() if key not in SPELLINGS}
        switches = [("train", spelling) for spelling in SPELLINGS]
        locations = {path: location for path, location in layer.locations.items() if path[:2] not in switches}
        if allowed and location and given is not None and kept.get("precision") is None:
            kept["precision"], locations["train", "precision"] = given, location
        resolved.append(Layer({**layer.values, "train": kept}, locations))
    return resolved, problems + undecided


def _read_switches(layer: Layer, train: dict[str, Any]) -> tuple[list[str], str, list[LocatedProblem]]:
    """What the switches of a layer allow, the switch that problems are reported at, and problems of the switches."""
    values = {name: train[name] for name in SPELLINGS if name in train}
    problems = []
    for name, value in values.items():
        if not isinstance(value, bool):
            location, what = layer.locations["train", name], f"{value!r} is not true or false"
            usual = "write true or false, or use train.precision"
            fix = "write train.precision: auto" if value == "auto" else usual
            problems.append(_problem(location, f"train.{name}", what=what, fix=fix))
    if problems or not values:
        return [], "", problems
    chosen = [name for name, on in values.items() if on]
    location, name = min((layer.locations["train", name], name) for name in chosen or values)
    if len(chosen) == 2:
        fix = "keep one of them, or write train.precision: bf16"
        return [], "", [_problem(location, "train.bf16, train.fp16", what="both are true", fix=fix)]
    return chosen or [word for word in ("fp32", *SPELLINGS) if word not in values], name, []


def _problem(location: SourceLocation, keys: str, *, what: str, fix: str) -> LocatedProblem:
    return LocatedProblem(location, ConfigError(what, where=f"{location} {keys}", fix=fix))


TASK_SPELLINGS = {"dapt": "cpt"}  # accepted word -> the task that it stands for

NO_PRETRAINED = "builtin:hrm"  # model.name in task mode hrm: the model is made of the section hrm, from nothing


def resolve_task_mode(layers: Sequence[Layer]) -> list[Layer]:
    """Replace accepted words by the task's own name, and put a layer below that says what task mode hrm has instead of
    a pretrained model."""
    resolved, word = [], None
    for layer in layers:
        if "task_mode" in layer.values:
            word = layer.values["task_mode"]
            word = TASK_SPELLINGS.get(word, word) if isinstance(word, str) else word
            layer = Layer({**layer.values, "task_mode": word}, layer.locations)
        resolved.append(layer)
    if word == "hrm":
        resolved.insert(0, Layer(nested("model.name", NO_PRETRAINED) | nested("tuning.mode", "full")))
    return resolved
