"""What a run that learns from rewards needs, and what has no meaning in it."""

import pytest

from sftplay.config.keys import differences, values_that_decide_weights
from sftplay.config.load import notes

GRPO = "task_mode: grpo\nrewards: [{name: answer, use: exact_match}]\n"


def test_a_run_without_rewards_has_nothing_to_learn_from(refusals):
    (problem,) = refusals("task_mode: grpo\n")
    assert problem.what == "grpo learns from rewards, and there is none"
    (problem,) = refusals("task_mode: grpo\nrewards: [{name: answer, use: exact_match, weight: 0}]\n")
    assert problem.what == "every weight is 0, so nothing would be learned"


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("grpo: {loss_type: luspo}", "grpo.loss_type", "write grpo.importance_sampling_level: sequence"),
        (
            "grpo: {loss_type: vespo, importance_sampling_level: sequence}",
            "grpo.importance_sampling_level",
            "write grpo.importance_sampling_level: token",
        ),
        ("grpo: {delta: 1.1}", "grpo.delta", "remove it, or write 4"),
        ("grpo: {delta: 4, loss_type: cispo}", "grpo.delta", "remove it, or write 4"),
        ("grpo: {max_completion_length: 2048}", "grpo.max_completion_length", "write model.max_seq_len: 4096"),
        ("grpo: {max_prompt_length: 2000}", "grpo.max_prompt_length", "write model.max_seq_len: 2512"),
        (
            "grpo: {skip_zero_variance: true, loss_type: bnpo}",
            "grpo.skip_zero_variance",
            "leave grpo.loss_type or grpo.skip_zero_variance out",
        ),
        (
            "grpo: {skip_zero_variance: true, dynamic_sampling_rounds: 2}",
            "grpo.skip_zero_variance",
            "leave grpo.dynamic_sampling_rounds or grpo.skip_zero_variance out",
        ),
        (
            "grpo: {skip_zero_variance: true, placebo_reward: random}",
            "grpo.skip_zero_variance",
            "leave grpo.placebo_reward or grpo.skip_zero_variance out",
        ),
        (
            "grpo: {skip_zero_variance: true, generation: vllm_server}",
            "grpo.skip_zero_variance",
            "leave grpo.generation or grpo.skip_zero_variance out",
        ),
        ("grpo: {generation: vllm_server}\ntuning: {mode: qlora}", "grpo.generation", "write tuning.mode: lora"),
        ("grpo: {generation: vllm_colocate}\ntuning: {mode: qlora}", "grpo.generation", "write tuning.mode: lora"),
        ("grpo: {tools: [calculatr]}", "grpo.tools", "did you mean 'calculator'?"),
        ("grpo: {tools: ['a.py:f', 'a.py:f']}", "grpo.tools", "name each tool once"),
        ("grpo: {environment: twenty}", "grpo.environment", "there are twenty_questions"),
        *(
            (
                f"grpo: {{generation: vllm_server, vllm: {{sync: adapter}}}}\n{other}",
                "grpo.vllm.sync",
                "write grpo.vllm.sync: full",
            )
            for other in (
                "tuning: {mode: full}",
                "tuning: {lora: {dora: true}}",
                "tuning: {lora: {modules_to_save: [norm]}}",
            )
        ),
        ("grpo: {loss_type: cispo}", "grpo.loss_type", "write grpo.epsilon_high: 5"),  # TRL would cut off at 0.2
        ("grpo: {overlong_buffer: 512}", "grpo.overlong_buffer", "write a quarter of it"),
        (
            "grpo: {entropy_coef: 0.1, entropy_mean: step, top_entropy_quantile: 0.2}",
            "grpo.entropy_mean",
            "write grpo.entropy_mean: micro_batch, or leave grpo.top_entropy_quantile out",
        ),
        (
            "grpo: {sampler_correction: token_mask, sampler_ratio_max: 1}",
            "grpo.sampler_ratio_max",
            "write 0.5 and 3",
        ),
        (
            "grpo: {sampler_correction: sequence_mask, loss_type: vespo}",
            "grpo.sampler_correction",
            "write grpo.sampler_correction: token_truncate",
        ),
        (
            "grpo: {sampler_correction: none, extra: {vllm_importance_sampling_clip_max: 2}}",
            "grpo.extra.vllm_importance_sampling_clip_max",
            "keep one of the two",
        ),
        (
            "grpo: {score_centering: 64, generation: continuous}",
            "grpo.generation",
            "write grpo.generation: transformers",
        ),
        (
            "grpo: {sampler_correction: token_mask}\ntuning: {lora: {dropout: 0.1}}",
            "grpo.sampler_correction",
            "write tuning.lora.dropout: 0",
        ),
        (
            "grpo: {score_centering: 64, sampler_correction: sequence_mask}",
            "grpo.sampler_correction",
            "write token_truncate or token_mask",
        ),
        ("grpo: {score_centering: 64, top_p: 0.9}", "grpo.top_p", "write grpo.top_p: 1"),
        (
            "grpo: {score_centering: 64, generation: vllm_server}",
            "grpo.generation",
            "write grpo.generation: transformers",
        ),
        (
            "grpo: {score_centering: 64, top_entropy_quantile: 0.2}",
            "grpo.top_entropy_quantile",
            "write grpo.top_entropy_quantile: 1",
        ),
        (
            "grpo: {score_centering: 64, off_policy_mask_threshold: 0.5}",
            "grpo.off_policy_mask_threshold",
            "write grpo.off_policy_mask_threshold: null",
        ),
        ("grpo: {score_centering: 64, loss_type: sapo}", "grpo.loss_type", "write grpo.loss_type: dapo"),
        ("train: {packing: true}", "train.packing", "write train.packing: false"),
        ("train: {neftune_alpha: 5}", "train.neftune_alpha", "write train.neftune_alpha: null"),
        ("train: {loss_head: standard}", "train.loss_head", "write train.loss_head: auto"),
        ("train: {best_metric: loss}", "train.best_metric", "write train.best_metric: null"),
        ("train: {early_stopping: 2}", "train.early_stopping", "write train.early_stopping: null"),
        ("train: {batching: tokens}", "train.batching", "write train.batching: examples"),
        ("tuning: {backend: unsloth}", "tuning.backend", "write tuning.backend: bnb"),
        ("tuning: {new_tokens: {path: a}}", "tuning.new_tokens.path", "write tuning.new_tokens.path: null"),
        ("tuning: {lora: {target_modules: [q_proj, lm_head]}}", "tuning.lora.target_modules", "remove lm_head"),
        (
            "grpo: {loss_type: vespo, generation: vllm_server}",
            "grpo.loss_type",
            "write grpo.extra.vllm_importance_sampling_mode: token_truncate or token_mask",
        ),
    ],
)
def test_what_cannot_be_or_means_nothing_is_refused_before_anything_is_loaded(refusals, text, key, fix):
    (problem,) = refusals(f"{GRPO}{text}\n")
    assert problem.where.endswith(key)
    assert problem.fix.startswith(fix)


