"""The keys of `data`: what they take, what cannot be meant, and what has no effect."""

from __future__ import annotations

import codecs
from encodings.aliases import aliases
from typing import get_args

import pytest

from sftplay.config.data import Column, Layout
from sftplay.config.load import load_config, notes
from sftplay.config.resolved import dump_resolved
from sftplay.data.layouts import SHAPES
from sftplay.errors import ConfigErrors
from sftplay.tasks.preference.pairs import CHOSEN, MARGIN, REJECTED, SCORES, VERDICT

REFUSED = {
    "data: {columns: {qestion: frage}}": (
        "data.columns.qestion",
        "data.columns has no field called 'qestion'",
        "did you mean 'question'?",
    ),
    "data: {columns: {zzz: frage}}": ("data.columns.zzz", "no field called 'zzz'", "data.columns has messages, "),
    "data: {columns: {question: 3}}": ("data.columns.question", "3 is not text", "write text"),
    "data: {columns: {question: a, answer: a}}": (
        "data.columns.answer",
        "the column 'a' is given to 'question' already",
        "keep it in one of the two",
    ),
    "data: {columns: {question: ''}}": ("data.columns.question", "is empty", "name a column"),
    "data: {columns: frage}": ("data.columns", "'frage' is not text for any of messages", "write text for any of"),
    "data: {encoding: cp1253x}": ("data.encoding", "no encoding called 'cp1253x'", "did you mean 'cp1253'?"),
    "data: {encoding: Windows-1251x}": ("data.encoding", "no encoding called", "did you mean 'windows_1251'?"),
    "data: {encoding: atuo}": ("data.encoding", "no encoding called 'atuo'", "did you mean 'auto'?"),
    "data: {encoding: qqqq}": ("data.encoding", "no encoding called 'qqqq'", "such as utf-8"),
    "data: {encoding: base64}": ("data.encoding", "'base64' is no encoding of text", "such as utf-8"),
    "data: {encoding: undefined}": ("data.encoding", "'undefined' is no encoding of text", "such as utf-8"),
    'data: {encoding: "a\\0"}': ("data.encoding", "holds a NUL character", "remove it"),
    "data: {encoding: ''}": ("data.encoding", "is empty", "give it a value"),
    "data: {delimiter: '\\t'}": ("data.delimiter", "is not one character", 'double quotes: "\\t"'),
    "data: {delimiter: tab}": ("data.delimiter", "'tab' is not one character", 'double quotes: "\\t"'),
    "data: {delimiter: ''}": ("data.delimiter", "'' is no character", "write the one character"),
    "data: {delimiter: '::'}": ("data.delimiter", "'::' is not one character", "write the one character"),
    "data: {delimiter: atuo}": ("data.delimiter", "'atuo' is not one character", "did you mean 'auto'?"),
    "data: {delimiter: '\"'}": ("data.delimiter", "cannot stand between cells", "write another character"),
    'data: {delimiter: "\\n"}': ("data.delimiter", "cannot stand between cells", "write another character"),
    "data: {system: ''}": ("data.system", "is empty", "leave the key out"),
    "data: {format: sharegtp}": ("data.format", "no format called 'sharegtp'", "did you mean 'sharegpt'?"),
    "data: {duplicates: dorp}": ("data.duplicates", "no duplicates called 'dorp'", "did you mean 'drop'?"),
    "data: {contamination: skip}": ("data.contamination", "no contamination called 'skip'", "write error or drop"),
}

MODEL = "\nmodel: {name: a}\n"


@pytest.fixture
def problem(write):
    """The only problem of a section `data` that is right but for one value."""

    def refuse(text):
        with pytest.raises(ConfigErrors) as caught:
            load_config(write(text.replace("data: {", "data: {train_path: b, ") + MODEL))
        (found,) = caught.value.problems
        return found

    return refuse


@pytest.mark.contract
@pytest.mark.parametrize("text", REFUSED)
def test_a_value_that_cannot_be_meant_is_refused_with_a_way_out(problem, text):
    key, what, fix = REFUSED[text]
    found = problem(text)
    assert found.where == f"run.yaml:1 {key}"
    assert what in found.what
    assert fix in found.fix


