"""The verb `lm-eval`: tasks of lm-evaluation-harness on a run and its base, asked as the run was trained."""

from __future__ import annotations

import gc
import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.places import find_vllm_python
from sftplay.runs.finished_run import load_renderer, name_config, open_run, prepare_environment, report_at_end

NAME = "lm-eval.json"

Measure = Callable[[str, Any], None]
"""Takes `run` or `base`, and the harness's model."""


def lm_eval(args: Namespace) -> int:
    """`lm-eval`: the figures of these tasks for the run and for its base, in eval/lm-eval.json, every answer next to it
    in lm-eval.jsonl, and in report.html.
    """
    if not args.tasks:
        fix = "name some, with commas: make lm-eval RUN=name TASKS=gsm8k,ifeval"
        raise ConfigError("no task is named", where="--tasks", fix=fix)
    if args.include_path and not Path(args.include_path).is_dir():
        raise ConfigError("is no folder", where=args.include_path, fix="name the folder of your task files")
    name_config(args)
    cfg, folder = open_run(args)
    if find_spec("lm_eval") is None:
        fix = "make install EXTRAS=harness"
        raise MachineError("lm-evaluation-harness is not installed", where="the package lm-eval", fix=fix)
    if args.engine == "vllm" and find_vllm_python() is None:
        raise MachineError("vLLM is not installed", where=".venv-vllm", fix="make install-vllm")
    prepare_environment(cfg, reads_hub=True)
    from sftplay.evaluate.boxed_code import boxed_code_eval
    from sftplay.evaluate.evaluate import write_measurement
    from sftplay.report.evaluation import harness_table

    # The harness and the tasks' own Python print: bootstrapping, what they fetch.
    with boxed_code_eval(cfg.sandbox) as boxed, redirect_stdout(log.screen()):
        content, answers = _measure(args, cfg, folder=folder, boxed=boxed)
    folder.eval.mkdir(parents=True, exist_ok=True)
    write_measurement(folder.eval / NAME, content, rows=answers)
    report_at_end(folder)
    if args.json:
        print(json.dumps(content))
    else:
        log.show(harness_table(content).format())
    return 0


