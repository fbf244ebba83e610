"""Rules of the tasks that learn from preferences, and which of their keys a loss does not read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sftplay.config.keys import keys_in
from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.errors import ConfigError, nearest_names

LOSS, SMOOTHING, REFERENCE = "preference.loss", "preference.label_smoothing", "preference.reference"

KINDS = ("start", "adapter_off", "none")
"""What `preference.reference` may say instead of a path or a name."""

REFERRING = ("dpo", "ipo", "kto")
"""Tasks whose loss measures the distance to a reference."""

USUAL_BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}
"""What beta null means: the papers' main settings (Rafailov 2023, Azar 2023, Ethayarajh 2024, Hong 2024, where it is
lambda, and Meng 2024)."""

READERS: dict[str, tuple[str, ...]] = {
    "loss": ("dpo",),
    "label_smoothing": ("dpo",),
    "reference": REFERRING,
    "rpo_alpha": ("dpo", "ipo"),
    "gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Key of the section -> the tasks that read it. All read the others."""


def uses_reference(cfg: RunConfig) -> bool:
    """Return whether the loss compares with the log-probabilities of a reference model."""
    return cfg.task_mode in REFERRING and cfg.preference.reference != "none"


def find_beta(cfg: RunConfig) -> float:
    """Return `preference.beta`, or what its paper uses."""
    return cfg.preference.beta or USUAL_BETA[cfg.task_mode]


@dataclass(frozen=True)
class ReferenceModel:
    """The model that `preference.reference` names: a base, and an adapter on it where it has one."""

    name: str
    revision: str | None = None
    adapter: Path | None = None


def find_reference_model(cfg: RunConfig) -> ReferenceModel:
    """Find the model of a reference that is a path or a name: of a folder, a finished run, or a model on the hub.

    Raises:
        ConfigError: there is no such model, or the run has no result yet.
    """
    from sftplay.config.layers import RESOLVED
    from sftplay.launch.run_folder import RunFolder
    from sftplay.model.source import ADAPTER_CONFIG, check_source
    from sftplay.model.start_point import find_adapter_base

    name, where = cfg.preference.reference, cfg.describe_origin(REFERENCE)
    run = Path(cfg.output_dir) / name
    folder = Path(name)
    if not folder.is_dir() and "/" not in name and (run / RESOLVED).is_file():
        folder = run
    if (folder / RESOLVED).is_file():
        holder = RunFolder(folder)
        if holder.result is None:
            fix = f"{holder.remedy}, or name a run that is finished"
            raise ConfigError(f"the run {folder} has no result yet", where=where, fix=fix)
        folder = holder.result
    if (folder / ADAPTER_CONFIG).is_file():
        base, revision = find_adapter_base(folder)
        return ReferenceModel(base, revision, folder)
    if folder.is_dir():
        name = str(folder)
    check_source(name, where, allow_pickle=cfg.model.allow_pickle)
    return ReferenceModel(name)


class PreferenceSpec(TaskSpec):
    """A model learns which of two answers is better."""

    def list_inputs(self, cfg: RunConfig) -> list[str]:
        return [REFERENCE] if uses_reference(cfg) and cfg.preference.reference not in KINDS else []

    def check_input(self, cfg: RunConfig, key: str, *, where: str) -> None:
        find_reference_model(cfg)

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        yield from _loss(cfg)
        yield from _reference(cfg)
        yield from _settings(cfg)

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        for name, tasks in READERS.items():
            if cfg.task_mode not in tasks:
                listed = " and ".join(filter(None, (", ".join(tasks[:-1]), tasks[-1])))
                yield f"preference.{name}", "task_mode", f"only {listed} {'read' if tasks[1:] else 'reads'} it"
        why = f"task_mode {cfg.task_mode} counts the pairs that are right; its answers are for people to read"
        for key, _ in keys_in(cfg):
            if key == "eval.metrics" or key.startswith("rewards."):
                yield key, "task_mode", why
        yield from idle_dropout(cfg)


