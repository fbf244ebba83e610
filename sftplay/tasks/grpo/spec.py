"""Task grpo without torch: its rules, and whole groups of completions.

The rules of groups are those of TRL's GRPOConfig (trl 1.16, `__post_init__`): a drawing, which is steps_per_generation
optimizer steps long, holds whole groups of num_generations completions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.errors import ConfigError

COMPLETION, PROMPT = "grpo.max_completion_length", "grpo.max_prompt_length"
EFFECTIVE, GENERATIONS = "train.effective_batch_size", "grpo.num_generations"
LEVEL, LOSS = "grpo.importance_sampling_level", "grpo.loss_type"

UNCLIPPED = ("cispo", "sapo", "vespo")
"""Losses that bound the ratio in another way than by epsilon and delta (trl 1.16, `_compute_loss`)."""


def broken_grpo_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Every rule of task mode grpo that the config breaks."""
    yield from _rewards(cfg)
    yield from _lengths(cfg)
    yield from _loss(cfg)
    yield from _skipping(cfg)
    yield from _second_engine(cfg)
    yield from settings_of_labels(cfg)


def idle_grpo_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    grpo, kind = cfg.grpo, "grpo.generation"
    of_vllm = {"memory_share", "sleep"} if grpo.generation != "vllm_colocate" else set()
    of_vllm |= {"url", "timeout", "command"} if grpo.generation != "vllm_server" else set()
    of_vllm |= {"tensor_parallel"} if not grpo.generation.startswith("vllm") else set()
    for name in sorted(of_vllm):
        yield f"grpo.vllm.{name}", kind, f"{kind} is {grpo.generation}"
    if grpo.generation == "vllm_server" and grpo.vllm.url:
        for name in ("command", "tensor_parallel"):
            yield f"grpo.vllm.{name}", "grpo.vllm.url", "the server at grpo.vllm.url is not started by the kit"
    if grpo.generation.startswith("vllm"):
        yield "grpo.generation_rows", kind, f"{grpo.generation} decides itself how many completions it draws at a time"
    if grpo.loss_type in UNCLIPPED:
        yield "grpo.epsilon", LOSS, f"loss_type {grpo.loss_type} does not use it"
    if grpo.loss_type in ("sapo", "vespo"):
        yield "grpo.epsilon_high", LOSS, f"loss_type {grpo.loss_type} does not use it"


def _rewards(cfg: RunConfig) -> Iterator[Problem]:
    if not cfg.rewards:
        what, fix = "grpo learns from rewards, and there is none", "add one: - {name: answer, use: exact_match}"
        yield Problem(("task_mode", "rewards"), what, fix=fix)
    elif not any(reward.weight for reward in cfg.rewards):
        what = "every weight is 0, so nothing would be learned"
        yield Problem(("rewards.0.weight", "rewards"), what, fix="give one reward another weight")


def _lengths(cfg: RunConfig) -> Iterator[Problem]:
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


def _skipping(cfg: RunConfig) -> Iterator[Problem]:
    grpo = cfg.grpo
    others = {
        "grpo.dynamic_sampling_rounds": (
            bool(grpo.dynamic_sampling_rounds),
            "which gives the turn of such a prompt to another one",
        ),
        "grpo.placebo_reward": (grpo.placebo_reward is not None, "whose rewards say nothing of a prompt"),
        "grpo.generation": (grpo.generation.startswith("vllm"), "which draws all of a step"),
        "grpo.loss_type": (grpo.loss_type == "bnpo", "where bnpo divides by the tokens that a micro-batch has left"),
    }
    for key, (is_set, why) in others.items():
        if grpo.skip_zero_variance and is_set:
            what = f"it does not go together with {key}, {why}"
            yield Problem(("grpo.skip_zero_variance", key), what, fix=f"leave {key} or grpo.skip_zero_variance out")


