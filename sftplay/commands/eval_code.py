"""The verb `eval-code`: a model's programs against the tests of MBPP or HumanEval."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.errors import ConfigError
from sftplay.launch.command import Scale
from sftplay.machine.probe import probe
from sftplay.runs.code_eval import Subject, answer_by_ranks, build_ranks, find_subject, make_questions
from sftplay.runs.start import print_command, read_scale

ROOMY_TOKENS = 512
"""The longest solution of MBPP has 906 characters; that of HumanEval 1,993, with the docstring of its question."""


def eval_code(args: Namespace) -> int:
    """`eval-code`: pass@k of a model on problems with tests, in eval/code-N.json and every answer next to it."""
    ks = _checked_ks(args)
    machine = probe()
    scale = read_scale(args, machine)
    if scale.nnodes > 1:
        what = "eval-code starts processes of one node, and those of several would not find each other's answers"
        raise ConfigError(what, where="--nnodes", fix="leave NNODES out")
    subject = find_subject(args)
    if args.dry_run:
        launch = build_ranks(subject, Path("FOLDER"), scale=scale, has_gpu=bool(machine.gpus))
        return print_command(launch, args)
    subject.folder.eval.mkdir(parents=True, exist_ok=True)  # before the work: it may be refused
    figures, lines = _measure(args, subject, ks=ks, scale=scale, has_gpu=bool(machine.gpus))
    for number in count(1):  # the first name that is free: no measurement is written over, nor by another process
        path = subject.folder.eval / f"code-{number}.json"
        with suppress(FileExistsError):
            path.touch(exist_ok=False)
            break
    write_text(path.with_suffix(".jsonl"), "".join(line + "\n" for line in lines))
    write_text(path, json.dumps(figures, indent=1) + "\n")
    if args.json:
        print(json.dumps(figures))
    else:
        for k in figures["k"]:
            error = figures["stderr" if k == figures["k"][0] else f"stderr@{k}"]
            log.show(f"{f'pass@{k}':<10} {figures[f'pass@{k}']:.3f} +- {error:.3f}")
        most = sorted(figures["statuses"].items(), key=lambda pair: -pair[1])[:6]
        log.show("answers    " + ", ".join(f"{name} {n:,}" for name, n in most))
        log.say(f"every answer with its verdict: {path.with_suffix('.jsonl')}", "eval")
    return 0


def _checked_ks(args: Namespace) -> tuple[int, ...]:
    """The k of the figures. Raises ConfigError if settings of sampling contradict each other, or a k is too large."""
    if args.n > 1 and args.temperature == 0:
        fix = "write TEMPERATURE=0.2, or N=1"
        raise ConfigError(f"{args.n} answers a problem would all be the likeliest one", where="--n", fix=fix)
    if args.temperature == 0 and args.top_p is not None:
        what = "has no effect: at temperature 0 nothing is drawn"
        raise ConfigError(what, where="--top-p", fix="leave it out, or set --temperature (TEMPERATURE=0.8)")
    ks = args.k or tuple(k for k in (1, 10) if k <= args.n)
    if max(ks) > args.n:
        what = f"pass@{max(ks)} cannot be estimated from {args.n} answers a problem"
        raise ConfigError(what, where="--k", fix=f"ask for more: N={max(ks)} TEMPERATURE=0.8; or for a smaller k")
    return tuple(sorted(set(ks)))


def _measure(
    args: Namespace, subject: Subject, *, ks: Sequence[int], scale: Scale, has_gpu: bool
) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each answer."""
    from sftplay.data.load_problems import load_problems, sample_subset, sound_problems
    from sftplay.data.problem import format_question
    from sftplay.evaluate.code import evaluate_code, measuring_limits
    from sftplay.sandbox.pool import Sandbox

    limits = measuring_limits(subject.cfg.sandbox)
    seed = subject.cfg.seed if args.seed is None else args.seed
    executor = args.executor or subject.cfg.sandbox.executor
    packages = subject.cfg.sandbox.packages
    with Sandbox(executor, packages=packages) as sandbox:  # before the heavy libraries: boxes are forked from it
        sound, failed = sound_problems(load_problems(args.data, args.split), sandbox, limits=limits)
        problems = sample_subset(sound, args.limit, seed=seed)
        if len(problems) < len(sound):
            log.say(f"{len(problems):,} of {len(sound):,} problems, chosen by seed {seed}", "eval")
        if len(problems) < 100:  # the standard error is up to five points and more
            log.say(f"note: {len(problems)} problems say little; look at the standard error", "eval")
        questions = make_questions([format_question(item) for item in problems], cfg=subject.cfg, args=args)
        log.say(f"{len(problems):,} problems, {args.n} answers each; programs run in {sandbox.executor}", "eval")
        if questions.max_new_tokens < ROOMY_TOKENS:
            note = f"note: answers end at {questions.max_new_tokens} tokens, which cuts long programs off"
            log.say(f"{note}; MAX_NEW_TOKENS={ROOMY_TOKENS} leaves them room", "eval")
        started = time.monotonic()
        answers = answer_by_ranks(subject, questions, scale=scale, has_gpu=has_gpu)
        answered = time.monotonic()
        figures, graded = evaluate_code(problems, answers, ks=ks, sandbox=sandbox, limits=limits)
    seconds = {"answering": round(answered - started, 2), "grading": round(time.monotonic() - answered, 2)}
    drawn = {"temperature": questions.temperature, "top_p": questions.top_p, "seed": seed}
    figures = {
        "data": args.data, "split": args.split, **figures, "left_out": failed, "limit": args.limit, **drawn,
        "max_new_tokens": questions.max_new_tokens, "processes": scale.world_size, "seconds": seconds,
        "questions_sha256": questions.digest(), **subject.describe(),
    }  # fmt: skip
    return figures, [json.dumps(item.as_json()) for item in graded]
