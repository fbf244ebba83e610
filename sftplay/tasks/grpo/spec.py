"""Task grpo without torch: its rules, and whole groups of completions.

The rules of groups are those of TRL's GRPOConfig (trl 1.16, `__post_init__`): a rollout batch, which is
steps_per_generation optimizer steps long, holds whole groups of num_generations completions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.environments import SHIPPED_ENVIRONMENTS, SHIPPED_TOOLS
from sftplay.errors import ConfigError, suggest

COMPLETION, PROMPT = "grpo.max_completion_length", "grpo.max_prompt_length"
EFFECTIVE, GENERATIONS = "train.effective_batch_size", "grpo.num_generations"
LEVEL, LOSS = "grpo.importance_sampling_level", "grpo.loss_type"
CORRECTION, CENTERING = "grpo.sampler_correction", "grpo.score_centering"

UNCLIPPED = ("cispo", "sapo", "vespo")
"""Losses that bound the ratio in another way than by epsilon and delta (trl 1.16, `_compute_loss`)."""


class GrpoSpec(TaskSpec):
    """Completions are sampled and scored by rewards."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        if not cfg.rewards:
            what, fix = "grpo learns from rewards, and there is none", "add one: - {name: answer, use: exact_match}"
            yield Problem(("task_mode", "rewards"), what, fix=fix)
        elif not any(reward.weight for reward in cfg.rewards):
            what = "every weight is 0, so nothing would be learned"
            yield Problem(("rewards.0.weight", "rewards"), what, fix="give one reward another weight")
        grpo, limit = cfg.grpo, cfg.model.max_seq_len
        if grpo.max_completion_length >= limit:
            what = f"{grpo.max_completion_length} leaves no room for a prompt in model.max_seq_len {limit}"
            fix = f"write model.max_seq_len: {2 * grpo.max_completion_length}, or shorter completions"
            yield Problem((COMPLETION, "model.max_seq_len"), what, fix=fix)
        elif grpo.max_prompt_length is not None and grpo.max_prompt_length + grpo.max_completion_length > limit:
            both = grpo.max_prompt_length + grpo.max_completion_length
            what = f"{grpo.max_prompt_length} and {COMPLETION} {grpo.max_completion_length} are more than "
            fix = f"write model.max_seq_len: {both}, or {PROMPT}: {limit - grpo.max_completion_length}"
            yield Problem((PROMPT, COMPLETION, "model.max_seq_len"), f"{what}model.max_seq_len {limit}", fix=fix)
        yield from _check_loss(cfg)
        yield from _check_sampler_correction(cfg)
        why = dict[str, str]()
        if grpo.dynamic_sampling_rounds:
            why["grpo.dynamic_sampling_rounds"] = "which gives the turn of such a prompt to another one"
        if grpo.placebo_reward is not None:
            why["grpo.placebo_reward"] = "whose rewards say nothing of a prompt"
        if grpo.generation.startswith("vllm"):
            why["grpo.generation"] = "which samples all of a step"
        if grpo.loss_type == "bnpo":
            why[LOSS] = "where bnpo divides by the tokens that a micro-batch has left"
        for key, reason in why.items() if grpo.skip_zero_variance else ():
            what = f"it does not go together with {key}, {reason}"
            yield Problem(("grpo.skip_zero_variance", key), what, fix=f"leave {key} or grpo.skip_zero_variance out")
        yield from _check_adapter_sync(cfg)
        if cfg.grpo.generation.startswith("vllm") and cfg.tuning.mode == "qlora":
            what = f"{cfg.grpo.generation} cannot be sent an adapter whose base is held in 4 bits"
            fix = "write tuning.mode: lora, or grpo.generation: transformers"
            yield Problem(("grpo.generation", "tuning.mode"), what, fix=fix)
        yield from _check_turns(cfg)
        yield from check_label_settings(cfg)

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        grpo, kind = cfg.grpo, "grpo.generation"
        idle = {"memory_share", "sleep"} if grpo.generation != "vllm_colocate" else set()
        idle |= {"url", "timeout", "command", "sync"} if grpo.generation != "vllm_server" else set()
        idle |= {"tensor_parallel"} if not grpo.generation.startswith("vllm") else set()
        for name in sorted(idle):
            yield f"grpo.vllm.{name}", kind, f"{kind} is {grpo.generation}"
        if grpo.generation == "vllm_server" and grpo.vllm.url:
            for name in ("command", "tensor_parallel"):
                yield f"grpo.vllm.{name}", "grpo.vllm.url", "the server at grpo.vllm.url is not started by the kit"
        if grpo.environment is None:
            yield "grpo.environment_options", "grpo.environment", "there is no grpo.environment"
            for name in ("max_turns", "step_deadline") if not grpo.tools else ():
                yield f"grpo.{name}", "grpo.environment", "there is neither grpo.environment nor grpo.tools"
        if not grpo.tools:
            yield "grpo.tool_options", "grpo.tools", "there are no grpo.tools"
        if grpo.generation.startswith("vllm"):
            why = f"{grpo.generation} decides itself how many completions it samples at a time"
            yield "grpo.generation_rows", kind, why
        if grpo.sampler_correction in ("trl", "none"):
            for name in ("min", "max"):
                yield f"grpo.sampler_ratio_{name}", CORRECTION, f"{CORRECTION} is {grpo.sampler_correction}"
        if grpo.loss_type != "dr_grpo":
            yield "grpo.dr_grpo_divisor", LOSS, "only loss_type dr_grpo divides by a constant"
        if not grpo.entropy_coef:
            yield "grpo.entropy_mean", "grpo.entropy_coef", "grpo.entropy_coef is 0"
        if grpo.placebo_reward is not None:
            yield "grpo.overlong_buffer", "grpo.placebo_reward", "grpo.placebo_reward is what the model gets"
        unused = {"grpo.epsilon": UNCLIPPED, "grpo.epsilon_high": ("sapo", "vespo")}
        for key, losses in unused.items():
            if grpo.loss_type in losses:
                yield key, LOSS, f"loss_type {grpo.loss_type} does not use it"

    def step_multiple(self, cfg: RunConfig) -> int:
        return cfg.grpo.step_multiple

    def refuse_broken_groups(self, cfg: RunConfig, world_size: int) -> None:
        train, grpo = cfg.train, cfg.grpo
        total, group = count_batch_completions(cfg), grpo.num_generations
        if total % group == 0:
            return
        sizes = [size for size in (train.batch_size, train.grad_accum) if isinstance(size, int)]
        unit = world_size * math.prod(sizes)
        batches = self.near_batches(cfg, unit, is_fixed=len(sizes) == 2)
        fitting = [size for size in range(2, total + 1) if total % size == 0]
        groups = [*[size for size in fitting if size <= group][-1:], *[size for size in fitting if size > group][:1]]
        choices = [f"{EFFECTIVE} to {' or '.join(map(str, batches))}"] if batches else []
        if groups and train.effective_batch_size % unit == 0:
            choices.append(f"{GENERATIONS} to {' or '.join(map(str, groups))}")
        steps = f" x grpo.steps_per_generation {grpo.steps_per_generation}" if grpo.steps_per_generation > 1 else ""
        what = f"{train.effective_batch_size} completions a step{steps} do not make whole groups of {GENERATIONS} "
        raise ConfigError(
            f"{what}{group} over {world_size} process(es)",
            where=f"{cfg.origins.get(EFFECTIVE, cfg.origins.get(GENERATIONS, 'default'))} {EFFECTIVE}",
            fix=f"set {', or '.join(choices)}" if choices else "leave train.batch_size and train.grad_accum on auto",
        )


