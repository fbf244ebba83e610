"""The verbs that ask a finished run for answers: `infer` line by line, `infer-batch` a whole file."""

from __future__ import annotations

import json
import signal
import sys
from argparse import Namespace
from io import TextIOWrapper
from pathlib import Path
from threading import Event
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.layouts import read_layout_options
from sftplay.data.read import read_dialect
from sftplay.errors import ConfigError, DataError, MachineError
from sftplay.generate.partial_answers import PartialAnswers, fingerprint_run
from sftplay.generate.prompts import PromptFile
from sftplay.launch.run_folder import RunFolder
from sftplay.runs.finished_run import load_renderer, open_run, prepare_environment
from sftplay.units import plural


def infer(args: Namespace) -> int:
    """`infer`: talk on standard input and output until an empty line; or solve the puzzle in a file."""
    cfg, folder = open_run(args, takes_puzzles=True)
    if not cfg.task.reads_text:
        return _solve_puzzle(args, cfg, folder=folder)
    if args.input:
        what = "only a run of task mode hrm takes a file here"
        fix = "leave it out to talk, or answer a file of rows with make infer-batch IN= OUT="
        raise ConfigError(what, where="--in (IN=)", fix=fix)
    cfg = _in_length(cfg, args)
    generator, renderer, role_models = _open_generator(cfg, folder, args=args)
    from sftplay.generate.chat import Conversation, run_command

    conversation: Any
    if role_models is None:
        conversation = Conversation(generator, renderer, cfg.data.system)
    else:
        conversation = cfg.task.finished.EpisodeChat(cfg, role_models, renderer=renderer, generator=generator)
    model = f"{'the base of ' if args.base else ''}{folder.path}"
    log.say(f"talking to {model}; an empty line ends it, /help lists commands", "infer")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    while line := _next_line():
        if not line.startswith("/"):
            _answer(conversation, line.strip())
        elif (reply := run_command(conversation, line)) is not None:
            log.say(reply, "infer")
        else:
            return 0
    return 0


def _in_length(cfg: RunConfig, args: Namespace) -> RunConfig:
    """The config of a run that answers twice with answers as long as the command line says."""
    if cfg.task.turns != 2 or not args.max_new_tokens:
        return cfg
    longer = cfg.with_values({"score.max_new_tokens": args.max_new_tokens}, "command line")
    if longer.prompt_tokens < 1:
        what = f"{args.max_new_tokens} leaves no room for a problem: the run read {cfg.model.max_seq_len} tokens"
        raise ConfigError(what, where="--max-new-tokens", fix="write fewer: MAX_NEW_TOKENS=")
    return longer


def _next_line() -> str:
    """The next line without its end; empty at the end of the conversation."""
    is_typed = sys.stdin.isatty()
    sys.stdout.write("> " if is_typed else "")
    sys.stdout.flush()
    line = ""
    try:
        line = sys.stdin.readline()
    finally:
        if is_typed and not line:  # Ctrl-C and Ctrl-D leave the cursor behind the prompt
            print(flush=True)
    return line.rstrip() if line.strip() else ""


