"""A reward model that was trained here pays in a run of task grpo, and a finished one is measured and reported."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch
from grpo_run import grpo_options
from in_process import train
from pairs import RUN, pair_inputs
from peft import AutoPeftModelForSequenceClassification
from processes import HANG_S
from transformers import AutoTokenizer

from sftplay.errors import ConfigError
from sftplay.report.report import write_report
from sftplay.runs.finished_run import open_run
from sftplay.tasks.reward_model.finished import figures_table, measure_finished


@pytest.fixture(scope="module")
def run(tiny_llama, tmp_path_factory):
    """A reward model that wants answers to end in "salt"."""
    home = tmp_path_factory.mktemp("run")
    inputs = pair_inputs(tiny_llama, home / "pairs")
    changes = {"train__max_steps": 40, "tuning__lora__dropout": 0.0, "train__eval_steps": 20, "eval__after": True}
    return train(home, inputs, **RUN, **changes)


def test_it_has_learned_which_answer_is_chosen(run):
    figures = run.folder.read_json("eval/after.json")
    assert figures["accuracy"] == 1.0
    assert figures["margin"] > 1.0


@pytest.mark.slow
def test_its_scores_are_the_rewards_of_a_grpo_run_and_those_of_plain_transformers(run, prompts, tmp_path):
    reward = {"name": "helpful", "use": "model", "path": str(run.folder.path), "deadline": HANG_S}
    options = grpo_options(prompts, rewards=[reward], train__max_steps=3, logging__steps=1)
    trained = train(tmp_path, prompts, **options)
    lines = [
        json.loads(line)
        for path in sorted((trained.folder.path / "samples").glob("step-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(lines) == 24
    model = AutoPeftModelForSequenceClassification.from_pretrained(run.folder.result, num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder.result)
    expected = []
    with torch.no_grad():
        for line in lines:
            chat = [
                {"role": "user", "content": line["prompt"]},
                {"role": "assistant", "content": line["completion"]},
            ]
            batch = tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt")
            expected.append(float(model(**batch).logits[0, 0]))
    assert [line["rewards"]["helpful"] for line in lines] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1
    assert any(line["advantage"] for line in lines)
    assert trained.metrics[0]["reward"] == pytest.approx(sum(expected[:8]) / 8, abs=1e-5)
    assert trained.metrics[0]["abstained"] == 0.0


def test_make_eval_measures_a_finished_one_as_the_run_did(run, tmp_path):
    found = measure_finished(run.cfg, run.folder, split="val", limit=5, path=tmp_path / "after.json")
    kept = run.folder.read_json("eval/after.json")
    assert found["n"] == 12
    for key in ("loss", "accuracy", "margin", "calibration_error"):
        assert found[key] == pytest.approx(kept[key], abs=1e-5)
    assert len((tmp_path / "after.jsonl").read_text().splitlines()) == 5
    assert "100" in figures_table(found)


def test_its_report_shows_the_calibration_and_pairs_with_their_scores(run):
    page = write_report(run.folder).read_text(encoding="utf-8")
    assert "Better as often as predicted" in page
    assert "Pairs right" in page
    line = json.loads((run.folder.eval / "after.jsonl").read_text().splitlines()[0])
    assert f"{line['scores'][0]:.3f}" in page
    assert line["rejected"] in page


@pytest.mark.parametrize("verb", ["infer", "serve", "parity", "export", "merge", "lm-eval", "eval-code"])
def test_verbs_that_need_a_model_which_writes_refuse_it_and_say_what_it_is_for(run, verb):
    args = Namespace(config=str(run.folder.resolved), overrides=[], run=str(run.folder.path), verb=verb)
    with pytest.raises(ConfigError, match="scores answers") as caught:
        open_run(args)
    assert "use: model, path" in caught.value.fix
    cfg, _ = open_run(args, takes_scores=True)
    assert cfg.task_mode == "reward_model"


@pytest.mark.parametrize("task", ["sft", "reward_model"])
def test_no_run_starts_from_a_model_that_gives_scores(run, task, write_config):
    from sftplay.config.load import load_config
    from sftplay.model.start_point import resolve_names

    for name in (run.folder.path, run.folder.result):
        key = "model__adapter" if name == run.folder.result else "model__name"
        cfg = load_config(write_config(task_mode=task, model__merge_adapter=True, **{key: str(name)}))
        with pytest.raises(ConfigError, match="gives scores"):
            resolve_names(cfg)