def _measure(
    args: Namespace, cfg: RunConfig, *, folder: RunFolder, boxed: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The content of lm-eval.json, and the lines of the answers. Tasks are loaded before any model."""
    from sftplay.evaluate.evaluate import ready_to_answer
    from sftplay.evaluate.harness import SEEDS, load_tasks, read_answers, read_figures, run_tasks

    tasks, names = load_tasks(args.tasks, args.include_path, boxed=boxed)
    tokenizer, renderer = load_renderer(cfg, folder)
    if plain := "--no-template was given" if args.no_template else _learned_plainly(folder, tokenizer):
        renderer = None
    how = f"as plain documents ({plain})" if plain else "by the run's chat template"
    how += f" and its system prompt {cfg.data.system!r}" if cfg.data.system and not plain else ""
    log.say(f"{', '.join(names)}: run and base are asked {how}, in batches of {cfg.eval.batch_size}", "lm-eval")
    found = dict[str, Any]()
    counts, programs = dict[str, dict[str, int]](), dict[str, dict[str, int]]()

    def measure(side: str, lm: Any) -> None:
        boxed.statuses.clear()
        log.say(f"measuring the {'run' if side == 'run' else 'base'}", "lm-eval")
        with nullcontext() if is_served else ready_to_answer(lm.model, cfg):
            found[side] = run_tasks(
                lm, tasks, names=names, system=cfg.data.system or None, limit=args.limit, fewshot=args.num_fewshot,
                log_file=folder.logs / "lm-eval.log",
            )  # fmt: skip
        counts[side], programs[side] = dict(lm.counts), dict(sorted(boxed.statuses.items()))

    is_served = args.engine == "vllm"
    measure_models = _measure_served if is_served else _measure_opened
    base_by, engine, max_length = measure_models(cfg, folder, tokenizer, renderer, measure)
    result = found["run"]
    for name, asked in result["n-shot"].items():
        if args.num_fewshot not in (None, asked):
            log.say(f"note: {name} keeps its own number of examples, {asked}", "lm-eval")
    notes = {"cut": "lose their beginning: the model reads no more", "special_tokens_typed": "type special tokens",
             "system_left_out": "lose the task's description: the template takes no system prompt"}  # fmt: skip
    for key, text in notes.items():
        if number := counts["run"][key]:
            log.say(f"note: {number:,} prompts {text}", "lm-eval")
    content = {
        **{side: read_figures(found[side]) for side in ("run", "base")},
        "tasks": {
            name: {
                "version": result["versions"].get(name), "n": result["n-samples"][name]["effective"],
                "rows": result["n-samples"][name]["original"], "fewshot": result["n-shot"].get(name),
            }
            for name in result["n-samples"]
        },
        "engine": args.engine, "engine_version": engine, "harness": version("lm-eval"),
        "template": renderer is not None,
        "template_sha256": renderer.template_hash if renderer else None,
        "system": (cfg.data.system or None) if renderer else None, "limit": args.limit, "seeds": SEEDS,
        "batch_size": cfg.eval.batch_size, "max_length": max_length, "prompts": counts["run"],
        "programs": programs if any(programs.values()) else None, "executor": boxed.executor,
        "model": cfg.model.name, "weights": folder.result.name if folder.result else None,
        "base_by": base_by, "step": folder.read_json("status.json").get("step"),
    }  # fmt: skip
    return content, [line for side in ("run", "base") for line in read_answers(found[side], side)]


@contextmanager
def _serving(
    cfg: RunConfig, folder: RunFolder, source: str, *, tokenizer: Any
) -> Iterator[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]]:
    """Run vLLM's server with the model in `source` until the block ends; yield a function that asks it for completions,
    and its version.
    """
    from transformers import AutoConfig

    from sftplay.export.server import build_server
    from sftplay.machine.ports import HOST, free_port
    from sftplay.machine.probe import find_gpus
    from sftplay.parity.by_vllm import call, started

    port = free_port(0)
    url = f"http://{HOST}:{port}"
    trusts_code = cfg.model.trust_remote_code
    with tempfile.TemporaryDirectory(prefix="sftplay-lm-eval-") as scratch:
        tokenizer.save_pretrained(scratch)
        AutoConfig.from_pretrained(source, trust_remote_code=trusts_code).save_pretrained(scratch)
        launch = build_server(
            "vllm", Path(source), name="model", port=port,
            trusts_code=trusts_code, tokenizer=Path(scratch), has_gpu=bool(find_gpus()[0]), is_gated=False,
        )  # fmt: skip
        log_file = (folder.logs / "lm-eval-vllm.log").resolve()
        with started(launch, port, cwd=Path(scratch), log_file=log_file, tag="lm-eval"):
            engine = f"vLLM {call(f'{url}/version').get('version', 'of unknown release')}"
            yield lambda body: call(f"{url}/v1/completions", {"model": "model", **body}), engine


def _switches_off(cfg: RunConfig, folder: RunFolder) -> bool:
    """True where the base is the run's model without its adapter."""
    return folder.result == folder.path / "adapter" and (cfg.model.adapter is None or cfg.model.merge_adapter)


def _name_result(folder: RunFolder) -> str:
    return f"the {'adapter' if folder.result == folder.path / 'adapter' else 'model'} {folder.result}"


def _measure_opened(
    cfg: RunConfig, folder: RunFolder, tokenizer: Any, renderer: Any, measure: Measure
) -> tuple[str, str, int]:
    """Measure base and run in this process. Return how the base was had, the engine's version, and the context."""
    import transformers

    from sftplay.evaluate.harness import HarnessModel
    from sftplay.model.load import load_result, load_untrained

    switches_off = _switches_off(cfg, folder)  # else the base has an adapter too
    if not switches_off:
        lm = HarnessModel(load_untrained(cfg, folder.path), tokenizer, renderer, cfg=cfg)
        measure("base", lm)
        of_base = lm.score(lm.first_prompt).cpu() if lm.first_prompt else None
        del lm  # one model at a time
        gc.collect()
    model = load_result(cfg, folder.path)
    lm = HarnessModel(model, tokenizer, renderer, cfg=cfg)

    def score_base(ids: list[int]) -> Any:
        if not switches_off:
            return of_base
        with model.disable_adapter():
            return lm.score(ids)

    lm.score_base, lm.base_name = score_base, _name_result(folder)
    measure("run", lm)
    if switches_off:
        lm.score_base = None
        with model.disable_adapter():
            measure("base", lm)
    base_by = "adapter switched off" if switches_off else "opened again"
    return base_by, f"transformers {transformers.__version__}", lm.max_length


def _measure_served(
    cfg: RunConfig, folder: RunFolder, tokenizer: Any, renderer: Any, measure: Measure
) -> tuple[str, str, int]:
    """The same by vLLM's server, one after the other. An adapter is merged: with one next to its base, vLLM 0.31 fails
    as soon as it scores two prompts at a time.
    """
    from sftplay.evaluate.served_harness import ServedHarnessModel
    from sftplay.export.serve import base_folder, whole_model

    if folder.result == folder.path / "adapter" and not _switches_off(cfg, folder):
        what = "the run went on from another adapter, and its start is no whole model that vLLM could serve"
        raise ConfigError(what, where="--engine", fix="leave it out: transformers takes both adapters")
    start = str(base_folder(cfg, folder))
    whole = str(whole_model(cfg, folder))
    with _serving(cfg, folder, start, tokenizer=tokenizer) as (ask, _):
        base = ServedHarnessModel(ask, start, tokenizer, renderer, cfg=cfg)
        measure("base", base)
        of_base = base.score(base.first_prompt) if base.first_prompt else None
    with _serving(cfg, folder, whole, tokenizer=tokenizer) as (ask, engine):
        lm = ServedHarnessModel(ask, whole, tokenizer, renderer, cfg=cfg)
        lm.score_base, lm.base_name = lambda _: of_base, _name_result(folder)
        measure("run", lm)
        return "served before", engine, lm.max_length


def _learned_plainly(folder: RunFolder, tokenizer: Any) -> str:
    """Why the chat template says nothing to this run's model; empty where the run has learned it."""
    from sftplay.data.render.templates import template_hash

    if not tokenizer.chat_template:
        return "the run has no chat template"
    trained = folder.read_json("manifest.json").get("template_sha256")
    return "the run has learned plain texts" if trained == template_hash("") else ""
