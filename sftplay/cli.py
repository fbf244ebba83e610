"""The command line: parser, verb table, and the only place that turns errors into exit codes.

A verb's module is imported only when the verb runs, so that help and refusals are instant.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import pathlib
import shlex
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

from sftplay import log
from sftplay import make_arguments as make
from sftplay.errors import ConfigError, MachineError, RunError, SftplayError, machine_refusal, nearest_names
from sftplay.flags import PATH, flags_of
from sftplay.terminal import RED, drop, is_unwritable, open_closed, painted

VERBS = {
    "train": ("sftplay.commands.train", "train", "train the run of a config"),
    "resume": ("sftplay.commands.train", "resume", "continue a run from its newest complete checkpoint"),
    "demo": ("sftplay.commands.demo", "demo", "teach the builtin model a task, on any machine"),
    "process": ("sftplay.commands.rows", "process", "read, render and cache the data; print the data report"),
    "inspect": ("sftplay.commands.rows", "inspect", "show training rows with what is learned of them; the report"),
    "render": (
        "sftplay.commands.rows",
        "render",
        "show rows as the chat template writes them, or write all to a file",
    ),
    "reward-check": (
        "sftplay.commands.reward_check",
        "reward_check",
        "try the rewards of a config on right answers and on junk",
    ),
    "style": ("sftplay.commands.style", "style", "set the system prompt of a config, data.system"),
    "ingest": (
        "sftplay.commands.ingest",
        "ingest",
        "turn a folder of documents into rows of text, with a report",
    ),
    "puzzle-data": (
        "sftplay.commands.puzzles",
        "puzzle_data",
        "turn files of puzzles into the folder that task hrm learns from",
    ),
    "init": ("sftplay.commands.init", "init", "write a commented config for a data file"),
    "validate": ("sftplay.commands.config", "validate", "check a config and say what each value is and why"),
    "completion": ("sftplay.commands.completion", "completion", "print a shell's completion: bash, zsh or fish"),
    "schema": ("sftplay.commands.config", "schema", "print the JSON schema of the config"),
    "manual": ("sftplay.commands.config", "manual", "print the config manual"),
    "eval": ("sftplay.commands.evaluate", "evaluate", "measure a run on its held-out rows, beside its base"),
    "eval-test": ("sftplay.commands.evaluate", "evaluate", "measure it on the test rows"),
    "eval-quick": ("sftplay.commands.evaluate", "evaluate", "measure it on 50 prompts, without its base"),
    "eval-full": ("sftplay.commands.evaluate", "evaluate", "measure it on every held-out row, by every metric"),
    "eval-code": ("sftplay.commands.eval_code", "eval_code", "run a run's programs against the tests of problems"),
    "infer": ("sftplay.commands.infer", "infer", "chat with a run's model"),
    "infer-batch": ("sftplay.commands.infer", "infer_batch", "answer every row of a file"),
    "download-model": (
        "sftplay.commands.download",
        "download_model",
        "fetch a model from the hub into its cache",
    ),
    "merge": ("sftplay.commands.export", "merge", "merge a run's adapter into its full-precision base"),
    "merge-test": ("sftplay.commands.export", "merge_test", "compare a merged model with the adapter it came from"),
    "export": ("sftplay.commands.export", "export", "write a run's model as a folder that stands alone"),
    "serve": ("sftplay.commands.export", "serve", "answer OpenAI clients on this machine with a run's model"),
    "report": ("sftplay.commands.report", "report", "write report.html of a run"),
    "compare": ("sftplay.commands.report", "compare", "two runs side by side"),
    "tensorboard": ("sftplay.commands.tensorboard", "start", "show curves in a browser; returns at once"),
    "tb-stop": ("sftplay.commands.tensorboard", "stop", "stop that TensorBoard"),
    "gpu-info": ("sftplay.commands.machine", "gpu_info", "what this machine offers"),
    "plan": ("sftplay.commands.plan", "plan", "what a run takes, before anything is downloaded"),
    "memory-check": ("sftplay.commands.machine", "memory_check", "who holds which memory, planned and real"),
    "comm-check": ("sftplay.commands.comm_check", "comm_check", "how fast processes exchange gradients here"),
    "doctor": ("sftplay.commands.machine", "doctor", "what would go wrong here, and what to do about it"),
    "gpu-check": ("sftplay.commands.gpu_check", "gpu_check", "try what the kit promises on this machine's GPUs"),
    "matrix": ("sftplay.commands.cluster", "matrix", "what goes together: tuning mode, strategy, precision"),
    "setup-accelerate": (
        "sftplay.commands.cluster",
        "setup_accelerate",
        "write an accelerate config for this machine",
    ),
    "train-ray": ("sftplay.commands.train", "train_ray", "train on a cluster of Ray, or on one of its own"),
    "submit": ("sftplay.commands.slurm", "submit", "queue the run of a config as a job of SLURM"),
    "status": ("sftplay.commands.slurm", "status", "the job of a run and how far the run is"),
    "logs": ("sftplay.commands.slurm", "logs", "the last lines of a run's job"),
    "cancel": ("sftplay.commands.slurm", "cancel", "stop the job of a run with a checkpoint"),
    "job-file": (
        "sftplay.commands.slurm",
        "job_file",
        "write a run as a job for SkyPilot, dstack or Kubernetes",
    ),
    "sandbox": ("sftplay.commands.sandbox", "sandbox", "run programs of a model in a box, and judge them"),
    "check": ("sftplay.commands.machine", "check", "lint and types of this repository"),
}
"""verb -> module, function, help. A verb's function takes the parsed arguments and returns an exit code."""

