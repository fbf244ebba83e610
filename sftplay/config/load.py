"""YAML files and overrides to a checked `RunConfig`, which knows where values were written; the rules between keys.

Precedence: command line > file > include > default. All problems are reported at once, in the order of the files. The
rules look at no machine: whether a batch fits is for `plan`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from sftplay.config.cluster import SPLIT_WEIGHTS, broken_cluster_rules
from sftplay.config.data import (
    broken_cpt_rules,
    broken_data_rules,
    broken_reward_rules,
    has_held_out,
    idle_cpt_keys,
    idle_data_keys,
    idle_reward_keys,
    needs_train_path,
)
from sftplay.config.keys import (
    all_keys,
    all_sections,
    find_entry_section,
    find_section,
    general_key,
    keys_in,
    list_keys,
    path_keys,
    required_below,
)
from sftplay.config.layers import (
    NO_PRETRAINED,
    Layer,
    LocatedProblem,
    SourceLocation,
    is_overlong,
    is_written_by_kit,
    merge,
    nested,
    read_layers,
    read_overrides,
    resolve_precision,
    resolve_task_mode,
    walk,
)
from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, Section, find_spec
from sftplay.errors import ConfigError, ConfigErrors, nearest_names
from sftplay.tasks import TASKS
from sftplay.units import parse_seconds

TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")


def load_config(path: str | Path, overrides: Sequence[str] = (), *, above: Sequence[Layer] = ()) -> RunConfig:
    """Load the config in a YAML file, laid over what it includes, with `a.b=c` texts laid over both, and the layers
    `above` over all.

    Of two overrides of one key the later one counts. Paths in messages and origins are as the user typed them, those of
    includes relative to the current folder. In a run's folder renamed keys are read by their new names.

    Raises:
        ConfigError: a file that cannot be read or is not YAML.
        ConfigErrors: everything else that is wrong with it, all at once.
    """
    cfg, problems = examine_config(path, overrides, above=above)
    if problems:
        raise ConfigErrors(problems)
    assert cfg is not None
    return cfg


def examine_config(
    path: str | Path, overrides: Sequence[str] = (), *, above: Sequence[Layer] = ()
) -> tuple[RunConfig | None, list[ConfigError]]:
    """Return everything that is wrong with a config, and the config with defaults instead of what was refused; None
    where nothing sensible is left. `origins` names only what was accepted.

    Raises:
        ConfigError: a file that cannot be read or is not YAML.
    """
    override_layer, problems = read_overrides(overrides)
    *included, written = read_layers(path)
    if is_written_by_kit(Path(path)):
        from sftplay.config.resolved import with_new_names

        written = with_new_names(written)
    layers, contradictions = resolve_precision([*included, written, override_layer, *above])
    problems += contradictions
    merged = merge(resolve_task_mode(layers))
    merged = Layer(_with_empty_sections(merged.values, RunConfig), merged.locations)
    for at, value in walk(merged.values):
        if isinstance(value, str) and TOKEN.search(value):  # run folder, report and export would repeat it
            location = merged.find_location(at) or SourceLocation(0, 0, "")
            what, fix = "holds a token of the Hugging Face hub", "remove it, and set HF_TOKEN in the environment"
            where = f"{location} {'.'.join(map(str, at))}"
            problems.append(LocatedProblem(location, ConfigError(what, where=where, fix=fix)))
    cfg: RunConfig | None
    try:
        cfg = RunConfig.model_validate(merged.values)
    except ValidationError as error:
        from sftplay.config.problems import translated

        problems += translated(error, merged, file=os.fspath(path))
        cfg = _without_refused(merged.values, error)
    if cfg is not None:
        cfg = cfg.with_origins(_origins(merged))
        if needs_train_path(cfg) and "data.train_path" not in offending_keys(problems):
            from sftplay.config.problems import missing_key

            problems.append(missing_key("data.train_path", merged, file=os.fspath(path)))
        # Rules look only at values which are right in themselves.
        offending = offending_keys(problems)
        for broken in (problem for problem in broken_rules(cfg) if offending.isdisjoint(problem.keys)):
            location = merged.find_location(tuple(broken.key_in(cfg).split("."))) or SourceLocation(0, 0, "")
            problems.append(LocatedProblem(location, broken.as_error(cfg)))
        offending = offending_keys(problems)
        cfg = cfg.with_origins({key: location for key, location in cfg.origins.items() if key not in offending})
    return cfg, [problem.error for problem in sorted(problems, key=lambda problem: problem.location)]


def load_resolved(path: Path) -> RunConfig:
    """Load the config in a file that `dump_resolved` wrote, with the origins that its comments name; raises as
    `load_config`."""
    from sftplay.config.resolved import read_origins

    cfg = load_config(path)
    return cfg.with_origins(read_origins(cfg, path.read_text(encoding="utf-8")))


def offending_keys(problems: Iterable[LocatedProblem]) -> set[str]:
    """Return the dotted keys that problems are about, and those that an unknown name may have meant."""
    found: set[str] = set()
    for _, error in problems:
        key = error.where.rpartition(" ")[2]
        found |= {key, *error.nearest, *(outer for outer in list_keys() if key.startswith(f"{outer}."))}
    return found


def _with_empty_sections(values: dict[str, Any], section: type[Section]) -> dict[str, Any]:
    """A section whose keys are all commented out (`train:`) is an empty section, not null."""
    filled = dict(values)
    for key, value in values.items():
        field = section.model_fields.get(key)
        inner = find_section(field) if field else None
        if inner and isinstance(value, dict):
            filled[key] = _with_empty_sections(value, inner)
        elif value is None and field and (inner or get_origin(field.annotation) is dict):
            filled[key] = {}
        elif value is None and field and find_entry_section(field):
            filled[key] = []
    return filled


def _without_refused(values: dict[str, Any], error: ValidationError) -> RunConfig | None:
    """The config without the refused values, so that the rules between the others are checked in the same go."""
    tree = dict(values)
    for refused in error.errors():
        # Inside a list or one form of a union, the whole value of the key is dropped.
        branch = tree
        for part in refused["loc"]:
            inner = branch.get(str(part))
            if not isinstance(inner, dict) or part == refused["loc"][-1]:
                branch.pop(str(part), None)
                break
            branch[str(part)] = branch = dict(inner)
    stand_ins = [Layer(nested(key, "unknown")) for key in required_below("")]
    try:
        return RunConfig.model_validate(merge([*stand_ins, Layer(tree)]).values)
    except ValidationError:
        return None


def _origins(merged: Layer) -> dict[str, str]:
    """Dotted key -> place, of every key that holds a value, of a list's entries too, and of every key below `extra`."""
    origins = {}
    for path, location in merged.locations.items():
        key = ".".join(map(str, path))
        holds_value = key not in all_sections() or key in list_keys()
        is_key = all(isinstance(part, str) for part in path) or general_key(key) in all_keys()
        if holds_value and is_key and isinstance(path[-1], str):
            origins[key] = str(location)
    return origins


