"""Check the inputs of a run before a heavy library is imported: model and its shape, files, first rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from sftplay import log
from sftplay.config.data import row_paths
from sftplay.config.load import examine_config
from sftplay.config.run import RunConfig
from sftplay.config.section import find_spec as find_task_spec
from sftplay.data.files import FIX_ROW, find_suffix, list_files
from sftplay.data.layouts import read_layout_options, select_data_config, to_record
from sftplay.data.read import is_hub_name, read_dialect, read_rows
from sftplay.data.records import Refused, Text
from sftplay.errors import (
    ConfigError,
    ConfigErrors,
    DataError,
    MachineError,
    SeveralErrors,
    SftplayError,
    nearest_names,
)
from sftplay.model.source import BUILTIN, BUILTIN_CONFIGS, check_source, is_downloaded, is_local
from sftplay.plan.find_shape import find_config, find_shape, read_table

if TYPE_CHECKING:
    from sftplay.plan.forecast import RowLengths
    from sftplay.plan.shape import ModelShape


def known_shape(cfg: RunConfig) -> ModelShape | None:
    """Return the shape of the model that trains; None when only the hub knows it. Raise SftplayError where the puzzles
    that decide the shape of a model of puzzles are there, but not sound.
    """
    if not cfg.task.reads_text:
        from sftplay.plan.sizing import find_sizing

        return find_sizing(cfg).known_shape(cfg)
    shape = find_shape(cfg.model.name, cfg.model.revision, builtin=BUILTIN_CONFIGS)
    return shape.with_score_head() if shape and cfg.task.gives_score else shape


def is_known(cfg: RunConfig) -> bool:
    """Return whether the shape of the config's model is known here; a name of the shipped table is not read for it."""
    name = cfg.model.name
    return name in BUILTIN_CONFIGS or name in read_table() or known_shape(cfg) is not None


def require_shape(cfg: RunConfig) -> ModelShape:
    """Return the shape of the config's model. Raise ConfigError where the shape is neither on this machine nor in the
    shipped table.
    """
    if shape := known_shape(cfg):
        return shape
    near = _near(cfg.model.name)
    guess = f"did you mean {' or '.join(near)}? else " if near else ""
    fetch = "" if near else f", or `make download-model MODEL={cfg.model.name}`"
    what, where = f"the shape of {cfg.model.name!r} is not known here", cfg.origins.get("model.name", "model")
    fix = f"{guess}put its config.json into a folder and name that{fetch}"
    raise ConfigError(what, where=f"{where} model.name", fix=fix, nearest=near)


def checkpoint_bytes(cfg: RunConfig) -> int | None:
    """Return the bytes of one checkpoint of a config on this machine, None where its shape is not known here."""
    from sftplay.machine.probe import probe
    from sftplay.plan.report import find_report
    from sftplay.plan.sizing import size_run

    cfg = resolve_names(cfg)
    shape = known_shape(cfg)
    if shape is None:
        return None
    sized = size_run(cfg, probe(), shape=shape)
    assert sized.forecast is not None
    return find_report(cfg).workload(sized.cfg, sized.forecast).checkpoint_bytes


TERMS = "tuning.new_tokens.path"


def resolve_names(cfg: RunConfig) -> RunConfig:
    """Return what `start_point.resolve_names` does, which is imported where an adapter, a run or a folder is named."""
    model = cfg.model
    folders = (Path(model.name), Path(cfg.output_dir, model.name))
    if model.adapter is None and not model.merge_adapter and not any(folder.is_dir() for folder in folders):
        return cfg
    from sftplay.model import start_point

    return start_point.resolve_names(cfg)


def needs_no_hub(cfg: RunConfig) -> bool:
    """Return whether the model and all data are on this machine."""
    if not cfg.task.reads_text:
        return True
    return is_local(resolve_names(cfg).model.name) and all(Path(path).exists() for _, path in row_paths(cfg))


def check_inputs(cfg: RunConfig, *, asks_hub: bool = True) -> RunConfig:
    """Refuse missing inputs; otherwise return `cfg` with names of runs resolved.

    With `asks_hub` the hub is asked whether it has a model that is not on this machine.

    Raises:
        ConfigError: the model is not found, its name is ambiguous, or the adapter does not fit.
        DataError: a data file is missing or of an unknown kind, or none of its first rows can be read.
        MachineError: a tracker is not installed; the hub does not answer.
        SeveralErrors: more than one of these.
    """
    if problems := list(_problems(cfg, _keys(cfg), asks_hub=asks_hub)):
        raise _join_problems(problems)
    return resolve_names(cfg)


