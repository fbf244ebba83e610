"""The tables of other kits, and what is said with them: the rule of a key, and the answer for a value.

`KIT.yaml` is the table of a kit. It holds data alone; a key is written with dots and without the numbers of lists
(`datasets.path`), and `key.*` stands for everything below it. Its parts:

- `title`, `source`: the kit's name, and the version and files that the table was made from.
- `marks`: keys; every file of this kit has at least one of them.
- `held_out`: keys that name held-out rows; without any of them nothing is evaluated while the run trains.
- `rules`: key -> rule. A rule is the key here, which takes the value as it is, or a mapping of
  - `to`: the key here;
  - `values`: value there -> value here. null: it says nothing here. A value that is not listed is kept, or, with
    `otherwise` (why it is not offered), refused; `nearest` is then written instead, a
    value or one for each value there, with `*` for all others;
  - `first`: a key that decides where the file has it;
  - `by` and `with`: the name of a conversion in `conversions.CONVERSIONS`, and what it needs besides the value;
  - `verdict: auto`: where `auto` is written, the kit decides and nothing was translated;
  - `why`: a word on it for the table and the comment; `differs: true`: it is said at the top of the config too, because
    the run is not the same.
- `defaults`: key -> what the kit does where its file is silent. They go through the rules as if the file had them, and
  are written out, so that the run is the same run.
- `parts`: leading key -> keys that mean nothing while it is off. `key=a,b`: while it has none of these values.
- `idle`: key -> a value, or values, that say nothing, besides null, false, and whatever is empty.
- `no_effect`, `not_offered`: why -> keys. `auto`: "key here: why" -> keys. A key of `not_offered` with a value that is
  off counts as `no_effect`.
- `aliases`: older name of a key -> its name in the table.
- `rows`: what the conversions of data sets need (see `rows`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from sftplay.config.keys import all_keys

Verdict = Literal["translated", "no_effect", "auto", "not_offered"]
Rule = Mapping[str, Any]
EMPTY = ("no_effect", "empty")
"""What is found for a key that is known as a block of others alone."""


@dataclass(frozen=True, kw_only=True)
class Kit:
    """The table of a kit, as the module's docstring describes it."""

    name: str
    title: str
    source: str
    marks: str
    rules: dict[str, Any]
    held_out: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    idle: dict[str, Any] = field(default_factory=dict)
    no_effect: dict[str, str] = field(default_factory=dict)
    auto: dict[str, str] = field(default_factory=dict)
    not_offered: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)

    def find(self, key: str) -> tuple[str, Any] | None:
        """Return what the table says of a key: the name of the part, and the rule or the reason there; None for a key
        that it does not know."""
        known, key = self.answers, self.aliases.get(key, key)
        names = [key, *(f"{key.rsplit('.', cut)[0]}.*" for cut in range(1, key.count(".") + 1)), f"{key}.*"]
        return next((known[name] for name in names if name in known), EMPTY if key in self.blocks else None)

    def lead(self, key: str) -> str:
        """Return the leading key of a part; empty for any other key."""
        key = self.aliases.get(key, key)
        return next((lead for lead, names in self.parts.items() if key in names.split()), "")

    @cached_property
    def blocks(self) -> set[str]:
        """The keys that hold others."""
        return {name.rsplit(".", cut)[0] for name in self.answers for cut in range(1, name.count(".") + 1)}

    @cached_property
    def answers(self) -> dict[str, tuple[str, Any]]:
        """Key -> the part of the table it stands in, and what that says of it."""
        found: dict[str, tuple[str, Any]] = {}
        for lead, names in self.parts.items():
            what = f"belongs to {lead.partition('=')[0]}, which is not offered"
            found |= dict.fromkeys(names.split(), ("not_offered", what))
        for part in ("not_offered", "auto", "no_effect"):
            found |= {name: (part, why) for why, names in getattr(self, part).items() for name in names.split()}
        return found | {name: ("rules", rule) for name, rule in self.rules.items()}


