"""The verb `lm-eval`: tasks of lm-evaluation-harness on a run and its base, asked as the run was trained."""

from __future__ import annotations

import gc
import json
from argparse import Namespace
from contextlib import redirect_stdout
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.runs.finished_run import load_renderer, name_config, open_run, prepare_environment, report_at_end

NAME = "lm-eval.json"


def lm_eval(args: Namespace) -> int:
    """`lm-eval`: the figures of these tasks for the run and for its base, in eval/lm-eval.json, every answer next to it
    in lm-eval.jsonl, and in report.html.
    """
    if args.engine == "vllm":
        what = "vLLM is not used here yet: the kit cannot prove there that adapter and template are in effect"
        raise ConfigError(what, where="--engine", fix="leave it out: transformers asks the same questions, more slowly")
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
    from sftplay.evaluate.harness import SEEDS, HarnessModel, load_tasks, read_answers, read_figures, run_tasks
    from sftplay.model.load import load_result, load_untrained

    tasks, names = load_tasks(args.tasks, args.include_path, boxed=boxed)
    tokenizer, renderer = load_renderer(cfg, folder)
    if plain := "--no-template was given" if args.no_template else _learned_plainly(folder, tokenizer):
        renderer = None
    how = f"as plain documents ({plain})" if plain else "by the run's chat template"
    how += f" and its system prompt {cfg.data.system!r}" if cfg.data.system and not plain else ""
    log.say(f"{', '.join(names)}: run and base are asked {how}, in batches of {cfg.eval.batch_size}", "lm-eval")
    found, counts, programs = {}, {}, dict[str, dict[str, int]]()

    def measure(side: str, lm: Any) -> None:
        boxed.statuses.clear()
        log.say(f"measuring the {'run' if side == 'run' else 'base'}", "lm-eval")
        with ready_to_answer(lm.model, cfg):
            found[side] = run_tasks(
                lm, tasks, names=names, system=cfg.data.system or None, limit=args.limit, fewshot=args.num_fewshot,
                log_file=folder.logs / "lm-eval.log",
            )  # fmt: skip
        counts[side], programs[side] = dict(lm.counts), dict(sorted(boxed.statuses.items()))

    is_adapter = folder.result == folder.path / "adapter"
    switches_off = is_adapter and (cfg.model.adapter is None or cfg.model.merge_adapter)  # else the base has one too
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

    lm.score_base, lm.base_name = score_base, f"the {'adapter' if is_adapter else 'model'} {folder.result}"
    measure("run", lm)
    if switches_off:
        lm.score_base = None
        with model.disable_adapter():
            measure("base", lm)
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
        "engine": "transformers", "harness": version("lm-eval"), "template": renderer is not None,
        "template_sha256": renderer.template_hash if renderer else None,
        "system": (cfg.data.system or None) if renderer else None, "limit": args.limit, "seeds": SEEDS,
        "batch_size": cfg.eval.batch_size, "max_length": lm.max_length, "prompts": counts["run"],
        "programs": programs if any(programs.values()) else None, "executor": boxed.executor,
        "model": cfg.model.name, "weights": folder.result.name if folder.result else None,
        "base_by": "adapter switched off" if switches_off else "opened again",
        "step": folder.read_json("status.json").get("step"),
    }  # fmt: skip
    return content, [line for side in ("run", "base") for line in read_answers(found[side], side)]


def _learned_plainly(folder: RunFolder, tokenizer: Any) -> str:
    """Why the chat template says nothing to this run's model; empty where the run has learned it."""
    from sftplay.data.render.templates import template_hash

    if not tokenizer.chat_template:
        return "the run has no chat template"
    trained = folder.read_json("manifest.json").get("template_sha256")
    return "the run has learned plain texts" if trained == template_hash("") else ""