WITHOUT_CONFIG = (
    "demo", "init", "ingest", "puzzle-data", "completion", "download-model", "schema", "manual", "compare",
    "tensorboard", "tb-stop", "gpu-info", "memory-check", "doctor", "check", "comm-check", "gpu-check", "matrix",
    "setup-accelerate", "sandbox", "status", "logs", "cancel",
)  # fmt: skip
"""Verbs that run without --config."""

FLAGS_OF_VARIABLES = {"init": {"DATA": "--data", "OUT": "--out"}, "completion": {"FOR": "--shell"}}
"""Verb -> what it takes without a flag, in order."""

BUG = 1

REFUSED = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}
"""What a file system says to a path that it does not serve. Readers with more to say about a path say it first."""

SPIN_COUNT = "1000"
"""How often a thread of OpenMP looks for work before it sleeps (GOMP_SPINCOUNT). GNU's library looks 300,000 times, so
that threads which wait take the cores from those which work, where anything else runs on the machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code that docs/interfaces.md promises."""
    open_closed()
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in split(arguments)[0]
    _print_anything()
    try:
        _check_folder()
        is_make = bool(arguments) and arguments[-1].startswith(make.ARGS)
        if is_make:
            arguments += make.split_args(arguments.pop().removeprefix(make.ARGS))
            as_json = "--json" in split(arguments)[0]
        if as_json:
            os.environ[log.JSON] = "1"
        args = parse(arguments, is_make=is_make)
        if strays := log.clear_cluster_variables():
            text = f"note: the environment's {', '.join(strays)} are not used: this command starts its own processes"
            log.say(text, args.verb)
        args.strays = strays
        limit_spinning()
        module, function, _ = VERBS[args.verb]
        exit_code: int = getattr(import_module(module), function)(args)
        sys.stdout.flush()  # raises BrokenPipeError here, where it is handled, if the reader has left
        lost = log.own_screen()
        if lost and lost.failure and not _launches(args.verb):  # a run needs no reader; what only shows has failed
            return _report_unwritable(lost.failure)
        return exit_code
    except SftplayError as error:
        return _report(error, as_json)
    except BrokenPipeError:
        drop(1)  # the reader has closed the pipe, as `head` does; not an error
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return _report_unwritable(error) if is_unwritable(error) else _report_path(error, as_json)
    except Exception as error:  # noqa: BLE001 - the one place where a bug becomes exit code 1 with its traceback
        return _report_bug(error, as_json)
    finally:
        os.environ.pop(log.JSON, None)