def count_batch_completions(cfg: RunConfig) -> int:
    """Count the completions of a rollout batch on all processes."""
    return cfg.train.effective_batch_size * cfg.grpo.steps_per_generation


def _check_turns(cfg: RunConfig) -> Iterator[Problem]:
    grpo = cfg.grpo
    for key, names, known in (
        ("grpo.environment", [grpo.environment] if grpo.environment else [], SHIPPED_ENVIRONMENTS),
        ("grpo.tools", grpo.tools, SHIPPED_TOOLS),
    ):
        for name in names:
            if ":" not in name and name not in known:
                fix, near = suggest(name, list(known), f"there are {', '.join(known)}, and path.py:NAME")
                yield Problem((key,), f"there is no {name!r}", fix=fix, nearest=tuple(near))
    if len(set(grpo.tools)) < len(grpo.tools):
        yield Problem(("grpo.tools",), "a tool is named twice", fix="name each tool once")


def _check_adapter_sync(cfg: RunConfig) -> Iterator[Problem]:
    """Yield what keeps the server from a base of its own with the adapter's files on it."""
    if cfg.grpo.generation != "vllm_server" or cfg.grpo.vllm.sync != "adapter":
        return
    lora, key = cfg.tuning.lora, "grpo.vllm.sync"
    table = (
        ("tuning.mode", cfg.tuning.mode == "full", "there is no adapter in tuning.mode full"),
        ("tuning.lora.dora", lora.dora, "vLLM has no DoRA"),
        ("tuning.lora.modules_to_save", bool(lora.modules_to_save), "vLLM puts no whole modules on its base"),
        ("model.merge_adapter", cfg.model.merge_adapter, "the server would not have the merged base"),
    )
    for other, is_broken, what in table:
        if is_broken:
            yield Problem((key, other), f"adapter: {what}", fix=f"write {key}: full")


