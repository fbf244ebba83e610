"""Runs of task score in this process: resumed ones, one without a value, and ones that are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_process import Finished, StopAfter, assert_same_course, new_run, stop_and_resume, train, train_in
from safetensors.torch import load_file
from score_run import score_options
from small_run import Inputs

from sftplay.errors import RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.report.compare import compare_runs
from sftplay.tasks.score.evaluation import EvaluateEpisodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("whole"), inputs, **score_options())


CRITIC = score_options(
    score__advantage="critic", score__value="separate", score__value_flow="stop",
    score__critic={"learning_rate": 1e-2, "width": 8},
)  # fmt: skip


def test_a_run_with_a_critic_and_a_separate_value_resumes_bit_for_bit(inputs: Inputs, tmp_path: Path):
    with patch(
        "sftplay.tasks.score.update.MIN_EXPLAINED_VARIANCE", -1e9
    ):  # so that the critic is a baseline from the first step
        whole = train(tmp_path / "whole", inputs, **CRITIC)
        resumed = stop_and_resume(tmp_path / "halves", inputs, 2, **CRITIC)
    assert_same_course(resumed, whole)
    assert {"critic_q1", "critic_q2", "critic_v1", "critic_v2", "grad_norm/critic"} <= set(whole.metrics[0])
    assert [line["critic_is_baseline_t2"] for line in whole.metrics] == [1, 1, 1, 1]
    assert whole.metrics[0]["critic_q1"] != whole.metrics[-1]["critic_q1"]
    mine, its = (run.trainer.role_models.find_checkpoint_weights() for run in (whole, resumed))
    assert {"critic", "slow_critic", "value_head"} <= {name.split(".")[0] for name in mine}
    for name, tensor in mine.items():
        assert torch.equal(tensor, its[name]), name
    assert not torch.equal(mine["slow_critic.encoder.embedding.weight"], mine["critic.encoder.embedding.weight"])


def test_a_run_resumed_between_the_stages_is_the_same_bit_for_bit(whole: Finished, inputs: Inputs, tmp_path: Path):
    assert_same_course(stop_and_resume(tmp_path, inputs, 2, **score_options()), whole)


def test_two_runs_are_compared_by_their_last_held_out_episodes(whole: Finished, tmp_path: Path):
    other = RunFolder(shutil.copytree(whole.folder.path, tmp_path / "other"))
    other.write_json("data_report.json", other.read_json("data_report.json") | {"fingerprint": "another"})
    comparison = compare_runs(whole.folder, other)
    assert comparison["same_held_out"] is True
    last = json.loads((other.eval / "step-4.json").read_text())
    (row,) = (row for row in comparison["training"] if row["name"] == "last held-out acc_t2")
    assert (row["a"], row["b"]) == (last["acc_t2"], last["acc_t2"])
    lines = (other.eval / "step-4.jsonl").read_text()
    (other.eval / "step-4.jsonl").write_text(lines.replace("1+0=", "1+1="))
    assert compare_runs(whole.folder, other)["same_held_out"] is False


def test_a_run_resumes_within_a_rollout_batch_bit_for_bit(inputs: Inputs, tmp_path: Path):
    changes = {"score__steps_per_generation": 2, "score__num_iterations": 2, "score__stage1_steps": 4}
    sampled = {"score__eval_temperature": 1.0, "score__eval_samples": 3}
    options = score_options(**changes, **sampled, train__max_steps=7, train__learning_rate=3e-3, score__samples=3)
    whole = train(tmp_path / "whole", inputs, **options)
    cfg, folder = new_run(tmp_path / "parts", inputs, **options)
    for step in (2, 5):
        train_in(cfg, folder, StopAfter(step))
        cfg = cfg.with_values({"train.resume": "auto"}, "test")
    resumed = train_in(cfg, folder)
    assert_same_course(resumed, whole)
    ratios = [line["ratio_t2"] for line in whole.metrics]
    assert [ratio == pytest.approx(1.0, abs=1e-9) for ratio in ratios] == [n % 4 == 0 for n in range(7)]
    assert [line["stage"] for line in whole.metrics] == [1, 1, 1, 1, 2, 2, 2]
    assert "ratio_t1" not in whole.metrics[0]  # in stage 1 turn 1 has no policy gradient
    written = {path.stem: len(path.read_text().splitlines()) for path in (whole.folder.path / "samples").iterdir()}
    assert written == {"step-1": 3, "step-5": 3}
    last = json.loads((whole.folder.eval / "step-7.json").read_text())
    assert last["n"] == 5 * 3
    assert last["acc_t2_greedy"] in [n / 5 for n in range(6)]
    for measured in ("acc_t1", "return_t2"):  # figures of the rollout batch
        assert len({line[measured] for line in whole.metrics[:4]}) == 1


def test_every_line_says_what_turn_2_did_and_the_gain_is_what_was_fixed_less_what_was_broken(whole: Finished):
    assert [line["stage"] for line in whole.metrics] == [1, 1, 2, 2]
    evaluations = [json.loads(path.read_text()) for path in sorted(whole.folder.eval.glob("step-*.json"))]
    assert len(evaluations) == 3  # start, end of stage 1, end
    for line in [*whole.metrics, *evaluations]:
        assert line["delta"] == pytest.approx(line["i2c"] - line["c2i"])
    wanted = {"kl_t1", "kl_t2", "kl_guide", "edit_ratio", "hint_leak", "explained_variance", "grad_norm/guide"}
    assert wanted <= set(whole.metrics[0])
    assert {"acc_t2_empty", "acc_t2_static", "diagnosis"} <= set(evaluations[0])
    assert whole.metrics[-1]["eval_acc_t1"] == evaluations[-1]["acc_t1"]
    shares = [line["padding_share"] for line in whole.metrics]
    assert all(0 <= share < 0.5 for share in shares)
    assert max(shares) > 0
    assert whole.trainer.role_models.critic is None  # it is not used


def test_a_model_that_cannot_use_a_right_hint_is_refused_with_the_gain(inputs: Inputs, tmp_path: Path):
    with pytest.raises(RunError, match=r"cannot use a hint: .* a gain of 0\.\d+|a gain of -0\.\d+"):
        train(tmp_path, inputs, **score_options(score__min_hint_gain=0.9))


def test_a_guide_that_does_not_learn_writes_hints_and_has_a_value(inputs: Inputs, tmp_path: Path):
    run = train(tmp_path, inputs, **score_options(score__guidance="model", train__max_steps=2))
    assert set(run.trainer.role_models.trainable) == {"solver", "value"}
    assert not any("kl_guide" in line for line in run.metrics)


@pytest.fixture
def peak() -> Iterator[None]:
    """Second answers are right most often after step 2."""
    real = EvaluateEpisodes.measure

    def measure(self: EvaluateEpisodes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        figures, lines = real(self)
        step = self.trainer.state.global_step
        return {**figures, "acc_t2": {2: 0.9}.get(step, 0.1 * step)}, lines

    with patch.object(EvaluateEpisodes, "measure", measure):
        yield


@pytest.mark.usefixtures("peak")
def test_the_best_evaluations_weights_are_kept_and_are_the_result_of_both_adapters(inputs: Inputs, tmp_path: Path):
    options = score_options(train__best_metric="acc_t2", train__save_total_limit=1, train__eval_steps=1)
    run = train(tmp_path / "whole", inputs, **options)
    kept = sorted(path.name for path in run.folder.checkpoints.iterdir())
    assert kept == ["checkpoint-2", "checkpoint-4"]  # the best and the newest
    best = load_file(run.folder.checkpoints / "checkpoint-2" / "score.safetensors")
    last = load_file(run.folder.checkpoints / "checkpoint-4" / "score.safetensors")
    result = run.weights
    for adapter, name in (("adapter", "default"), ("guide", "guide")):
        pairs = {n.partition("/")[2]: tensor for n, tensor in result.items() if n.startswith(f"{adapter}/")}
        assert pairs
        for path, tensor in pairs.items():
            kept_as = path.replace(".weight", f".{name}.weight")
            assert torch.equal(tensor, best[kept_as]), path
        assert any(
            not torch.equal(tensor, last[p.replace(".weight", f".{name}.weight")]) for p, tensor in pairs.items()
        )
    assert_same_course(stop_and_resume(tmp_path / "halves", inputs, 3, **options), run)