@pytest.mark.contract
@pytest.mark.parametrize("delimiter", ['"\\t"', "';'", "' '", "'|'", "auto", "ä"])
def test_any_one_character_may_stand_between_cells(write, delimiter):
    cfg = load_config(write(f"data: {{train_path: b.csv, delimiter: {delimiter}}}" + MODEL))
    assert cfg.data.delimiter == {'"\\t"': "\t"}.get(delimiter, delimiter.strip("'"))
    write(dump_resolved(cfg), "again.yaml")
    assert load_config("again.yaml").model_dump() == cfg.model_dump()


@pytest.mark.contract
@pytest.mark.parametrize("name", ["utf-8", "UTF_16", "latin-1", "cp1252", "Shift-JIS", "utf-8-sig", "gb18030"])
def test_an_encoding_may_be_spelt_in_any_way_python_knows(write, name):
    assert load_config(write(f"data: {{train_path: b, encoding: {name}}}" + MODEL)).data.encoding == name


@pytest.mark.contract
def test_every_encoding_of_python_that_turns_bytes_into_text_is_taken(write):
    # The names come from Python's own table; those of the last line are no encodings of files.
    names = {codecs.lookup(name).name for name in set(aliases.values()) - {"mbcs", "oem"}}
    for name in sorted(names):
        is_text = codecs.lookup(name)._is_text_encoding and name not in ("undefined", "idna", "punycode")
        if is_text:
            b"".decode(name)
            load_config(write(f"data: {{train_path: b, encoding: {name}}}" + MODEL))


@pytest.mark.contract
def test_columns_given_on_the_command_line_and_in_a_file_are_joined(write):
    name = write("data: {train_path: b, columns: {question: frage}}" + MODEL)
    cfg = load_config(name, ["data.columns.answer=die antwort"])
    assert cfg.data.columns == {"question": "frage", "answer": "die antwort"}
    assert cfg.origins["data.columns.question"] == "run.yaml:1"
    assert cfg.origins["data.columns.answer"] == "command line"


def test_the_fields_and_layouts_of_the_config_are_those_that_rows_are_read_by():
    of_pairs = {names[0] for names in (CHOSEN, REJECTED, VERDICT, *SCORES, MARGIN)}
    assert set(get_args(Column)) == of_pairs.union(*(shape.fields for shape in SHAPES.values()))
    assert list(get_args(Layout)) == list(SHAPES)


def test_settings_of_tables_without_a_table_are_noted(write):
    text = "data:\n  train_path: {}\n  delimiter: ';'\n{}model:\n  name: a\n"
    lines = notes(load_config(write(text.format("b.jsonl.gz", ""))))
    assert [line.partition(" has no effect")[0] for line in lines] == ["run.yaml:3 data.delimiter"]
    assert notes(load_config(write(text.format("b.csv", "  test_path: c.jsonl\n")))) == []
    assert notes(load_config(write(text.format("folder", "  val_path: c.jsonl\n")))) == []


@pytest.mark.contract
@pytest.mark.parametrize(
    "text",
    [
        "data: {train_path: rows, processed_dir: rows/processed}",
        "data: {train_path: rows, processed_dir: ./rows}",
        "data: {train_path: a.jsonl, val_path: held/, processed_dir: held/out/x}",
        "data: {train_path: .}",
        "data: {train_path: rows}\noutput_dir: rows/outputs",
    ],
)
def test_folders_that_runs_write_to_may_not_be_read_as_rows(write, text):
    with pytest.raises(ConfigErrors, match="lies in the folder of rows"):
        load_config(write(f"model: {{name: x}}\n{text}\n"))


@pytest.mark.contract
def test_folders_beside_the_rows_or_hidden_below_them_may_be_written_to(write):
    for text in (
        "data: {train_path: rows/a.jsonl, processed_dir: rows/processed}\noutput_dir: rows/outputs",
        "data: {train_path: rows, processed_dir: rows/.cache/processed}",
        "data: {train_path: rows, processed_dir: rows2/processed}",
    ):
        load_config(write(f"model: {{name: x}}\n{text}\n"))
