"""The generated manual and JSON schema are fresh and complete."""

import json
from pathlib import Path

import pytest
import yaml

from sftplay.cli import main
from sftplay.config.keys import all_keys, all_sections
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


def test_the_manual_spells_nothing_as_yaml_does():
    assert "None" not in manual_text()
    assert "None" not in schema_text()


def test_the_json_schema_knows_includes_and_the_accepted_spellings_and_refuses_unknown_keys():
    schema = json.loads(schema_text())
    assert "include" in schema["properties"]
    assert {"bf16", "fp16"} <= set(schema["$defs"]["TrainConfig"]["properties"])
    assert all(node["additionalProperties"] is False for node in [schema, *schema["$defs"].values()])


def test_the_json_schema_has_every_key_of_every_section():
    schema = json.loads(schema_text())
    for dotted, section in all_sections().items():
        node = schema["$defs"][section.__name__] if dotted else schema
        assert set(section.model_fields) <= set(node["properties"])
        assert all(node["properties"][name].get("description") for name in section.model_fields)


def test_the_json_schema_fits_the_shipped_files_as_an_editor_reads_them():
    schema = json.loads(schema_text())
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        unknown = set(values) - set(schema["properties"])
        assert not unknown, path.name