def check_rules(cfg: RunConfig) -> list[ConfigError]:
    """Return every rule the config breaks, as an error with the place of the value that is easiest to change."""
    return [problem.as_error(cfg) for problem in broken_rules(cfg)]


def broken_rules(cfg: RunConfig) -> list[Problem]:
    """Return the same as problems, which name all the keys that a rule looked at."""
    return [problem for rule in _RULES for problem in rule(cfg)]


def notes(cfg: RunConfig) -> list[str]:
    """Return a line for each setting that was written down and has no effect in this run.

    A value that a file merely includes is not reported: a shared base file may say more than one run needs. Nothing in
    a resolved file is reported, because it writes down every key.
    """
    origins = cfg.origins
    if set(origins) >= {key for key, _ in keys_in(cfg)}:
        return []
    found = []
    for key, decider, reason in idle_keys(cfg):
        origin, other = origins.get(key), origins.get(decider)
        if origin is not None and (
            other is None or origin == "command line" or origin.rpartition(":")[0] == other.rpartition(":")[0]
        ):
            found.append(f"{origin} {key} has no effect: {reason}")
    return found


def idle_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield each key without effect, the key that takes its effect away, and why."""
    mode, train = cfg.tuning.mode, cfg.train
    # While a size is `auto`, the number of processes is not known.
    sizes = (train.batch_size, train.grad_accum)
    is_alone = "auto" not in sizes and math.prod(map(int, sizes)) == train.effective_batch_size
    for key, _ in keys_in(cfg):
        if key.startswith("tuning.lora.") and mode == "full":
            yield key, "tuning.mode", "tuning.mode full trains no adapter"
        if key in ("tuning.quant_type", "tuning.double_quant") and mode != "qlora":
            yield key, "tuning.mode", f"tuning.mode {mode} holds no weights in 4 bits"
        if key.startswith(("cluster.comm.", "cluster.nccl.")) and is_alone:
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
    absent = {row.section: row.absent for row in TASKS.values() if row.section not in ("", "cpt", cfg.task.section)}
    for key, _ in keys_in(cfg):
        if why := absent.get(key.partition(".")[0]):
            yield key, "task_mode", f"task_mode {cfg.task_mode} {why}"
    yield from find_spec(cfg).idle_keys(cfg)
    yield from idle_reward_keys(cfg)


def _task_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Rules of the task itself, and values that only another task takes."""
    yield from find_spec(cfg).broken_rules(cfg)
    if cfg.train.best_metric == "acc_t2" and cfg.task.best_metrics == ("loss",):
        what = f"acc_t2 counts right second answers, and task_mode {cfg.task_mode} plays no episodes"
        yield Problem(("train.best_metric", "task_mode"), what, fix="write train.best_metric: loss")
    if cfg.task.reads_text and cfg.model.name == NO_PRETRAINED:
        what = f"{NO_PRETRAINED} is the model of task mode hrm, and the task is {cfg.task_mode}"
        yield Problem(("model.name", "task_mode"), what, fix="name another model, or write task_mode: hrm")