def _answer(conversation: Any, question: str) -> None:
    """Print the answer. The first Ctrl-C ends it, the second one interrupts as usual."""
    stop = Event()

    def on_interrupt(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        for piece in conversation.ask(question, stop, notify=lambda text: log.say(f"note: {text}", "infer")):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except DataError as error:
        log.say(str(error), "infer")
    else:
        print(flush=True)
    finally:
        signal.signal(signal.SIGINT, before)


def infer_batch(args: Namespace) -> int:
    """`infer-batch`: answer the rows of a file, in order; the same command continues after an interruption."""
    cfg, folder = open_run(args)
    cfg = _in_length(cfg, args)
    out = _check_paths(args)
    questions = PromptFile(args.input, read_layout_options(cfg.data), read_dialect(cfg.data))
    n = sum(1 for _ in questions)
    digest = questions.digest()
    longest = cfg.score.max_new_tokens if cfg.task.turns == 2 else args.max_new_tokens or cfg.eval.max_new_tokens
    settings = {"batch_size": cfg.eval.batch_size, "max_new_tokens": longest}
    settings |= _drawing(args, cfg) if args.temperature else {"temperature": args.temperature}
    partial = PartialAnswers(out, {"input": digest, "run": fingerprint_run(folder), **settings})
    with partial.held():
        if n_kept := partial.n_answers:
            log.say(f"{partial.path} holds {n_kept} of {n} answers: continuing from there", "infer")
        if n_kept < n:
            _answer_file(args, cfg, folder=folder, questions=questions, partial=partial, n=n)
        if questions.digest() != digest:
            fix = f"put it back as it was, or remove {partial.path}"
            raise DataError("has changed while it was being answered", where=args.input, fix=fix)
        from sftplay.generate.batch import write_answered

        write_answered(questions, partial, out=out, batch_size=cfg.eval.batch_size)
    log.say(f"{plural(n, 'answer')} in {out}", "infer")
    if args.json:
        print(json.dumps({"answers": n, "kept": n_kept, "out": str(out)}))
    return 0


def _answer_file(
    args: Namespace, cfg: RunConfig, *, folder: RunFolder, questions: PromptFile, partial: PartialAnswers, n: int
) -> None:
    """Answer the rest of the rows. Before the first one the lengths of all are checked."""
    if cfg.task.turns == 2:
        prepare_environment(cfg)
        from sftplay.generate.generate import Sampling

        finished = cfg.task.finished
        _, renderer = load_renderer(cfg, folder)
        role_models, sampling = finished.open_role_models(cfg, folder), Sampling(**_drawing(args, cfg))
        row_sampler = finished.RowEpisodeSampler(cfg, role_models, renderer=renderer, sampling=sampling)
        if not partial.n_batches:
            finished.check_problems(questions, renderer, cfg=cfg)
        answer = row_sampler.sample_answers
    else:
        generator, renderer, _ = _open_generator(cfg, folder, args=args)
        from sftplay.generate.batch import check_lengths, make_answerer

        if not partial.n_batches:
            check_lengths(questions, renderer, generator=generator)
        answer = make_answerer(generator)
    from sftplay.generate.batch import answer_rest

    batch_size = cfg.eval.batch_size
    try:
        answer_rest(answer, renderer, questions=questions, batch_size=batch_size, partial=partial, total=n)
    except KeyboardInterrupt:
        log.say(f"stopped; {plural(partial.n_answers, 'answer')} kept, the same command continues from there", "infer")
        raise


def _check_paths(args: Namespace) -> Path:
    out = Path(args.out)
    if out.is_dir():
        raise ConfigError("is a folder", where=args.out, fix="name a file with OUT=")
    if out.suffix.lower() in (".csv", ".tsv", ".parquet", ".xlsx"):
        fix = f"name a file of such lines: OUT={out.with_suffix('.jsonl')}"
        raise ConfigError("is to hold lines of JSON, which its name denies", where=args.out, fix=fix)
    if out.exists() and Path(args.input).exists() and out.samefile(args.input):
        raise ConfigError("is the file with the rows themselves", where=args.out, fix="name another file with OUT=")
    if args.temperature == 0:
        for flag, value in (("--top-p", args.top_p), ("--seed", args.seed)):
            if value is not None:
                what = "has no effect: at temperature 0 nothing is drawn"
                raise ConfigError(what, where=flag, fix="leave it out, or set --temperature (TEMPERATURE=1)")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be written ({error.strerror})"
        raise MachineError(what, where=args.out, fix="choose another file with OUT=") from error
    return out


def _open_generator(cfg: RunConfig, folder: RunFolder, *, args: Namespace) -> tuple[Any, Any, Any]:
    """A generator and its renderer, and the models of both roles of a run that answers twice; else None."""
    prepare_environment(cfg)
    from sftplay.generate.generate import Generator, Sampling
    from sftplay.model.load import load_result, load_untrained

    tokenizer, renderer = load_renderer(cfg, folder)
    is_base, role_models = getattr(args, "base", False), None
    longest = args.max_new_tokens or cfg.eval.max_new_tokens
    if cfg.task.turns == 2:
        longest = cfg.score.max_new_tokens
        role_models = cfg.task.finished.open_role_models(cfg, folder, untrained=is_base)
        model = role_models.model
    else:
        model = load_untrained(cfg, folder.path) if is_base else load_result(cfg, folder.path)
    sampling = Sampling(**_drawing(args, cfg))
    return Generator(model, tokenizer, renderer.end_token_ids, longest, sampling), renderer, role_models


def _drawing(args: Namespace, cfg: RunConfig) -> dict[str, Any]:
    """The settings of sampling."""
    top_p, seed = 1.0 if args.top_p is None else args.top_p, cfg.seed if args.seed is None else args.seed
    return {"temperature": args.temperature, "top_p": top_p, "seed": seed}


def _solve_puzzle(args: Namespace, cfg: RunConfig, *, folder: RunFolder) -> int:
    """Print the grid of the solution, and what is to be said of it."""
    name = args.input
    if not name:
        fix = "name a file with one grid: IN=puzzle.txt"
        raise ConfigError("this run solves puzzles, and none is named", where="--in (IN=)", fix=fix)
    fix = "name a file with one grid"
    try:
        if Path(name).stat().st_size > 1 << 16:
            raise DataError("is larger than any puzzle", where=name, fix=fix)
        text = Path(name).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=name, fix=fix) from None
    except UnicodeDecodeError:
        raise DataError("is no text", where=name, fix=fix) from None
    prepare_environment(cfg)
    answer, remark = cfg.task.finished.solve_text(cfg, folder, text=text, where=name)
    print(answer, flush=True)
    log.say(remark, "infer")
    return 0
