"""Runs whose completions have several turns: what is learned, resumed, measured and reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import Finished, assert_same_course, stop_and_resume, train
from small_run import Inputs, write_small_run
from untimed_metrics import lines_of

from sftplay.data.load_prompts import load_prompts
from sftplay.evaluate.rewarded import evaluate_prompts
from sftplay.report.report import write_report
from sftplay.tasks.grpo.shared_groups import loss_mask

pytestmark = pytest.mark.slow

GAME = """
class Game:
    def reset(self, row):
        self.turns = 0
        return f"Level {row['level'] % 3}."

    def step(self, text):
        self.turns += 1
        return f"Turn {self.turns} done.", min(len(set(text)), 20) / 40, self.turns == 3

def double(number: int) -> int:
    return 2 * number

def make():
    return Game()
"""


def options(inputs: Inputs, **changes: Any) -> dict[str, Any]:
    """A window of two steps, groups of four, and the game."""
    file = inputs.train.parent / "game.py"
    file.write_text(GAME)
    return grpo_options(
        inputs, grpo__environment=f"{file}:make", rewards=[{"name": "game", "use": "environment"}],
        grpo__max_completion_length=80, grpo__steps_per_generation=2, grpo__logprob_check_steps=1,
        train__max_steps=3, train__eval_steps=3, train__save_steps=1, model__max_seq_len=256, eval__limit=3, **changes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("turns")


@pytest.fixture(scope="module")
def prompts(home: Path, builtin_tiny: Path) -> Inputs:
    return grpo_inputs(builtin_tiny, home / "prompts")


@pytest.fixture(scope="module")
def trained(home: Path, prompts: Inputs) -> Finished:
    """The run, with the micro-batches that it learned from in `trainer.kept`."""
    kept: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        from sftplay.tasks.grpo.sampling import SamplingMixin

        real = SamplingMixin.compute_loss

        def keep(self: Any, model: Any, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
            kept.append(dict(inputs))
            return real(self, model, inputs, *given, **named)

        patch.setattr(SamplingMixin, "compute_loss", keep)
        done = train(home / "whole", prompts, **options(prompts))
    done.trainer.kept = kept
    return done


def samples(folder: Path) -> list[dict[str, Any]]:
    return [line for path in sorted(folder.glob("samples/*.jsonl")) for line in read_lines(path)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_and_metrics_tell_of_the_turns(trained: Finished):
    lines = samples(trained.folder.path)
    counts = [sum(turn["role"] == "assistant" for turn in line["turns"]) for line in lines]
    assert max(counts) > 1
    for line in lines:
        roles = [turn["role"] for turn in line["turns"]]
        assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"] * (len(roles) % 2)
        paid = [min(len(set(turn["content"])), 20) / 40 for turn in line["turns"] if turn["role"] == "assistant"]
        assert line["rewards"]["game"] == pytest.approx(sum(paid))
    first = trained.metrics[0]
    assert first["turns"] == pytest.approx(sum(counts[:16]) / 16)
    assert first["ended/done_share"] + first["ended/tokens_share"] + first["ended/end_token_share"] == pytest.approx(1)
    # Steps 1 and 3 begin a rollout batch: there the weights that learn are those that sampled.
    assert max(line["sampler_gap"] for line in trained.metrics[::2]) <= 1e-5


def test_nothing_is_learned_from_what_the_environment_wrote(trained: Finished):
    trainer = trained.trainer
    batch = max(trainer.kept, key=lambda inputs: int((inputs["tool_mask"] == 0).sum()))
    written = loss_mask(batch)
    foreign = (batch["completion_mask"] - written).bool()
    assert int(foreign.sum()) > 0
    decoded = trainer.processing_class.decode(batch["completion_ids"][foreign.any(1)][0][foreign[foreign.any(1)][0]])
    assert decoded.startswith("\n<|im_start|>user\nTurn 1 done.<|im_end|>\n<|im_start|>assistant\n")
    batch = {key: value for key, value in batch.items() if key in KEPT} | {"old_per_token_logps": None}
    gradients = []
    for mask in (None, written, batch["completion_mask"]):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch) if mask is None else plain_loss(trainer, batch, mask)
        loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()]))
    kit, masked, unmasked = gradients
    size = masked.abs().max()
    assert (kit - masked).abs().max() <= 1e-4 * size
    assert (kit - unmasked).abs().max() > 1e-2 * size


KEPT = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "row",
    "num_items_in_batch",
)  # fmt: skip


def plain_loss(trainer: Any, batch: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
    """The loss of dapo on policy, by plain torch: minus the advantage of each token, over the tokens of the batch."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = trainer.model(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, :-1]
    width = batch["completion_ids"].size(1)
    logps = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, -width:]
    ratio = (logps - logps.detach()).exp()
    items = batch["num_items_in_batch"] / trainer.accelerator.num_processes
    steps = trainer.current_gradient_accumulation_steps
    return -(ratio * batch["advantages"][:, None] * mask).sum() / items * trainer.args.steps_per_generation / steps


def test_a_run_stopped_in_a_rollout_batch_goes_on_to_the_same_weights(trained: Finished, home: Path, prompts: Inputs):
    resumed = stop_and_resume(home / "resumed", prompts, 1, **options(prompts))
    assert_same_course(resumed, trained)
    assert samples(resumed.folder.path) == samples(trained.folder.path)


def test_the_final_evaluation_plays_the_same_turns_as_the_one_in_training(trained: Finished, tmp_path: Path):
    model = trained.trainer.model
    prompts = load_prompts(trained.cfg, trained.trainer.processing_class, tools="")
    found = evaluate_prompts(model, prompts, cfg=trained.cfg, path=tmp_path / "after.json")
    during = json.loads((trained.folder.eval / "step-3.json").read_text())
    assert during["turns"] > 1
    for key in ("n", "reward", "turns", "environment_tokens", "ended/done_share"):
        assert found[key] == pytest.approx(during[key]), key
    answers = [read_lines(path) for path in (tmp_path / "after.jsonl", trained.folder.eval / "step-3.jsonl")]
    assert [line["turns"] for line in answers[0]] == [line["turns"] for line in answers[1]]


def test_the_report_has_a_table_of_turns(trained: Finished):
    page = write_report(trained.folder).read_text()
    assert "Turns of the model" in page
    assert "Samples of the last 10 steps, by the model&#x27;s turns in a completion" in page.replace("&#39;", "&#x27;")


@pytest.mark.contract
def test_two_processes_play_the_turns_of_their_own_rows(
    prompts: Inputs, tmp_path: Path, sftplay: Callable[..., CompletedProcess[str]]
):
    config = write_small_run(tmp_path, prompts, **options(prompts, train__batch_size=4, grpo__samples=None))
    done = sftplay("train", "--config", config, "--nproc", 2, "train.max_steps=2")
    assert done.returncode == 0, done.stderr
    lines = samples(tmp_path / "outputs" / "run")
    assert len(lines) == 16
    assert sum(len(line["turns"]) > 1 for line in lines) > 0
    for at in range(0, 16, 4):
        group = lines[at : at + 4]
        assert len({line["prompt_id"] for line in group}) == 1
        assert sum(line["advantage"] for line in group) == pytest.approx(0.0, abs=1e-4)
    assert lines_of(tmp_path / "outputs" / "run")[0]["turns"] > 1
