"""Task grpo beside a plain TRL script of the same settings, in one alternating run. `make bench-grpo` runs it.

Four questions. Is a step as fast, with the same rewards (`--only speed`)? How much of it is saved while completions are
sampled (`--only sampling`)? How long does learning take where prompts are computed once for all their answers
(`--only learning`)? And how many tokens does each generate until the toy's sampled pass@1 reaches a goal, where ours
resamples zero-variance groups (`--only redraws`)? The first three use the toy of workflows/sft_then_grpo.sh and its
warm start, which is trained first unless `--warm RUN` names one. The first runs on a GPU where there is one. The last
has a model of its own, too small for a GPU, and runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.overhead import cpu_name
from sftplay.config.load import load_resolved
from sftplay.data.pipeline import training_order
from sftplay.machine.probe import probe

ROOT = Path(__file__).resolve().parents[1]
TOY, WARM = ROOT / "configs" / "run_grpo_toy.yaml", ROOT / "configs" / "run_grpo_toy_sft.yaml"
LONG_ROWS = ROOT / "data" / "word_problems" / "train.jsonl"


@dataclass
class Course:
    """What a contestant did, step by step."""

    seconds: list[float]
    tokens: list[float]
    """Prompt and completion tokens that it learned from, since the first step."""

    rewards: list[float]
    cpu_s: float
    """CPU seconds of its process, without those of rewards and sandbox; of all steps and the last checkpoint."""


def main() -> int:
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        work = Path(name)
        print(
            f"{time.strftime('%Y-%m-%d')}, {', '.join(gpu.name for gpu in probe().gpus) or 'no GPU'}, {cpu_name()}, "
            f"{os.cpu_count()} cores, {options.threads} thread(s), "
            f"load {os.getloadavg()[0]:.1f}, "
            + ", ".join(f"{each} {version(each)}" for each in ("torch", "transformers", "trl"))
        )
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
        if options.only != "redraws":
            warm = options.warm or train_warm(work)
        if options.only in (None, "learning"):
            from benchmarks.grpo_learning import compare_learning  # brings torch and TRL

            print(compare_learning(warm / "model", work / "learning", rounds=options.rounds))
        if options.only in (None, "sampling"):
            from benchmarks.grpo_sampling import compare_sampling

            print(compare_sampling(warm, rounds=options.rounds))
        if options.only in (None, "speed"):
            for shape in ("toy", "long"):
                print(compare_speed(work / shape, warm, shape=shape, options=options))
        if options.only in (None, "redraws"):
            from benchmarks.grpo_dynamic_sampling import compare_dynamic_sampling  # brings torch and TRL

            print(
                compare_dynamic_sampling(
                    seeds=options.seeds, steps=options.goal_steps, hopeless=options.hopeless, goals=options.goals,
                    key=options.key,
                )
            )  # fmt: skip
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["speed", "sampling", "learning", "redraws"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each run that is timed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--goal-steps", type=int, default=110, help="of each run that is to reach the goal")
    parser.add_argument("--hopeless", type=int, default=81, help="questions of the toy that nothing is right to")
    parser.add_argument("--goals", type=float, nargs="+", default=[0.6, 0.7], help="shares of right answers to reach")
    parser.add_argument(
        "--key",
        choices=["dynamic_sampling_rounds", "skip_zero_variance"],
        default="dynamic_sampling_rounds",
        help="what beats silent groups",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warm", type=Path, help="folder of a warm run, made by configs/run_grpo_toy_sft.yaml")
    return parser.parse_args()


def train_warm(work: Path) -> Path:
    """The warm start, as the workflow makes it."""
    sftplay("train", "--config", WARM, "run_name=warm", f"output_dir={work}")
    return work / "warm"


def settings(shape: str) -> list[str]:
    """Values of the config that make a shape: the toy, or long answers of different lengths, none of them right."""
    same = ["train.batch_size=16", "train.grad_accum=4", "train.save_steps=1000"]
    same += ["data.split=0", "data.val_path=null", "train.eval_steps=null"]
    if shape == "toy":
        return same
    rewards = json.dumps([{"name": "correct", "use": "math"}])
    return [
        *same,
        f"data.train_path={LONG_ROWS}",
        f"rewards={rewards}",
        "grpo.max_completion_length=128",
        "grpo.stop_without_signal=0",  # no answer of the untrained model is right
        "model.max_seq_len=256",
    ]


def compare_speed(work: Path, warm: Path, *, shape: str, options: argparse.Namespace) -> str:
    """A table of one shape: medians of all timed steps of all rounds. The first step of a run is not timed."""
    work.mkdir()
    ours, plain = [], []
    for n in range(options.rounds):
        changes = [*settings(shape), f"train.max_steps={options.steps}"]
        ours.append(run_ours(work / f"ours-{n}", warm, changes))
        plain.append(run_plain(work / f"plain-{n}", warm, like=work / f"ours-{n}" / "run"))
        print(f"{shape} round {n + 1}/{options.rounds}", file=sys.stderr)
    same = next(
        (
            n
            for n, pair in enumerate(zip(ours[0].rewards, plain[0].rewards, strict=True))
            if abs(pair[0] - pair[1]) > 1e-6
        ),
        options.steps,
    )
    rows = {"SFT-Play": ours, "plain TRL": plain}
    step_s = {name: median(second for each in courses for second in each.seconds[1:]) for name, courses in rows.items()}
    rate = {name: median(tokens_per_s(each) for each in courses) for name, courses in rows.items()}
    lines = [f"\n{shape}: {options.steps} steps of 64 completions, median of {options.rounds} runs each", ""]
    cpu_s = {name: min(each.cpu_s for each in courses) / options.steps for name, courses in rows.items()}
    lines += [
        "| path | s a step | tokens/s | beside TRL | CPU s a step | beside TRL | mean reward |",
        "| --- " * 7 + "|",
    ]
    for name, courses in rows.items():
        wall, cpu = (figure["plain TRL"] / figure[name] for figure in (step_s, cpu_s))
        lines.append(
            f"| {name} | {step_s[name]:.3f} | {rate[name]:.0f} | {wall:.2f}x | {cpu_s[name]:.3f} | {cpu:.2f}x "
            f"| {mean(courses[0].rewards):.4f} |"
        )
    return "\n".join(
        [*lines, "", f"Mean rewards of the step are the same in the first {same} of {options.steps} steps."]
    )


def tokens_per_s(course: Course) -> float:
    return (course.tokens[-1] - course.tokens[0]) / sum(course.seconds[1:])


def run_ours(home: Path, warm: Path, changes: list[str]) -> Course:
    """The user's command."""
    where = [f"model.name={warm}", "run_name=run", f"output_dir={home}", f"data.processed_dir={home / 'rows'}"]
    sftplay("train", "--config", TOY, *where, *changes)
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    return Course(
        seconds=[line["step_s"] for line in lines],
        tokens=[line["tokens_seen"] for line in lines],
        rewards=[line["reward"] for line in lines],
        cpu_s=json.loads((home / "run" / "status.json").read_text())["train_cpu_seconds"],
    )


