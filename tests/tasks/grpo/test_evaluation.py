"""Held-out prompts answered while a run learns from rewards: greedy, shared by ranks, and nothing else is changed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_process import Finished, Inputs, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.launch.run_folder import RunFolder
from sftplay.report.compare import compare_runs
from sftplay.tasks.grpo.watch import EvaluatePrompts

STEPS, MEASURED = 3, (0, 2, 3)
GRPO: dict[str, Any] = {
    "task_mode": "grpo",
    "tuning__mode": "full",
    "rewards": [
        {"name": "right", "use": "exact_match"},
        {"name": "e", "use": "regex", "options": {"pattern": "e", "whole": False}},
    ],
    "grpo__num_generations": 4,
    "grpo__max_completion_length": 8,
    "train__max_steps": STEPS,
    "train__effective_batch_size": 8,
    "train__eval_steps": 2,
    "eval__limit": 5,
}


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("evaluated"), inputs, **GRPO)


def answers(run: Finished, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder.eval / f"step-{step}.jsonl").read_text().splitlines()]


def samples(run: Finished) -> list[str]:
    """The completions of all steps as they were written, without how long a reward took."""
    texts = [path.read_text() for path in sorted((run.folder.path / "samples").glob("*.jsonl"))]
    return [re.sub(r'"seconds": [\d.]+', "", text) for text in texts]


def test_it_answers_at_the_start_every_so_many_steps_and_at_the_end(run: Finished):
    found = {path.name: json.loads(path.read_text()) for path in run.folder.eval.glob("step-*.json")}
    assert sorted(found) == [f"step-{step}.json" for step in MEASURED]
    (own,) = (each for each in run.trainer.callback_handler.callbacks if isinstance(each, EvaluatePrompts))
    # A time limit asks which steps it measures.
    assert [step for step in range(STEPS + 1) if own.measures_at(step, run.trainer.state)] == list(MEASURED)
    for step in MEASURED:
        figures, lines = found[f"step-{step}.json"], answers(run, step)
        assert (figures["step"], figures["n"], len(lines)) == (step, 5, 5)
        assert figures["reward/e"] == sum("e" in line["prediction"] for line in lines) / 5
        assert figures["pass"] == sum(line["prediction"] == line["reference"] for line in lines) / 5
        assert figures["reward"] == pytest.approx(sum(line["reward"] for line in lines) / 5)
    for step in MEASURED[1:]:
        assert run.metrics[step - 1]["held_out_reward"] == found[f"step-{step}.json"]["reward"]


def test_the_first_answers_are_those_of_plain_greedy_generation(run: Finished, inputs: Inputs):
    model, tokenizer = (each.from_pretrained(inputs.model) for each in (AutoModelForCausalLM, AutoTokenizer))
    chats = [json.loads(line)["messages"] for line in inputs.held_out.read_text().splitlines()]
    for line in answers(run, 0):
        prompt = chats[line["row"]][:1]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, do_sample=False, max_new_tokens=8)[0, ids["input_ids"].shape[1] :]
        assert line["prediction"] == tokenizer.decode(out, skip_special_tokens=True)
        assert line["prompt"] == prompt[0]["content"]


def test_two_runs_are_compared_by_the_answers_and_rewards_that_they_have(run: Finished, inputs: Inputs, tmp_path: Path):
    right, e = GRPO["rewards"]
    changes = {"rewards": [right, e | {"weight": 0.5}], "grpo__max_prompt_length": 60, "eval__after": True}
    other = train(tmp_path, inputs, **GRPO | changes)
    comparison = compare_runs(run.folder, other.folder)
    assert [row["a"] == row["b"] for row in comparison["data"] if row["key"] == "fingerprint"] == [False]
    assert comparison["same_held_out"] is True
    assert [text for text in comparison["warnings"] if "compare" in text] == [
        "the weights of the rewards differ: reward, their sum, does not compare"
    ]
    rows = {row["name"]: (row["a"], row["b"]) for row in (*comparison["figures"], *comparison["training"])}
    folders = [each.folder.eval for each in (run, other)]
    last, after = (json.loads((folders[1] / f"{name}.json").read_text()) for name in ("step-3", "after"))
    assert after.items() <= last.items()  # of the same weights, also how long the answers are
    for side, names in (("before", ("step-0", "step-0")), ("after", ("step-3", "after"))):
        found = [json.loads((folder / f"{name}.json").read_text()) for folder, name in zip(folders, names, strict=True)]
        for key in ("reward", "reward/right", "reward/e", "pass"):
            assert rows[f"{side} {key}"] == tuple(figures[key] for figures in found), (side, key)
    for key in ("reward", "reward/right", "reward/e"):  # of fewer than 3 steps: all of them
        means = tuple(pytest.approx(fmean(line[key] for line in each.metrics)) for each in (run, other))
        assert (rows[f"first sampled {key}"], rows[f"last sampled {key}"]) == (means, means)
    assert not [name for name in rows if name.endswith(("loss", " step", " seconds"))]


def test_runs_that_were_asked_other_prompts_or_none_are_not_said_to_compare(run: Finished, tmp_path: Path):
    folder = RunFolder(shutil.copytree(run.folder.path, tmp_path / "other"))
    folder.write_json("data_report.json", folder.read_json("data_report.json") | {"fingerprint": "another"})
    (folder.eval / "step-3.jsonl").write_text("\n".join(map(json.dumps, answers(run, 3)[1:])) + "\n")
    assert compare_runs(run.folder, folder)["same_held_out"] is False
    shutil.rmtree(folder.eval)
    comparison = compare_runs(run.folder, folder)
    assert comparison["same_held_out"] is None
    assert "one of the two has no held-out figures: there is nothing to compare them with" in comparison["warnings"]


@pytest.mark.slow
def test_what_is_learned_does_not_depend_on_how_often_it_is_measured(run: Finished, inputs: Inputs, tmp_path: Path):
    with patch.object(EvaluatePrompts, "evaluate", lambda self, step: None):
        other = train(tmp_path, inputs, **GRPO)
    assert not list(other.folder.eval.glob("*"))
    assert samples(other) == samples(run)
    for key in ("loss", "reward", "entropy", "generated_tokens", "completion_tokens", "tokens_seen"):
        assert [line[key] for line in other.metrics] == [line[key] for line in run.metrics], key
    for name, weight in run.trainer.model.state_dict().items():
        assert torch.equal(weight, other.trainer.model.state_dict()[name]), name
