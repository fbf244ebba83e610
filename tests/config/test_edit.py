"""A value set in a config file: the value is there, and everything else is as it was, to the byte."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sftplay.config.edit import Unclear, amend_file, amended
from sftplay.config.load import load_config
from sftplay.errors import ConfigError

KEY = "data.system"
AWKWARD = ['say "hi"', "it's", "C:\\new\\x", "a\nb\n", "\ttab", "key: value # no comment", "#", "😀 ünï", "- x", "{a}"]
AWKWARD += [
    "null",
    "12",
    "2e-4",
    "---",
    "%d",
    "&a *b",
    "\u2028",
    "\ufeff",
    "\x00\x1b",
    "e\u0301\u200d",
    " edges ",
    "`$x`",
]
TEXTS = st.sampled_from(AWKWARD) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
COMMENTS = st.sampled_from(["", "  # why", "   # data: {system: no}"])
LINES = st.sampled_from(["", "# a comment", "  # data:", "#   system: old", "      # 'quotes\" here"])


@st.composite
def files(draw) -> tuple[str, int]:
    """A config and the place of its line with the system prompt; where there is none, minus where it belongs."""

    def noise() -> list[str]:
        return draw(st.lists(LINES, max_size=2))

    pad = " " * draw(st.sampled_from([1, 2, 4]))
    old = draw(st.sampled_from([None, "", "plain words", "'single: quoted'", '"a \\" b"', "null"]))
    lines = [*noise(), f"model: {{name: a}}{draw(COMMENTS)}", *noise(), f"data:{draw(COMMENTS)}"]
    at = len(lines)
    inner = [f"{pad}train_path: b{draw(COMMENTS)}", f"{pad}split: 0.1"]
    if old is not None:
        key = draw(st.sampled_from(["system", '"system"']))
        inner.insert(draw(st.integers(0, 2)), f"{pad}{key}: {old}{draw(COMMENTS)}")
    lines += [*noise(), *inner, *noise(), "seed: 3", *noise()]
    places = [n for n, line in enumerate(lines) if line.strip().startswith(("system:", '"system":'))]
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    text = draw(st.sampled_from(["", "\ufeff"])) + newline.join(lines) + draw(st.sampled_from(["", newline]))
    return text, places[0] if places else -at


@given(files(), TEXTS)
def test_the_value_is_read_back_and_every_other_line_stays_as_it_was(file: tuple[str, int], value: str):
    text, place = file
    changed = amended(text, KEY, value=value)
    values = yaml.safe_load(changed.removeprefix("\ufeff"))  # an outside reader
    assert values["data"].pop("system") == value
    before = yaml.safe_load(text.removeprefix("\ufeff"))
    before["data"].pop("system", None)
    assert values == before
    old, new = text.splitlines(keepends=True), changed.splitlines(keepends=True)
    if place >= 0:
        ending = old[place][old[place].index("  # ") if "  # " in old[place] else len(old[place].rstrip("\r\n")) :]
        assert new[place].endswith(ending)
        assert (new[:place], new[place + 1 :]) == (old[:place], old[place + 1 :])
    else:
        assert (new[:-place], new[1 - place :]) == (old[:-place], old[-place:])


def changed(text: str, value: str = "Be brief.") -> str:
    return amended(textwrap.dedent(text), KEY, value=value)


def test_a_section_is_added_where_there_is_none_or_only_comments_in_it():
    assert changed("include: base.yaml\n# end") == 'include: base.yaml\n# end\ndata:\n  system: "Be brief."\n'
    assert changed("data:\n  # format: auto\nseed: 1\n") == (
        'data:\n  system: "Be brief."\n  # format: auto\nseed: 1\n'
    )
    assert changed("seed: 1\ndata:") == 'seed: 1\ndata:\n  system: "Be brief."\n'


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("data: {train_path: b}\n", 'data: {system: "Be brief.", train_path: b}\n'),
        ('{"data": {\n "train_path": "b"\n}}\n', '{"data": {"system": "Be brief.", \n "train_path": "b"\n}}\n'),
        ("{data: {split: 0, system: old}}\n", '{data: {split: 0, system: "Be brief."}}\n'),
    ],
)
def test_a_value_is_added_inside_braces(text: str, after: str):
    assert changed(text) == after
    assert yaml.safe_load(after)["data"]["system"] == "Be brief."


@pytest.mark.parametrize(
    "text",
    [
        "data: null\n",
        "data:\n  system: |\n    several\n    lines\n  split: 0\n",
        "data:\n  system: two\n    lines\n",
        "data:\n  system: >-\n    folded\n",
        "run_name: &n x\ndata:\n  system: *n\n",
        "eval: &e {limit: 3}\ndata: *e\n",
        "? data\n: split: 0\n",
        "data:\n  split: 0\n...\n---\n",
        "seed: 1\n...\n",
        "run_name: |+\n  x",
    ],
)
def test_what_cannot_be_changed_safely_is_refused(text: str):
    with pytest.raises((Unclear, ConfigError)):
        changed(text)


def test_a_refused_file_is_left_alone_and_the_line_to_add_is_named(write):
    name = write("model: {name: a}\ndata:\n  train_path: b\n  system: two\n    lines\n")
    before = Path(name).read_bytes()
    with pytest.raises(ConfigError) as caught:
        amend_file(Path(name), KEY, value='a "b"')
    assert caught.value.where == name
    assert (
        caught.value.fix == 'open it in an editor and give the key system of the section data this value: "a \\"b\\""'
    )
    assert Path(name).read_bytes() == before
    assert [path.name for path in Path().iterdir()] == [name]


def test_a_file_keeps_its_mode_and_a_link_stays_a_link(write):
    write("data: {train_path: b}\n", "base.yaml")
    name = write("include: base.yaml\nmodel: {name: a}\n")
    Path(name).chmod(0o640)
    Path("link.yaml").symlink_to(name)
    amend_file(Path("link.yaml"), KEY, value="x")
    assert Path("link.yaml").is_symlink()
    assert Path(name).stat().st_mode & 0o777 == 0o640
    cfg = load_config(name)
    assert (cfg.data.system, cfg.data.train_path, cfg.origins[KEY]) == ("x", "b", "run.yaml:4")