def _check_loss(cfg: RunConfig) -> Iterator[Problem]:
    grpo, is_vespo = cfg.grpo, cfg.grpo.loss_type == "vespo"
    if grpo.loss_type == "luspo" and grpo.importance_sampling_level != "sequence":
        what = "luspo is a loss of whole completions, but the ratio is taken of each token"
        yield Problem((LOSS, LEVEL), what, fix=f"write {LEVEL}: sequence")
    if is_vespo and grpo.importance_sampling_level != "token":
        what = "vespo makes the ratio of a completion itself, out of those of its tokens"
        yield Problem((LEVEL, LOSS), what, fix=f"write {LEVEL}: token")
    mode = grpo.extra.get("vllm_importance_sampling_mode", "sequence_mask")
    is_corrected = grpo.generation.startswith("vllm") and grpo.extra.get("vllm_importance_sampling_correction", True)
    is_corrected = is_corrected and grpo.sampler_correction == "trl"
    if is_vespo and is_corrected and mode not in ("token_truncate", "token_mask"):
        key = "grpo.extra.vllm_importance_sampling_mode"
        what = f"{mode}: loss_type vespo corrects vLLM's probabilities by token"
        yield Problem((key, LOSS, "grpo.generation"), what, fix=f"write {key}: token_truncate or token_mask")
    if grpo.delta is not None and (grpo.loss_type in UNCLIPPED or grpo.delta <= 1 + grpo.epsilon):
        what = f"{grpo.delta:g} is not above 1 + grpo.epsilon {grpo.epsilon:g}"
        if grpo.loss_type in UNCLIPPED:
            what = f"loss_type {grpo.loss_type} does not use it"
        yield Problem(("grpo.delta", LOSS, "grpo.epsilon"), what, fix="remove it, or write 4")
    elif grpo.loss_type == "cispo" and (bound := grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high) < 1:
        what = f"cispo cuts the ratio itself off there: every token would count by {bound:g}"
        yield Problem(("grpo.epsilon_high", LOSS), what, fix="write grpo.epsilon_high: 5")
    if grpo.overlong_buffer is not None and grpo.overlong_buffer >= grpo.max_completion_length:
        what = f"{grpo.overlong_buffer} leaves no length without a penalty below {grpo.max_completion_length}"
        yield Problem(("grpo.overlong_buffer", COMPLETION), what, fix="write a quarter of it")
    for n, reward in enumerate(cfg.rewards):
        if grpo.overlong_buffer is not None and reward.name == "overlong_penalty":
            what = "the penalty of grpo.overlong_buffer has this name among the rewards"
            yield Problem((f"rewards.{n}.name", "grpo.overlong_buffer"), what, fix="give the reward another name")
    if grpo.entropy_mean == "step" and grpo.entropy_coef:
        for key, is_set in {
            "grpo.top_entropy_quantile": grpo.top_entropy_quantile < 1,
            "grpo.extra.use_adaptive_entropy": grpo.extra.get("use_adaptive_entropy"),
        }.items():
            if is_set:
                what = f"{key} is TRL's, with the mean over a micro-batch"
                yield Problem(
                    ("grpo.entropy_mean", key), what, fix=f"write grpo.entropy_mean: micro_batch, or leave {key} out"
                )


