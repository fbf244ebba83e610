"""Rules about two-turn episodes: what a run of task mode score needs, what contradicts itself.

Nothing here looks at the number of processes or at the machine.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.errors import nearest_names
from sftplay.tasks.grpo.spec import check_label_settings
from sftplay.tasks.score.section import PLACE, PLACES

GROUP, EFFECTIVE, LENGTH = "score.episodes_per_problem", "train.effective_batch_size", "model.max_seq_len"
STEPS_PER_GENERATION, NUM_ITERATIONS = "score.steps_per_generation", "score.num_iterations"
FLOW, VALUE = "score.value_flow", "score.value"
PLACEMENT, DEVICES, STRATEGY = "score.placement", "score.devices", "cluster.strategy"


def _sizes(cfg: RunConfig) -> Iterator[Problem]:
    score, effective = cfg.score, cfg.train.effective_batch_size
    group, parts = score.episodes_per_problem, score.steps_per_generation
    if effective * parts % group:
        unit = group // math.gcd(group, parts)
        near = [size for size in (effective // unit * unit, (effective // unit + 1) * unit) if size]
        times = f" x {STEPS_PER_GENERATION} {parts}" if parts > 1 else ""
        what = f"{effective} episodes a step{times} do not make whole groups of {GROUP} {group}"
        yield Problem((EFFECTIVE, GROUP), what, fix=f"write {EFFECTIVE}: {' or '.join(map(str, near))}")
    steps, unit = score.stage1_steps, score.steps_per_rollout
    if steps % unit and score.stage2_steps:
        near = [size for size in (steps // unit * unit, (steps // unit + 1) * unit) if size]
        keys = f"{STEPS_PER_GENERATION} x {NUM_ITERATIONS}"
        what = f"{steps} steps end within a rollout batch, which {keys} makes {unit} steps long"
        fix = f"write score.stage1_steps: {' or '.join(map(str, near))}"
        yield Problem(("score.stage1_steps", STEPS_PER_GENERATION, NUM_ITERATIONS), what, fix=fix)
    if cfg.prompt_tokens < 1:
        both = f"score.max_new_tokens {score.max_new_tokens} and score.max_hint_tokens {score.max_hint_tokens}"
        what = f"{cfg.model.max_seq_len} leaves no room for a problem next to {both}"
        fix = f"write {LENGTH}: {2 * (score.max_new_tokens + score.max_hint_tokens)}, or lower them"
        yield Problem((LENGTH, "score.max_new_tokens", "score.max_hint_tokens"), what, fix=fix)
    if not score.stage1_steps + score.stage2_steps:
        yield Problem(("score.stage1_steps", "score.stage2_steps"), "both stages have 0 steps", fix="give one some")


def _prompts(cfg: RunConfig) -> Iterator[Problem]:
    for name, places in PLACES.items():
        key, text = f"score.prompts.{name}", getattr(cfg.score.prompts, name)
        counts = Counter(PLACE.findall(text))
        for place in places:
            if counts[place] != 1:
                what = f"has {{{place}}} {counts[place]} times"
                yield Problem((key,), what, fix=f"write {{{place}}} once")
        for word in sorted({*re.findall(r"\{([A-Za-z_]\w*)\}", text)} - {*places}):
            near = nearest_names(word, places)
            fix = f"did you mean {{{near[0]}}}?" if near else f"it has {', '.join(f'{{{place}}}' for place in places)}"
            yield Problem((key,), f"nothing fills {{{word}}} in this prompt", fix=fix, nearest=tuple(near))
    if "{answer}" not in cfg.score.prompts.right_hint and cfg.score.min_hint_gain:
        what = "states no answer, so it is no correct hint"
        yield Problem(("score.prompts.right_hint", "score.min_hint_gain"), what, fix="write {answer} into it")


def _value(cfg: RunConfig) -> Iterator[Problem]:
    score = cfg.score
    if score.value == "separate" and score.value_flow != "stop":
        what = f"{score.value_flow}: a network of its own reads tokens, so no gradient of V reaches the guide"
        yield Problem((FLOW, VALUE), what, fix=f"write {FLOW}: stop, or {VALUE}: head")
    if score.advantage == "value" and score.guidance in ("none", "static"):
        what = f"value is read from the guide, but score.guidance is {score.guidance}"
        yield Problem(("score.advantage", "score.guidance"), what, fix="write score.advantage: rloo")
    learns = score.guidance != "model_trained" or score.value_flow != "shared_trunk" or score.value_coef > 0
    if score.advantage == "value" and not learns:
        what = f"value compares with V, but {FLOW} shared_trunk weights the loss of V by score.value_coef, which is 0"
        fix = f"write score.advantage: rloo, {FLOW}: stop, or score.value_coef: 0.01"
        yield Problem(("score.advantage", "score.value_coef", FLOW), what, fix=fix)


def _devices(cfg: RunConfig) -> Iterator[Problem]:
    score, adapts = cfg.score, cfg.tuning.mode != "full"
    devices = {part: device for part, device in dict(score.devices).items() if device != "auto"}
    if score.placement == "shared":
        for part in ("guide", "value", "critic"):
            if part in devices:
                what = f"{devices[part]}, but {PLACEMENT} shared puts it on the solver's device"
                yield Problem((f"{DEVICES}.{part}", PLACEMENT), what, fix=f"write {PLACEMENT}: roles")
    if adapts and "ref" in devices:
        what = f"{devices['ref']}, but the reference of a {cfg.tuning.mode} run is the base with its adapter off"
        yield Problem((f"{DEVICES}.ref", "tuning.mode"), what, fix=f"write {DEVICES}.ref: auto; it holds no weights")
    if adapts and cfg.tuning.lora.modules_to_save:
        what = "two adapters on one base train no modules but their pairs"
        yield Problem(("tuning.lora.modules_to_save", "task_mode"), what, fix="remove it")


def broken_shard_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Yield what models in shards need, and the strategies that cannot train two models."""
    score, strategy = cfg.score, cfg.cluster.strategy
    if strategy not in ("auto", "ddp", "fsdp"):
        why = "an engine of DeepSpeed trains one model" if strategy.startswith("zero") else "nobody has tried it"
        what = f"{strategy}: task mode score trains two models, and {why}"
        yield Problem((STRATEGY, "task_mode"), what, fix=f"write {STRATEGY}: fsdp, with tuning.mode: full; or ddp")
    elif score.placement not in ("auto", "sharded") and strategy == "fsdp":
        what = f"fsdp splits models, and {PLACEMENT} {score.placement} has them whole"
        yield Problem((STRATEGY, PLACEMENT), what, fix=f"write {PLACEMENT}: sharded, or {STRATEGY}: ddp")
    if score.placement != "sharded" and (strategy, score.placement) != ("fsdp", "auto"):
        return
    if score.placement == "sharded" and strategy == "ddp":
        what = "sharded: models are split by fsdp, and ddp has them whole"
        yield Problem((PLACEMENT, STRATEGY), what, fix=f"write {STRATEGY}: fsdp, or leave it out")
    if cfg.tuning.mode != "full":
        what = f"sharded: it splits models all of whose weights train, and tuning.mode is {cfg.tuning.mode}"
        fix = f"write tuning.mode: full, or {PLACEMENT}: shared with {STRATEGY}: ddp"
        yield Problem((STRATEGY if strategy == "fsdp" else PLACEMENT, "tuning.mode"), what, fix=fix)
    if score.value_flow == "straight_through":
        what = "straight_through runs a frozen copy of the guide, which is not there where its weights are in shards"
        yield Problem((FLOW, PLACEMENT), what, fix=f"write {FLOW}: shared_trunk or stop")
    # torch's own: their arithmetic is that of each number by itself, and torch knows it for parts of a weight.
    optimizers = ("adamw_torch_fused", "adamw_torch", "sgd")
    if cfg.train.optim not in ("auto", *optimizers):
        what = f"{cfg.train.optim} cannot hold its state in shards"
        yield Problem(("train.optim", PLACEMENT), what, fix=f"write train.optim: {' or '.join(optimizers)}")
    if cfg.train.precision == "fp16":
        what = "fp16: its scaler looks for numbers that are not finite on each process alone, and each has a part"
        yield Problem(("train.precision", PLACEMENT), what, fix="write train.precision: fp32, or bf16")
    for part, device in dict(score.devices).items():
        if device != "auto":
            what = f"{device}, but every process holds a part of each model on its own device"
            yield Problem((f"{DEVICES}.{part}", PLACEMENT), what, fix=f"write {DEVICES}.{part}: auto")


