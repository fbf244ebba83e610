"""What a run of two-turn episodes needs, what contradicts itself, and what has no form for two models."""

from pathlib import Path

import pytest

from sftplay.config.load import load_config, notes

ROOT = Path(__file__).parents[2]
SPLIT = "tuning: {mode: full}\nscore: {placement: sharded}\n"
SCORE = "task_mode: score\nrewards: [{name: answer, use: exact_match}]\n"


def test_a_run_without_rewards_has_nothing_to_learn_from(refusals):
    (problem,) = refusals("task_mode: score\n")
    assert problem.what == "score learns from a reward, and there is none"


@pytest.mark.parametrize("other", ["{name: other, use: format}", "{name: answer, use: exact_match, weight: -1}"])
def test_answers_are_right_or_wrong_by_rewards_that_judge_the_content(other, refusals, load):
    first = "{name: digit, use: regex, options: {pattern: 1}, judges: %s}"
    text = f"task_mode: score\nrewards: [{first % 'form'}, {other}]\n"
    (problem,) = refusals(text)
    assert problem.where.endswith(" rewards")
    assert "so no answer is right or wrong" in problem.what
    assert load(text.replace("judges: form", "judges: content, weight: 2"))


def test_a_value_network_of_its_own_lets_no_gradient_reach_the_guide(refusals):
    (problem,) = refusals(f"{SCORE}score: {{value: separate}}\n")
    assert "no gradient of V reaches the guide" in problem.what
    assert "score.value_flow: stop" in problem.fix


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("train: {effective_batch_size: 30}", "train.effective_batch_size", "28 or 32"),
        (
            "train: {effective_batch_size: 30}\nscore: {steps_per_generation: 3}",
            "train.effective_batch_size",
            "28 or 32",
        ),
        ("score: {stage1_steps: 10, steps_per_generation: 2, num_iterations: 2}", "score.stage1_steps", "8 or 12"),
        ("score: {max_new_tokens: 2000}", "score.max_new_tokens", "model.max_seq_len"),
        ("score: {stage1_steps: 0, stage2_steps: 0}", "score.stage1_steps", "give one some"),
        ('score: {prompts: {solve: "no place"}}', "score.prompts.solve", "write {problem} once"),
        ('score: {prompts: {guide: "{problem} {atempt} {attempt}"}}', "score.prompts.guide", "{attempt}"),
        ('score: {prompts: {revise: "{problem}{attempt}{attempt}{hint}"}}', "score.prompts.revise", "{attempt} once"),
        ("score: {eval_samples: 4}", "score.eval_samples", "score.eval_temperature: 0.7"),
        ("score: {advantage: value, guidance: static}", "score.advantage", "rloo"),
        ("score: {advantage: value, value_coef: 0}", "score.advantage", "score.value_coef: 0.01"),
        ("score: {placement: sharded}", "score.placement", "tuning.mode: full"),
        (f"{SPLIT}train: {{optim: adamw_8bit}}", "train.optim", "adamw_torch_fused"),
        (f"{SPLIT}train: {{precision: fp16}}", "train.precision", "fp32"),
        (f"{SPLIT}cluster: {{strategy: ddp}}", "score.placement", "fsdp"),
        ("tuning: {mode: full}\nscore: {placement: sharded, devices: {ref: cpu}}", "score.devices.ref", "auto"),
        ("tuning: {mode: full}\nscore: {placement: sharded, value_flow: straight_through}", "score.value_flow", "stop"),
        ("score: {placement: roles}\ncluster: {strategy: fsdp}", "cluster.strategy", "sharded"),
        ("cluster: {strategy: zero3}", "cluster.strategy", "fsdp"),
        ('score: {placement: shared, devices: {guide: "cuda:1"}}', "score.devices.guide", "roles"),
        ("score: {devices: {ref: cpu}}", "score.devices.ref", "auto"),
        ("tuning: {lora: {modules_to_save: [lm_head]}}", "tuning.lora.modules_to_save", "remove"),
        ("cluster: {strategy: fsdp}", "cluster.strategy", "tuning.mode: full"),
        ("train: {packing: true}", "train.packing", "false"),
        ("train: {best_metric: loss}", "train.best_metric", "acc_t2"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(refusals, text, key, fix):
    (problem,) = refusals(f"{SCORE}{text}\n")
    assert problem.where.endswith(key)
    assert fix in problem.fix


def test_the_best_second_answers_are_sought_where_there_are_some(load, refusals):
    assert load(f"{SCORE}train: {{best_metric: acc_t2, save_steps: 30, eval_steps: 20}}\n").train.best_metric
    (problem,) = refusals("train: {best_metric: acc_t2}\n")
    assert "task_mode sft plays no episodes" in problem.what
    assert problem.fix == "write train.best_metric: loss"


def test_the_bound_of_a_ratio_has_no_effect_where_a_drawing_feeds_one_step(load):
    (note,) = notes(load(f"{SCORE}score: {{epsilon: 0.3}}\n"))
    assert "score.epsilon has no effect" in note
    assert notes(load(f"{SCORE}score: {{epsilon: 0.3, num_iterations: 2}}\n")) == []


@pytest.mark.parametrize(("task", "config"), [("score", "run_score_gsm8k.yaml"), ("hrm", "run_hrm_sudoku.yaml")])
def test_what_only_an_exchange_by_ddp_uses_is_named_as_without_effect(monkeypatch, task, config):
    monkeypatch.chdir(ROOT)
    said = [
        "cluster.comm.hook=fp16",
        "cluster.comm.static_graph=true",
        "train.oom_recovery=false",
        "train.grad_accum=1",
    ]
    found = notes(load_config(f"configs/{config}", [*said, "train.batch_size=4"]))
    reason = f"task_mode {task} sends whole gradients itself, once a step"
    for name in ("hook", "static_graph"):
        assert f"command line cluster.comm.{name} has no effect: {reason}" in found


def test_keys_without_effect_are_named(load):
    assert len(notes(load("score: {alpha: 3.0}\n"))) == 1
    (note,) = notes(load(f"{SCORE}score: {{guidance: static, value_coef: 0.5}}\n"))
    assert "score.value_coef has no effect" in note
