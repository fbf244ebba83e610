"""Rules between fields: combinations that are refused, and settings that have no effect.

Single values are the schema's business. Nothing here looks at the machine: whether a batch fits is for `plan`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from sftplay.config.cluster import SPLIT_WEIGHTS, broken_cluster_rules
from sftplay.config.data import (
    broken_cpt_rules,
    broken_data_rules,
    has_held_out,
    idle_cpt_keys,
    idle_data_keys,
)
from sftplay.config.keys import keys_in, list_keys, path_keys
from sftplay.config.layers import NO_PRETRAINED, is_overlong
from sftplay.config.resolved import flow
from sftplay.config.rewards import broken_reward_rules, idle_reward_keys
from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, find_spec
from sftplay.config.train import TrainConfig
from sftplay.errors import ConfigError, nearest_names
from sftplay.tasks import TASKS
from sftplay.units import parse_seconds


def check_rules(cfg: RunConfig) -> list[ConfigError]:
    """Every rule the config breaks, as an error with the place of the value that is easiest to change."""
    return [problem.as_error(cfg) for problem in broken_rules(cfg)]


def broken_rules(cfg: RunConfig) -> list[Problem]:
    """The same as violations, which name all the keys that a rule looked at."""
    return [problem for rule in _RULES for problem in rule(cfg)]


def notes(cfg: RunConfig) -> list[str]:
    """One line for each setting that was written down and has no effect in this run.

    A value that a file merely includes is not reported: a shared base file may say more than one run needs. Nothing in
    a resolved file is reported, because it writes down every key.
    """
    origins = cfg.origins
    if set(origins) >= {key for key, _ in keys_in(cfg)}:
        return []
    return [
        f"{origins[key]} {key} has no effect: {reason}"
        for key, decider, reason in idle_keys(cfg)
        if key in origins and _is_deliberate(origins[key], origins.get(decider))
    ]


def _is_deliberate(origin: str, decider: str | None) -> bool:
    return decider is None or origin == "command line" or origin.rpartition(":")[0] == decider.rpartition(":")[0]


def idle_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    mode, train = cfg.tuning.mode, cfg.train
    for key, _ in keys_in(cfg):
        if key.startswith("tuning.lora.") and mode == "full":
            yield key, "tuning.mode", "tuning.mode full trains no adapter"
        if key in ("tuning.quant_type", "tuning.double_quant") and mode != "qlora":
            yield key, "tuning.mode", f"tuning.mode {mode} holds no weights in 4 bits"
        if key.startswith(("cluster.comm.", "cluster.nccl.")) and _has_one_process(train):
            yield key, key, "a single process exchanges no gradients"
        elif key in ("cluster.comm.hook", "cluster.comm.static_graph") and cfg.task.averages_itself:
            yield key, "task_mode", f"task_mode {cfg.task_mode} sends whole gradients itself, once a step"
        if key in ("train.profile.start", "train.profile.memory") and train.profile.steps == 0:
            yield key, "train.profile.steps", "train.profile.steps 0 profiles nothing"
    if mode == "full" and cfg.tuning.backend != "unsloth":
        yield "tuning.backend", "tuning.mode", "tuning.mode full has neither an adapter nor weights in 4 bits"
    if train.max_steps is not None:
        yield "train.epochs", "train.max_steps", f"train.max_steps {train.max_steps} ends the run"
    if train.lr_scheduler == "constant":
        yield "train.warmup_ratio", "train.lr_scheduler", "the schedule constant has no warm-up"
    if train.lr_scheduler != "warmup_stable_decay":
        reason = f"the schedule {train.lr_scheduler} has no stable part that it could end"
        yield "train.decay_ratio", "train.lr_scheduler", reason
    yield from idle_data_keys(cfg)
    yield from idle_cpt_keys(cfg)
    yield from _keys_of_other_tasks(cfg)
    yield from find_spec(cfg).idle_keys(cfg)
    yield from idle_new_token_keys(cfg)
    yield from idle_reward_keys(cfg)


def _keys_of_other_tasks(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    section = TASKS[cfg.task_mode].section
    absent = {row.section: row.absent for row in TASKS.values() if row.section not in ("", "cpt", section)}
    for key, _ in keys_in(cfg):
        if why := absent.get(key.partition(".")[0]):
            yield key, "task_mode", f"task_mode {cfg.task_mode} {why}"


def _task_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Rules of the task itself, and values that only another task takes."""
    yield from find_spec(cfg).broken_rules(cfg)
    if cfg.train.best_metric == "acc_t2" and cfg.task.best_metrics == ("loss",):
        what = f"acc_t2 counts right second answers, and task_mode {cfg.task_mode} plays no episodes"
        yield Problem(("train.best_metric", "task_mode"), what, fix="write train.best_metric: loss")
    if cfg.task.reads_text and cfg.model.name == NO_PRETRAINED:
        what = f"{NO_PRETRAINED} is the model of task mode hrm, and the task is {cfg.task_mode}"
        yield Problem(("model.name", "task_mode"), what, fix="name another model, or write task_mode: hrm")