class ScoreSpec(TaskSpec):
    """Two-turn episodes are sampled, and rewards score them."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        score = cfg.score
        if not any(reward.weight for reward in cfg.rewards):
            what, fix = "score learns from a reward, and there is none", "add one: - {name: answer, use: math}"
            yield Problem(("task_mode", "rewards"), what, fix=fix)
        yield from _sizes(cfg)
        yield from _prompts(cfg)
        yield from _value(cfg)
        if score.eval_samples > 1 and not score.eval_temperature:
            what = f"{score.eval_samples} episodes of a problem are all the same at score.eval_temperature 0"
            fix = "write score.eval_temperature: 0.7, or score.eval_samples: 1"
            yield Problem(("score.eval_samples", "score.eval_temperature"), what, fix=fix)
        yield from _devices(cfg)
        yield from broken_shard_rules(cfg)
        yield from check_label_settings(cfg)

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        score = cfg.score
        if score.guidance in ("none", "static"):
            names = (
                "max_hint_tokens", "beta_guide", "guide_learning_rate", "guide_reward", "value", "value_coef",
                "value_flow", "value_learning_rate", "devices.guide", "devices.value",
            )  # fmt: skip
            why = f"guidance {score.guidance} has no guide"
            yield from ((f"score.{name}", "score.guidance", why) for name in names)
        if score.steps_per_rollout == 1:
            why = "a rollout batch feeds one step, so there is no ratio to older weights"
            yield "score.epsilon", STEPS_PER_GENERATION, why
        if score.advantage != "critic":
            keys = [*(f"score.critic.{name}" for name in type(score.critic).model_fields)]
            keys += [f"{DEVICES}.critic", f"{DEVICES}.target_critic"]
            yield from ((key, "score.advantage", f"advantage {score.advantage} has no critic") for key in keys)


SPEC = ScoreSpec()