def _check_sampler_correction(cfg: RunConfig) -> Iterator[Problem]:
    grpo, mode = cfg.grpo, cfg.grpo.sampler_correction
    corrects = mode not in ("trl", "none")
    low, high = grpo.sampler_ratio_min, grpo.sampler_ratio_max
    if corrects and (high <= 1 or (low is not None and low >= 1)):
        what = f"the same probabilities have the ratio 1, which is not between {low or 0:g} and {high:g}"
        yield Problem(("grpo.sampler_ratio_max", "grpo.sampler_ratio_min", CORRECTION), what, fix="write 0.5 and 3")
    if corrects and grpo.loss_type == "vespo" and mode not in ("token_truncate", "token_mask"):
        what = f"{mode}: loss_type vespo takes the ratio of each token"
        yield Problem((CORRECTION, LOSS), what, fix=f"write {CORRECTION}: token_truncate")
    trl = [f"grpo.extra.{name}" for name in grpo.extra if name.startswith("vllm_importance_sampling")]
    if mode != "trl" and trl:
        yield Problem(
            (trl[0], CORRECTION), f"it is TRL's setting for what {CORRECTION} says", fix="keep one of the two"
        )
    for key in (*[CORRECTION] * corrects, *[CENTERING] * (grpo.score_centering is not None)):
        if cfg.tuning.mode != "full" and cfg.tuning.lora.dropout:
            what = "the model learns with dropout, which would count as another sampler"
            yield Problem((key, "tuning.lora.dropout"), what, fix="write tuning.lora.dropout: 0")
    if grpo.score_centering is None:
        return
    if corrects and mode not in ("token_truncate", "token_mask"):
        what = f"{CENTERING} weights each token by itself, and {mode} whole completions"
        yield Problem((CORRECTION, CENTERING), what, fix="write token_truncate or token_mask")
    table = {
        "grpo.generation": (grpo.generation != "transformers", "others give the sampled token alone", "transformers"),
        "grpo.top_p": (grpo.top_p < 1, "left-out tokens have no probability to compare", "1"),
        "grpo.top_k": (grpo.top_k, "left-out tokens have no probability to compare", "0"),
        "grpo.min_p": (grpo.min_p, "left-out tokens have no probability to compare", "null"),
        "grpo.repetition_penalty": (grpo.repetition_penalty != 1, "the model learns without it", "1"),
        "grpo.share_prompts": (grpo.share_prompts is True, "it takes the scores of rows", "auto"),
        "grpo.top_entropy_quantile": (
            grpo.top_entropy_quantile < 1, "tokens that are not learned from would be centred too", "1",
        ),
        "grpo.off_policy_mask_threshold": (
            grpo.off_policy_mask_threshold is not None, "completions that are not learned from would be centred too",
            "null",
        ),
        LOSS: (grpo.loss_type in ("sapo", "vespo"), "its weights are no ratios of probabilities", "dapo"),
    }  # fmt: skip
    for key, (is_broken, why, fix) in table.items():
        if is_broken:
            yield Problem(
                (key, CENTERING), f"it does not go together with {CENTERING}: {why}", fix=f"write {key}: {fix}"
            )


def check_label_settings(cfg: RunConfig) -> Iterator[Problem]:
    """Yield settings of other tasks that would be ignored, or would change what the model is rewarded for."""
    train, tuning = cfg.train, cfg.tuning
    best = "acc_t2" if cfg.task_mode == "score" else None
    head = f"{train.loss_head} is not offered: the probabilities of completions are taken in tiles"
    no_rows = "TRL reads the head without new rows"
    table = (
        ("train.packing", train.packing is True, "true packs rows, but prompts are padded to sample", "false"),
        ("train.loss_head", train.loss_head in ("standard", "liger"), head, "auto"),
        ("train.neftune_alpha", train.neftune_alpha is not None, "the noise would enter the probabilities", "null"),
        (
            "train.best_metric", train.best_metric not in (None, best),
            "loss says nothing about rewards", best or "null",
        ),
        ("train.early_stopping", train.early_stopping is not None, "it watches the loss on labels", "null"),
        (
            "train.batching", train.batching == "tokens",
            "a micro-batch has a fixed number of completions", "examples",
        ),
        ("tuning.backend", tuning.backend == "unsloth", "unsloth is not offered", "bnb"),
        ("tuning.new_tokens.path", tuning.new_tokens.path is not None, no_rows, "null"),
    )  # fmt: skip
    for key, is_asked, why, remedy in table:
        if is_asked:
            yield Problem((key, "task_mode"), f"{why}, in task_mode {cfg.task_mode}", fix=f"write {key}: {remedy}")
    targets = tuning.lora.target_modules
    if tuning.mode != "full" and isinstance(targets, list) and "lm_head" in targets:
        what = "lm_head: TRL reads the weights of the head without their adapter, so it would not train"
        yield Problem(("tuning.lora.target_modules", "task_mode"), what, fix="remove lm_head from the list")


SPEC = GrpoSpec()
