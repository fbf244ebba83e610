"""Rules about continued pre-training: the sources of a mixture, their weights, and the size of a block."""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.rules.problem import Problem
from sftplay.config.schema.mixture import DatasetConfig
from sftplay.config.schema.run import RunConfig

EXAMPLE = "- {name: domain, path: data/processed/domain.jsonl, type: cpt, weight: 0.9}"


def needs_train_path(cfg: RunConfig) -> bool:
    """Whether data.train_path is missing: nothing else names the rows."""
    return cfg.data.train_path is None and not cfg.datasets and not cfg.task.mixes_chats


def broken_cpt_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Every rule that `datasets` and `cpt` break."""
    yield from _task(cfg)
    yield from _held_out(cfg)
    if cfg.learns_documents:
        yield from _sizes(cfg)
        yield from _streaming(cfg)


def idle_cpt_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    if not cfg.learns_documents:
        task = f"task_mode {cfg.task_mode}"
        yield from ((f"cpt.{name}", "task_mode", f"{task} has no blocks") for name in type(cfg.cpt).model_fields)
        yield "eval.stride", "task_mode", f"{task} slides no window over documents"
        return
    yield "train.packing", "task_mode", f"the rows of task_mode {cfg.task_mode} are full blocks"
    if cfg.cpt.train_tokens is not None:
        yield "train.epochs", "cpt.train_tokens", f"cpt.train_tokens {cfg.cpt.train_tokens} ends the run"
    if all(source.type == "cpt" for source in cfg.sources):
        for key in ("data.too_long", "data.template", "data.system"):
            yield key, "task_mode", "no chat is among the rows, and long documents continue over blocks"
    if len(cfg.sources) == 1:
        yield "cpt.weights_of", "datasets" if cfg.datasets else "task_mode", "there is one source"


def has_held_out(cfg: RunConfig) -> bool:
    """Whether the config asks for held-out rows of any source."""
    return any(source.val_path is not None or held_out_share(cfg, source) != 0 for source in cfg.sources)


def held_out_share(cfg: RunConfig, source: DatasetConfig) -> float | None:
    """Share of a source's rows that is held out; None means the usual one."""
    return cfg.data.split if source.split is None else source.split


def _task(cfg: RunConfig) -> Iterator[Problem]:
    if not cfg.datasets:
        if cfg.task.mixes_chats:
            yield Problem(("task_mode", "datasets"), "cpt_mixed needs datasets", fix=f"write datasets: {EXAMPLE}")
        return
    if not cfg.learns_documents:
        fix = "write task_mode: cpt_mixed, or name one file with data.train_path in their place"
        yield Problem(
            ("datasets", "task_mode"), f"are for task modes cpt and cpt_mixed, not for {cfg.task_mode}", fix=fix
        )
    for name in ("train_path", "val_path", "test_path"):
        key = f"data.{name}"
        if cfg.value_of(key) is not None:
            fix = "remove it; each entry of datasets has path and val_path"
            yield Problem((key, "datasets"), "is given, but datasets names the rows already", fix=fix)
    for number, source in enumerate(cfg.datasets):
        if not cfg.task.mixes_chats and cfg.learns_documents and source.type == "chat":
            what = f"{source.name!r} is chat, but task_mode {cfg.task_mode} learns documents only"
            yield Problem((f"datasets.{number}.type", "task_mode"), what, fix="write task_mode: cpt_mixed")
    if not any(source.weight for source in cfg.datasets):
        what = "every weight is 0, so nothing would be trained on"
        yield Problem(("datasets.0.weight", "datasets"), what, fix="give one source a weight above 0")


def _held_out(cfg: RunConfig) -> Iterator[Problem]:
    for number, source in enumerate(cfg.datasets):
        if source.val_path is not None and source.split is not None:
            key, other = f"datasets.{number}.split", f"datasets.{number}.val_path"
            what = f"{source.split:g} is given, but {other} names the held-out rows already"
            yield Problem((key, other), what, fix="remove one of the two")


def _sizes(cfg: RunConfig) -> Iterator[Problem]:
    size, limit, train = cfg.cpt.block_size, cfg.model.max_seq_len, cfg.train
    if size is not None and size > limit:
        what = f"{size} is more than model.max_seq_len {limit}"
        fix = f"write model.max_seq_len: {size}, or a smaller block_size"
        yield Problem(("cpt.block_size", "model.max_seq_len"), what, fix=fix)
    if cfg.eval.stride is not None and cfg.eval.stride >= cfg.row_tokens:
        what = f"{cfg.eval.stride} is not less than the window, a block of {cfg.row_tokens} tokens"
        fix = f"write eval.stride: {cfg.row_tokens // 2}, or remove it"
        yield Problem(("eval.stride", "cpt.block_size", "model.max_seq_len"), what, fix=fix)
    if cfg.cpt.train_tokens is not None and train.max_steps is not None:
        what = f"{cfg.cpt.train_tokens} is given, but train.max_steps {train.max_steps} says how long the run is"
        yield Problem(("cpt.train_tokens", "train.max_steps"), what, fix="keep one of the two")


def _streaming(cfg: RunConfig) -> Iterator[Problem]:
    if not cfg.cpt.streaming:
        return
    key = "cpt.streaming"
    if cfg.cpt.train_tokens is None and cfg.train.max_steps is None:
        what = "true needs the length of the run, which nobody knows before the sources are read"
        yield Problem((key, "train.max_steps"), what, fix="give cpt.train_tokens or train.max_steps")
    if cfg.cpt.on_source_end == "stop":
        what = "stop is not known to fall into the run before the sources are read, but cpt.streaming is true"
        yield Problem(("cpt.on_source_end", key), what, fix="write cpt.on_source_end: repeat, or cpt.streaming: false")
    for number, source in enumerate(cfg.sources):
        if source.val_path is None and held_out_share(cfg, source) != 0:
            own = f"datasets.{number}.split" if cfg.datasets else "data.split"
            what = f"true holds no rows out of a source that it has not read, but {source.name!r} has no val_path"
            fix = f"give its val_path, or write {own}: 0"
            yield Problem((key, own, "data.split"), what, fix=fix)