def _has_one_process(train: TrainConfig) -> bool:
    """True when the sizes say that there is one process; False while a size is `auto`."""
    if train.batch_size == "auto" or train.grad_accum == "auto":
        return False
    return train.batch_size * train.grad_accum == train.effective_batch_size


def _static_graph(cfg: RunConfig) -> Iterator[Problem]:
    key, train = "cluster.comm.static_graph", cfg.train
    if not cfg.cluster.comm.static_graph:
        return
    # Every micro-batch but the last runs under no_sync, where torch 2.13 fails an assertion of its own (reducer.cpp).
    if train.grad_accum != 1:
        what = f"needs every step in one micro-batch, but train.grad_accum is {train.grad_accum}"
        yield Problem((key, "train.grad_accum"), what, fix="write train.grad_accum: 1, or remove it")
    if train.oom_recovery:
        what = "needs every step in one micro-batch, but train.oom_recovery makes smaller ones when memory runs out"
        yield Problem((key, "train.oom_recovery"), what, fix="write train.oom_recovery: false, or remove it")


def _rate_scaling(cfg: RunConfig) -> Iterator[Problem]:
    train = cfg.train
    scaling, found_with = "train.lr_scaling", "train.lr_batch_size"
    if train.lr_scaling == "none":
        if train.lr_batch_size is not None:
            what = f"{train.lr_batch_size} is given, but {scaling} none scales nothing"
            yield Problem((found_with, scaling), what, fix=f"write {scaling}: linear or sqrt, or remove {found_with}")
        return
    if train.lr_batch_size is None:
        what = f"{train.lr_scaling} needs the effective batch that train.learning_rate was found with"
        yield Problem((scaling, found_with), what, fix=f"give {found_with}, or remove {scaling}")
    if train.learning_rate == "auto":
        what = f"{train.lr_scaling} scales a rate that you have found, but train.learning_rate is auto"
        yield Problem((scaling, "train.learning_rate"), what, fix=f"give train.learning_rate, or remove {scaling}")


def _schedule(cfg: RunConfig) -> Iterator[Problem]:
    train, scheduler = cfg.train, "train.lr_scheduler"
    falls_late = train.lr_scheduler == "warmup_stable_decay"
    if falls_late and train.warmup_ratio + train.decay_ratio > 1:
        what = f"{train.decay_ratio:g} and train.warmup_ratio {train.warmup_ratio:g} are more than all steps"
        fix = f"write train.decay_ratio: {1 - train.warmup_ratio:g}, or less"
        yield Problem(("train.decay_ratio", "train.warmup_ratio", scheduler), what, fix=fix)
    if train.min_lr_ratio and train.lr_scheduler not in ("cosine", "warmup_stable_decay"):
        what = f"{train.min_lr_ratio:g} is given, but {scheduler} {train.lr_scheduler} has no lowest rate"
        fix = f"write {scheduler}: cosine or warmup_stable_decay, or remove train.min_lr_ratio"
        yield Problem(("train.min_lr_ratio", scheduler), what, fix=fix)
    if "lr_scheduler_kwargs" in train.extra and (falls_late or train.min_lr_ratio):
        what = "the kit sets it from train.decay_ratio and train.min_lr_ratio"
        yield Problem(("train.extra.lr_scheduler_kwargs", scheduler), what, fix="write these two keys in its place")