def load_checked(
    path: str, overrides: Sequence[str] = (), *, asks_hub: bool = True, needs_data: bool = True
) -> RunConfig:
    """Return the config as `load_config` does, with its inputs checked too; raise all problems of both at once.

    Without `needs_data` files of rows may be missing, unless one of almost that name is there.
    """
    cfg, found = examine_config(path, overrides)
    problems: list[SftplayError] = list(found)
    if cfg is not None:
        # A key that is missing or was refused has no origin. Its stand-in says nothing about the inputs.
        keys = [key for key in _keys(cfg) if not found or key in cfg.origins]
        if not needs_data:
            absent = {key for key, path in row_paths(cfg) if not Path(path).exists() and not _near_files(path)}
            keys = [key for key in keys if key not in absent]
        problems += _problems(cfg, keys, asks_hub=asks_hub and not found)
    if problems:
        raise _join_problems(problems)
    assert cfg is not None
    return cfg


def _keys(cfg: RunConfig) -> list[str]:
    if not cfg.task.reads_text:
        return [*find_task_spec(cfg).list_inputs(cfg), "logging.backend"]
    inputs = find_task_spec(cfg).list_inputs(cfg)
    return ["model.name", *(key for key, _ in row_paths(cfg)), *inputs, "data.template", "logging.backend", TERMS]


def _join_problems(problems: Sequence[SftplayError]) -> SftplayError:
    """All problems in one error. The config comes first, because its code ends a script that wrote it."""
    listed = sorted(problems, key=lambda problem: problem.exit_code)
    config = [problem for problem in listed if isinstance(problem, ConfigError)]
    if len(config) == len(listed):
        return config[0] if len(config) == 1 else ConfigErrors(config)
    return listed[0] if len(listed) == 1 else SeveralErrors(listed)


def _problems(cfg: RunConfig, keys: Sequence[str], *, asks_hub: bool) -> Iterator[SftplayError]:
    """What is wrong with the inputs that these keys name."""
    if cfg.rewards:
        from sftplay.reward.table import reward_problems

        yield from reward_problems(cfg)
    for key in keys:
        try:
            _check(key, cfg=cfg, asks_hub=asks_hub)
        except SftplayError as error:
            yield error
        except OSError as error:  # a path that the file system does not serve
            what = f"{error.filename}: {error.strerror}"
            yield ConfigError(
                what, where=cfg.describe_origin(key), fix="name another path, or give this user the right to it"
            )


def _check(key: str, *, cfg: RunConfig, asks_hub: bool) -> None:
    if key == "model.name":
        check_model(resolve_names(cfg), asks_hub=asks_hub)
    elif key == "data.template":
        if (name := cfg.data.template) not in ("auto", "chatml") and not Path(name).is_file():
            fix = "give auto, chatml or a Jinja file's path"
            raise DataError(f"there is no file {name!r}", where=cfg.describe_origin(key), fix=fix)
    elif key == "logging.backend":
        backend = cfg.logging.backend
        for tracker in [backend] if isinstance(backend, str) else backend:
            if tracker != "none" and find_spec(tracker) is None:
                fix = f"{sys.executable} -m pip install {tracker}, or logging.backend=none"
                raise MachineError(f"the tracker {tracker} is not installed", where=cfg.describe_origin(key), fix=fix)
    elif key == TERMS:
        if cfg.tuning.new_tokens.path is not None:
            from sftplay.model.new_tokens import read_terms

            read_terms(cfg.tuning.new_tokens.path)
    elif not cfg.task.reads_text or key in find_task_spec(cfg).list_inputs(cfg):
        find_task_spec(cfg).check_input(cfg, key, where=cfg.describe_origin(key))
    elif (path := cfg.get_value(key)) is not None and not is_hub_name(path):
        try:
            list_files(path)
        except DataError as error:
            fix = error.fix if Path(path).exists() else f"correct {key}; it starts at the current folder"
            if near := _near_files(path):
                fix = f"did you mean {str(Path(path).with_name(near[0]))!r}?"
            raise DataError(f"{path}: {error.what}", where=cfg.describe_origin(key), fix=fix, nearest=near) from None
        if key != "data.test_path":  # training only looks at its readable rows
            _check_first_rows(path, key, cfg=cfg)


def _near_files(path: str) -> list[str]:
    """The files with rows in the same folder whose names are like that of `path`, the nearest first."""
    with suppress(OSError):
        return nearest_names(Path(path).name, [file.name for file in Path(path).parent.iterdir() if find_suffix(file)])
    return []


