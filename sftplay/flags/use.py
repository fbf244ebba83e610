"""Flags of the verbs that measure, show and hand on what was trained."""

from __future__ import annotations

from argparse import SUPPRESS

from sftplay.flags import (
    PATH,
    RUN,
    SCALE,
    Flags,
    count,
    counts,
    flag,
    names,
    number,
    positive,
    processes,
    seconds,
    share,
    switch,
    temperature,
)

SAMPLING: Flags = {
    "--temperature": flag("0 takes the likeliest token each time", temperature, default=0.0),
    "--top-p": flag("sample from the likeliest tokens that sum up to it", share),
    "--max-new-tokens": flag(
        "longest answer; else eval.max_new_tokens", number("a number of tokens", int, holds=lambda value: value >= 1)
    ),
    "--seed": flag("of what is sampled; else the config's", int),
}
WHOLE_MODEL: Flags = {
    "--out": flag("a new folder for the model", PATH),
    "--dtype": flag("its number format; else the base's", choices=["fp32", "bf16", "fp16"]),
}

FLAGS: dict[str, Flags] = {
    "eval": {**RUN, "--split": flag(choices=["val", "test"], default="val")},
    "download-model": {
        "--model": flag("its hub name, org/model", required=True),
        "--revision": flag("branch, tag or commit"),
    },
    "merge": {**RUN, **WHOLE_MODEL},
    "merge-test": {**RUN, "--merged": flag("the merged model's folder", PATH)},
    "export": {
        **RUN,
        **WHOLE_MODEL,
        "--format": flag("for plain transformers, or for llama.cpp and Ollama", choices=["hf", "gguf"], default="hf"),
        "--quant": flag("formats of the GGUF files, with commas: f32, f16, bf16, q8_0, q6_k, q5_k_m, q4_k_m", names),
        "--llama-cpp": flag("a checkout of llama.cpp, whose converter writes the files", PATH),
    },
    "serve": {
        **RUN,
        "--port": flag(
            "where to listen; 0 takes any free port",
            number("a port", int, holds=lambda value: value <= 65535),
            default=8000,
        ),
        "--engine": flag(
            "what answers; auto takes vLLM if it is installed", choices=["auto", "transformers", "vllm"], default="auto"
        ),
        "--server": flag(
            "another name of --engine", choices=["auto", "transformers", "vllm"], dest="engine", default=SUPPRESS
        ),
        "--weights": flag("merged, or (vLLM) the adapter on its base", choices=["merged", "adapter"], default="merged"),
    },
    "compare": {
        "--a": flag("name or folder of a run", PATH, required=True),
        "--b": flag("name or folder of the other", PATH, required=True),
    },
    **dict.fromkeys(("eval-test", "eval-quick", "eval-full"), RUN),
    "report": {
        "--run": flag("name or folder of the run; several with commas", PATH),
        "--out": flag("of several runs: the page to write", PATH, default=""),
    },
    "eval-code": {
        **RUN,
        "--base": switch("what the run started from"),
        "--data": flag(
            "a file of MBPP or HumanEval; or mbpp, mbpp-sanitized, humaneval: in data/, else from the hub",
            default="mbpp",
        ),
        "--split": flag(choices=["test", "validation", "train", "prompt", "all"], default="test"),
        "--n": flag("answers to each problem", positive, default=1),
        "--k": flag("answers that a figure allows, with commas; else 1, and 10 if n is as many", counts, default=()),
        "--limit": flag("only so many problems, chosen by the seed", positive),
        "--executor": flag("as for the verb sandbox; else sandbox.executor of the config"),
        **SAMPLING,
        **SCALE,
    },
    "lm-eval": {
        **RUN,
        "--tasks": flag("names of the harness's tasks or groups, with commas", names, default=()),
        "--include-path": flag("a folder of task files of your own", PATH, default=""),
        "--limit": flag("only so many rows of each task, the first ones", positive),
        "--num-fewshot": flag("examples before each question; else the task's own number", count),
        "--no-template": switch("ask with plain documents, not by the run's chat template"),
        "--engine": flag("what answers", choices=["transformers", "vllm"], default="transformers"),
    },
    "parity": {
        **RUN,
        "--engine": flag(
            "what serves the model (transformers; with --url, what the server gives)",
            choices=["transformers", "vllm", "llama.cpp"],
        ),
        "--against": flag("what of the run is served", choices=["merged", "adapter", "gguf"]),
        "--served": flag("another folder or GGUF file than the run's own", PATH),
        "--in": flag("rows to ask instead of the held-out ones", PATH, dest="input", default=""),
        "--n": flag("how many prompts", positive, default=20),
        "--max-new-tokens": flag("longest answer", positive, default=64),
        "--url": flag("a server that runs already, such as http://127.0.0.1:8000", default=""),
        "--name": flag("of the model on that server", default=""),
    },
    "infer": {
        **RUN,
        "--base": switch("the untuned model"),
        "--in": flag("of a run on puzzles: a file with one grid", PATH, dest="input", default=""),
        **SAMPLING,
    },
    "infer-batch": {
        **RUN,
        "--in": flag(kind=PATH, dest="input", required=True),
        "--out": flag(kind=PATH, required=True),
        **SAMPLING,
    },
    "tensorboard": {**RUN, "--port": flag(kind=int, default=6006)},
    "sandbox": {
        "--executor": flag("auto takes the best one that holds here; none isolates nothing", default="auto"),
        "--timeout": flag("seconds for a program with all its tests", seconds, default=5.0),
        "--workers": flag("boxes at the same time; else one per core", processes),
        "--packages": flag("what programs may import besides Python's own: numpy,sympy", default=""),
        "--fresh": switch("a new box for each program, instead of a fork in one that waits"),
        "--in": flag("a jsonl file of jobs; else standard input", PATH, dest="input", default=""),
        "--out": flag("the file for verdicts; else standard output", PATH),
        "--self-test": switch("let every attack of the suite loose in every kind of box here"),
    },
}