def _schedule(cfg: RunConfig) -> Iterator[Problem]:
    """The peak rate and what follows it."""
    train, scheduler = cfg.train, "train.lr_scheduler"
    scaling, found_with = "train.lr_scaling", "train.lr_batch_size"
    if train.lr_scaling == "none" and train.lr_batch_size is not None:
        what = f"{train.lr_batch_size} is given, but {scaling} none scales nothing"
        yield Problem((found_with, scaling), what, fix=f"write {scaling}: linear or sqrt, or remove {found_with}")
    if train.lr_scaling != "none" and train.lr_batch_size is None:
        what = f"{train.lr_scaling} needs the effective batch that train.learning_rate was found with"
        yield Problem((scaling, found_with), what, fix=f"give {found_with}, or remove {scaling}")
    if train.lr_scaling != "none" and train.learning_rate == "auto":
        what = f"{train.lr_scaling} scales a rate that you have found, but train.learning_rate is auto"
        yield Problem((scaling, "train.learning_rate"), what, fix=f"give train.learning_rate, or remove {scaling}")
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
    data, train = cfg.data, cfg.train
    if data.val_path is not None and data.split is not None:
        what = f"{data.split:g} is given, but data.val_path names the held-out rows already"
        yield Problem(("data.split", "data.val_path"), what, fix="remove one of the two")
    holds_out = data.val_path is not None or (has_held_out(cfg) if cfg.datasets else data.split != 0)
    if not holds_out and not cfg.task.measures_training_rows:
        for key in ("train.best_metric", "train.early_stopping", "train.eval_steps", "eval.before", "eval.after"):
            if cfg.get_value(key):
                what = "needs held-out rows, but data.split is 0 and there is no data.val_path"
                fix = "give data.val_path, or a data.split above 0"
                yield Problem((key, "data.split", "data.val_path"), what, fix=fix)
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


def _limits(cfg: RunConfig) -> Iterator[Problem]:
    train, profile, key = cfg.train, cfg.train.profile, "cluster.comm.static_graph"
    # Every micro-batch but the last runs under no_sync, where torch 2.13 fails an assertion of its own (reducer.cpp).
    if cfg.cluster.comm.static_graph and train.grad_accum != 1:
        what = f"needs every step in one micro-batch, but train.grad_accum is {train.grad_accum}"
        yield Problem((key, "train.grad_accum"), what, fix="write train.grad_accum: 1, or remove it")
    if cfg.cluster.comm.static_graph and train.oom_recovery:
        what = "needs every step in one micro-batch, but train.oom_recovery makes smaller ones when memory runs out"
        yield Problem((key, "train.oom_recovery"), what, fix="write train.oom_recovery: false, or remove it")
    if train.batching == "tokens" and train.packing is True:
        what = "tokens forms micro-batches of padded rows, but train.packing true leaves no padding to save"
        yield Problem(("train.batching", "train.packing"), what, fix="keep one of the two")
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
        yield from _extra_field(f"train.extra.{name}", value, kind=cfg.task.trl_config, section=cfg.task.section)
    for name, value in cfg.grpo.extra.items():
        yield from _extra_field(f"grpo.extra.{name}", value, kind="GRPOConfig")
        if name in cfg.train.extra:
            what = "is given in train.extra too"
            yield Problem((f"grpo.extra.{name}", f"train.extra.{name}"), what, fix="keep one of the two")


