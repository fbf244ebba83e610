"""Whole runs of task grpo: on policy the sampler is the model, its base stays, and silent groups are drawn again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grpo_run import grpo_inputs, grpo_options
from in_process import Finished, Inputs, StopAfter, new_run, train, train_in
from small_run import write_small_run

from sftplay.config.load import load_config
from sftplay.errors import RunError
from sftplay.tasks.grpo.sampling import SamplingMixin

SILENT = """def pay(completions, level, **_):
    return [0.0 if n % 3 else len(set(text)) / 40 for text, n in zip(completions, level)]
"""
"""Pays the same for all completions of two prompts of three."""

NOTHING = "def pay(completions, **_):\n    return [0.0] * len(completions)\n"


def paid_by(text: str, inputs: Inputs, **changes: Any) -> dict[str, Any]:
    path = inputs.train.parent / f"pay{abs(hash(text))}.py"
    path.write_text(text)
    rewards = [{"name": "pay", "use": f"{path}:pay", "judges": "form"}]
    return grpo_options(inputs, rewards=rewards, **changes)


def column(run: Finished, name: str) -> list[Any]:
    return [line[name] for line in run.metrics]


@pytest.mark.slow
def test_over_40_on_policy_steps_the_base_is_unchanged_and_the_sampler_is_the_model(prompts: Inputs, tmp_path: Path):
    short = {
        "train__max_steps": 40,
        "train__save_steps": 20,
        "grpo__max_completion_length": 6,
        "grpo__logprob_check_steps": 1,
    }
    run = train(tmp_path, prompts, **grpo_options(prompts, tuning__mode="lora", **short))
    assert column(run, "sampler_kl") == [0.0] * 40
    assert 0 < max(column(run, "sampler_gap")) < 1e-5  # rounding: one token at a time with a cache, or all at once
    base = run.folder.read_json("manifest.json")["base_weights"]
    assert base["unchanged_at_steps"] == [0, 20, 40]


def test_a_run_whose_rewards_are_all_0_stops_and_says_that_it_lacks_a_warm_start(prompts: Inputs, tmp_path: Path):
    options = paid_by(NOTHING, prompts, grpo__stop_without_signal=2)
    with pytest.raises(RunError, match=r"last 2 steps.* every reward since the first step was 0") as raised:
        train(tmp_path, prompts, **options)
    assert raised.value.exit_code == 5


@pytest.mark.slow
def test_silent_groups_are_drawn_again_and_every_token_is_counted(
    prompts: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[int] = []
    real = SamplingMixin._generate_rows

    def counted(self: Any, prompt_ids: Any, *given: Any, **named: Any) -> Any:
        ids, logps = real(self, prompt_ids, *given, **named)
        if self._inputs is not None:  # no evaluation
            drawn.append(sum(map(len, ids)))
        return ids, logps

    monkeypatch.setattr(SamplingMixin, "_generate_rows", counted)
    again = train(tmp_path, prompts, **paid_by(SILENT, prompts, train__max_steps=8, grpo__dynamic_sampling_rounds=3))
    last = again.metrics[-1]
    assert last["generated_tokens"] == sum(drawn)
    assert last["redrawn_groups"] > 0 < last["passed_turns"]
    assert sum(column(again, "zero_variance_share")) < 0.6 * sum(column(again, "first_zero_variance_share"))
    # what is kept are whole groups of the prompts that were drawn last
    for path in (again.folder.path / "samples").glob("step-*.jsonl"):
        rows = [json.loads(line)["prompt_id"] for line in path.read_text().splitlines()]
        assert all(len(set(rows[n : n + 4])) == 1 for n in (0, 4))


@pytest.mark.slow
def test_nothing_is_drawn_in_the_turns_of_silent_prompts_and_nothing_is_learned_from_them(
    prompts: Inputs, tmp_path: Path
):
    options = paid_by(SILENT, prompts, train__max_steps=12, grpo__beta=0.1)
    plain = train(tmp_path / "plain", prompts, **options)
    fewer = train(tmp_path / "fewer", prompts, **options, grpo__skip_zero_variance=True)
    last = fewer.metrics[-1]
    assert last["passed_turns"] > 0
    assert last["generated_tokens"] < plain.metrics[-1]["generated_tokens"]
    counts, tokens = [], 0.0
    for step, line in enumerate(fewer.metrics, 1):
        path = fewer.folder.path / "samples" / f"step-{step}.jsonl"
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        counts.append(len(lines))
        paid = [each["rewards"]["pay"] for each in lines]
        assert line["reward"] == pytest.approx(sum(paid) / len(paid))
        assert line["abstained"] == 0.0
        assert all(each["advantage"] == 0 for each in lines if each["prompt_id"] % 3)
        tokens += line["completion_tokens"] * len(lines)
        assert line["generated_tokens"] == pytest.approx(tokens)
        assert line["label_tokens"] == pytest.approx(line["completion_tokens"] * len(lines))
    assert set(counts) == {4, 8}  # one group or both: one is always drawn
    assert sum(8 - count for count in counts) == 4 * last["passed_turns"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"grpo__dynamic_sampling_rounds": 2}, {"grpo__skip_zero_variance": True}])
def test_a_resumed_run_draws_the_same_prompts_again(options: dict[str, Any], prompts: Inputs, tmp_path: Path):
    options = paid_by(SILENT, prompts, train__max_steps=9, **options)
    whole = train(tmp_path / "whole", prompts, **options)
    cfg, folder = new_run(tmp_path / "stopped", prompts, **options)
    train_in(cfg, folder, StopAfter(5))
    resumed = train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)
    for name in ("loss", "reward", "generated_tokens", "redrawn_groups", "passed_turns", "entropy"):
        assert column(resumed, name) == column(whole, name)
    assert whole.metrics[-1]["passed_turns"] > whole.metrics[4]["passed_turns"]


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"train__max_steps": 4, "grpo__dynamic_sampling_rounds": 2}, "redrawn_groups"),
        ({"train__max_steps": 8, "grpo__skip_zero_variance": True}, "passed_turns"),
    ],
)
def test_two_processes_that_share_a_group_draw_it_again_or_skip_it_together(
    options: dict[str, Any], counted: str, tiny_llama: Path, tmp_path: Path, sftplay: Any
):
    inputs = grpo_inputs(tiny_llama, tmp_path / "prompts")
    rows = [json.loads(line) for line in inputs.train.read_text().splitlines()]
    for row in rows:
        del row["answer"]  # without one the reward, which makes no sense, is not tried before the run
    inputs.train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"train__effective_batch_size": 12, "train__batch_size": 3, **options}
    config = write_small_run(tmp_path, inputs, **paid_by(SILENT, inputs, **sizes))
    done = sftplay("train", "--config", config, "--nproc", "2", "run_name=two")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = Path(load_config(str(config)).output_dir) / "two"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1][counted] > 0
    passed = 0
    for step, line in enumerate(metrics, 1):
        samples = [json.loads(each) for each in (folder / "samples" / f"step-{step}.jsonl").read_text().splitlines()]
        rows = [each["prompt_id"] for each in samples]
        skipped = line["passed_turns"] - passed if counted == "passed_turns" else 0
        assert [len(set(rows[n : n + 4])) for n in range(0, len(rows), 4)] == [1] * (3 - skipped)
        assert all(each["advantage"] == 0 for each in samples if each["prompt_id"] % 3)
        assert line["label_tokens"] == pytest.approx(line["completion_tokens"] * len(rows))
        passed = line["passed_turns"]


def written_down(self: Any, prompt_ids: list[list[int]], *given: Any, **named: Any) -> tuple[list[list[int]], None]:
    """Completions that follow from the prompt and the place in its group, each of another length."""
    rows = [(sum(ids), n % 4) for n, ids in enumerate(prompt_ids)]
    return [[5 + (seed + 13 * n + k * (n + 1)) % 200 for k in range(2 + (seed + 3 * n) % 9)] for seed, n in rows], None


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dapo", "dr_grpo"])
def test_a_step_has_the_same_gradient_whether_silent_groups_are_drawn_or_not(
    loss: str, prompts: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SamplingMixin, "_generate_rows", written_down)
    options = paid_by(SILENT, prompts, train__max_steps=12, train__learning_rate=0.0, grpo__loss_type=loss)
    plain = train(tmp_path / "plain", prompts, **options)
    fewer = train(tmp_path / "fewer", prompts, **options, grpo__skip_zero_variance=True)
    assert fewer.metrics[-1]["passed_turns"] > 2
    norms = column(plain, "grad_norm")
    assert max(norms) > 0
    assert column(fewer, "grad_norm") == pytest.approx(norms, rel=1e-4, abs=1e-9)
