"""The keys of the config by their dotted names: what sections there are, and what each holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from sftplay.config.run import RunConfig
from sftplay.config.section import WITH_HOME, Section, UserPath
from sftplay.tasks import TASKS


def find_section(field: FieldInfo) -> type[Section] | None:
    """Return the section a field opens, or None for a field that holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def find_entry_section(field: FieldInfo) -> type[Section] | None:
    """Return the section that each entry of a field's list is, or None for any other field."""
    inner = get_args(field.annotation)[:1] if get_origin(field.annotation) is list else ()
    return inner[0] if inner and isinstance(inner[0], type) and issubclass(inner[0], Section) else None


def general_key(dotted: str) -> str:
    """Return the key of a list's entry without the entry's number: `datasets.weight` for `datasets.0.weight`."""
    return ".".join(part for part in dotted.split(".") if not part.isdecimal())


def section_at(path: tuple[str, ...]) -> type[Section] | None:
    """Find the section at a path without numbers; RunConfig at the empty one, None where no section is."""
    section: type[Section] | None = RunConfig
    for name in path:
        field = section.model_fields.get(name) if section else None
        section = (find_section(field) or find_entry_section(field)) if field else None
    return section


@cache
def all_sections() -> dict[str, type[Section]]:
    """Dotted name -> section, the whole config first under "", in the order of the schema.

    A list of sections is one of them: `datasets` is the section that each of its entries is.
    """

    def walk(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
        for name, field in section.model_fields.items():
            if inner := find_section(field) or find_entry_section(field):
                yield prefix + name, inner
                yield from walk(inner, f"{prefix}{name}.")

    return {"": RunConfig, **dict(walk(RunConfig, ""))}


@cache
def all_keys() -> dict[str, FieldInfo]:
    """Dotted name -> field of every key that holds a value, in the order of the schema."""
    found = {}
    for dotted, section in all_sections().items():
        for name, field in section.model_fields.items():
            if find_section(field) is None and find_entry_section(field) is None:
                found[f"{dotted}.{name}".lstrip(".")] = field
    return found


@cache
def list_keys() -> list[str]:
    """The keys that hold a list of sections."""
    return [name for name, field in RunConfig.model_fields.items() if find_entry_section(field)]


def keys_in(cfg: RunConfig) -> Iterator[tuple[str, FieldInfo]]:
    """`all_keys` for one config: each entry of a list has keys of its own, such as `datasets.0.weight`."""
    for key, field in all_keys().items():
        outer, _, name = key.partition(".")
        if outer in list_keys():
            yield from ((f"{outer}.{number}.{name}", field) for number in range(len(cfg.get_value(outer))))
        else:
            yield key, field


def path_keys(cfg: RunConfig) -> list[str]:
    """List the keys of a config that take a path, or a name in its place."""
    return [key for key, field in keys_in(cfg) if WITH_HOME in field.metadata or UserPath in get_args(field.annotation)]


def required_below(dotted: str) -> list[str]:
    """List the required keys at `dotted`: itself if it holds a value, else those of the section ("" is the config)."""
    start = f"{general_key(dotted)}." if dotted else ""
    lists = () if start else tuple(f"{key}." for key in list_keys())
    return [
        key
        for key, field in all_keys().items()
        if field.is_required() and f"{key}.".startswith(start) and not key.startswith(lists)
    ]


@cache
def all_homes() -> dict[str, list[str]]:
    """Last part of a name -> the dotted keys and sections that end in it, without the keys of a list's entries."""
    homes: dict[str, list[str]] = {}
    entries = tuple(f"{key}." for key in list_keys())
    for dotted in (dotted for dotted in [*all_keys(), *all_sections()] if dotted and not dotted.startswith(entries)):
        homes.setdefault(dotted.rpartition(".")[2], []).append(dotted)
    return homes


@cache
def json_schema() -> dict[str, Any]:
    """pydantic's JSON schema of the config; not to be changed by callers."""
    return RunConfig.model_json_schema()


def node_at(dotted: str) -> dict[str, Any]:
    """Return the JSON schema of one key, without the name of its section."""
    node = json_schema()
    for name in general_key(dotted).split("."):
        node = node.get("items", node)
        reference = node.get("$ref", "")
        node = json_schema()["$defs"][reference.rpartition("/")[2]] if reference else node
        node = node["properties"][name]
    return node


RENAMED_KEYS = {
    "grpo.redraws": "grpo.dynamic_sampling_rounds",
    "grpo.skip_silent": "grpo.skip_zero_variance",
    "grpo.control": "grpo.placebo_reward",
    "grpo.gauge_steps": "grpo.logprob_check_steps",
    "score.hint_gain": "score.min_hint_gain",
    "data.leaks": "data.contamination",
    "cpt.exhausted": "cpt.on_source_end",
}
"""Old dotted key -> the new one, which is in the same section."""

LIST_TERMS = (
    "remove it; a new run names a file with one term a line in tuning.new_tokens.path, and a run that has found its "
    "terms is resumed with them as it is"
)
REMOVED_KEYS = {
    "cpt.streaming": "remove it: sources are tokenised before the first step, once for all runs",
    "tuning.new_tokens.count": LIST_TERMS,
    "tuning.new_tokens.min_count": LIST_TERMS,
}
"""Dotted key that the kit no longer has -> what to do. A run that was started with the key is resumed without it."""

FREE_TO_CHANGE = (
    "logging", "eval", "sandbox.executor", "run_name", "output_dir", "data.processed_dir",
    "train.resume", "train.save_total_limit", "train.probe", "train.oom_recovery", "train.stall_timeout",
    "train.time_limit", "train.profile", "train.dataloader_num_workers", "train.dataloader_pin_memory",
    "grpo.samples", "grpo.stop_without_signal", "grpo.logprob_check_steps", "grpo.vllm", "grpo.step_deadline",
    "score.samples", "score.generation_rows", "score.kl1_max", "score.min_hint_gain", "score.eval_samples",
    "score.eval_temperature", "score.placement", "score.devices",
    "hrm.eval_limit", "hrm.eval_halt", "hrm.puzzle_emb_placement",
    "cluster.max_restarts", "cluster.timeout", "cluster.nccl", "cluster.launcher", "cluster.price_per_hour",
)  # fmt: skip
"""Config keys that may differ when a run is resumed: they change neither rows nor weights."""

OTHER_ROWS = ("data.val_path", "data.test_path")
"""Files that are only evaluated on. Another file may be named as long as it decides nothing. Having one or none may not
change: without data.val_path, the rows to measure on are split off those that are trained on."""

SIZES = ("train.batch_size", "train.grad_accum")
"""How a step is cut into micro-batches. With other sizes, sums are rounded and dropout is drawn in another order."""

DRAWN = "grpo.generation_rows"
"""How a rollout batch is cut into parts. In other parts, random numbers are drawn in another order."""


def values_that_decide_weights(cfg: RunConfig) -> dict[str, Any]:
    """Dotted key -> JSON value of every key that decides which weights come out."""
    free = [*FREE_TO_CHANGE]
    if not cfg.task.learns_from_rewards:  # then they only measure
        free += ["rewards", "sandbox"]
    if cfg.task.splits_itself:  # it goes with `score.placement`, and checkpoints are those of whole models
        free.append("cluster.strategy")
    prefixes = tuple(f"{key}." for key in free)
    return {key: value for key, value in flatten(cfg).items() if not f"{key}.".startswith(prefixes)}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys in which a resumed run would be another run: (dotted key, before, after).

    Both mappings are those of `values_that_decide_weights`. A missing key has its default: the run was begun before the
    kit had it. `before` may have names of an older release, which also decided keys of other tasks.
    """
    before = {RENAMED_KEYS.get(key, key): value for key, value in before.items() if key not in REMOVED_KEYS}
    free = () if held_out_decides(after) else OTHER_ROWS
    optional = {key: field for key, field in all_keys().items() if not field.is_required()}
    defaults = {key: field.get_default(call_default_factory=True) for key, field in optional.items()}
    defaults |= {key: [] for key in list_keys()}
    read = TASKS[after.get("task_mode", defaults["task_mode"])].section
    others = tuple(f"{row.section}." for row in TASKS.values() if row.section not in ("", read))
    found = []
    for key in sorted({*before, *after}):
        old, new = (values.get(key, defaults.get(key)) for values in (before, after))
        if new == "auto" and key.startswith(others):
            continue
        if old != new and not (key in free and (old is None) == (new is None)):
            found.append((key, old, new))
    return found


def held_out_decides(values: Mapping[str, Any]) -> bool:
    """Return whether held-out rows decide which rows are trained on, or which weights are kept."""
    seeks_best = values.get("train.best_metric") is not None or values.get("train.early_stopping") is not None
    return values.get("data.contamination") == "drop" or seeks_best


def flatten(cfg: RunConfig) -> dict[str, Any]:
    """Return dotted key -> JSON value of every key."""

    def flat(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
                value = {str(number): entry for number, entry in enumerate(value)}
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return found

    return flat(cfg.model_dump(mode="json"), "")