def _held_out_rules(cfg: RunConfig) -> Iterator[Problem]:
    data = cfg.data
    if data.val_path is not None and data.split is not None:
        what = f"{data.split:g} is given, but data.val_path names the held-out rows already"
        yield Problem(("data.split", "data.val_path"), what, fix="remove one of the two")
    if data.val_path is not None or (has_held_out(cfg) if cfg.datasets else data.split != 0):
        return
    if cfg.task.measures_training_rows:
        return
    for key in ("train.best_metric", "train.early_stopping", "train.eval_steps", "eval.before", "eval.after"):
        if cfg.get_value(key):
            what = "needs held-out rows, but data.split is 0 and there is no data.val_path"
            fix = "give data.val_path, or a data.split above 0"
            yield Problem((key, "data.split", "data.val_path"), what, fix=fix)


def _saves_where_it_evaluates(cfg: RunConfig) -> Iterator[Problem]:
    train = cfg.train
    if train.best_metric != "loss" and train.early_stopping is None:
        return
    if train.save_steps is None or train.eval_steps is None or train.save_steps % train.eval_steps == 0:
        return
    key = "train.best_metric" if train.best_metric else "train.early_stopping"
    below = train.save_steps // train.eval_steps * train.eval_steps
    choices = [str(steps) for steps in (below, below + train.eval_steps) if steps]
    what = f"{train.save_steps} is no multiple of train.eval_steps {train.eval_steps}, which {key} needs"
    yield Problem(("train.save_steps", "train.eval_steps", key), what, fix=f"write {' or '.join(choices)}")


