"""Flags of the verbs that make and look at configs and data."""

from __future__ import annotations

from sftplay.flags import PATH, RUN, Flags, count, flag, names, number, processes, seconds, share, size, switch

N_ROWS: Flags = {"--n": flag("how many rows", count, default=3)}

FLAGS: dict[str, Flags] = {
    "init": {
        "--data": flag("a file or folder with rows", default=""),
        "--out": flag("the config to write", PATH, default="run.yaml"),
    },
    "import-config": {
        "--in": flag("the config of another kit, YAML or JSON", PATH, dest="input", required=True),
        "--kind": flag(
            "the kit; else its keys tell", choices=["axolotl", "llamafactory", "swift", "trl", "verl"], default=""
        ),
        "--out": flag("the config to write", PATH, required=True),
        "--nproc": flag("GPUs that the config was meant for: other kits multiply by them", processes, default=1),
    },
    "ingest": {
        "--in": flag("a folder of documents, or one file", PATH, dest="input", required=True),
        "--out": flag("the jsonl file to write; the report lies next to it", PATH, required=True),
        "--by": flag("what becomes a row", choices=["document", "section"], default="document"),
        "--without": flag("steps to leave out, with commas; docs/ingest.md has them", names, default=()),
        "--near": flag("least similarity of near-duplicates", share, default=0.8),
        "--min-chars": flag("shorter texts are dropped", int, default=50),
        "--max-chars": flag("longer texts are dropped", int),
        "--language": flag("languages to keep, such as en,de; else all", names, default=()),
        "--encoding": flag("of text files without a byte order mark; else UTF-8 or UTF-16", default="auto"),
        "--timeout": flag("seconds for one file", seconds, default=30.0),
        "--memory": flag("for one file's reader, such as 2GB", size, default=10**9),
        "--workers": flag("files read side by side; else one for each core", processes),
        "--on-bad-file": flag("error: end with 4 after all others", choices=["report", "error"], default="report"),
        "--tokenizer": flag("a model's name, to count tokens", default=""),
        "--replace": switch("write over a file that is there"),
    },
    "puzzle-data": {
        "--kind": flag("sudoku4 needs no file", choices=["sudoku", "maze", "arc", "sudoku4"], required=True),
        "--in": flag(
            "a file, which is split; a folder with train.* and test.*; for arc one with training, evaluation",
            PATH,
            dest="input",
            default="",
        ),
        "--out": flag("a new folder for both splits", PATH, required=True),
        "--aug": flag("copies of each training puzzle; else 1000, of a maze 0", count),
        "--seed": flag("of all random choices", number("a seed, 0 or more", int), default=0),
        "--subsample": flag("training puzzles that are chosen at random; else all", count),
        "--held-out": flag("share of the solutions of one file that go to the test", share, default=0.1),
        "--workers": flag("processes; else one for each core", processes),
    },
    "reward-check": {
        **RUN,
        "--n": flag(
            "how many rows (32); of a run, how many steps (all)", number("a number, 1 or more", int, holds=bool)
        ),
        "--in": flag("rows with `completion`: the rewards of each", PATH, dest="input", default=""),
    },
    "completion": {"--shell": flag("bash, zsh or fish", default="")},
    "schema": {"--verbs": switch("the schema of the verbs' JSON and of a run's files instead")},
    "inspect": N_ROWS,
    "render": {**N_ROWS, "--out": flag("a new jsonl file for all rows", PATH)},
    "style": {"--style": flag("the system prompt; without it the present one is printed")},
}
