"""Expected values are written by hand from section 10.3.2 (core schema) of the YAML 1.2.2 specification."""

import math

import pytest

from sftplay.config.layers import parse, read, scalar
from sftplay.errors import ConfigError

NUMBERS = {
    "0": 0,
    "-19": -19,
    "+12": 12,
    "007": 7,
    "0o7": 7,
    "0o14": 12,
    "0x3A": 58,
    "2e-4": 0.0002,
    "1e3": 1000.0,
    "1E+2": 100.0,
    "12e03": 12000.0,
    "-2E+05": -200000.0,
    "0.": 0.0,
    "-0.0": 0.0,
    ".5": 0.5,
    "3.14": 3.14,
}
WORDS = ["no", "No", "NO", "yes", "on", "Off", "y", "n", "tRUE", "nUll", "None", "1_000", "12:30", "190:20:30"]
WORDS += ["2024-05-01", "2001-12-14t21:59:43.10-05:00", "0b11", "0o8", "0xG", "1e", "e3", "1.2.3", "-", ".", "=", "nan"]


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_a_number_of_the_specification_is_that_number(text, value):
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


@pytest.mark.parametrize("text", WORDS)
def test_a_word_that_only_yaml_1_1_converts_stays_a_word(text):
    assert scalar(text) == text
    assert parse(f"key: {text}", "f").values["key"] == text if text != "-" else True


def test_booleans_and_null_have_the_spellings_of_the_specification_and_no_others():
    assert [scalar(text) for text in ("true", "True", "TRUE")] == [True] * 3
    assert [scalar(text) for text in ("false", "False", "FALSE")] == [False] * 3
    assert [scalar(text) for text in ("null", "Null", "NULL", "~", "")] == [None] * 5


def test_infinities_and_not_a_number_are_read():
    assert [scalar(text) for text in (".inf", "-.Inf", "+.INF")] == [math.inf, -math.inf, math.inf]
    assert math.isnan(scalar(".NaN"))


def test_every_key_and_list_item_remembers_its_line():
    document = parse("# one\na:\n  b: 1\n\n  c: [x,\n      y]\nd: 2\n", "f")
    lines = {("a",): 2, ("a", "b"): 3, ("a", "c"): 5, ("a", "c", 0): 5, ("a", "c", 1): 6, ("d",): 7}
    assert document.lines == lines


def test_aliases_and_merge_keys_work_and_remember_the_line_of_the_value():
    text = "base: &base\n  r: 8\n  alpha: 16\none:\n  <<: *base\n  alpha: 32\ntwo: {<<: [*base, {r: 1, s: 2}]}\n"
    document = parse(text, "f")
    assert document.values["one"] == {"r": 8, "alpha": 32}
    assert document.values["two"] == {"r": 8, "alpha": 16, "s": 2}
    assert document.lines[("one", "r")] == 2
    assert document.lines[("one", "alpha")] == 6


def test_a_tag_of_the_core_schema_is_obeyed_and_any_other_is_refused():
    assert parse("a: !!str 3\nb: !!float 3\n", "f").values == {"a": "3", "b": 3.0}
    assert type(parse("b: !!float 3\n", "f").values["b"]) is float
    for text in ("a: !!python/object/apply:os.system [ls]", "a: !mine 3", "a: !!int word", "a: !!set {x}"):
        with pytest.raises(ConfigError, match=r"tag .* cannot be read"):
            parse(text, "f")


REFUSED = {
    "a: 1\nb: 2\na: 3\n": ("f:3", "'a' is given twice, first on line 1"),
    "a:\n  b: 1\n  b: 2\n": ("f:3", "'b' is given twice"),
    "a: [1\nb: 2\n": ("f:2", "not YAML"),
    "a:\n\tb: 1\n": ("f:2", "not YAML"),
    "a: b: c\n": ("f:1", "not YAML"),
    "a: *gone\n": ("f:1", "undefined alias"),
    "a: 1\n---\nb: 2\n": ("f:2", "second document"),
    "3: x\n": ("f:1", "3 stands where a key's name belongs"),
    "? [a]\n: x\n": ("f:1", "stands where a key's name belongs"),
    "a: &x [*x]\n": ("f:1", "unfolds without end"),
    "<<: 3\n": ("f:1", "takes a mapping"),
    "a: 'x\x07'\n": ("f:1", "control character"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_text_that_cannot_be_meant_is_refused_with_its_line(text):
    where, what = REFUSED[text]
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert caught.value.where == where
    assert what in caught.value.what
    assert caught.value.fix


def test_aliases_that_unfold_into_gigabytes_are_refused():
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 10):
        text += f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n"
    with pytest.raises(ConfigError, match="unfolds without end"):
        parse(text, "f")


def test_deep_nesting_is_refused_without_a_traceback():
    with pytest.raises(ConfigError):
        parse("a: " + "[" * 5000, "f")
    with pytest.raises(ConfigError):
        parse("a: " + "[" * 200 + "]" * 200, "f")


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("a: 1\nb: Köln\n".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8") as caught:
        read(tmp_path / "latin.yaml", "latin.yaml")
    assert caught.value.where == "latin.yaml:2"
    with pytest.raises(ConfigError, match="no such file"):
        read(tmp_path / "gone.yaml", "gone.yaml")
    with pytest.raises(ConfigError, match="folder"):
        read(tmp_path, "here")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "latin.yaml" / "below", "below")


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path):
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: 2\r\n")
    document = read(tmp_path / "f.yaml", "f.yaml")
    assert document.values == {"a": 1, "b": {"c": 2}}
    assert document.lines[("b", "c")] == 3
