"""A folder to write configs in, and the problems a config has."""

from __future__ import annotations

import textwrap

import pytest

from sftplay.config.load import load_config
from sftplay.errors import ConfigErrors

MINIMAL = """\
model: {name: builtin:tiny}
data: {train_path: rows.jsonl}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file in a folder of its own, which is the current one; the name is what a user would type."""
    monkeypatch.chdir(tmp_path)

    def write_file(text, name="run.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    return write_file


@pytest.fixture
def load(write):
    """The config that a text gives, with model.name and data.train_path added at its end."""

    def load_text(text, *overrides):
        return load_config(write(textwrap.dedent(text) + MINIMAL), overrides)

    return load_text


@pytest.fixture
def refusals(load):
    """All problems of a text, as `where: what` with fix and nearest."""

    def refused(text, *overrides):
        with pytest.raises(ConfigErrors) as caught:
            load(text, *overrides)
        return caught.value.problems

    return refused
