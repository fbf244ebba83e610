"""The generated manual and JSON schema are fresh and complete."""

import json
from pathlib import Path

import pytest
import yaml

from sftplay.cli import main
from sftplay.config.keys import all_keys
from sftplay.config.manual import manual_text, schema_text

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("verb", "page"), [("manual", "docs/config.md"), ("schema", "configs/schema.json")])
def test_the_page_is_what_the_command_writes_today(verb, page, capsys):
    assert main([verb]) == 0
    assert capsys.readouterr().out == (ROOT / page).read_text(encoding="utf-8"), f"run `make {verb} > {page}`"


def test_every_key_has_a_row_with_what_it_takes_its_default_and_its_effect():
    rows = [line.split(" | ") for line in manual_text().splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(all_keys())
    assert all(len(row) >= 4 and all(cell.strip(" |") for cell in row) for row in rows)


def test_the_json_schema_fits_the_shipped_files_as_an_editor_reads_them():
    schema = json.loads(schema_text())
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        unknown = set(values) - set(schema["properties"])
        assert not unknown, path.name
