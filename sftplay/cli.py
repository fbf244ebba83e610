"""The command line: verbs, their flags, and the only place that turns errors into exit codes.

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
from typing import Any, NoReturn

from sftplay import log
from sftplay.errors import ConfigError, MachineError, RunError, SftplayError, machine_refusal, nearest_names, suggest
from sftplay.log import RED, UNWRITABLE, drop, open_closed, painted

VERBS = {
    "train": ("train.train", "train the run of a config"),
    "resume": ("train.train", "continue a run from its newest complete checkpoint"),
    "demo": ("demo.demo", "teach the builtin model a task, on any machine"),
    "process": ("data.process", "read, render and cache the data; print the data report"),
    "inspect": ("data.inspect", "show training rows with what is learned of them; the report"),
    "render": ("data.render", "show rows as the chat template writes them, or write all to a file"),
    "reward-check": ("reward_check.reward_check", "try the rewards of a config on right answers and on junk"),
    "style": ("config.style", "set the system prompt of a config, data.system"),
    "ingest": ("ingest.ingest", "turn a folder of documents into rows of text, with a report"),
    "puzzle-data": (
        "tasks.hrm.puzzles.make.puzzle_data",
        "turn files of puzzles into the folder that task hrm learns from",
    ),
    "init": ("config.init", "write a commented config for a data file"),
    "import-config": ("import_config.import_config", "turn a config of another kit into one of this kit"),
    "validate": ("config.validate", "check a config and say what each value is and why"),
    "completion": ("completion.completion", "print a shell's completion: bash, zsh or fish"),
    "schema": ("config.manual", "print the JSON schema of the config, or of what the verbs print"),
    "manual": ("config.manual", "print the config manual"),
    "eval": ("evaluate.evaluate", "measure a run on its held-out rows, against its base"),
    "eval-test": ("evaluate.evaluate", "measure it on the test rows"),
    "eval-quick": ("evaluate.evaluate", "measure it on 50 prompts, without its base"),
    "eval-full": ("evaluate.evaluate", "measure it on every held-out row, by every metric"),
    "eval-code": ("eval_code.eval_code", "run a run's programs against the tests of problems"),
    "lm-eval": ("harness.lm_eval", "tasks of lm-evaluation-harness on a run and its base"),
    "infer": ("infer.infer", "chat with a run's model"),
    "infer-batch": ("infer.infer_batch", "answer every row of a file"),
    "download-model": ("download.download_model", "fetch a model from the hub into its cache"),
    "merge": ("export.merge", "merge a run's adapter into its full-precision base"),
    "merge-test": ("export.merge_test", "compare a merged model with the adapter it came from"),
    "export": ("export.export", "write a run's model as a folder that stands alone, or as GGUF files"),
    "parity": ("export.parity", "hold what an engine serves against the trained model"),
    "serve": ("export.serve", "answer OpenAI clients on this machine with a run's model"),
    "report": ("report.report", "write report.html of a run, or one page of several"),
    "compare": ("report.compare", "two runs side by side"),
    "tensorboard": ("report.start", "show curves in a browser; returns at once"),
    "tb-stop": ("report.stop", "stop that TensorBoard"),
    "gpu-info": ("machine.gpu_info", "what this machine offers"),
    "plan": ("plan.plan", "what a run takes, before anything is downloaded"),
    "memory-check": ("machine.memory_check", "who holds which memory, planned and real"),
    "comm-check": ("gpu_check.comm_check", "how fast processes exchange gradients here"),
    "doctor": ("machine.doctor", "what would go wrong here, and what to do about it"),
    "gpu-check": ("gpu_check.gpu_check", "try what the kit promises on this machine's GPUs"),
    "matrix": ("machine.matrix", "what goes together: tuning mode, strategy, precision"),
    "setup-accelerate": ("machine.setup_accelerate", "write an accelerate config for this machine"),
    "train-ray": ("train.train_ray", "train on a cluster of Ray, or on one of its own"),
    "sweep": ("sweep.sweep", "train a config with many values, and find the best"),
    "submit": ("slurm.submit", "queue the run of a config as a job of SLURM"),
    "status": ("status.status", "how far the runs here are, and their jobs"),
    "logs": ("slurm.logs", "the last lines of a run's job"),
    "cancel": ("slurm.cancel", "stop the job of a run with a checkpoint"),
    "sandbox": ("sandbox.sandbox", "run programs of a model in a box, and judge them"),
    "check": ("machine.check", "lint and types of this repository"),
    "help": ("help.show_help", "print the verbs; with --json all targets, settings, flags and exit codes"),
}
"""verb -> module of `sftplay.commands` and function, help. A function takes the arguments and returns an exit code."""

LOOKS: dict[str, dict[str, dict[str, Any]]] = {
    "gpu-info": {"--torch": {"action": "store_true", "help": "ask torch too, which takes seconds"}},
    "memory-check": {"--watch": {"action": "store_true", "help": "again every two seconds, until Ctrl-C"}},
    "doctor": {"--fast": {"action": "store_true", "help": "ask neither torch nor the network"}},
}
LOOKS["status"] = {
    "--run": {"type": os.path.expanduser, "help": "name or folder of the run"},
    **LOOKS["memory-check"],
}
"""Flags of verbs that import next to nothing."""

GROUPS = {
    "flags.training": ("train", "resume", "sweep", "train-ray", "comm-check", "demo", "submit", "logs", "cancel"),
    "flags.data": (
        "init", "import-config", "ingest", "puzzle-data", "reward-check", "completion", "schema", "inspect", "render",
        "style",
    ),
    "flags.use": (
        "eval", "eval-test", "eval-quick", "eval-full", "eval-code", "lm-eval", "infer", "infer-batch", "merge",
        "download-model", "merge-test", "export", "parity", "serve", "report", "compare", "tensorboard", "sandbox",
    ),
    "flags": ("plan", "setup-accelerate", "gpu-check"),
}  # fmt: skip
"""Module -> the verbs whose flags stand there."""

WITHOUT_CONFIG = (
    "demo", "init", "import-config", "ingest", "puzzle-data", "completion", "download-model", "schema", "manual",
    "compare", "report", "tensorboard", "tb-stop", "gpu-info", "memory-check", "doctor", "check", "comm-check",
    "gpu-check", "matrix", "setup-accelerate", "sandbox", "status", "logs", "cancel", "help", "lm-eval", "parity",
)  # fmt: skip
"""Verbs that run without --config."""

WITHOUT_JSON = ("completion", "manual", "infer", "serve", "tensorboard", "tb-stop", "check")
"""Verbs that have no JSON document. configs/verbs.schema.json describes those of all others."""

NO_OVERRIDES = ("compare", "report", "comm-check", "status", "logs", "cancel", "import-config")
"""Verbs that take no config values where no config is named."""

FLAGS_OF_VARIABLES = {"init": {"DATA": "--data", "OUT": "--out"}, "completion": {"FOR": "--shell"}}
"""Verb -> what it takes without a flag, in order."""

MAKE_ARGS = "--make-args="  # what follows it, always in the last argument, is the text of make's ARGS as it was typed

REFUSED = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS}
"""What a file system says to a path that it does not serve. Readers with more to say about a path say it first."""

SPIN_COUNT = "1000"
"""How often a thread of OpenMP looks for work before it sleeps (GOMP_SPINCOUNT). GNU's library looks 300,000 times, so
that threads which wait take the cores from those which work, where anything else runs on the machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code that docs/interfaces.md promises."""
    open_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a character that the terminal's encoding lacks is printed as its escape
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in split(arguments)[0]
    is_make = bool(arguments) and arguments[-1].startswith(MAKE_ARGS)
    try:
        try:
            pathlib.Path.cwd()
        except OSError:  # the folder was deleted: nothing that is written would be found again
            fix = "go to a folder that exists: cd"
            raise MachineError("does not exist any more", where="the working folder", fix=fix) from None
        if is_make:
            from sftplay.make_arguments import refuse_unused_here, split_args

            refuse_unused_here()
            arguments += split_args(arguments.pop().removeprefix(MAKE_ARGS))
            as_json = "--json" in split(arguments)[0]
        if as_json:
            os.environ[log.JSON] = "1"
        args = parse(arguments, is_make=is_make)
        if strays := log.clear_cluster_variables():
            text = f"note: the environment's {', '.join(strays)} are not used: this command starts its own processes"
            log.say(text, args.verb)
        args.strays = strays
        limit_spinning()
        if not args.config and args.verb not in WITHOUT_CONFIG:
            import_module("sftplay.runs.finished_run").name_config(args)
        module, _, function = VERBS[args.verb][0].rpartition(".")
        folder = "" if module.startswith("tasks.") else "commands."
        exit_code: int = getattr(import_module(f"sftplay.{folder}{module}"), function)(args)
        sys.stdout.flush()  # raises BrokenPipeError here, where it is handled, if the reader has left
        if (lost := log.own_screen()) and lost.failure and not _launches(args.verb):  # a run needs no reader
            return _report_unwritable(lost.failure)
        return exit_code
    except SftplayError as error:
        import_module("sftplay.make_arguments").put_names(error, arguments, None if is_make else list_flags)
        return _report(error, as_json)
    except BrokenPipeError:
        drop(1)  # the reader has closed the pipe, as `head` does; not an error
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        is_full = error.errno in UNWRITABLE
        if is_full and error.filename is None:  # of a stream
            return _report_unwritable(error)
        if not is_full and (error.filename is None or error.errno not in REFUSED):
            return _report_bug(error, as_json)
        kind, fix = (RunError, "make room there") if is_full else (ConfigError, "give this user the right to it")
        fix, where = f"{fix}, or name another path", os.fsdecode(error.filename)
        return _report(kind(str(error.strerror), where=where, fix=fix), as_json)
    except Exception as error:  # noqa: BLE001 - the one place where a bug becomes exit code 1 with its traceback
        return _report_bug(error, as_json)
    finally:
        os.environ.pop(log.JSON, None)


def limit_spinning() -> None:
    """Let threads that wait leave their core soon, here and in what this starts. The user's own settings stay."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of the kit, and those after the first `--`, which are the launcher's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), list(arguments[end + 1 :])


