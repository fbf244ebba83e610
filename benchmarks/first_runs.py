"""From a data file to a measured run without a line of YAML by hand: seven data sets, each by the verbs a user types.

    make bench-first-runs DATA=../shared/data ARGS="--only gsm8k"

For each: init, validate, inspect, train (20 steps of builtin:tiny), eval, infer-batch, report. The verbs run in this
process, one after another, so that the libraries are imported once; training starts its own process as always.
It takes about ten minutes on two quiet cores, and two more where builtin:tiny has to be made first. A verb that ends
with another code than 0 ends it all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "builtin:tiny"
ASKED = 5

SETS = {
    "alpaca": "alpaca/alpaca_2000.json",
    "glaive": "glaive-toolcall/sharegpt_toolcall_200.json",
    "gpteacher": "gpteacher-code/codegen_500.jsonl",
    "gsm8k": "gsm8k/train_1000.jsonl",
    "mbpp": "mbpp/sanitized-mbpp.json",
    "sgd": "sgd-dialogues/messages_150.jsonl",
    "sudoku": "sudoku/puzzles.jsonl",
}
VERBS = ("init", "validate", "inspect", "train", "eval", "infer-batch", "report")


def main() -> int:
    """Run every set in a folder of its own and print a Markdown table of seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the runs; else they are thrown away")
    args = parser.parse_args()
    table = ["| data set | layout | limit | loss | " + " | ".join(f"{verb} s" for verb in VERBS) + " |"]
    table.append("| --- " * (4 + len(VERBS)) + "|")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.only:
            place = (args.keep or Path(scratch)) / name
            place.mkdir(parents=True)
            table.append(run_set(args.data / SETS[name], place, steps=args.steps))
            print("\n".join([table[0], table[1], table[-1]]), flush=True)
    print("\n" + "\n".join(table) + f"\n\n{len(args.only)} data sets in {time.monotonic() - began:.0f} s")
    return 0


def run_set(data: Path, place: Path, *, steps: int) -> str:
    """One data set from its file to the report; its row of the table."""
    config, seconds = place / "run.yaml", {}
    own = [f"model.name={MODEL}", f"output_dir={place}/outputs", "run_name=first", f"train.max_steps={steps}"]
    small = ["train.effective_batch_size=8", "eval.limit=10", "eval.max_new_tokens=32", "logging.steps=1"]
    seconds["init"] = call("init", str(data), str(config), *own, *small)
    seconds["validate"] = call("validate", "--config", str(config))
    seconds["inspect"] = call("inspect", "--config", str(config), "--n", "1")
    seconds["train"] = call("train", "--config", str(config))
    seconds["eval"] = call("eval", "--config", str(config))
    run = place / "outputs" / "first"
    prompts = place / "prompts.jsonl"
    with (run / "eval" / "after.jsonl").open(encoding="utf-8") as answers:
        rows = [json.loads(line)["prompt"] for line in islice(answers, ASKED)]
    prompts.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")
    out = place / "answers.jsonl"
    seconds["infer-batch"] = call("infer-batch", "--config", str(config), "--in", str(prompts), "--out", str(out))
    seconds["report"] = call("report", "--config", str(config))
    assert (run / "report.html").stat().st_size > 10_000, "the report is empty"
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(rows), "an answer is missing"
    return describe(data, config, run=run, seconds=seconds)


def call(verb: str, *words: str) -> float:
    """Seconds of a verb; what it prints is shown only where it fails."""
    from sftplay.cli import main as sftplay

    began, printed = time.monotonic(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = sftplay([verb, *words])
    if code:
        raise SystemExit(f"sftplay {verb} {' '.join(words)} ended with code {code}:\n{printed.getvalue()[-4000:]}")
    return time.monotonic() - began


def describe(data: Path, config: Path, *, run: Path, seconds: dict[str, float]) -> str:
    """A row of the table: what init found, how the loss went, and the seconds of every verb."""
    from sftplay.config.load import load_config

    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    layout = config.read_text(encoding="utf-8").split("layout ")[1].split("\n")[0]
    limit = load_config(config).model.max_seq_len
    figures = " | ".join(f"{seconds[verb]:.1f}" for verb in VERBS)
    return f"| {data.parent.name}/{data.name} | {layout} | {limit} | {losses[0]:.3f} -> {losses[-1]:.3f} | {figures} |"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = str(ROOT)  # for the worker, which starts in the current folder
    raise SystemExit(main())