def _batch_is_exact(cfg: RunConfig) -> Iterator[Problem]:
    train, effective = cfg.train, cfg.train.effective_batch_size
    keys = ("train.batch_size", "train.grad_accum", "train.effective_batch_size")
    if isinstance(train.batch_size, int) and isinstance(train.grad_accum, int):
        product = train.batch_size * train.grad_accum
        if effective % product:
            unit = math.lcm(product, find_spec(cfg).step_multiple(cfg))
            below = max(effective // unit, 1)
            sizes = f"{train.batch_size} * grad_accum {train.grad_accum} = {product}"
            fix = f"write {keys[2]}: {below * unit} or {(below + 1) * unit}"
            yield Problem(keys, f"{sizes} does not divide {keys[2]} {effective}", fix=fix)
        return
    for key, value in zip(keys[:2], (train.batch_size, train.grad_accum), strict=True):
        if isinstance(value, int) and effective % value:
            divisors = [size for size in range(1, effective + 1) if effective % size == 0]
            around = [max(d for d in divisors if d < value), *[d for d in divisors if d > value][:1]]
            what = f"{value} does not divide {keys[2]} {effective}"
            yield Problem((key, keys[2]), what, fix=f"write {' or '.join(map(str, around))}")


def _token_batches(cfg: RunConfig) -> Iterator[Problem]:
    train = cfg.train
    if train.batching == "tokens" and train.packing is True:
        what = "tokens forms micro-batches of padded rows, but train.packing true leaves no padding to save"
        yield Problem(("train.batching", "train.packing"), what, fix="keep one of the two")


def _limits(cfg: RunConfig) -> Iterator[Problem]:
    train, profile = cfg.train, cfg.train.profile
    if train.time_limit is not None:
        try:
            parse_seconds(str(train.time_limit))
        except ValueError as error:
            what = str(error).partition(" (")[0]
            yield Problem(("train.time_limit",), what, fix="write 3h30m, 90m, 1-12:00:00 or 5400")
    if profile.steps and train.max_steps is not None and profile.start > train.max_steps:
        what = f"{profile.start} lies behind train.max_steps {train.max_steps}, so nothing would be profiled"
        keys = ("train.profile.start", "train.profile.steps", "train.max_steps")
        yield Problem(keys, what, fix=f"start at step {train.max_steps} or before")


def _extra(cfg: RunConfig) -> Iterator[Problem]:
    """Fields of TRL's own config that the kit sets itself, that TRL does not have, or whose value it would not take."""
    for name, value in cfg.train.extra.items():
        yield from _extra_field(f"train.extra.{name}", value, kind=cfg.task.trl_config)
    for name, value in cfg.grpo.extra.items():
        yield from _extra_field(f"grpo.extra.{name}", value, kind="GRPOConfig")
        if name in cfg.train.extra:
            what = "is given in train.extra too"
            yield Problem((f"grpo.extra.{name}", f"train.extra.{name}"), what, fix="keep one of the two")


def _extra_field(key: str, value: object, *, kind: str) -> Iterator[Problem]:
    from sftplay.config.other_kits import config_fields, kit_answer, unfit

    name, draws = key.rpartition(".")[2], kind == "GRPOConfig"
    fields = config_fields(kind)
    if answer := kit_answer(name, draws=draws):
        yield Problem((key,), answer.what, fix=answer.fix, nearest=(answer.key,) if answer.key else ())
    elif fields is not None and name not in fields:
        near = [known for known in nearest_names(name, sorted(fields)) if not kit_answer(known, draws=draws)]
        fix = f"did you mean {near[0]!r}?" if near else f"remove it; see the fields of trl.{kind}"
        yield Problem((key,), f"TRL's {kind} has no field {name!r}", fix=fix, nearest=tuple(near))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem((key,), f"{flow(value)} is no number to train with", fix="write a finite number")
    elif wanted := unfit(kind, name, value=value):
        yield Problem((key,), f"{flow(value)} is not {wanted}", fix=f"write {wanted}")


def _lists(cfg: RunConfig) -> Iterator[Problem]:
    backend, lora = cfg.logging.backend, cfg.tuning.lora
    if backend == []:
        yield Problem(("logging.backend",), "the list is empty", fix="write logging.backend: none")
    if lora.target_modules == [] and cfg.tuning.mode != "full":
        what = "the list is empty, so no adapter would train"
        yield Problem(("tuning.lora.target_modules",), what, fix="write auto, or name modules")
    both = set(lora.target_modules) & set(lora.modules_to_save) if isinstance(lora.target_modules, list) else set()
    if both:
        what = f"{', '.join(sorted(both))} is also in tuning.lora.modules_to_save"
        keys = ("tuning.lora.target_modules", "tuning.lora.modules_to_save")
        yield Problem(keys, what, fix="keep it in one of the two lists")
    for key in ("logging.backend", "eval.metrics"):
        values = cfg.get_value(key)
        if isinstance(values, list) and (twice := sorted({value for value in values if values.count(value) > 1})):
            yield Problem((key,), f"{', '.join(twice)} is listed twice", fix="list it once")


COUNT, PATH = "tuning.new_tokens.count", "tuning.new_tokens.path"
KEYS = (COUNT, PATH)


def broken_new_token_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Two sources of terms, and settings under which the rows of new tokens would not train."""
    wanted = cfg.tuning.new_tokens
    if not wanted.is_on:
        return
    if wanted.count and wanted.path is not None:
        what = f"{wanted.count} terms are to be found, but {PATH} lists them"
        yield Problem(KEYS, what, fix="keep one of the two")
    if cfg.model.adapter is not None and not cfg.model.merge_adapter:
        what = "an adapter that is continued has no rows for new tokens"
        fix = "write model.merge_adapter: true, which trains a new adapter, or remove tuning.new_tokens"
        yield Problem((*_given(cfg), "model.adapter"), what, fix=fix)
    if not cfg.tuning.trains_single_rows:
        return
    if cfg.cluster.strategy in SPLIT_WEIGHTS:
        what = (
            f"the rows of new tokens train where each process has the whole matrix, which {cfg.cluster.strategy} splits"
        )
        fix = "write cluster.strategy: ddp or zero2, or tuning.mode: full"
        yield Problem(("cluster.strategy", *_given(cfg)), what, fix=fix)
    if cfg.train.loss_head == "liger":
        what = "liger was not tried with rows of new tokens, which PEFT puts into the head's weight at each step"
        yield Problem(("train.loss_head", *_given(cfg)), what, fix="write train.loss_head: chunked")


def idle_new_token_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    wanted, key = cfg.tuning.new_tokens, "tuning.new_tokens.min_count"
    if wanted.path is not None:
        yield key, PATH, f"{PATH} lists the terms"
    elif not wanted.count:
        yield key, COUNT, f"{COUNT} 0 finds no terms"


def _given(cfg: RunConfig) -> tuple[str, ...]:
    return (COUNT,) if cfg.tuning.new_tokens.count else (PATH,)


_CHOICES = {"train.resume": ("never", "auto"), "data.template": ("auto", "chatml")}
"""Key -> the words it takes besides a path. A near miss of a word would be taken for a path."""


def broken_text_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Every rule that a text of the config breaks."""
    yield from _characters(cfg)
    yield from _texts(cfg)
    yield from _homes(cfg)
    yield from _twins(cfg)


def _characters(cfg: RunConfig) -> Iterator[Problem]:
    """No path, name or text can hold a NUL or half of a character: files, processes and tokenizers refuse both."""
    for key, _ in keys_in(cfg):
        for place, text in _texts_in(cfg.get_value(key), key):
            if "\0" in text:
                yield Problem((place,), "holds a NUL character", fix="remove it")
            elif not _is_unicode(text):
                yield Problem((place,), f"{text!r} is not valid Unicode", fix="write it as UTF-8")
            elif key != "data.system" and is_overlong(text):
                yield Problem((place,), f"is longer than any name or path: {len(text):,} characters", fix="shorten it")


def _texts_in(value: object, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts_in(inner, key)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts_in(inner, f"{key}.{name}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _texts(cfg: RunConfig) -> Iterator[Problem]:
    name = cfg.run_name if cfg.run_name and _is_unicode(cfg.run_name) else None
    if name is not None and (name in (".", "..") or "/" in name or "\\" in name or not name.isprintable()):
        what = f"{name!r} is a path, not a name of a folder" if name.isprintable() else f"{name!r} is no folder's name"
        yield Problem(("run_name",), what, fix="write a plain name; output_dir says where run folders go")
    if name == "latest":
        yield Problem(("run_name",), "'latest' always points at the newest run", fix="choose another name")
    if name == ".set-aside":
        yield Problem(("run_name",), "'.set-aside' keeps starts that made no step", fix="choose another name")
    for key, field in keys_in(cfg):
        value = cfg.get_value(key)
        if isinstance(value, str) and not value.strip() and key != "data.delimiter":
            yield Problem((key,), "is empty", fix="give it a value, or leave the key out")
        elif isinstance(value, str) and value in ("None", "none") and field.default is None:
            yield Problem((key,), f"{value!r} is a word in YAML, not nothing", fix="write null, or leave the key out")
    for key, words in _CHOICES.items():
        value = cfg.get_value(key)
        near = nearest_names(value, words) if value not in words and not set("/.") & set(value) else []
        if near:
            fix = f"did you mean {near[0]!r}? A path of that name is written ./{value}"
            yield Problem((key,), f"{value!r} is neither {' nor '.join(words)}", fix=fix, nearest=tuple(near))


def _homes(cfg: RunConfig) -> Iterator[Problem]:
    for key in path_keys(cfg):
        value = cfg.get_value(key)
        if isinstance(value, str) and value.startswith("~"):
            what = f"{value!r}: this machine knows no home folder of {value.partition('/')[0]}"
            yield Problem((key,), what, fix=f"write the whole path, or ./{value} for a folder of that very name")


def _twins(cfg: RunConfig) -> Iterator[Problem]:
    """Entries of a list (`datasets`, `rewards`) that are named like one before them."""
    for outer in list_keys():
        first: dict[str, int] = {}
        for number, entry in enumerate(cfg.get_value(outer)):
            if first.setdefault(entry.name, number) != number:
                key, other = f"{outer}.{number}.name", f"{outer}.{first[entry.name]}.name"
                yield Problem((key, other), f"{entry.name!r} is the name of {other} too", fix="give each its own name")


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    broken_text_rules,
    _batch_is_exact,
    _token_batches,
    _held_out_rules,
    _saves_where_it_evaluates,
    _lists,
    _limits,
    _static_graph,
    _rate_scaling,
    _schedule,
    _extra,
    broken_data_rules,
    broken_reward_rules,
    broken_cpt_rules,
    _task_rules,
    broken_new_token_rules,
    broken_cluster_rules,
)
