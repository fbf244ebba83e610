"""What a run would stumble over is said before anything heavy is imported, all of it at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.cli import main
from sftplay.errors import DataError
from sftplay.model import hub

ROW = '{"prompt": "a", "completion": "b"}\n'
TYPO = "Qwen/Qwen2.5-0.5B-Instrukt"


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code of a verb and its problems by the key at their place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "rows.jsonl").write_text(ROW)

    def run(verb: str, *overrides: str, text: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
        text = text or "model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n"
        (tmp_path / "run.yaml").write_text(text)
        code = main([verb, "--config", "run.yaml", "--json", *overrides])
        out = capsys.readouterr().out
        error = json.loads(out[out.index("{") :]).get("error")
        found = error.get("problems", [error]) if error else []
        return code, {one["where"].rsplit(" ", 1)[-1]: one for one in found}

    return run


@pytest.mark.contract
@pytest.mark.parametrize("override", ["trian.max_steps=5", "trian.a.b=5", "model.nmae.x=1"])
def test_a_typo_in_the_section_of_an_override_is_answered_with_the_nearest_name(said, override):
    code, found = said("validate", override)
    assert code == 2
    (problem,) = found.values()
    assert problem["where"].startswith("command line ")
    assert problem["fix"] in ("did you mean 'train'?", "did you mean 'name'?")


@pytest.mark.contract
@pytest.mark.parametrize("verb", ["validate", "plan", "process", "inspect", "train"])
def test_a_missing_data_file_is_refused_by_every_verb_with_its_key_and_the_nearest_file(said, verb):
    code, found = said(verb, "data.train_path=row.jsonl")
    assert code == 4
    assert found["data.train_path"]["where"] == "command line data.train_path"
    assert "did you mean 'rows.jsonl'?" in found["data.train_path"]["fix"]


@pytest.mark.contract
def test_config_files_and_model_name_are_told_at_once_and_the_config_decides_the_code(said):
    code, found = said("validate", "train.epochs=0", "data.val_path=v.csv", "data.template=t.jinja", "model.name=./no")
    assert code == 2
    assert list(found) == ["train.epochs", "model.name", "data.val_path", "data.template"]


@pytest.mark.contract
def test_rows_of_another_layout_are_refused_by_validate_too(said, tmp_path):
    (tmp_path / "odd.jsonl").write_text('{"frage": "a"}\n')
    code, found = said("validate", "data.val_path=odd.jsonl")
    assert (code, list(found)) == (4, ["data.val_path"])
    assert "odd.jsonl:1 no known layout has the keys" in found["data.val_path"]["what"]


@pytest.mark.contract
@pytest.mark.parametrize("verb", ["validate", "plan", "process", "inspect", "render", "train"])
def test_a_misspelt_model_is_answered_with_the_nearest_name_and_never_with_its_download(said, verb):
    code, found = said(verb, f"model.name={TYPO}")
    assert code == 2
    assert found["model.name"]["nearest"][0] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert found["model.name"]["fix"].startswith("did you mean Qwen/Qwen2.5-0.5B-Instruct ")
    assert "download" not in found["model.name"]["fix"]


@pytest.mark.contract
def test_a_misspelt_builtin_model_is_answered_with_the_nearest_one(said):
    code, found = said("validate", "model.name=builtin:tyni")
    assert code == 2
    assert found["model.name"]["fix"].startswith("did you mean builtin:tiny")


def test_a_model_that_is_like_a_known_one_is_taken_where_the_hub_has_it(said, monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "check_reachable", lambda name, *_, **__: asked.append(name) or True)
    assert said("validate", f"model.name={TYPO}") == (0, {})
    assert asked == [TYPO]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("value", "what"),
    [(".nan", ".nan is no number to train with"), ("[0.9]", "[0.9] is not a number"), ("x", "x is not a number")],
)
def test_a_value_that_no_field_of_the_trainer_takes_is_refused(said, value, what):
    code, found = said("validate", f"train.extra.adam_beta1={value}")
    assert (code, found["train.extra.adam_beta1"]["what"]) == (2, what)


@pytest.mark.contract
@pytest.mark.parametrize("value", ["0.9", "1"])
def test_a_number_is_taken_by_a_field_that_takes_numbers(said, value):
    assert said("validate", f"train.extra.adam_beta1={value}")[0] == 0


@pytest.mark.contract
@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("cluster.deepspeed", 'cluster: {strategy: zero2, deepspeed: "a\\0b"}'),
        ("output_dir", 'output_dir: "o\\0"'),
        ("data.columns.output", 'data: {train_path: rows.jsonl, columns: {output: "a\\0"}}'),
        ("run_name", r'run_name: "\ud800"'),
    ],
)
def test_a_character_that_no_path_can_hold_is_refused_by_its_key(said, key, text):
    rest = "" if text.startswith("data") else "\ndata: {train_path: rows.jsonl}"
    code, found = said("validate", text=f"model: {{name: builtin:tiny}}\n{text}{rest}\n")
    assert code == 2
    assert key in found


@pytest.mark.contract
@pytest.mark.parametrize("key", ["model.adapter", "model.name", "data.train_path", "data.template", "train.resume"])
def test_a_path_that_no_file_can_have_is_refused_by_its_key(said, key):
    code, found = said("validate", f"{key}={'x' * 300}")
    assert code == 2
    assert "is longer than any name or path" in found[key]["what"]


@pytest.mark.contract
def test_a_message_repeats_neither_a_huge_value_nor_a_password(said):
    for override in ("data.template=" + "x" * 100_000, "train.epochs=" + "9" * 100_000, "y" * 100_000 + "=1"):
        code, found = said("validate", override)
        assert code in (2, 4)
        assert len(json.dumps(found)) < 8_000
    code, found = said("validate", "model.name=https://me:s3cret@hub.example/org/model")
    assert (code, "s3cret" in json.dumps(found)) == (2, False)


@pytest.mark.contract
def test_a_thousand_unknown_keys_are_told_by_the_first_hundred(said):
    text = "model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n" + "".join(f"k{n}: 1\n" for n in range(1000))
    code, found = said("validate", text=text)
    assert (code, len(found)) == (2, 100)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("key", "rows", "reason"),
    [
        ("datasets.0.path", {"messages": []}, "has no key 'text'; its keys are 'messages'"),
        ("datasets.1.path", {"text": "a"}, "is a plain text, and the source has type: chat"),
    ],
)
def test_rows_of_another_type_than_their_source_are_refused_at_its_entry(said, tmp_path, key, rows, reason):
    given = {"datasets.0.path": {"text": "a"}, "datasets.1.path": {"prompt": "a", "completion": "b"}, key: rows}
    for name, row in given.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    text = """\
task_mode: cpt_mixed
model: {name: builtin:tiny}
datasets:
  - {name: a, path: datasets.0.path.jsonl, type: cpt}
  - {name: b, path: datasets.1.path.jsonl, type: chat}
"""
    code, problems = said("validate", text=text)
    assert code == DataError.exit_code
    assert list(problems) == [key]
    assert reason in problems[key]["what"]


@pytest.mark.contract
def test_dapt_train_refuses_a_config_that_does_not_learn_documents(said):
    text = "model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n"
    code, problems = said("train", "--documents", "--dry-run", text=text)
    assert code == 2
    assert problems["task_mode"]["what"] == "sft does not learn documents"
    assert "make train" in problems["task_mode"]["fix"]