def test_keys_that_the_run_would_not_follow_are_said(load):
    def said(text):
        return [line.partition(" ")[2] for line in notes(load(text))]

    assert said("grpo: {beta: 0.1}\n") == ["grpo.beta has no effect: task_mode sft samples no completions"]
    assert said(f"{GRPO}grpo: {{vllm: {{sleep: false}}}}\n") == [
        "grpo.vllm.sleep has no effect: grpo.generation is transformers"
    ]
    assert said(f"{GRPO}grpo: {{generation: vllm_server, vllm: {{url: 'http://a:1', command: serve}}}}\n") == [
        "grpo.vllm.command has no effect: the server at grpo.vllm.url is not started by the kit"
    ]
    assert said(f"{GRPO}grpo: {{loss_type: cispo, epsilon: 0.1, epsilon_high: 5}}\n") == [
        "grpo.epsilon has no effect: loss_type cispo does not use it"
    ]


def test_keys_of_turns_without_anything_that_answers_are_said(load):
    def said(text):
        return [line.partition(" ")[2] for line in notes(load(f"{GRPO}grpo: {{{text}}}\n"))]

    nothing = "there is neither grpo.environment nor grpo.tools"
    assert said("max_turns: 3, step_deadline: 2") == [
        f"grpo.max_turns has no effect: {nothing}",
        f"grpo.step_deadline has no effect: {nothing}",
    ]
    assert said("max_turns: 3, tools: [calculator]") == []
    assert said("environment_options: {size: 3}, tools: [calculator]") == [
        "grpo.environment_options has no effect: there is no grpo.environment"
    ]
    assert said("tool_options: {f: {x: 3}}") == ["grpo.tool_options has no effect: there are no grpo.tools"]


def test_the_reward_of_an_environment_needs_one(refusals):
    game = "rewards: [{name: game, use: environment}]\n"
    for text in (f"task_mode: grpo\n{game}", f"{game}grpo: {{environment: 'game.py:make'}}\n"):
        (problem,) = refusals(text)
        assert problem.what == "nothing gives the reward environment: there is no grpo.environment"


def test_rewards_decide_the_weights_of_a_run_that_learns_from_them_and_of_no_other(load):
    for task, expected in (("grpo", ["rewards.0.weight", "sandbox.timeout"]), ("sft", [])):
        before, after = (
            load(
                f"task_mode: {task}\nrewards: [{{name: a, use: exact_match, weight: {weight}}}]\n"
                f"sandbox: {{timeout: {timeout}}}\n"
            )
            for weight, timeout in ((1, 5), (2, 6))
        )
        found = differences(values_that_decide_weights(before), values_that_decide_weights(after))
        assert [key for key, *_ in found] == expected


def test_keys_of_variants_that_do_nothing_are_said(load):
    text = f"{GRPO}grpo: {{sampler_ratio_max: 2, dr_grpo_divisor: 9, entropy_mean: step}}\n"
    said = [line.partition(" ")[2] for line in notes(load(text))]
    assert said == [
        "grpo.sampler_ratio_max has no effect: grpo.sampler_correction is trl",
        "grpo.dr_grpo_divisor has no effect: only loss_type dr_grpo divides by a constant",
        "grpo.entropy_mean has no effect: grpo.entropy_coef is 0",
    ]
    used = "sampler_correction: token_mask, sampler_ratio_max: 2, loss_type: dr_grpo, dr_grpo_divisor: 9"
    assert notes(load(f"{GRPO}grpo: {{{used}, entropy_coef: 0.1, entropy_mean: step}}\n")) == []


def test_a_reward_that_has_the_name_of_the_penalty_for_length_is_refused(refusals):
    text = "task_mode: grpo\nrewards: [{name: overlong_penalty, use: math}]\n"
    (problem,) = refusals(f"{text}grpo: {{overlong_buffer: 64}}\n")
    assert problem.where.endswith("rewards.0.name")
    assert problem.fix == "give the reward another name"
