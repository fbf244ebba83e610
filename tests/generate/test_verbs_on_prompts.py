"""The verbs that show rows and measure results, on a run that learns from rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grpo_run import grpo_inputs, grpo_options
from in_process import Finished, Inputs, train

from sftplay import cli

pytestmark = pytest.mark.contract

Verb = Callable[..., Any]


@pytest.fixture(scope="module")
def run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("prompts")
    inputs: Inputs = grpo_inputs(tiny_llama, home / "data")
    more = {"eval__after": True, "eval__limit": None, "data__test_path": str(inputs.held_out), "train__max_steps": 2}
    return train(home, inputs, **grpo_options(inputs, train__learning_rate=0.05, **more))


@pytest.fixture
def run_verb(run: Finished, verbs_environment: None, capsys: pytest.CaptureFixture[str]) -> Verb:
    """Return a function that runs a verb on the run and returns its JSON."""

    def call(verb: str, *words: str) -> Any:
        capsys.readouterr()
        assert cli.main([verb, "--config", str(run.folder.path.parents[1] / "run.yaml"), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def read(run: Finished, name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((run.folder.eval / f"{name}.json").read_text())
    return figures


def test_what_is_measured_in_the_run_after_it_and_by_eval_is_the_same(run: Finished, run_verb: Verb):
    figures = run_verb("eval")
    last, after = read(run, "step-2"), read(run, "after")
    same = ("n", "reward", "reward/variety")
    assert [figures["after"][key] for key in same] == [after[key] for key in same] == [last[key] for key in same]
    assert [figures["before"][key] for key in same] == [read(run, "step-0")[key] for key in same]
    assert figures["before"]["reward"] != figures["after"]["reward"]
    assert run_verb("eval-test")["after"]["n"] == 6


def test_prompts_that_were_trained_on_are_no_test_rows(
    run: Finished, tmp_path: Path, verbs_environment: None, capsys: pytest.CaptureFixture[str]
):
    prompts = [json.loads(line) for line in Path(run.cfg.data.train_path or "").read_text().splitlines()]
    path = tmp_path / "test.jsonl"
    # The question alone counts: another answer makes no new one.
    rows = [{"prompt": "a new question"}, {**prompts[3], "answer": "other"}, prompts[5]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval-test", "--config", str(run.folder.path.parents[1] / "run.yaml"), f"data.test_path={path}"]
    assert cli.main(words) == 4
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: 2 of its rows were trained on")
    assert f"train.jsonl:4 is held out as well, at {path}:2" in said


def test_the_report_of_process_is_that_of_the_run(run: Finished, run_verb: Verb):
    assert run_verb("process") == run.folder.read_json("data_report.json")


@pytest.mark.parametrize("verb", ["inspect", "render"])
def test_prompts_are_shown_as_they_are_asked(verb: str, run: Finished, run_verb: Verb):
    rows = run_verb(verb, "--n", "3")["rows"]
    assert [row["row"] for row in rows] == [0, 4, 8]
    for row in rows:
        assert row["text"].startswith("<|im_start|>user\n")
        assert row["text"].endswith(f" {row['row']}<|im_end|>\n<|im_start|>assistant\n")
        assert row["source"].endswith(f"train.jsonl:{row['row'] + 1}")
        assert set(row.get("labels", [-100])) == {-100}


def test_one_who_reads_a_prompt_is_told_that_nothing_of_it_is_learned(
    run: Finished, verbs_environment: None, capsys: pytest.CaptureFixture[str]
):
    config = str(run.folder.path.parents[1] / "run.yaml")
    assert cli.main(["render", "--config", config, "--n", "1"]) == 0
    assert "completions are sampled after it, and none of its tokens are in the loss" in capsys.readouterr().out
    assert cli.main(["process", "--config", config]) == 0
    assert "12 prompts of" in capsys.readouterr().out
