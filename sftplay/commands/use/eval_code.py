"""The verb `eval-code`: a run's programs against the tests of MBPP or HumanEval."""

from __future__ import annotations

import json
from argparse import Namespace
from itertools import count
from pathlib import Path

from sftplay import log
from sftplay.atomic import write_text
from sftplay.commands.use.infer import open_generator
from sftplay.control.finished_run import open_run
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder

SHOWN_STATUSES = 6


def eval_code(args: Namespace) -> int:
    """`eval-code`: pass@k of a run on problems with tests, in eval/code-N.json and every answer beside it."""
    from sftplay.data.problems.load import load_problems

    if args.n > 1 and args.temperature == 0:
        fix = "write TEMPERATURE=0.2, or N=1"
        raise ConfigError(f"{args.n} answers a problem would all be the likeliest one", where="--n", fix=fix)
    problems = load_problems(args.data, args.split)[: args.limit]
    cfg, folder = open_run(args)
    generator, renderer = open_generator(cfg, folder, args=args)
    from sftplay.data.records import Message
    from sftplay.deliver.evaluate.code import evaluate_code
    from sftplay.deliver.infer.generate import answer_all
    from sftplay.sandbox.pool import Sandbox

    system = (Message("system", cfg.data.system),) if cfg.data.system else ()

    def ask(questions: list[str]) -> list[str]:
        prompts = [renderer.prompt_ids((*system, Message("user", question)), "") for question in questions]
        return answer_all(
            generator,
            prompts,
            batch_size=cfg.eval.batch_size,
            progress=lambda done: log.progress(done, len(prompts), what="answered", tag="eval"),
        )

    with Sandbox(args.executor) as sandbox:
        log.say(f"{len(problems):,} problems, {args.n} answers each; programs run in {sandbox.executor}", "eval")
        figures, graded = evaluate_code(ask, problems, n=args.n, sandbox=sandbox)
    path = _next_file(folder)
    drawn = {"temperature": args.temperature, "max_new_tokens": generator.max_new_tokens, "split": args.split}
    figures = {"data": args.data, **figures, **drawn}
    write_text(path.with_suffix(".jsonl"), "".join(json.dumps(each.as_json()) + "\n" for each in graded))
    write_text(path, json.dumps(figures, indent=1) + "\n")
    if args.json:
        print(json.dumps(figures))
    else:
        log.show(_summary(figures))
        log.say(f"every answer with its verdict: {path.with_suffix('.jsonl')}", "eval")
    return 0


def _next_file(folder: RunFolder) -> Path:
    """The first name that is free: no measurement is written over."""
    paths = (folder.eval / f"code-{number}.json" for number in count(1))
    return next(path for path in paths if not path.exists())


def _summary(figures: dict[str, object]) -> str:
    lines = [
        f"{key:<10} {figures[key]:.3f} +- {figures['stderr' if key == 'pass@1' else 'stderr@10']:.3f}"
        for key in ("pass@1", "pass@10")
        if key in figures
    ]
    statuses = figures["statuses"]
    assert isinstance(statuses, dict)
    most = sorted(statuses.items(), key=lambda pair: -pair[1])[:SHOWN_STATUSES]
    return "\n".join([*lines, "answers    " + ", ".join(f"{name} {n:,}" for name, n in most)])