def check_model(cfg: RunConfig, *, asks_hub: bool) -> None:
    """Refuse a model that is not there, whose name is almost one that the kit knows, or which no class for text opens;
    `cfg` has no names of runs. Raise ConfigError there, and MachineError where the hub was asked and did not answer.
    """
    name, where = cfg.model.name, cfg.describe_origin("model.name")
    check_source(name, where, allow_pickle=cfg.model.allow_pickle)
    with suppress(OSError, ValueError, RecursionError):  # what cannot be read is said by who needs it
        if path := find_config(name, cfg.model.revision):
            from sftplay.plan.config_json import refuse_unopened

            refuse_unopened(json.loads(path.read_text(encoding="utf-8-sig")), where=where)
    if is_local(name) and not name.startswith(BUILTIN):
        return

    known = is_known(cfg)
    if known and name.startswith(BUILTIN):
        return
    near = [] if known else _near(name)
    if name.startswith(BUILTIN):
        fix = f"did you mean {' or '.join(near or BUILTIN_CONFIGS)}?"
        raise ConfigError(f"there is no builtin model {name!r}", where=where, fix=fix, nearest=near)
    if not is_downloaded(name) and (asks_hub or near):
        if not known:
            log.say(f"{name} is not known here; the hub is asked", "model")
        ask_hub(name, cfg.model.revision, where=where)


def _near(name: str) -> list[str]:
    from sftplay.plan.near_names import nearest_models

    return nearest_models(name, BUILTIN_CONFIGS)


def ask_hub(name: str, revision: str | None, *, where: str) -> bool:
    """Return what `hub.check_reachable` does. Where the hub does not answer, raise ConfigError if the name is like that
    of a model that the kit knows, which is named, else MachineError.
    """
    from sftplay.model import hub

    try:
        return hub.check_reachable(name, revision, where=where)
    except MachineError as error:
        near = _near(name)
        if not near or near[0] == name:
            raise
        what = f"{name!r} is not known here ({error.what})"
        raise ConfigError(what, where=where, fix=f"did you mean {' or '.join(near)}?", nearest=near) from error


def _check_first_rows(path: str, key: str, *, cfg: RunConfig) -> None:
    """Refuse a file whose first rows are all bad, because its layout is another. With skip the full pass decides."""
    kind = "cpt" if cfg.learns_documents else None  # None in task sft, where any layout is read
    if key.startswith("datasets."):
        kind = cfg.datasets[int(key.split(".")[1])].type
    data, n_rows = cfg.data, 0
    if kind:
        data = select_data_config(cfg, kind)
    refused, fixes, n_damaged = list[str](), list[str](), 0
    for source, row in islice(read_rows(path, read_dialect(data)), 32):
        n_rows += 1
        try:
            if isinstance(row, Refused):
                refused.append(f"{source} {row.reason}")
                n_damaged += 1
            elif part := cfg.task.part("rows"):
                part.read_record(row, source, cfg=cfg)
                return
            elif cfg.task.learns_from_rewards:
                from sftplay.data.prompts import to_prompt

                to_prompt(row, source, number=0, reading=read_layout_options(data))
                return
            elif isinstance(to_record(row, source, reading=read_layout_options(data)), Text) and kind == "chat":
                refused.append(f"{source} is a plain text, and the source has type: chat")
            else:
                return
        except DataError as error:
            refused.append(f"{source} {error.what}")
            fixes.append(error.fix)
    where = cfg.describe_origin(key)
    if not n_rows:
        raise DataError(f"{path}: has no rows", where=where, fix="name a file with at least one row")
    if data.on_bad_row == "skip":
        return
    count = "its only row cannot" if n_rows == 1 else f"none of its first {n_rows} rows can"
    reasons = "".join(f"\n  {reason}" for reason in refused[:5])
    fix = "name its layout with data.format and its columns with data.columns, or another file"
    if cfg.task.part("rows") and fixes:  # a task that reads its own rows knows no layouts by name
        fix = "; ".join(dict.fromkeys(filter(None, fixes))) or "name another file"
    elif n_damaged + fixes.count(FIX_ROW) == n_rows:  # no other layout would read them
        fix = "mend what each line names, or name another file"
    elif kind == "cpt":
        fix = "name the column of the text, data.columns: {text: NAME}; chats take task_mode cpt_mixed and type: chat"
    elif isinstance(row, dict) and {"chosen", "rejected"} <= row.keys():
        side = "messages" if isinstance(row["chosen"], list) else "completion"
        fix = f"write task_mode: dpo, which learns from pairs; data.columns: {{{side}: chosen}} takes one side alone"
    raise DataError(f"{path}: {count} be read{reasons}", where=where, fix=fix)


def known_lengths(cfg: RunConfig) -> RowLengths | None:
    """Return the lengths of a resolved config's rows, where they were prepared before; None where nothing is known.

    Nobody knows how long completions will be, so rows of task modes grpo and score count as full. Puzzles of task
    mode hrm all have the same length.
    """
    if cfg.task.learns_from_rewards or not cfg.task.reads_text:
        return None
    if not (Path(cfg.data.processed_dir) / "lengths").is_dir():  # `data.cache` has noted none
        return None
    from sftplay.data.cache import OF_PAIRS, read_lengths
    from sftplay.plan.forecast import RowLengths

    found = read_lengths(cfg)
    if not found:
        return None
    of_pairs = {key: found.get(key) for key in OF_PAIRS}
    return RowLengths(longest=int(found["longest"]), mean=found["mean"], count=int(found["count"]), **of_pairs)