def _second_engine(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.grpo.generation.startswith("vllm") and cfg.tuning.mode == "qlora":
        what = f"{cfg.grpo.generation} cannot be sent an adapter whose base is held in 4 bits"
        fix = "write tuning.mode: lora, or grpo.generation: transformers"
        yield Problem(("grpo.generation", "tuning.mode"), what, fix=fix)


def _loss(cfg: RunConfig) -> Iterator[Problem]:
    grpo = cfg.grpo
    if grpo.loss_type == "luspo" and grpo.importance_sampling_level != "sequence":
        what = "luspo is a loss of whole completions, but the ratio is taken of each token"
        yield Problem((LOSS, LEVEL), what, fix=f"write {LEVEL}: sequence")
    if grpo.loss_type == "vespo" and grpo.importance_sampling_level != "token":
        what = "vespo makes the ratio of a completion itself, out of those of its tokens"
        yield Problem((LEVEL, LOSS), what, fix=f"write {LEVEL}: token")
    if grpo.loss_type == "vespo" and grpo.generation.startswith("vllm"):
        mode = grpo.extra.get("vllm_importance_sampling_mode", "sequence_mask")
        if mode not in ("token_truncate", "token_mask") and grpo.extra.get("vllm_importance_sampling_correction", True):
            key = "grpo.extra.vllm_importance_sampling_mode"
            what = f"{mode}: loss_type vespo corrects vLLM's probabilities by token"
            yield Problem((key, LOSS, "grpo.generation"), what, fix=f"write {key}: token_truncate or token_mask")
    if grpo.delta is not None and (grpo.loss_type in UNCLIPPED or grpo.delta <= 1 + grpo.epsilon):
        what = f"loss_type {grpo.loss_type} does not use it" if grpo.loss_type in UNCLIPPED else ""
        what = what or f"{grpo.delta:g} is not above 1 + grpo.epsilon {grpo.epsilon:g}"
        yield Problem(("grpo.delta", LOSS, "grpo.epsilon"), what, fix="remove it, or write 4")


def settings_of_labels(cfg: RunConfig) -> Iterator[Problem]:
    """Settings of other tasks that would be ignored, or would change what the model is paid for."""
    train, tuning = cfg.train, cfg.tuning
    best = "acc_t2" if cfg.task_mode == "score" else None
    table = {
        "train.packing": (
            train.packing is True,
            "true packs rows, but prompts are padded to draw completions",
            "false",
        ),
        "train.loss_head": (
            train.loss_head in ("standard", "liger"),
            f"{train.loss_head} is not offered: the probabilities of completions are taken in tiles",
            "auto",
        ),
        "train.neftune_alpha": (train.neftune_alpha is not None, "the noise would enter the probabilities", "null"),
        "train.best_metric": (train.best_metric not in (None, best), "loss says nothing about rewards", best or "null"),
        "train.early_stopping": (train.early_stopping is not None, "it watches the loss on labels", "null"),
        "train.batching": (train.batching == "tokens", "a micro-batch has a fixed number of completions", "examples"),
        "tuning.backend": (tuning.backend == "unsloth", "unsloth is not offered", "bnb"),
        "tuning.new_tokens.count": (tuning.new_tokens.count > 0, "TRL reads the head without new rows", "0"),
        "tuning.new_tokens.path": (tuning.new_tokens.path is not None, "TRL reads the head without new rows", "null"),
    }
    for key, (is_asked, why, remedy) in table.items():
        if is_asked:
            yield Problem((key, "task_mode"), f"{why}, in task_mode {cfg.task_mode}", fix=f"write {key}: {remedy}")
    targets = tuning.lora.target_modules
    if tuning.mode != "full" and isinstance(targets, list) and "lm_head" in targets:
        what = "lm_head: TRL reads the weights of the head without their adapter, so it would not train"
        yield Problem(("tuning.lora.target_modules", "task_mode"), what, fix="remove lm_head from the list")


def completions_of_drawing(cfg: RunConfig) -> int:
    """Completions that all processes draw before they learn from them."""
    return cfg.train.effective_batch_size * cfg.grpo.steps_per_generation


def near_groups(cfg: RunConfig) -> list[int]:
    """The nearest sizes of a group of which a drawing holds a whole number."""
    drawn, group = completions_of_drawing(cfg), cfg.grpo.num_generations
    fitting = [size for size in range(2, drawn + 1) if drawn % size == 0]
    return [*[size for size in fitting if size <= group][-1:], *[size for size in fitting if size > group][:1]]


def refuse_broken_groups(cfg: RunConfig, world_size: int) -> None:
    """Check that every drawing holds whole groups.

    Raises:
        ConfigError: it does not; the nearest effective batches and sizes of a group are named.
    """
    if completions_of_drawing(cfg) % cfg.grpo.num_generations == 0:
        return
    train, grpo = cfg.train, cfg.grpo
    given = [size for size in (train.batch_size, train.grad_accum) if isinstance(size, int)]
    unit = world_size * math.prod(given)
    batches = SPEC.near_batches(cfg, unit, is_fixed=len(given) == 2)
    groups = near_groups(cfg) if train.effective_batch_size % unit == 0 else []
    choices = [f"{EFFECTIVE} to {' or '.join(map(str, batches))}"] if batches else []
    choices += [f"{GENERATIONS} to {' or '.join(map(str, groups))}"] if groups else []
    steps = f" x grpo.steps_per_generation {grpo.steps_per_generation}" if grpo.steps_per_generation > 1 else ""
    what = f"{train.effective_batch_size} completions a step{steps} do not make whole groups of {GENERATIONS} "
    raise ConfigError(
        f"{what}{grpo.num_generations} over {world_size} process(es)",
        where=f"{cfg.origins.get(EFFECTIVE, cfg.origins.get(GENERATIONS, 'default'))} {EFFECTIVE}",
        fix=f"set {', or '.join(choices)}" if choices else "leave train.batch_size and train.grad_accum on auto",
    )


class GrpoSpec(TaskSpec):
    """Completions are sampled and paid by rewards."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        return broken_grpo_rules(cfg)

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        return idle_grpo_keys(cfg)

    def step_multiple(self, cfg: RunConfig) -> int:
        return cfg.grpo.step_multiple

    def refuse_broken_groups(self, cfg: RunConfig, world_size: int) -> None:
        refuse_broken_groups(cfg, world_size)


SPEC = GrpoSpec()
