"""Rules between fields: combinations that are refused, and settings that have no effect.

Single values are the schema's business. Nothing here looks at the machine: whether a batch fits is for `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sftplay.config.explain.other_kits import kit_answer
from sftplay.config.explain.trl_arguments import sft_config_fields
from sftplay.config.rules.cluster import broken_cluster_rules
from sftplay.config.rules.data import broken_data_rules, idle_data_keys
from sftplay.config.rules.violation import Violation
from sftplay.config.schema.keys import all_keys
from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError, nearest_names
from sftplay.units import parse_seconds

# Keys that take these words or a path: a near miss of a word would be taken for a path.
_WORDS = {"train.resume": ("never", "auto"), "data.template": ("auto", "chatml")}


def check_rules(cfg: RunConfig) -> list[ConfigError]:
    """Every rule the config breaks, each with the place of the value that is easiest to change."""
    return [finding.as_error(cfg) for finding in broken_rules(cfg)]


def broken_rules(cfg: RunConfig) -> list[Violation]:
    """The same as findings that name all the keys they looked at."""
    return [finding for rule in _RULES for finding in rule(cfg)]


def notes(cfg: RunConfig) -> list[str]:
    """One line for each setting that was written down and has no effect in this run.

    A value that a file merely includes is not reported: a shared base file may say more than one run needs. Nor is
    anything in a resolved file, which writes down every key.
    """
    origins = cfg.origins
    if set(origins) >= set(all_keys()):
        return []
    lines = []
    for key, decider, reason in _without_effect(cfg):
        if key in origins and _decided_knowingly(origins[key], origins.get(decider)):
            lines.append(f"{origins[key]} {key} has no effect: {reason}")
    return lines


def _decided_knowingly(origin: str, decider: str | None) -> bool:
    return decider is None or origin == "command line" or origin.rsplit(":", 1)[0] == decider.rsplit(":", 1)[0]


def _without_effect(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    mode = cfg.tuning.mode
    for key in all_keys():
        if key.startswith("tuning.lora.") and mode == "full":
            yield key, "tuning.mode", "tuning.mode full trains no adapter"
        if key in ("tuning.quant_type", "tuning.double_quant") and mode != "qlora":
            yield key, "tuning.mode", f"tuning.mode {mode} holds no weights in 4 bits"
    if mode == "full" and cfg.tuning.backend != "unsloth":
        yield "tuning.backend", "tuning.mode", "tuning.mode full has neither an adapter nor weights in 4 bits"
    if cfg.train.max_steps is not None:
        yield "train.epochs", "train.max_steps", f"train.max_steps {cfg.train.max_steps} ends the run"
    yield from idle_data_keys(cfg.data)
    if cfg.train.lr_scheduler == "constant":
        yield "train.warmup_ratio", "train.lr_scheduler", "the schedule constant has no warm-up"
    for key in _idle_comm_keys(cfg):
        yield key, key, "a single process exchanges no gradients"
    if cfg.train.profile.steps == 0:
        for key in ("train.profile.start", "train.profile.memory"):
            yield key, "train.profile.steps", "train.profile.steps 0 profiles nothing"


def _idle_comm_keys(cfg: RunConfig) -> list[str]:
    """Keys of traffic between processes, where the sizes say that there is only one; none while a size is `auto`."""
    train = cfg.train
    sizes = (train.batch_size, train.grad_accum)
    whole = [size for size in sizes if isinstance(size, int)]
    alone = len(whole) == len(sizes) and whole[0] * whole[1] == train.effective_batch_size
    return [key for key in all_keys() if key.startswith(("cluster.comm.", "cluster.nccl."))] if alone else []


def _static_graph(cfg: RunConfig) -> Iterator[Violation]:
    key, train = "cluster.comm.static_graph", cfg.train
    if not cfg.cluster.comm.static_graph:
        return
    # Under no_sync, which every piece but the last is run in, torch 2.13 ends in an assertion of its own (reducer.cpp).
    if train.grad_accum != 1:
        what = f"needs every step in one piece, but train.grad_accum is {train.grad_accum}"
        yield Violation((key, "train.grad_accum"), what, "write train.grad_accum: 1, or remove it")
    if train.oom_recovery:
        what = "needs every step in one piece, but train.oom_recovery cuts smaller ones where memory runs out"
        yield Violation((key, "train.oom_recovery"), what, "write train.oom_recovery: false, or remove it")


def _rate_scaling(cfg: RunConfig) -> Iterator[Violation]:
    train = cfg.train
    scaling, found_with = "train.lr_scaling", "train.lr_batch_size"
    if train.lr_scaling == "none":
        if train.lr_batch_size is not None:
            what = f"{train.lr_batch_size} is given, but {scaling} none scales nothing"
            yield Violation((found_with, scaling), what, f"write {scaling}: linear or sqrt, or remove {found_with}")
        return
    if train.lr_batch_size is None:
        what = f"{train.lr_scaling} needs the effective batch that train.learning_rate was found with"
        yield Violation((scaling, found_with), what, f"give {found_with}, or remove {scaling}")
    if train.learning_rate == "auto":
        what = f"{train.lr_scaling} scales a rate that you have found, but train.learning_rate is auto"
        yield Violation((scaling, "train.learning_rate"), what, f"give train.learning_rate, or remove {scaling}")


def _held_out(cfg: RunConfig) -> Iterator[Violation]:
    data, train = cfg.data, cfg.train
    if data.val_path is not None and data.split is not None:
        what = f"{data.split:g} is given, but data.val_path names the held-out rows already"
        yield Violation(("data.split", "data.val_path"), what, "remove one of the two")
    if data.val_path is not None or data.split != 0:
        return
    wanting: dict[str, Any] = {
        "train.best_metric": train.best_metric,
        "train.early_stopping": train.early_stopping,
        "train.eval_steps": train.eval_steps,
        "eval.before": cfg.eval.before,
        "eval.after": cfg.eval.after,
    }
    for key, value in wanting.items():
        if value:
            what = "needs held-out rows, but data.split is 0 and there is no data.val_path"
            fix = "give data.val_path, or a data.split above 0"
            yield Violation((key, "data.split", "data.val_path"), what, fix)


def _saves_where_it_evaluates(cfg: RunConfig) -> Iterator[Violation]:
    train = cfg.train
    if train.best_metric is None and train.early_stopping is None:
        return
    if train.save_steps is None or train.eval_steps is None or train.save_steps % train.eval_steps == 0:
        return
    key = "train.best_metric" if train.best_metric else "train.early_stopping"
    below = train.save_steps // train.eval_steps * train.eval_steps
    choices = [str(steps) for steps in (below, below + train.eval_steps) if steps]
    what = f"{train.save_steps} is no multiple of train.eval_steps {train.eval_steps}, which {key} needs"
    yield Violation(("train.save_steps", "train.eval_steps", key), what, f"write {' or '.join(choices)}")


def _batch_is_exact(cfg: RunConfig) -> Iterator[Violation]:
    train, effective = cfg.train, cfg.train.effective_batch_size
    keys = ("train.batch_size", "train.grad_accum", "train.effective_batch_size")
    if isinstance(train.batch_size, int) and isinstance(train.grad_accum, int):
        product = train.batch_size * train.grad_accum
        if effective % product:
            near = [size for size in (effective // product * product, (effective // product + 1) * product) if size]
            near = near if len(near) == 2 else [product, 2 * product]
            what = (
                f"{train.batch_size} * grad_accum {train.grad_accum} = {product} does not divide {keys[2]} {effective}"
            )
            yield Violation(keys, what, f"write {keys[2]}: {near[0]} or {near[1]}")
        return
    for key, value in zip(keys[:2], (train.batch_size, train.grad_accum), strict=True):
        if isinstance(value, int) and effective % value:
            divisors = [size for size in range(1, effective + 1) if effective % size == 0]
            around = [max(d for d in divisors if d < value), *[d for d in divisors if d > value][:1]]
            what = f"{value} does not divide {keys[2]} {effective}"
            yield Violation((key, keys[2]), what, f"write {' or '.join(map(str, around))}")


def _token_batches(cfg: RunConfig) -> Iterator[Violation]:
    train = cfg.train
    if train.batching == "tokens" and train.packing is True:
        what = "tokens forms pieces of padded rows, but train.packing true leaves no padding to save"
        yield Violation(("train.batching", "train.packing"), what, "keep one of the two")


def _limits(cfg: RunConfig) -> Iterator[Violation]:
    train, profile = cfg.train, cfg.train.profile
    if train.time_limit is not None:
        try:
            parse_seconds(str(train.time_limit))
        except ValueError as error:
            yield Violation(
                ("train.time_limit",), str(error).partition(" (")[0], "write 3h30m, 90m, 1-12:00:00 or 5400"
            )
    if profile.steps and train.max_steps is not None and profile.start > train.max_steps:
        what = f"{profile.start} lies behind train.max_steps {train.max_steps}, so nothing would be profiled"
        keys = ("train.profile.start", "train.profile.steps", "train.max_steps")
        yield Violation(keys, what, f"start at step {train.max_steps} or before")


def _extra(cfg: RunConfig) -> Iterator[Violation]:
    fields = sft_config_fields() if cfg.train.extra else None
    for name in cfg.train.extra:
        key = f"train.extra.{name}"
        if answer := kit_answer(name):
            yield Violation((key,), answer.what, answer.fix, (answer.key,) if answer.key else ())
        elif fields is not None and name not in fields:
            near = [known for known in nearest_names(name, sorted(fields)) if not kit_answer(known)]
            fix = f"did you mean {near[0]!r}?" if near else "remove it; see the fields of trl.SFTConfig"
            yield Violation((key,), f"TRL's SFTConfig has no field {name!r}", fix, tuple(near))


def _names(cfg: RunConfig) -> Iterator[Violation]:
    name = cfg.run_name
    if name is not None and (name in (".", "..") or "/" in name or "\\" in name or not name.isprintable()):
        what = f"{name!r} is a path, not a name of a folder" if name.isprintable() else f"{name!r} is no folder's name"
        yield Violation(("run_name",), what, "write a plain name; output_dir says where run folders go")
    if name == "latest":
        yield Violation(("run_name",), "'latest' always points at the newest run", "choose another name")
    for key, field in all_keys().items():
        value = _value(cfg, key)
        if isinstance(value, str) and not value.strip() and key != "data.delimiter":
            yield Violation((key,), "is empty", "give it a value, or leave the key out")
        elif isinstance(value, str) and value in ("None", "none") and field.default is None:
            yield Violation((key,), f"{value!r} is a word in YAML, not nothing", "write null, or leave the key out")
    for key, words in _WORDS.items():
        value = _value(cfg, key)
        near = nearest_names(value, words) if value not in words and not set("/.") & set(value) else []
        if near:
            fix = f"did you mean {near[0]!r}? A path of that name is written ./{value}"
            yield Violation((key,), f"{value!r} is neither {' nor '.join(words)}", fix, tuple(near))


def _lists(cfg: RunConfig) -> Iterator[Violation]:
    backend, lora = cfg.logging.backend, cfg.tuning.lora
    if backend == []:
        yield Violation(("logging.backend",), "the list is empty", "write logging.backend: none")
    if lora.target_modules == [] and cfg.tuning.mode != "full":
        what = "the list is empty, so no adapter would train"
        yield Violation(("tuning.lora.target_modules",), what, "write auto, or name modules")
    both = set(lora.target_modules) & set(lora.modules_to_save) if isinstance(lora.target_modules, list) else set()
    if both:
        what = f"{', '.join(sorted(both))} is also in tuning.lora.modules_to_save"
        keys = ("tuning.lora.target_modules", "tuning.lora.modules_to_save")
        yield Violation(keys, what, "keep it in one of the two lists")
    lists: dict[str, Any] = {"logging.backend": backend, "eval.metrics": cfg.eval.metrics}
    for key, values in lists.items():
        twice = sorted({value for value in values if values.count(value) > 1}) if isinstance(values, list) else []
        if twice:
            yield Violation((key,), f"{', '.join(twice)} is listed twice", "list it once")


def _value(cfg: RunConfig, dotted: str) -> Any:
    value: Any = cfg
    for name in dotted.split("."):
        value = getattr(value, name)
    return value


_RULES: tuple[Callable[[RunConfig], Iterator[Violation]], ...] = (
    _names,
    _batch_is_exact,
    _token_batches,
    _held_out,
    _saves_where_it_evaluates,
    _lists,
    _limits,
    _static_graph,
    _rate_scaling,
    _extra,
    broken_data_rules,
    broken_cluster_rules,
)