class Leaf(NamedTuple):
    """A value of the file, or a default of the kit, and its dotted key with the numbers of lists."""

    key: str
    value: Any
    is_default: bool = False


@dataclass(frozen=True)
class Answer:
    """What becomes of a leaf."""

    verdict: Verdict
    became: str | None = None
    why: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Key here -> value to write. One of a refused mode goes before every other."""

    refuses: bool = False
    """The kit has no such kind of training: what is written is refused by `validate`, and trains nothing."""

    differs: bool = False
    """It is translated, and the run is another one all the same: it is said at the top of the config."""


class Foreign(NamedTuple):
    """The file to be read, as the conversions see it."""

    tree: dict[str, Any]
    kit: Kit
    folder: Path
    nproc: int

    def get(self, key: str) -> Any:
        """Return a value of the file, or what the kit takes where the file has none."""
        for known in (key, *(old for old, name in self.kit.aliases.items() if name == key)):
            found: Any = self.tree
            for name in known.split("."):
                found = found.get(name) if isinstance(found, dict) else None
            if found is not None:
                return found
        return self.kit.defaults.get(key)

    def number(self, key: str) -> Any:
        """Return the same as a number, where a text can be read as one."""
        return as_number(self.get(key))

    def is_on(self, lead: str) -> bool:
        """Return whether the leading key of `parts` is on."""
        key, _, wanted = lead.partition("=")
        value = self.get(key)
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        return str(value) in wanted.split(",") if wanted else not is_off(self.kit, key, value)

    @property
    def holds_out(self) -> bool:
        """Whether the file names held-out rows."""
        return any(not is_off(self.kit, key, self.number(key)) for key in self.kit.held_out.split())


@cache
def read_kits() -> dict[str, Kit]:
    """Read the tables of all kits, by the name of their file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {
        path.stem: Kit(name=path.stem, **yaml.load(path.read_text(encoding="utf-8"), Loader=loader))
        for path in sorted(Path(__file__).parent.glob("*.yaml"))
    }


def is_off(kit: Kit, key: str, value: Any) -> bool:
    """Return whether a value says nothing: null, false, empty, or what the table names for the key."""
    if value is None or value is False or value in ("", [], {}):
        return True
    idle = kit.idle.get(key, ())
    return value in idle if isinstance(idle, list) else key in kit.idle and value == idle


def write_precision(key: str, chosen: str, says: str, *, halves: bool) -> Answer:
    """Return the answer for the number format. `halves`: all weights train, and that kit holds them in 16 bits too;
    `says`: the key that it is said of."""
    if halves and chosen != "fp32" and key == says:
        why = "every weight is held in 32 bits here, and in 16 there, where small updates are lost"
        return write("train.precision", chosen, why, differs=True)
    return write("train.precision", chosen)


def find_file(*places: Path) -> Path | None:
    """Return the first of the places that is a file; a text too long for a name is none."""
    for place in places:
        try:
            if place.is_file():
                return place
        except (OSError, ValueError):
            continue
    return None


def as_number(value: Any) -> Any:
    """Return a text as the number it is; any other value as it is. YAML 1.1 reads 2e-5 as a text."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        number = float(value.replace("_", ""))
        return int(number) if number.is_integer() and "." not in value and "e" not in value.lower() else number
    return value


def write(to: str, value: Any, why: str = "", *, differs: bool = False, verdict: Verdict = "translated") -> Answer:
    """Return the answer that writes a value, as the key here takes it."""
    known = all_keys().get(to)
    kinds = str(known.annotation) if known else ""
    if known and isinstance(value, float) and value.is_integer() and "int" in kinds and "float" not in kinds:
        value = int(value)
    if known and not isinstance(value, str | list) and "str" in kinds and "int" not in kinds:
        value = str(value)
    return Answer(verdict, to, why, {to: value}, differs=differs)
