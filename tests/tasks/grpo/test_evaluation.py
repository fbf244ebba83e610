"""Held-out prompts answered while a run learns from rewards: greedy, shared by ranks, and nothing else is changed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_process import Finished, Inputs, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.questions import Question
from sftplay.heartbeat import Heartbeat
from sftplay.reward.calls import RewardValues
from sftplay.reward.reward_set import BatchRewards
from sftplay.tasks.grpo.watch import EvaluatePrompts

STEPS = 2
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
    "train__eval_steps": 1,
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


def test_it_answers_at_the_start_and_at_each_evaluated_step(run: Finished):
    found = {path.name: json.loads(path.read_text()) for path in run.folder.eval.glob("step-*.json")}
    assert sorted(found) == [f"step-{step}.json" for step in range(STEPS + 1)]
    for step in range(STEPS + 1):
        figures, lines = found[f"step-{step}.json"], answers(run, step)
        assert (figures["step"], figures["n"], len(lines)) == (step, 5, 5)
        assert figures["reward/e"] == sum("e" in line["prediction"] for line in lines) / 5
        assert figures["pass"] == sum(line["prediction"] == line["reference"] for line in lines) / 5
        assert figures["reward"] == pytest.approx(sum(line["reward"] for line in lines) / 5)
    for line in run.metrics:
        assert line["held_out_reward"] == found[f"step-{line['step']}.json"]["reward"]


def test_the_first_answers_are_those_of_plain_greedy_generation(run: Finished, inputs: Inputs):
    model, tokenizer = (each.from_pretrained(inputs.model) for each in (AutoModelForCausalLM, AutoTokenizer))
    chats = [json.loads(line)["messages"] for line in inputs.held_out.read_text().splitlines()]
    for line in answers(run, 0):
        prompt = chats[line["row"]][:1]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, do_sample=False, max_new_tokens=8)[0, ids["input_ids"].shape[1] :]
        assert line["prediction"] == tokenizer.decode(out, skip_special_tokens=True)
        assert line["prompt"] == prompt[0]["content"]


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


class Scorer:
    """Stands for the rewards: each answer is worth its length."""

    columns = ("answer",)
    rewards = SimpleNamespace(
        weights=(1.0,),
        executor="",
        score=lambda texts, columns: BatchRewards(
            {"length": RewardValues([float(len(text)) for text in texts])}, [None] * len(texts)
        ),
    )


class Trainer:
    """Stands for TRL's: answers a prompt of one token with that many letters."""

    use_vllm = False
    state = SimpleNamespace(max_steps=9)
    accelerator = SimpleNamespace(autocast=lambda: torch.no_grad())
    processing_class = SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: ["a" * len(each) for each in ids])

    def __init__(self) -> None:
        self.heartbeat, self.model_wrapped = Heartbeat(), torch.nn.Identity()
        self.generation_config = sampling_config()
        self.asked: list[list[int]] = []

    def _generate_single_turn(self, prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        assert not self.model_wrapped.training
        assert self.generation_config.do_sample is False
        self.asked = prompts
        return [[7] * prompt[0] for prompt in prompts], None


def sampling_config() -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.3)


def callback(folder: Path, n: int) -> EvaluatePrompts:
    questions = [Question(10 * number, [number + 1], f"question {number}", {"answer": "a"}) for number in range(n)]
    cfg = RunConfig.model_validate(
        {"model": {"name": "m"}, "data": {"train_path": "t"}, "rewards": [{"name": "length", "use": "a.py:f"}]}
    )
    scorer: Any = Scorer()
    found = EvaluatePrompts(cfg, questions, scorer=scorer, folder=folder, every_steps=3, prompt_version="v")
    found.trainer = Trainer()
    return found


@pytest.mark.parametrize(("n", "world"), [(7, 1), (7, 2), (7, 3), (2, 4), (8, 4)])
def test_ranks_share_the_questions_and_each_has_as_many_as_the_others(tmp_path: Path, n: int, world: int):
    shares = []
    for rank in range(world):
        with patch.object(log, "rank", lambda rank=rank: rank), patch.object(log, "world_size", lambda: world):
            shares.append(callback(tmp_path, n)._score_share())
    assert {len(share) for share in shares} == {-(-n // world)}
    for rank, share in enumerate(shares):
        assert {each.asked.row // 10 for each in share} <= {*range(rank, n, world), *range(n)}
        assert all(each.rewards == {"length": float(each.asked.row // 10 + 1)} for each in share)
    assert {each.asked.row // 10 for share in shares for each in share} == set(range(n))


def test_a_measurement_that_is_there_is_not_made_again(tmp_path: Path):
    found = callback(tmp_path, 3)
    (tmp_path / "step-6.json").write_text("{}")
    found.evaluate(6)
    assert (tmp_path / "step-6.json").read_text() == "{}"
    assert not found.trainer.asked
    found.evaluate(9)
    assert json.loads((tmp_path / "step-9.json").read_text())["reward"] == 2.0
    assert found.trainer.model_wrapped.training
    assert found.trainer.generation_config.do_sample is True


def test_it_measures_at_the_start_of_a_new_run_every_so_many_steps_and_at_the_end(tmp_path: Path):
    found = callback(tmp_path, 2)
    control = SimpleNamespace(should_log=False)
    for start in (0, 4):
        measured: list[int] = []
        with patch.object(EvaluatePrompts, "evaluate", lambda self, step, measured=measured: measured.append(step)):
            found.on_train_begin(None, SimpleNamespace(global_step=start), control)
            for step in range(start + 1, 9):
                found.on_step_end(None, SimpleNamespace(global_step=step, max_steps=8), control)
        assert measured == ([0, 3, 6, 8] if start == 0 else [6, 8])
