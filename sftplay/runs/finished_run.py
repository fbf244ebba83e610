"""What the commands that use a finished run share: opening it, its chat template, its report."""

from __future__ import annotations

import logging
import os
import traceback
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import read_object, write_text
from sftplay.config.layers import RESOLVED
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.launch.command import cache_environment, offline_environment, quiet_environment
from sftplay.launch.run_folder import RunFolder, find_run
from sftplay.log import Screen
from sftplay.model.libraries import unneeded
from sftplay.model.source import is_local
from sftplay.signals import StopAtOnce, Stopped, catching
from sftplay.startup import leave_out


def name_config(args: Namespace) -> None:
    """Let the run's own config stand for one that is not named. Raise ConfigError where no run is named either, or none
    is called so. A name is looked up in `output_dir=` of the command line, else in outputs.
    """
    if args.config:
        return
    if not args.run:
        raise ConfigError("no run is named", where="--run", fix=f"name one: make {args.verb} RUN=name")
    from sftplay.runs.status import find_folder

    output_dir = dict(override.partition("=")[::2] for override in args.overrides).get("output_dir", "outputs")
    found = find_folder(Path(output_dir), args.run, (RESOLVED,))
    args.config, args.run = str(found / RESOLVED), str(found)


def open_run(
    args: Namespace,
    values: Mapping[str, Any] | None = None,
    *,
    needs_result: bool = True,
    takes_puzzles: bool = False,
    takes_scores: bool = False,
) -> tuple[RunConfig, RunFolder]:
    """Return the finished run that a command line names, and its config.

    The config is the run's own, except for the keys that do not shape the weights: these come from the command line.
    `values` are the verb's own values of some keys; the command line overrides them. `takes_puzzles` says that the verb
    has a use for a run of task mode hrm, which has neither a tokenizer nor a chat template, `takes_scores` that it has
    one for a reward model. Raise ConfigError where there is no such run; it has no result yet and `needs_result`; or it
    learns puzzles or scores and the verb takes a model that writes texts.
    """
    given = load_config(args.config, args.overrides)
    folder = find_run(given, args.config, run=args.run)
    if needs_result and folder.result is None:
        raise ConfigError("this run has no result yet", where=str(folder.path), fix=folder.remedy)
    cfg = load_config(folder.resolved)
    if not cfg.task.reads_text and not takes_puzzles:
        what = f"task_mode hrm learns puzzles, and {args.verb} needs a model of texts"
        fix = f"take {folder.path / 'model'} as it is; `make eval` and `make infer IN=puzzle.txt` use it"
        raise ConfigError(what, where=str(folder.path), fix=fix)
    if cfg.task.gives_score and not takes_scores:
        what = f"a run of task_mode {cfg.task_mode} scores answers, and {args.verb} needs a model that writes them"
        fix = f"use it as a reward, {{use: model, path: {folder.path}}}; or open {folder.result} with transformers'"
        raise ConfigError(what, where=str(folder.path), fix=f"{fix} AutoModelForSequenceClassification")
    unset = {key: value for key, value in (values or {}).items() if given.origins.get(key) != "command line"}
    given = given.with_values(unset, args.verb)
    wanted: dict[str, Any] = {"eval": given.eval.model_dump()}
    if given.data.val_path is not None:  # without one the run keeps its own held-out rows, not a share of the others
        wanted["data.val_path"] = given.data.val_path
    if given.data.test_path is not None or given.origins.get("data.test_path") == "command line":
        wanted["data.test_path"] = given.data.test_path
    return folder.at_base_commit(cfg).with_values(wanted, "command line"), folder


def prepare_environment(cfg: RunConfig, *, reads_hub: bool = False) -> None:
    """Quieten the heavy libraries. Call it before the first of them is imported. With `reads_hub` data may come from
    the hub although the model is here, and bars of progress are the caller's own.
    """
    log.say("loading libraries and model", "use")
    os.environ.update(quiet_environment() | cache_environment())
    if reads_hub:
        os.environ.update({"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"})
    elif is_local(cfg.model.name):
        # Nothing is downloaded; without this, progress bars of libraries would appear between the lines.
        os.environ.update(offline_environment())
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends packages nobody asked for
    # It is no news that there is no GPU. DeepSpeed sets its logger's level when it is imported, and keeps a filter.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    log.quiet_libraries()
    leave_out(unneeded(cfg))


def load_renderer(cfg: RunConfig, folder: RunFolder) -> tuple[Any, Any]:
    """Return the tokenizer in the result's folder, and the renderer of the chat template there."""
    from sftplay.data.render.render import Renderer
    from sftplay.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    return tokenizer, Renderer.prove(tokenizer, stored_template(tokenizer, folder), samples=[])


def stored_template(tokenizer: Any, folder: RunFolder) -> str | None:
    """Return the chat template in the result's folder; print a warning where the run was trained with another one."""
    from sftplay.data.render.templates import template_hash

    template: str | None = tokenizer.chat_template
    trained = folder.read_json("manifest.json").get("template_sha256")
    stored = template_hash(template or "")
    if trained not in (None, stored, template_hash("")):  # of a run that learned plain text the template is the base's
        log.say(f"warning: the chat template in {folder.result} is not the one this run was trained with:", "use")
        log.say(f"its sha256 is {stored}, the run's was {trained}; it is used as it stands", "use")
    return template


def describe_end(folder: RunFolder) -> dict[str, Any]:
    """Return the JSON document of `train` and `resume`: status.json, the result, the report, the figures of eval/."""
    report = folder.path / "report.html"
    figures = {name: read_object(folder.eval / f"{name}.json") for name in ("before", "after", "perplexity")}
    return {
        "run": str(folder.path),
        **folder.read_json("status.json"),
        "result": folder.result and str(folder.result),
        "report": str(report) if report.exists() else None,
        "figures": {name: content for name, content in figures.items() if content},
    }


def report_at_end(folder: RunFolder) -> None:
    """Write report.html after a run or a measurement and print its path.

    A failure is only printed, and its traceback kept in logs/report.log: the run or measurement has ended, and nothing
    here may change its outcome. A stop signal ends the writing alone.
    """
    log_file = folder.logs / "report.log"
    try:
        with catching(StopAtOnce(of_make=True).on_signal):
            from sftplay.report.report import write_report

            text = f"report: {write_report(folder)}"
    except Stopped as stopped:
        text = f"note: no report: stopped by {stopped}; `make report` writes it"
    except Exception as error:  # noqa: BLE001 - see above
        text = f"note: no report ({getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'})"
        with suppress(OSError):
            write_text(log_file, traceback.format_exc())
            text += f"; {log_file} has the traceback"
    Screen(log.screen)(f"[report] {text}\n")  # a Screen also survives a closed pipe
