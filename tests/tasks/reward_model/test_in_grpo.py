"""A reward model that was trained here pays in a run of task grpo, and a finished one is measured and reported."""

from __future__ import annotations

import json
import logging
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_run import grpo_options
from in_process import train
from pairs import RUN, pair_inputs
from peft import AutoPeftModelForSequenceClassification
from processes import HANG_S
from small_run import Inputs, write_small_run
from transformers import AutoTokenizer
from untimed_metrics import lines_of

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


def read_samples(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "samples").glob("step-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_its_scores_are_the_rewards_of_a_grpo_run_and_those_of_plain_transformers(
    run, prompts, tmp_path, sftplay, processes
):
    reward = {"name": "helpful", "use": "model", "path": str(run.folder.path), "deadline": HANG_S}
    options = grpo_options(prompts, rewards=[reward], train__max_steps=3, logging__steps=1)
    config = write_small_run(tmp_path, prompts, **options)
    done = sftplay("train", "--config", config, "run_name=paid", "--nproc", processes)
    assert done.returncode == 0, done.stderr
    lines, metrics = (read(tmp_path / "outputs" / "paid") for read in (read_samples, lines_of))
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
    assert metrics[0]["reward"] == pytest.approx(sum(expected[:8]) / 8, abs=1e-5)
    assert metrics[0]["abstained"] == 0.0


def write_endings(path: Path, tokenizer: Any, count: int, *, seed: int) -> Path:
    """Write pairs of random tokens of which the one is better whose last letter is a vowel."""
    rng = random.Random(seed)
    texts = [text for text in map(tokenizer.decode, range(len(tokenizer))) if text.strip().isalpha()]
    ends = {is_vowel: [text for text in texts if (text[-1] in "aeiou") == is_vowel] for is_vowel in (True, False)}

    def write_text(*, vowel: bool) -> str:
        return "".join(rng.choices(texts, k=rng.randint(1, 8))) + rng.choice(ends[vowel])

    pairs = [
        {"prompt": str(n), "chosen": write_text(vowel=True), "rejected": write_text(vowel=False)} for n in range(count)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.mark.slow
def test_what_it_pays_rises_in_a_grpo_run_and_not_where_other_rewards_are_learned(tiny_llama, prompts, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    files = (
        write_endings(tmp_path / f"{seed}.jsonl", tokenizer, count, seed=seed) for seed, count in ((1, 300), (2, 9))
    )
    learning = {"train__max_steps": 60, "train__effective_batch_size": 16, "tuning__lora__dropout": 0.0}
    scorer = train(tmp_path / "scorer", Inputs(tiny_llama, *files), **RUN, **learning)
    reward = {"name": "helpful", "use": "model", "path": str(scorer.folder.path), "deadline": HANG_S}
    options = grpo_options(
        prompts, rewards=[reward], train__max_steps=14, train__effective_batch_size=32, grpo__num_generations=8,
        train__learning_rate=0.03, train__lr_scheduler="constant", logging__steps=1, eval__before=False,
    )  # fmt: skip
    paid = [line["reward"] for line in train(tmp_path / "paid", prompts, **options).metrics]
    placebo = {"grpo__placebo_reward": "random"}
    unpaid = [line["true_reward"] for line in train(tmp_path / "unpaid", prompts, **options, **placebo).metrics]
    assert paid[0] == unpaid[0] < 0
    assert min(paid[-3:]) > 2
    assert max(unpaid[-3:]) < 0


def test_make_eval_measures_a_finished_one_as_the_run_did(run, tmp_path, caplog, request):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    request.addfinalizer(lambda: logger.removeHandler(caplog.handler))
    found = measure_finished(run.cfg, run.folder, split="val", limit=5, path=tmp_path / "after.json")
    kept = run.folder.read_json("eval/after.json")
    assert found["n"] == 12
    for key in ("loss", "accuracy", "margin", "calibration_error"):
        assert found[key] == pytest.approx(kept[key], abs=1e-5)
    assert len((tmp_path / "after.jsonl").read_text().splitlines()) == 5
    assert "100" in figures_table(found)
    assert "MISSING" not in caplog.text  # the base of an adapter has no head of one score


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