def _extra_field(key: str, value: object, *, kind: str, section: str = "") -> Iterator[Problem]:
    from sftplay.config.other_kits import config_fields, describe_config, kit_answer, unfit
    from sftplay.config.resolved import flow

    name, samples = key.rpartition(".")[2], kind == "GRPOConfig"
    fields = config_fields(kind)
    if answer := kit_answer(name, samples=samples, section=section):
        yield Problem((key,), answer.what, fix=answer.fix, nearest=(answer.key,) if answer.key else ())
    elif fields is not None and name not in fields:
        near = [known for known in nearest_names(name, sorted(fields)) if not kit_answer(known, samples=samples)]
        fix = f"did you mean {near[0]!r}?" if near else f"remove it; see the fields of {kind}"
        yield Problem((key,), f"{describe_config(kind)} has no field {name!r}", fix=fix, nearest=tuple(near))
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
    for outer in list_keys():
        first: dict[str, int] = {}
        for number, entry in enumerate(cfg.get_value(outer)):
            if first.setdefault(entry.name, number) != number:
                key, other = f"{outer}.{number}.name", f"{outer}.{first[entry.name]}.name"
                yield Problem((key, other), f"{entry.name!r} is the name of {other} too", fix="give each its own name")


def _new_tokens(cfg: RunConfig) -> Iterator[Problem]:
    """Settings under which the rows of new tokens would not train."""
    if not cfg.tuning.new_tokens.is_on:
        return
    given = "tuning.new_tokens.path"
    if cfg.model.adapter is not None and not cfg.model.merge_adapter:
        what = "an adapter that is continued has no rows for new tokens"
        fix = "write model.merge_adapter: true, which trains a new adapter, or remove tuning.new_tokens"
        yield Problem((given, "model.adapter"), what, fix=fix)
    if not cfg.tuning.trains_single_rows:
        return
    if (strategy := cfg.cluster.strategy) in SPLIT_WEIGHTS:
        what = f"the rows of new tokens train where each process has the whole matrix, which {strategy} splits"
        fix = "write cluster.strategy: ddp or zero2, or tuning.mode: full"
        yield Problem(("cluster.strategy", given), what, fix=fix)
    if cfg.train.loss_head == "liger":
        what = "liger was not tried with rows of new tokens, which PEFT puts into the head's weight at each step"
        yield Problem(("train.loss_head", given), what, fix="write train.loss_head: chunked")


_CHOICES = {"train.resume": ("never", "auto"), "data.template": ("auto", "chatml")}
"""Key -> the words it takes besides a path. A near miss of a word would be taken for a path."""


def _characters(cfg: RunConfig) -> Iterator[Problem]:
    """No path, name or text can hold a NUL or half of a character: files, processes and tokenizers refuse both."""
    for key, _ in keys_in(cfg):
        texts = [pair for pair in walk(cfg.get_value(key)) if isinstance(pair[1], str)]
        for path, text in texts:
            place = ".".join([key, *(part for part in path if isinstance(part, str))])
            if "\0" in text:
                yield Problem((place,), "holds a NUL character", fix="remove it")
            elif not _is_unicode(text):
                yield Problem((place,), f"{text!r} is not valid Unicode", fix="write it as UTF-8")
            elif key != "data.system" and is_overlong(text):
                yield Problem((place,), f"is longer than any name or path: {len(text):,} characters", fix="shorten it")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


TAKEN_NAMES = {
    "latest": "always points at the newest run",
    ".set-aside": "keeps starts that made no step",
    "sweeps": "keeps sweeps",
}
"""What else stands in an output_dir, and what for."""


def _texts(cfg: RunConfig) -> Iterator[Problem]:
    name = cfg.run_name if cfg.run_name and _is_unicode(cfg.run_name) else None
    if name is not None and (name in (".", "..") or "/" in name or "\\" in name or not name.isprintable()):
        what = f"{name!r} is a path, not a name of a folder" if name.isprintable() else f"{name!r} is no folder's name"
        yield Problem(("run_name",), what, fix="write a plain name; output_dir says where run folders go")
    if name in TAKEN_NAMES:
        yield Problem(("run_name",), f"{name!r} {TAKEN_NAMES[name]}", fix="choose another name")
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
    for key in path_keys(cfg):
        value = cfg.get_value(key)
        if isinstance(value, str) and value.startswith("~"):
            what = f"{value!r}: this machine knows no home folder of {value.partition('/')[0]}"
            yield Problem((key,), what, fix=f"write the whole path, or ./{value} for a folder of that very name")


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _characters,
    _texts,
    _batch_is_exact,
    _held_out_rules,
    _lists,
    _limits,
    _schedule,
    _extra,
    broken_data_rules,
    broken_reward_rules,
    broken_cpt_rules,
    _task_rules,
    _new_tokens,
    broken_cluster_rules,
)
