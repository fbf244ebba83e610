"""What is said about a fading signal, once each, and when a run without one ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sftplay.config.run import RunConfig
from sftplay.errors import RunError
from sftplay.tasks.grpo.watch import MEAN_WINDOW, SignalHealth

GOOD = {"reward": 0.5, "reward/a": 0.4, "zero_variance_share": 0.2, "clipped_ratio": 0.0, "completion_tokens": 100.0}
GOOD_LOGS = {"entropy": 1.0, "kl": 0.01, "sampler_kl": 0.0, "sampler_gap": 1e-6, "clip_ratio/region_mean": 0.05}


def health(**grpo: Any) -> SignalHealth:
    values = {"model": {"name": "builtin:tiny"}, "task_mode": "grpo", "rewards": [{"name": "a", "use": "exact_match"}]}
    watcher = SignalHealth(RunConfig.model_validate({**values, "grpo": grpo}))
    watcher.trainer = SimpleNamespace(drawing={})
    return watcher


def step(watcher: SignalHealth, number: int, *, logs: dict[str, Any] | None = None, **drawing: Any) -> None:
    state: Any = SimpleNamespace(global_step=number)
    watcher.trainer.rollout_figures = GOOD | drawing
    watcher.on_step_end(None, state, None)
    watcher.on_log(None, state, None, logs=GOOD_LOGS | (logs or {}))


def run(watcher: SignalHealth, *, logs: dict[str, Any] | None = None, **drawing: Any) -> None:
    """A good beginning, then these figures for long enough."""
    for number in range(MEAN_WINDOW):
        step(watcher, number)
    for number in range(3 * MEAN_WINDOW):
        step(watcher, MEAN_WINDOW + number, logs=logs, **drawing)


@pytest.mark.parametrize(
    ("drawing", "logs", "what", "fix"),
    [
        ({"zero_variance_share": 0.9}, {}, "of the groups have equal rewards", "grpo.dynamic_sampling_rounds=2"),
        ({"clipped_ratio": 0.5}, {}, "of the completions are cut off", "mask_truncated_completions"),
        ({"completion_tokens": 300.0}, {}, "longer: ", "overlong"),
        ({"completion_tokens": 20.0}, {}, "shorter: ", "samples/"),
        ({}, {"entropy": 0.01}, "nearly sure of each token: entropy ", "epsilon_high"),
        ({}, {"entropy": 6.0}, "unsure of its tokens", "learning_rate"),
        ({}, {"kl": 4.0}, "far from the one that the run started with", "grpo.beta"),
        ({}, {"clip_ratio/region_mean": 0.6}, "the ratio of ", "num_iterations"),
        ({}, {"cispo_clip_ratio": 0.6, "clip_ratio/region_mean": None}, "the ratio of ", "num_iterations"),
        ({}, {"sampler_kl": 0.5}, "far from those that sampled", "steps_per_generation"),
    ],
)
def test_a_cause_is_said_once_with_what_to_change(drawing, logs, what, fix, capsys):
    run(health(), logs=logs, **drawing)
    said = capsys.readouterr().out
    assert said.count("warning:") == 1
    assert what in said
    assert fix in said


def test_a_healthy_run_is_told_nothing_and_neither_is_a_control(capsys):
    run(health())
    run(health(placebo_reward="random"), zero_variance_share=0.95, logs={"kl": 5.0})
    assert "warning" not in capsys.readouterr().out


FORM_ALONE = {"reward": 0.1, "reward/a": 0.0, "reward/shape": 1.0}


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        ({"reward": 0.0}, {"reward": 0.0}, "every reward since the first step was 0"),
        (FORM_ALONE, FORM_ALONE, "every reward for content (a) since the first step was 0"),
        ({"reward": 0.3}, {"reward": 0.0}, ""),
    ],
    ids=["0 from the first step", "form alone", "fallen to 0"],
)
def test_a_run_that_was_never_paid_ends_with_the_missing_warm_start(first, later, said):
    watcher = health(stop_without_signal=4)
    step(watcher, 0, **first)
    for number in range(1, 4):
        step(watcher, number, zero_variance_share=1.0, **later)
    with pytest.raises(RunError) as raised:
        step(watcher, 4, zero_variance_share=1.0, **later)
    assert said in str(raised.value)
    assert ("since the first step was 0" in str(raised.value)) == bool(said)
    assert ("sft_then_grpo.sh" in str(raised.value)) == bool(said)


def test_a_run_that_is_paid_for_form_alone_is_told_so_once_with_the_same_remedy(capsys):
    watcher = health()
    for number in range(MEAN_WINDOW - 1):
        step(watcher, number, **FORM_ALONE)
    assert "warning" not in capsys.readouterr().out
    for number in range(2 * MEAN_WINDOW):
        step(watcher, MEAN_WINDOW + number, **FORM_ALONE)
    said = capsys.readouterr().out
    assert said.count("warning:") == 1
    assert "no answer got a reward for content (a): only form is learned" in said
    assert "sft_then_grpo.sh" in said


@pytest.mark.parametrize("found", [0.001, -1.0])
def test_one_answer_that_was_paid_for_content_is_enough_and_is_known_after_a_resume(found, capsys):
    before, after = health(), health()
    step(before, 0, **(FORM_ALONE | {"reward/a": found}))
    after.on_train_begin(None, SimpleNamespace(stateful_callbacks={"SignalHealth": before.state()}), None)
    for number in range(2 * MEAN_WINDOW):
        step(after, number, **FORM_ALONE)
    assert "warning" not in capsys.readouterr().out


def test_a_resumed_run_counts_on_and_does_not_repeat_itself(capsys):
    before = health(stop_without_signal=6)
    for number in range(2 * MEAN_WINDOW):
        step(before, number, clipped_ratio=0.9)
    for number in range(4):
        step(before, number, zero_variance_share=1.0, reward=0.0)
    saved = {"SignalHealth": before.state()}
    after = health(stop_without_signal=6)
    after.on_train_begin(None, SimpleNamespace(stateful_callbacks=saved), None)
    step(after, 5, zero_variance_share=1.0, reward=0.0)
    with pytest.raises(RunError, match="last 6 steps"):
        step(after, 6, zero_variance_share=1.0, reward=0.0)
    run(after, clipped_ratio=0.9)
    assert capsys.readouterr().out.count("are cut off") == 1
