"""Rules about two-turn episodes, and which device holds which model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.plan.devices import OWN
from sftplay.tasks.grpo.spec import check_label_settings
from sftplay.tasks.score.section import PLACE, PLACES

Placed = Literal["shared", "roles", "roles4", "sharded"]

PLACEMENT, DEVICES, STRATEGY = "score.placement", "score.devices", "cluster.strategy"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A device for each part: `own`, `cpu` or `cuda:N`."""

    placement: Placed
    solver: str = OWN
    guide: str = OWN
    value: str = OWN
    critic: str = OWN
    target_critic: str = OWN
    ref: str = OWN

    @property
    def separates(self) -> bool:
        """True where the guide is a model of its own and no adapter on the solver's base."""
        return self.placement != "shared"

    @property
    def is_split(self) -> bool:
        """True where every process holds a part of each weight."""
        return self.placement == "sharded"

    def devices(self) -> dict[str, str]:
        """Part -> device."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "placement"}

    def as_torch(self, here: str) -> dict[str, str]:
        """The same in torch's names; `here` is that of the process's device."""
        return {part: here if device == OWN else device for part, device in self.devices().items()}


def resolve_layout(cfg: RunConfig, *, placement: Placed, gpus: int, processes: int) -> Layout:
    """Find the layout of `placement` with what `score.devices` says, on a machine with so many visible GPUs.

    Raises:
        ConfigError: the devices contradict the placement or the number of processes.
        MachineError: the machine has too few GPUs.
    """
    if placement == "sharded" and processes == 1:
        by_strategy = cfg.score.placement == "auto" and cfg.cluster.strategy == "fsdp"
        others = [] if by_strategy else [f"{PLACEMENT}: roles or shared"]
        others += [f"{STRATEGY}: ddp"] if cfg.cluster.strategy == "fsdp" else []
        what = f"{'fsdp' if by_strategy else 'sharded'}: each process holds a part of each model, and one is started"
        fix = f"start several (NPROC=2, `make train-distributed`), or write {' and '.join(others)}"
        raise ConfigError(
            what, where=cfg.describe_origin(STRATEGY if by_strategy else PLACEMENT, unset="score"), fix=fix
        )
    # Of a config that says fp16 itself the rules know. This is what `auto` became.
    if placement == "sharded" and cfg.train.precision == "fp16":
        what = "sharded: the scaler of fp16 looks for numbers that are not finite on each process alone"
        fix = "write train.precision: fp32; bf16 needs a GPU from 2020 on"
        raise ConfigError(what, where=cfg.describe_origin("train.precision", unset="score"), fix=fix)
    if placement not in ("sharded", "shared") and processes > 1:
        what = f"{placement}: one process holds all parts, and {processes} are started"
        fix = f"start one process (NPROC=1, `make train`), or write {PLACEMENT}: shared"
        raise ConfigError(what, where=cfg.describe_origin(PLACEMENT, unset="score"), fix=fix)
    named = {part: device for part, device in dict(cfg.score.devices).items() if device != "auto"}
    for part, device in named.items():
        _refuse_device(cfg, part, device=device, gpus=gpus, processes=processes)
    devices: dict[str, str] = {}
    if placement == "roles" and gpus:
        devices = dict.fromkeys(("guide", "value", "target_critic", "ref"), "cuda:1")
    elif placement == "roles4" and gpus:
        devices = {"critic": "cuda:1", "guide": "cuda:2", "value": "cuda:3", "target_critic": "cpu", "ref": "cpu"}
    if placement == "roles" and "guide" in named:  # these follow the guide
        devices |= dict.fromkeys(("value", "target_critic", "ref"), named["guide"])
    here = "cuda:0" if gpus else "cpu"
    devices |= {part: OWN if device == here else device for part, device in named.items()}
    layout = Layout(placement=placement, **devices)
    for part, device in layout.devices().items():
        if device.startswith("cuda:") and gpu_number(device) >= gpus:
            what = f"{placement} lays the {part} on {device}, and this machine shows {gpus} GPU{'s' * (gpus > 1)}"
            fix = f"write {PLACEMENT}: {'roles' if gpus > 1 else 'shared'}, or {DEVICES}: {{{part}: cpu}}"
            raise MachineError(what, where=cfg.describe_origin(PLACEMENT, unset="score"), fix=fix)
    return layout


def gpu_number(device: str) -> int:
    """Return the number of a GPU; the process's own is the first."""
    return int(device.removeprefix("cuda:")) if device.startswith("cuda:") else 0


def _refuse_device(cfg: RunConfig, part: str, *, device: str, gpus: int, processes: int) -> None:
    key = f"{DEVICES}.{part}"
    where, auto = cfg.describe_origin(key, unset="score"), f"write {key}: auto"
    if device != "cpu" and processes > 1:
        what = f"{processes} processes are started, and every one of them would lay its {part} on this one GPU"
        fix = f"{auto}, which is each process's own GPU, or start one process (NPROC=1)"
        raise ConfigError(f"{device}: {what}", where=where, fix=fix)
    if device != "cpu" and gpu_number(device) >= gpus:
        shown = ", ".join(f"cuda:{n}" for n in range(gpus)) or "none"
        fix = f"{auto}{', cpu' if part != 'solver' else ''}{f' or cuda:{gpus - 1}' if gpus else ''}"
        raise MachineError(f"{device}: this machine shows {gpus} GPUs ({shown})", where=where, fix=fix)
    if part == "solver" and device != ("cuda:0" if gpus else "cpu"):
        what = f"{device}: the solver lies on the process's own device, which is the first visible GPU"
        fix = f"{auto}, and choose the first GPU with CUDA_VISIBLE_DEVICES, such as 1,0"
        raise ConfigError(what, where=where, fix=fix)


GROUP, EFFECTIVE, LENGTH = "score.episodes_per_problem", "train.effective_batch_size", "model.max_seq_len"
STEPS_PER_GENERATION, NUM_ITERATIONS = "score.steps_per_generation", "score.num_iterations"
FLOW, VALUE = "score.value_flow", "score.value"


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
        from sftplay.reward.table import judges_form

        score = cfg.score
        if not any(reward.weight for reward in cfg.rewards):
            what, fix = "score learns from a reward, and there is none", "add one: - {name: answer, use: math}"
            yield Problem(("task_mode", "rewards"), what, fix=fix)
        elif (weight := sum(reward.weight for reward in cfg.rewards if not judges_form(reward))) <= 0:
            what = f"those that judge the content weigh {weight:g} together, so no answer is right or wrong"
            fix = "add one: - {name: answer, use: math}, or write judges: content where a form is what is asked for"
            yield Problem(("rewards", "task_mode"), what, fix=fix)
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