def parse(arguments: list[str], *, is_make: bool = False) -> argparse.Namespace:
    """The parsed arguments; `args.launcher_args` holds what follows `--`.

    `args.overrides` holds the config values `a.b=c`, also those written `--a.b=c`. Raises ConfigError if the verb or
    flag is unknown (the error has the nearest name); a verb that needs a config got none; a verb without a launcher got
    arguments for one. With `is_make` it names make's settings for the flags.
    """
    try:
        return _parse(arguments)
    except ConfigError as error:
        if not is_make:
            raise
        from sftplay.make_arguments import in_settings

        raise in_settings(error, split(arguments)[0][0]) from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    words, launcher_args = split(arguments)
    words = with_flags(words) if words[:1] and words[0] in FLAGS_OF_VARIABLES else words or ["--help"]
    verb = words[0]
    if not verb.startswith("-") and verb not in VERBS:
        from sftplay.make_arguments import REMOVED

        near = nearest_names(verb, VERBS)
        fix = REMOVED.get(verb) or (f"did you mean {near[0]!r}?" if near else "see `make help`")
        raise ConfigError(f"no verb called {verb!r}", where="command line", fix=fix, nearest=near)
    # Overrides stay outside argparse, which would lose their order: the later of two values for one key counts.
    parser = _Parser(prog="sftplay", description="Fine-tune language models from one YAML file.", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (_, text) in VERBS.items():
        added = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name != verb:
            continue
        launcher = " [-- arguments of its launcher]" if _launches(name) else ""
        added.usage = f"sftplay {name} [flags] [a.b=c ...]{launcher}"
        added.epilog = "a.b=c sets a config value and goes before the file's"
        added.add_argument("--config", type=os.path.expanduser, default="", help="the run's YAML")
        added.add_argument("--json", action="store_true", help="one JSON document on standard output")
        for flag, options in find_flags(name).items():
            added.add_argument(flag, **options)
    args, rest = parser.parse_known_args(words)
    known = list_flags(args.verb)
    for argument in rest:
        key = argument.partition("=")[0]
        is_flag = argument.startswith("--") and "." not in key and nearest_names(key, known, cutoff=0.8)
        if "=" not in argument or key.strip("-") == "" or is_flag:
            fix, near = suggest(key, known, "write config values as a.b=c")
            raise ConfigError(f"{args.verb} does not know {argument!r}", where="command line", fix=fix, nearest=near)
    args.overrides = [argument.removeprefix("--") for argument in rest]
    args.launcher_args = launcher_args
    if launcher_args and not _launches(verb):
        problem = f"{verb} starts no launcher that could take {shlex.join(launcher_args)}"
        raise ConfigError(problem, where="--", fix="leave out what follows `--`")
    if args.json and verb in WITHOUT_JSON:
        raise ConfigError(f"{verb} prints no JSON document", where="--json", fix="leave it out")
    if args.overrides and not args.config and verb in NO_OVERRIDES:
        problem = f"{verb} has no config to set {args.overrides[0]!r} in"
        raise ConfigError(problem, where="command line", fix="leave it out, or name the config with CONFIG=")
    if not args.config and args.verb not in WITHOUT_CONFIG and not getattr(args, "run", None):
        more = "; or the run: --run=NAME" if "--run" in known else ""
        fix = f"name the run's YAML: python -m sftplay {verb} --config=configs/run_lora.yaml{more}"
        raise ConfigError(f"{verb} needs a config", where="--config", fix=fix)
    return args


def with_flags(words: Sequence[str]) -> list[str]:
    """`init DATA OUT` with flags instead of the bare words, which may be written with a sign as for make."""
    flags, rest, names = [words[0]], [], FLAGS_OF_VARIABLES[words[0]]
    free = [flag for flag in names.values() if flag not in [word.partition("=")[0] for word in words]]
    before = ""
    for word in words[1:]:
        name, sign, value = word.partition("=")
        if name in names and sign:
            flags += [names[name], value]
        elif free and not word.startswith("-") and before not in names.values() and not (sign and _is_key(name, word)):
            flags += [free.pop(0), word]
        else:
            rest.append(word)
        before = word
    return [*flags, *rest]


def _is_key(name: str, word: str) -> bool:
    """Whether `name=value` sets a key of the config, and is no file."""
    return "." in name or (name.replace("_", "").isalpha() and name.islower() and not os.path.exists(word))  # noqa: PTH110


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", fix=f"see `python -m {self.prog} --help`")


def list_flags(verb: str) -> list[str]:
    """The names of all flags that a verb takes."""
    return ["--config", *([] if verb in WITHOUT_JSON else ["--json"]), *find_flags(verb)]


def find_flags(verb: str) -> dict[str, dict[str, Any]]:
    """Return flag -> keywords of argparse's `add_argument`, besides --config and --json."""
    group = next((name for name, verbs in GROUPS.items() if verb in verbs), None)
    flags: dict[str, dict[str, Any]] = import_module(f"sftplay.{group}").FLAGS[verb] if group else {}
    return flags or LOOKS.get(verb, {})


def _launches(verb: str) -> bool:
    return "--dry-run" in list_flags(verb)


def _report(error: SftplayError, as_json: bool) -> int:
    try:
        if as_json:
            print(json.dumps({"error": error.as_json()}, ensure_ascii=False), flush=True)
        log.close_live_line()
        what, _, fix = str(error).partition("\n  fix: ")
        text = painted(what, RED, stream=sys.stderr)
        print(f"{text}\n  fix: {fix}" if fix else text, file=sys.stderr)
    except OSError:  # nobody can be told; the exit code remains
        drop(1)
        drop(2)
    return error.exit_code


def _report_unwritable(error: OSError) -> int:
    """Say that the output could not be written, where there still is a place to say it."""
    drop(1)
    fix = "make room, or send the output elsewhere"
    return _report(RunError(f"writing failed ({error.strerror})", where="the output", fix=fix), as_json=False)


def _report_bug(error: Exception, as_json: bool) -> int:
    if refusal := machine_refusal(error):
        return _report(refusal, as_json)
    try:
        if as_json:
            print(json.dumps({"error": SftplayError(f"{type(error).__name__}: {error}").as_json()}))
        traceback.print_exception(error)
    except OSError:
        drop(1)
    return SftplayError.exit_code