def limit_spinning() -> None:
    """Let threads that wait leave their core soon, here and in what this starts. The user's own settings stay."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def _check_folder() -> None:
    """Raise MachineError where the working folder was deleted: nothing that is written would be found again."""
    try:
        pathlib.Path.cwd()
    except OSError:
        fix = "go to a folder that exists: cd"
        raise MachineError("does not exist any more", where="the working folder", fix=fix) from None


def _print_anything() -> None:
    """Print a character that the terminal's encoding lacks as its escape, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the kit, and those after the first `--`, which are the launcher's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def parse(arguments: list[str], *, is_make: bool = False) -> argparse.Namespace:
    """The parsed arguments.

    `args.overrides` holds the config values `a.b=c`, also those written `--a.b=c`. `args.launcher_args` holds what
    follows `--`.

    Raises:
        ConfigError: the verb or flag is unknown (the error has the nearest name); a verb that needs a config got none;
            a verb without a launcher got arguments for one. With `is_make` it names make's settings for the flags.
    """
    try:
        return _parse(arguments)
    except ConfigError as error:
        raise (make.in_settings(error) if is_make else error) from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    own, launcher_args = split(arguments)
    own = with_flags(own) if own[:1] and own[0] in FLAGS_OF_VARIABLES else own or ["--help"]
    verb = own[0]
    if not verb.startswith("-") and verb not in VERBS:
        near = nearest_names(verb, VERBS)
        fix = f"did you mean {near[0]!r}?" if near else "see `make help`"
        raise ConfigError(f"no verb called {verb!r}", where="command line", fix=fix, nearest=near)
    # Overrides stay outside argparse, which would lose their order: the later of two values for one key counts.
    args, rest = _parser().parse_known_args(own)
    for argument in rest:
        key = argument.partition("=")[0]
        is_flag = (
            argument.startswith("--") and "." not in key and nearest_names(key, _known_flags(args.verb), cutoff=0.8)
        )
        if "=" not in argument or key.strip("-") == "" or is_flag:
            raise _unknown_argument(argument, args.verb)
    args.overrides = [argument.removeprefix("--") for argument in rest]
    args.launcher_args = launcher_args
    if launcher_args and not _launches(verb):
        problem = f"{verb} starts no launcher that could take {shlex.join(launcher_args)}"
        raise ConfigError(problem, where="--", fix="leave out what follows `--`")
    if not args.config and args.verb not in WITHOUT_CONFIG:
        fix = f"name the run's YAML: python -m sftplay {args.verb} --config=configs/run_lora.yaml"
        raise ConfigError(f"{args.verb} needs a config", where="--config", fix=fix)
    return args


def with_flags(words: Sequence[str]) -> list[str]:
    """`init DATA OUT` with flags in place of the bare words, which may be written with a sign as for make."""
    flags, rest, names = [words[0]], [], FLAGS_OF_VARIABLES[words[0]]
    free = [flag for flag in names.values() if flag not in words]
    before = ""
    for word in words[1:]:
        name, sign, value = word.partition("=")
        if name in names and sign:
            flags += [names[name], value]
        elif free and not word.startswith("-") and before not in names.values() and ("." not in name or not sign):
            flags += [free.pop(0), word]
        else:
            rest.append(word)
        before = word
    return [*flags, *rest]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", fix=f"see `python -m {self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="sftplay", description="Fine-tune language models from one YAML file.", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (_, _, text) in VERBS.items():
        verb = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        verb.usage = f"sftplay {name} [flags] [a.b=c ...]{' [-- arguments of its launcher]' if _launches(name) else ''}"
        verb.epilog = "a.b=c sets a config value and goes before the file's"
        verb.add_argument("--config", type=PATH, default="", help="the run's YAML")
        verb.add_argument("--json", action="store_true", help="one JSON document on standard output")
        for flag, options in flags_of(name).items():
            verb.add_argument(flag, **options)
    return parser


def _unknown_argument(argument: str, verb: str) -> ConfigError:
    near = nearest_names(argument.split("=")[0], _known_flags(verb))
    fix = f"did you mean {near[0]!r}?" if near else "write config values as a.b=c"
    return ConfigError(f"{verb} does not know {argument!r}", where="command line", fix=fix, nearest=near)


def _launches(verb: str) -> bool:
    return "--dry-run" in flags_of(verb)


def _known_flags(verb: str) -> list[str]:
    return ["--config", "--json", *flags_of(verb)]


def _report(error: SftplayError, as_json: bool) -> int:
    try:
        if as_json:
            print(json.dumps({"error": error.as_json()}, ensure_ascii=False), flush=True)
        log.close_live_line()
        what, _, fix = str(error).partition("\n  fix: ")
        told = painted(what, RED, stream=sys.stderr)
        print(f"{told}\n  fix: {fix}" if fix else told, file=sys.stderr)
    except OSError:  # nobody can be told; the exit code remains
        drop(1)
        drop(2)
    return error.exit_code


def _report_unwritable(error: OSError) -> int:
    """Say that the output could not be written, where there still is a place to say it."""
    drop(1)
    fix = "make room, or send the output elsewhere"
    return _report(RunError(f"writing failed ({error.strerror})", where="the output", fix=fix), as_json=False)


def _report_path(error: OSError, as_json: bool) -> int:
    """Name the path that cannot be opened; an error of another kind is a bug."""
    if error.filename is None or error.errno not in REFUSED:
        return _report_bug(error, as_json)
    fix = "name another path, or give this user the right to it"
    return _report(ConfigError(str(error.strerror), where=os.fsdecode(error.filename), fix=fix), as_json)


def _report_bug(error: Exception, as_json: bool) -> int:
    if refusal := machine_refusal(error):
        return _report(refusal, as_json)
    try:
        if as_json:
            print(json.dumps({"error": SftplayError(f"{type(error).__name__}: {error}").as_json()}))
        traceback.print_exception(error)
    except OSError:
        drop(1)
    return BUG
