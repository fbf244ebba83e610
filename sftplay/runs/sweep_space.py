"""The space of a sweep: which config keys vary and over which values, from GRID= or a YAML file; and its points."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from sftplay.config import layers
from sftplay.config.keys import all_keys, all_sections, general_key, node_at
from sftplay.config.layers import KeyPath, Layer, SourceLocation
from sftplay.config.load import broken_rules, examine_config
from sftplay.config.manual import accepts
from sftplay.config.resolved import flow
from sftplay.config.run import RunConfig
from sftplay.config.section import Positive, Section
from sftplay.errors import ConfigError, ConfigErrors, nearest_names
from sftplay.report.figures import find_name, format_figure, is_less_better

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

GRID = "GRID"
MOST_POINTS = 10_000
_RANK = 2_000_000  # of the places of swept values, behind those of the command line

FIXED = {
    "run_name": "each trial's run has a name of its own",
    "output_dir": "all runs of a sweep lie in one folder",
    "train.resume": "a trial continues from its own checkpoints",
    "task_mode": "figures of different tasks do not compare",
}
"""Keys that cannot be swept -> why."""

RANDOM_TRIALS = 10
"""So many trials of sampler tpe are random before it models the figures (optuna's own default)."""


class Range(Section):
    """The numbers from low to high, both included."""

    low: int | float
    high: int | float
    log: bool = False  # uniform by the logarithm
    step: int | float | None = None  # only low, low + step, ...


class SpaceFile(Section):
    """The YAML of `SPACE=`."""

    sampler: Literal["grid", "random", "tpe"] = "tpe"
    trials: Positive | None = None
    metric: str | None = None
    halving: Annotated[int, Field(ge=2, le=9)] | None = None
    values: dict[str, Any] = Field(min_length=1)


@dataclass(frozen=True)
class Axis:
    """One config key and its values: `choices`, or the numbers of `span`."""

    key: str
    location: SourceLocation
    choices: tuple[Any, ...] = ()
    span: Range | None = None

    def layer(self, value: Any) -> Layer:
        """Return the layer of a config that sets the key."""
        path = tuple(self.key.split("."))
        places = {inner: self.location for inner, _ in layers.walk(value, path)}
        return Layer(layers.nested(self.key, value), places)

    @property
    def is_whole(self) -> bool:
        """Whether a range has whole numbers only, as the config types the key."""
        if self.span is None or general_key(self.key) not in all_keys():  # TRL's own arguments, below `extra`
            return self.span is not None and isinstance(self.span.low, int) and isinstance(self.span.high, int)
        return not accepts(node_at(self.key), "number")

    def distribution(self) -> BaseDistribution:
        """Return it for optuna. A choice is a text, as YAML writes it on one line: optuna stores no lists."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.span is None:
            return CategoricalDistribution([flow(value) for value in self.choices])
        low, high, log, step = self.span.low, self.span.high, self.span.log, self.span.step
        if self.is_whole:
            return IntDistribution(int(low), int(high), log=log, step=int(step or 1))
        return FloatDistribution(float(low), float(high), log=log, step=None if step is None else float(step))

    def decode(self, value: Any) -> Any:
        """Return the value for the config of what `distribution` takes for it."""
        return value if self.span else next(choice for choice in self.choices if flow(choice) == value)

    def as_json(self) -> Any:
        return [*self.choices] if self.span is None else self.span.model_dump()


@dataclass(frozen=True)
class Space:
    """What is tried: the axes, how their points are chosen, how many, and by which figure trials compare."""

    axes: tuple[Axis, ...]
    sampler: str
    n_trials: int
    metrics: tuple[str, ...]
    """The figure by which trials compare; of several the first that the evaluations have."""

    halving: int = 0
    """Successive halving keeps one trial in so many at each comparison; 0 trains all to their end."""

    @property
    def is_less_better(self) -> bool:
        """Whether the best trial has the lowest figure."""
        return is_less_better(self.metrics[0])

    def describe(self, figure: object) -> str:
        """Return a figure with its name, for people."""
        name = "held-out loss" if self.metrics[0] == "loss" else find_name(self.metrics[0])
        return f"{name} {format_figure(self.metrics[0], figure)}"

    @property
    def rungs(self) -> list[float]:
        """The shares of a run at which trials are compared, in order: 1/2, 1/4, 1/8 or 1/3, 1/9 of it."""
        if not self.halving:
            return []
        depth = max(1, int(math.log(9, self.halving)))
        return [self.halving**-power for power in range(depth, 0, -1)]

    def cohort(self, number: int) -> range:
        """Return the numbers of the trials that a trial is compared with, itself among them.

        tpe learns from the cohorts before; the values of grid and random are known from the start.
        """
        size = RANDOM_TRIALS if self.halving and self.sampler == "tpe" else self.n_trials
        start = number // size * size
        return range(start, min(start + size, self.n_trials))

    def identity(self) -> dict[str, Any]:
        """Return what two starts of one sweep must have in common, as flat JSON."""
        facts = {"sampler": self.sampler, "halving": self.halving, "metric": self.metrics[0]}
        return facts | {axis.key: axis.as_json() for axis in self.axes}

    def sample(self, number: int, history: Sequence[FrozenTrial], *, seed: int) -> dict[str, Any]:
        """Return the point of trial `number` by key, as `distribution` takes it; the same for the same history.

        Each trial has a sampler with a seed of its own, so that a sweep that was killed goes on as it would have. A
        study in memory asks it, so that the journal gets a trial with all its values or none.
        """
        import optuna

        distributions = {axis.key: axis.distribution() for axis in self.axes}
        if self.sampler == "grid":
            points = itertools.product(*(axis.choices for axis in self.axes))
            point = next(itertools.islice(points, number, None))
            return {axis.key: flow(value) for axis, value in zip(self.axes, point, strict=True)}
        own_seed = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=own_seed)
        if self.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(seed=own_seed, n_startup_trials=RANDOM_TRIALS)
        study = optuna.create_study(direction="minimize" if self.is_less_better else "maximize", sampler=sampler)
        study.add_trials(history)
        params = study.ask(distributions).params
        for axis in self.axes:
            if axis.span and not axis.is_whole:  # so many figures are enough, and can be read
                digits = 4 if axis.span.step is None else 10
                params[axis.key] = min(max(float(f"{params[axis.key]:.{digits}g}"), axis.span.low), axis.span.high)
        return params

    def configure(self, base: RunConfig, params: dict[str, Any], *, run_name: str) -> RunConfig:
        """Return the config of a trial; ConfigErrors where these values do not go together."""
        cfg = base.with_values({"run_name": run_name}, "sweep")
        for axis in self.axes:
            cfg = cfg.with_values({axis.key: axis.decode(params[axis.key])}, str(axis.location))
        if problems := [problem.as_error(cfg) for problem in broken_rules(cfg)]:
            raise ConfigErrors(problems)
        return cfg


def read_space(args: Any, base: RunConfig) -> Space:
    """Return the space that the command line gives for the config `base`, all of it checked.

    Raise ConfigErrors where a key or a value is none of the config's, with the place where it was written.
    """
    if bool(args.grid) == bool(args.space):
        what = "both are given" if args.grid else "neither is given"
        fix = 'write GRID="train.learning_rate=1e-5,1e-4", or SPACE=space.yaml'
        raise ConfigError(what, where="--grid, --space", fix=fix)
    given, axes = _read_grid(args.grid) if args.grid else _read_file(Path(args.space))
    _check(axes, args.config, args.overrides)
    n_trials = given.trials
    if given.sampler == "grid":
        if ranges := [axis for axis in axes if axis.span]:
            where = f"{ranges[0].location} {ranges[0].key}"
            raise ConfigError("a grid has no ranges", where=where, fix="list its values, or write sampler: random")
        n_points = math.prod(len(axis.choices) for axis in axes)
        n_trials = min(n_points, n_trials or n_points)
        if n_trials > MOST_POINTS:
            what = f"the grid has {n_points:,} points; at most {MOST_POINTS:,} are trained"
            raise ConfigError(what, where=args.space or GRID, fix="list fewer values, or write sampler: random")
    if n_trials is None:
        fix = "write trials: 20"
        raise ConfigError(f"required by sampler {given.sampler}, but not given", where=f"{args.space} trials", fix=fix)
    found = [*base.task.best_metrics, *(key for key, _ in base.task.headlines)]
    metrics = [given.metric or base.train.best_metric or ""]
    metrics = metrics if metrics[0] else [*dict.fromkeys(found)] or ["exact_accuracy"]
    halving = args.halving or given.halving or 0
    measured = base.train.eval_steps or (base.train.max_steps is None and base.train.epochs >= 9)
    if halving and not measured and not any(axis.key == "train.eval_steps" for axis in axes):
        what = "is not set, and halving compares trials from an eighth of their steps on"
        fix = "set it to an eighth of the steps, or less"
        raise ConfigError(what, where=f"{args.config} train.eval_steps", fix=fix)
    space = Space(tuple(axes), given.sampler, n_trials, tuple(metrics), halving)
    _check_first_comparison(space, base)
    return space


def _check_first_comparison(space: Space, base: RunConfig) -> None:
    """Raise ConfigError where no evaluation can come as early as the first comparison of halving."""
    steps, every = base.train.max_steps, base.train.eval_steps
    is_swept = any(axis.key in ("train.max_steps", "train.eval_steps") for axis in space.axes)
    first = math.ceil(space.rungs[0] * steps) if steps and space.rungs and not is_swept else 0
    if first and every and every > first:
        what = f"is {every}, and halving compares trials first at step {first} of {steps}"
        where = base.describe_origin("train.eval_steps", unset="")
        raise ConfigError(what, where=where, fix=f"set it to {first} or less")


def _read_grid(text: str) -> tuple[SpaceFile, list[Axis]]:
    axes, problems = [], list[ConfigError]()
    for order, word in enumerate(word for word in _split(text, " \t\n") if word):
        key, sign, values = word.partition("=")
        where, choices = f"{GRID} {key}", []
        for part in _split(values, ","):
            layer, found = layers.read_overrides([f"{key}{sign}{part}"])
            problems += [ConfigError(error.what, where=where, fix=error.fix) for _, error in found]
            if sign and not part.strip():
                problems.append(ConfigError("has an empty value", where=where, fix="write null, or remove the comma"))
            value: Any = layer.values
            for name in key.split(".") if not found else ():
                value = value[name]
            choices.append(value)
        axes.append(Axis(key, SourceLocation(_RANK + order, 0, GRID), tuple(choices)))
    if problems or not axes:
        raise ConfigErrors(problems or [ConfigError("is empty", where=GRID, fix="write key=value,value")])
    return SpaceFile(sampler="grid", values={axis.key: axis.choices for axis in axes}), axes


def _split(text: str, ends: str) -> list[str]:
    """The parts between characters of `ends`; those inside brackets or quotes belong to their part.

    As in YAML, an apostrophe within a word is no quote.
    """
    parts, depth, quote, before = [""], 0, "", ""
    for character in text:
        if quote or (character in "\"'" and before in "=,:[{' \t\n"):
            quote = "" if character == quote else quote or character
        depth = max(0, depth + (character in "[{") - (character in "]}"))
        before = character
        if character in ends and not quote and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _read_file(path: Path) -> tuple[SpaceFile, list[Axis]]:
    document, name = layers.read(path, str(path)), str(path)

    def locate(at: KeyPath) -> SourceLocation:
        line = next((document.lines[at[:end]] for end in range(len(at), 0, -1) if at[:end] in document.lines), 0)
        return SourceLocation(_RANK + line, line, name)

    def refuse(error: ValidationError, above: KeyPath, kind: type[Section]) -> list[ConfigError]:
        problems = []
        for found in error.errors(include_url=False):
            at, what, fix = (*above, *found["loc"]), found["msg"], "write it as docs/sweep.md does"
            near = nearest_names(str(found["loc"][-1]), kind.model_fields) if found["type"] == "extra_forbidden" else []
            if found["type"] == "extra_forbidden":
                what, fix = f"no key called {at[-1]!r}", f"did you mean {near[0]!r}?" if near else fix
            where = f"{locate(at)} {'.'.join(map(str, at))}"
            problems.append(ConfigError(what, where=where, fix=fix, nearest=near))
        return problems

    try:
        given = SpaceFile.model_validate(document.values)
    except ValidationError as error:
        raise ConfigErrors(refuse(error, (), SpaceFile)) from None
    axes, problems = [], list[ConfigError]()
    for key, value in given.values.items():
        location, where = locate(("values", key)), f"{locate(('values', key))} {key}"
        if isinstance(value, list):
            axes.append(Axis(key, location, tuple(value)))
            continue
        if not isinstance(value, dict) or not {"low", "high"} & set(value):
            fix = "write a list of values, or {low: 1e-5, high: 1e-3, log: true}; keys with dots, such as tuning.lora.r"
            problems.append(ConfigError("is neither a list of values nor a range", where=where, fix=fix))
            continue
        try:
            span = Range.model_validate(value)
        except ValidationError as error:
            problems += refuse(error, ("values", key), Range)
            continue
        axes.append(Axis(key, location, span=span))
        if not span.low < span.high:
            what = f"low {span.low:g} is not below high {span.high:g}"
            problems.append(ConfigError(what, where=where, fix="swap them"))
        if span.log and (span.low <= 0 or span.step is not None):
            problems.append(ConfigError("log goes with a low above 0, and without step", where=where, fix="remove log"))
        if span.step is not None and not (span.step > 0 and _divides(span.step, span.high - span.low)):
            what = f"step {span.step:g} does not lead from low {span.low:g} to high {span.high:g}"
            problems.append(ConfigError(what, where=where, fix="choose high = low + n * step"))
    if problems:
        raise ConfigErrors(problems)
    return given, axes


def _divides(step: float, length: float) -> bool:
    return abs(length / step - round(length / step)) < 1e-9


def _check(axes: Sequence[Axis], config: str, overrides: Sequence[str]) -> None:
    """Raise ConfigErrors where a key is none of the config's, or a value is not of its kind.

    Rules between values are left to the trials: a point that breaks one counts as refused.
    """
    problems: dict[str, ConfigError] = {}

    def add(axis: Axis, what: str, fix: str) -> None:
        error = ConfigError(what, where=f"{axis.location} {axis.key}", fix=fix)
        problems.setdefault(str(error), error)

    written = layers.read_overrides(overrides)[0]
    for number, axis in enumerate(axes):
        for what, fix in _find_faults(axis, axes[:number], written=written):
            add(axis, what, fix)
        for value in axis.choices if axis.span is None else (axis.span.low, axis.span.high):
            cfg, found = examine_config(config, overrides, above=[axis.layer(value)])
            here = [problem for problem in found if problem.where.startswith(f"{axis.location} ")]
            taken = _find_value(cfg, axis.key)
            if taken != [value]:
                problems |= {str(problem): problem for problem in here}
            if not taken and not here:
                add(axis, "is no key with a value", "name one of docs/config.md")
    for axis in () if problems else axes:  # the key is one of the config's
        numbers = (axis.span.low, axis.span.high, axis.span.step or 1) if axis.span and axis.is_whole else ()
        if not all(float(number).is_integer() for number in numbers):
            add(axis, "takes whole numbers", "write low, high and step without fractions")
    if problems:
        raise ConfigErrors(list(problems.values()))


def _find_value(cfg: RunConfig | None, key: str) -> list[Any]:
    """The value of the key, in a list that is empty where there is none."""
    try:
        return [] if cfg is None or key in all_sections() else [cfg.get_value(key)]
    except (AttributeError, LookupError, ValueError, TypeError):
        return []


def _find_faults(axis: Axis, before: Sequence[Axis], *, written: Layer) -> Iterator[tuple[str, str]]:
    if why := FIXED.get(axis.key):
        yield f"cannot be swept: {why}", "remove it"
    if any(axis.key == other.key for other in before):
        yield "is given twice", "keep one of the two"
    if written.find_location_within(tuple(axis.key.split("."))):
        yield "is swept, and set on the command line too", "remove one of the two"
    if axis.span is None and not axis.choices:
        yield "has no values", "write at least one"
    texts = [flow(choice) for choice in axis.choices]
    if twice := sorted({text for text in texts if texts.count(text) > 1}):
        yield f"has {twice[0]} twice", "keep one of them"
    if axis.span and general_key(axis.key) in all_keys():
        node = node_at(axis.key)
        if not accepts(node, "number") and not accepts(node, "integer"):
            yield "takes no numbers, and has no range", "write a list of values"