def run_plain(home: Path, warm: Path, *, like: Path) -> Course:
    """The script, with the settings, prompts and order of the run in the folder `like`."""
    home.mkdir(parents=True)
    cfg = load_resolved(like / "config.resolved.yaml")
    rows = (ROOT / str(cfg.data.train_path)).read_text(encoding="utf-8").splitlines()
    records = [as_prompt(json.loads(line)) for line in rows]
    drawn = cfg.train.max_steps * cfg.train.effective_batch_size // cfg.grpo.num_generations
    job = {
        "config": str(like / "config.resolved.yaml"), "model": str(warm / "model"), "out": str(home),
        "columns": [name for name in records[0] if name != "prompt"],
        "rows": [records[n] for n in training_order(len(records), drawn, seed=cfg.seed)],
    }  # fmt: skip
    (home / "job.json").write_text(json.dumps(job))
    run([sys.executable, str(ROOT / "benchmarks" / "plain_grpo.py"), str(home / "job.json")])
    told = json.loads((home / "told.json").read_text())
    return Course(told["seconds"], told["tokens"], told["rewards"], told["cpu_seconds"])


def as_prompt(record: dict) -> dict:
    """A row of the data files as TRL takes it."""
    if "messages" in record:
        *prompt, answer = record.pop("messages")
        return {"prompt": prompt, "answer": answer["content"], **record}
    return {"prompt": [{"role": "user", "content": record.pop("question")}], **record}


def sftplay(*words: object) -> None:
    run([sys.executable, "-m", "sftplay", *map(str, words)])


def run(argv: list[str]) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{argv[1:5]} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    raise SystemExit(main())