def idle_dropout(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the dropout of an adapter, which no trainer of pairs lets drop anything."""
    if cfg.tuning.lora.dropout:
        why = f"task_mode {cfg.task_mode} compares answers, which dropout would blur"
        yield "tuning.lora.dropout", "task_mode", why


def _loss(cfg: RunConfig) -> Iterator[Problem]:
    preference = cfg.preference
    if cfg.task_mode != "dpo":
        return
    if preference.loss == "robust" and not preference.label_smoothing:
        what = "robust expects a share of the labels to be swapped, and that share is 0"
        fix = f"write {SMOOTHING}: 0.1, or {LOSS}: sigmoid"
        yield Problem((LOSS, SMOOTHING), what, fix=fix)
    if preference.loss == "hinge" and preference.label_smoothing:
        what = f"{preference.label_smoothing:g}, but hinge has no place for labels that are swapped"
        yield Problem((SMOOTHING, LOSS), what, fix=f"write {SMOOTHING}: 0, or {LOSS}: sigmoid or robust")


def _reference(cfg: RunConfig) -> Iterator[Problem]:
    reference = cfg.preference.reference
    if cfg.task_mode not in REFERRING:
        return
    near = [] if reference in KINDS or set("/.:") & set(reference) else nearest_names(reference, KINDS)
    if near:
        fix = f"did you mean {near[0]!r}? A folder of that name is written ./{reference}"
        what = f"{reference!r} is neither {', '.join(KINDS[:-1])} nor {KINDS[-1]}"
        yield Problem((REFERENCE,), what, fix=fix, nearest=tuple(near))
    if reference == "adapter_off" and cfg.tuning.mode == "full":
        what = "there is no adapter to switch off: tuning.mode full trains every weight"
        yield Problem((REFERENCE, "tuning.mode"), what, fix=f"write {REFERENCE}: start, or tuning.mode: lora")
    if reference == "none" and cfg.task_mode == "kto":
        what = "kto weighs an answer by how much likelier it became, which needs the probability that it had"
        yield Problem((REFERENCE, "task_mode"), what, fix=f"write {REFERENCE}: start, or task_mode: dpo or simpo")
    if reference not in KINDS and cfg.tuning.new_tokens.is_on:
        what = f"{reference} has no rows for the tokens of tuning.new_tokens, which the answers contain"
        yield Problem((REFERENCE, "tuning.new_tokens.path"), what, fix=f"write {REFERENCE}: start")


def _settings(cfg: RunConfig) -> Iterator[Problem]:
    """Yield settings of other tasks that would be ignored, or would change the log-probabilities that are compared."""
    train, task = cfg.train, cfg.task_mode
    table = (
        ("data.format", cfg.data.format != "auto", "the layout of each row is found by its keys", "auto"),
        ("train.packing", train.packing is True, "true packs rows, but answers already share a row", "false"),
        (
            "train.loss_head", train.loss_head == "liger",
            "liger computes the mean loss of tokens, and answers are compared by their sums", "auto",
        ),
        (
            "train.neftune_alpha", train.neftune_alpha is not None,
            "the noise would enter the log-probabilities that are compared", "null",
        ),
        ("tuning.backend", cfg.tuning.backend == "unsloth", "unsloth is not offered", "bnb"),
    )  # fmt: skip
    for key, is_asked, why, remedy in table:
        if is_asked:
            yield Problem((key, "task_mode"), f"{why}, in task_mode {task}", fix=f"write {key}: {remedy}")
    if train.extra.get("label_smoothing_factor"):
        what = f"it smooths the labels of tokens, and task_mode {task} learns from pairs"
        key = "train.extra.label_smoothing_factor"
        yield Problem((key, "task_mode"), what, fix=f"remove it; {SMOOTHING} smooths those of pairs, in task_mode dpo")


SPEC = PreferenceSpec()
