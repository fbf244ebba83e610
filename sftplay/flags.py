"""The flags of each verb and the parsers of their values. `cli` builds the argument parser."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

from sftplay.units import parse_bytes, parse_seconds

T = TypeVar("T")

Flags = dict[str, dict[str, Any]]
"""flag -> keywords of argparse's add_argument."""

PATH = os.path.expanduser
"""The type of a path: a shell leaves the `~` of `--out=~/x`, and make that of OUT=~/x."""


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a number of rows: {text!r}")
    return int(text)


def _processes(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a number of processes: {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"not a seed, 0 or more: {text!r}")
    return int(text)


def _tokens(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a number of tokens: {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a number, 1 or more: {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    return _number(text, lambda value: 0 <= value < float("inf"), what="a temperature, 0 or more")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, what="a share above 0 and up to 1")


def _number(text: str, holds: Callable[[float], bool], *, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"not {what}: {text!r}")
    return value


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"not a port: {text!r}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part.strip()) for part in text.split(","))


def _seconds(text: str) -> float:
    return _parsed(parse_seconds, text)


def _size(text: str) -> int:
    return _parsed(parse_bytes, text)


def _parsed(parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


ACCELERATE: Flags = {
    "--out": {"type": PATH, "default": "accelerate_configs/this_machine.yaml", "help": "the file to write"},
    "--interactive": {"action": "store_true", "help": "let accelerate ask its own questions"},
}

GPU_CHECK: Flags = {
    "--fast": {"action": "store_true", "help": "leave out the measurements of memory and speed"},
    "--out": {"type": PATH, "default": "outputs", "help": "the folder for gpu-check.json and gpu-check.md"},
    "--only": {"default": "", "help": "only checks whose name contains one of these words, with commas"},
}

LAUNCH: Flags = {
    "--dry-run": {"action": "store_true", "help": "print the command, start nothing"},
    "--nproc": {"default": None, "help": "processes on this node; `gpu` means one per GPU"},
    "--nnodes": {"type": int, "default": 1},
    "--node-rank": {"type": int, "default": 0},
    "--master-addr": {"default": "127.0.0.1"},
    "--master-port": {"type": int, "default": None},
    "--tb": {"action": "store_true", "help": "start TensorBoard too"},
    "--deepspeed": {"action": "store_true", "help": "share the work by DeepSpeed"},
}
"""The flags of the verbs that launch a run."""


PLAN: Flags = {
    "--gpus": {"default": None, "help": "GPUs to plan for in place of these, such as 2xH200"},
    "--vram": {"default": None, "help": "one GPU of so much memory, such as 24GiB"},
    "--nproc": {"type": _processes, "default": None, "help": "processes; else one per GPU"},
    "--compare": {"action": "store_true", "help": "all modes and strategies side by side"},
}

SUBMIT: Flags = {
    "--dry-run": {"action": "store_true", "help": "print the job file, queue nothing"},
    "--nodes": {"type": _processes, "default": 1, "help": "nodes of the job"},
    "--gpus-per-node": {"type": _processes, "default": None, "help": "GPUs of each node, of any kind"},
    "--gres": {"default": "", "help": "GPUs of each node as the cluster names them, such as gpu:volta:2"},
    "--time": {"default": "", "help": "limit of the job: 12:00:00, 1-12:00:00, or minutes"},
    "--partition": {"default": "", "help": "the partition of the cluster"},
    "--nproc": {"type": _processes, "default": None, "help": "processes on each node; else one for each GPU"},
    "--sbatch": {"default": "", "help": 'more options of sbatch, such as "--account=lab --mem=64G"'},
    "--server-sbatch": {"default": "", "help": "options of sbatch for the generation server's node"},
    "--setup": {"type": PATH, "default": "", "help": "a file for the job's shell to read first"},
    "--here": {"action": "store_true", "help": "train in the job that this is called in"},
}

TRAIN_RAY: Flags = {
    "--workers": {"type": _processes, "default": 2, "help": "processes on all machines together"},
    **{flag: LAUNCH[flag] for flag in ("--dry-run", "--tb", "--deepspeed")},
}

INIT: Flags = {
    "--data": {"default": "", "help": "a file or folder with rows"},
    "--out": {"default": "run.yaml", "help": "the config to write"},
}

INGEST: Flags = {
    "--in": {"type": PATH, "dest": "input", "required": True, "help": "a folder of documents, or one file"},
    "--out": {"type": PATH, "required": True, "help": "the jsonl file to write; the report lies beside it"},
    "--by": {"choices": ["document", "section"], "default": "document", "help": "what becomes a row"},
    "--without": {"type": _names, "default": (), "help": "steps to leave out, with commas; docs/ingest.md has them"},
    "--near": {"type": _share, "default": 0.8, "help": "least similarity of near-duplicates"},
    "--min-chars": {"type": int, "default": 50, "help": "shorter texts are dropped"},
    "--max-chars": {"type": int, "default": None, "help": "longer texts are dropped"},
    "--language": {"type": _names, "default": (), "help": "languages to keep, such as en,de; else all"},
    "--encoding": {"default": "auto", "help": "of text files without a byte order mark; else UTF-8 or UTF-16"},
    "--timeout": {"type": _seconds, "default": 30.0, "help": "seconds for one file"},
    "--memory": {"type": _size, "default": 10**9, "help": "for one file's reader, such as 2GB"},
    "--workers": {"type": _processes, "default": None, "help": "files read side by side; else one for each core"},
    "--on-bad-file": {
        "choices": ["report", "error"],
        "default": "report",
        "help": "error: end with 4 after all others",
    },
    "--tokenizer": {"default": "", "help": "a model's name, to count tokens"},
    "--replace": {"action": "store_true", "help": "write over a file that is there"},
}

PUZZLES: Flags = {
    "--kind": {"choices": ["sudoku", "maze", "arc", "sudoku4"], "required": True, "help": "sudoku4 needs no file"},
    "--in": {
        "type": PATH,
        "dest": "input",
        "default": "",
        "help": "a file, which is split; a folder with train.* and test.*; for arc one with training, evaluation",
    },
    "--out": {"type": PATH, "required": True, "help": "a new folder for both splits"},
    "--aug": {"type": _count, "default": None, "help": "copies of each training puzzle; else 1000, of a maze 0"},
    "--seed": {"type": _seed, "default": 0, "help": "of all that is drawn"},
    "--subsample": {"type": _count, "default": None, "help": "training puzzles that are drawn; else all"},
    "--held-out": {"type": _share, "default": 0.1, "help": "share of the solutions of one file that go to the test"},
    "--workers": {"type": _processes, "default": None, "help": "processes; else one for each core"},
}

_FILES: Flags = {
    "--in": {"type": PATH, "dest": "input", "required": True},
    "--out": {"type": PATH, "required": True},
}


def flags_of(verb: str) -> Flags:
    """The flags of a verb beside --config and --json."""
    run: Flags = {"--run": {"type": PATH, "default": None, "help": "name or folder of the run"}}
    count: Flags = {"--n": {"type": _count, "default": 3, "help": "how many rows"}}
    special: dict[str, Flags] = {
        "train": {"--documents": {"action": "store_true", "help": "refuse a config of task sft"}, **LAUNCH},
        "resume": {**LAUNCH, **run},
        "train-ray": TRAIN_RAY,
        "comm-check": {flag: LAUNCH[flag] for flag in LAUNCH if flag not in ("--tb", "--deepspeed")},
        "demo": {"--control": {"action": "store_true", "help": "train on shuffled answers instead"}, **LAUNCH},
        "init": INIT,
        "ingest": INGEST,
        "puzzle-data": PUZZLES,
        "reward-check": {
            **run,
            "--n": {"type": _count, "default": None, "help": "how many rows (32); of a run, how many steps (all)"},
            "--in": {"type": PATH, "dest": "input", "default": "", "help": "rows with `completion`: what each is paid"},
        },
        "completion": {"--shell": {"default": "", "help": "bash, zsh or fish"}},
        "inspect": count,
        "render": {**count, "--out": {"type": PATH, "default": None, "help": "a new jsonl file for all rows"}},
        "style": {"--style": {"default": None, "help": "the system prompt; without it the present one is printed"}},
        "eval": {**run, "--split": {"choices": ["val", "test"], "default": "val"}},
        "download-model": {
            "--model": {"required": True, "help": "its hub name, org/model"},
            "--revision": {"default": None, "help": "branch, tag or commit"},
        },
        **_result_flags(run),
        **_answer_flags(run),
        "tensorboard": {**run, "--port": {"type": int, "default": 6006}},
        "plan": PLAN,
        "gpu-info": {"--torch": {"action": "store_true", "help": "ask torch too, which takes seconds"}},
        "memory-check": {"--watch": {"action": "store_true", "help": "again every two seconds, until Ctrl-C"}},
        "setup-accelerate": ACCELERATE,
        "gpu-check": GPU_CHECK,
        "sandbox": _sandbox_flags(),
        **_job_flags(run),
        "doctor": {"--fast": {"action": "store_true", "help": "ask neither torch nor the network"}},
    }
    return special.get(verb, {})


def _job_flags(run: Flags) -> dict[str, Flags]:
    return {
        "submit": SUBMIT,
        "job-file": {
            "--kind": {"choices": ["skypilot", "dstack", "k8s"], "required": True, "help": "the tool that reads it"},
            "--gpus": {"default": None, "help": "GPUs of a node, such as 2xH200; else those here"},
            "--nodes": {"type": _processes, "default": 1, "help": "nodes of the job"},
            "--image": {"default": "", "help": "a container image with the kit; k8s needs one"},
            "--out": {"type": PATH, "default": None, "help": "a new file; else it is printed"},
        },
        "status": run,
        "logs": {
            **run,
            "--n": {"type": _count, "default": 50, "help": "how many lines of each file"},
            "--watch": {"action": "store_true", "help": "show new lines until Ctrl-C"},
        },
        "cancel": {
            **run,
            "--wait": {"type": _seconds, "default": 300.0, "help": "seconds for the checkpoint"},
            "--fast": {"action": "store_true", "help": "do not wait for a checkpoint"},
        },
    }


def _answer_flags(run: Flags) -> dict[str, Flags]:
    choice: Flags = {
        "--temperature": {"type": _temperature, "default": 0.0, "help": "0 takes the likeliest token each time"},
        "--top-p": {"type": _share, "default": None, "help": "draw from the likeliest tokens that sum up to it"},
        "--max-new-tokens": {"type": _tokens, "default": None, "help": "longest answer; else eval.max_new_tokens"},
        "--seed": {"type": int, "default": None, "help": "of what is drawn; else the config's"},
    }
    return {
        "eval-test": run,
        "eval-quick": run,
        "eval-full": run,
        "eval-code": {
            **run,
            "--base": {"action": "store_true", "help": "what the run started from"},
            "--data": {
                "default": "mbpp",
                "help": "a file of MBPP or HumanEval; or mbpp, mbpp-sanitized, humaneval: in data/, else from the hub",
            },
            "--split": {"choices": ["test", "validation", "train", "prompt", "all"], "default": "test"},
            "--n": {"type": _positive, "default": 1, "help": "answers to each problem"},
            "--k": {
                "type": _counts,
                "default": (),
                "help": "answers that a figure allows, with commas; else 1, and 10 if n is as many",
            },
            "--limit": {"type": _positive, "default": None, "help": "only so many problems, drawn by the seed"},
            "--executor": {"default": None, "help": "as for the verb sandbox; else sandbox.executor of the config"},
            **choice,
            **{flag: LAUNCH[flag] for flag in LAUNCH if flag not in ("--tb", "--deepspeed")},
        },
        "infer": {
            **run,
            "--base": {"action": "store_true", "help": "the untuned model"},
            "--in": {"type": PATH, "dest": "input", "default": "", "help": "of a run on puzzles: a file with one grid"},
            **choice,
        },
        "infer-batch": {**run, **_FILES, **choice},
    }


def _sandbox_flags() -> Flags:
    return {
        "--executor": {"default": "auto", "help": "auto takes the best one that holds here; none isolates nothing"},
        "--timeout": {"type": _seconds, "default": 5.0, "help": "seconds for a program with all its tests"},
        "--workers": {"type": _processes, "default": None, "help": "boxes at the same time; else one per core"},
        "--packages": {"default": "", "help": "what programs may import beside Python's own: numpy,sympy"},
        "--fresh": {"action": "store_true", "help": "a new box for each program, in place of a fork in one that waits"},
        "--in": {"type": PATH, "dest": "input", "default": "", "help": "a jsonl file of jobs; else standard input"},
        "--out": {"type": PATH, "default": None, "help": "the file for verdicts; else standard output"},
        "--self-test": {
            "action": "store_true",
            "help": "let every attack of the suite loose in every kind of box here",
        },
    }


def _result_flags(run: Flags) -> dict[str, Flags]:
    whole: Flags = {
        "--out": {"type": PATH, "default": None, "help": "a new folder for the model"},
        "--dtype": {"choices": ["fp32", "bf16", "fp16"], "default": None, "help": "its number format; else the base's"},
    }
    return {
        "merge": {**run, **whole},
        "merge-test": {**run, "--merged": {"type": PATH, "default": None, "help": "the merged model's folder"}},
        "export": {**run, **whole},
        "serve": {
            **run,
            "--port": {"type": _port, "default": 8000, "help": "where to listen; 0 takes any free port"},
            "--server": {"choices": ["auto", "transformers", "vllm"], "default": "auto"},
        },
        "report": run,
        "compare": {
            "--a": {"type": PATH, "required": True, "help": "name or folder of a run"},
            "--b": {"type": PATH, "required": True, "help": "name or folder of the other"},
        },
    }
