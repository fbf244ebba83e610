"""The verb `demo`: the builtin model learns a task that it could not do, with figures before and after."""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.commands.train import launch
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder, first_free
from sftplay.places import shipped

CONFIG = "configs/run_demo.yaml"
NAME = "demo"


def demo(args: Namespace) -> int:
    """Train, compare the answers before and after, and end with one line of result."""
    if args.nnodes > 1:  # each would make a run of its own
        fix = f"make train-distributed CONFIG={args.config or CONFIG} NNODES={args.nnodes} NODE_RANK= MASTER_ADDR="
        raise ConfigError(f"the demo runs on one node, not on {args.nnodes}", where="--nnodes", fix=fix)
    log.say("SFT-Play demo: a small model learns a task on this machine", "demo")
    started = time.monotonic()
    cfg = load_demo(args)
    folder = RunFolder(Path(cfg.output_dir) / NAME)
    if not args.dry_run:
        _move_aside(folder)
        if args.control:
            lines = Path(cfg.rows_path).read_text(encoding="utf-8").splitlines()
            rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
            answers = [row["messages"][-1] for row in rows]
            random.Random(cfg.seed).shuffle(answers)
            for row, answer in zip(rows, answers, strict=True):
                row["messages"][-1] = answer
            shuffled = Path(cfg.data.processed_dir) / "demo-control.jsonl"
            write_text(shuffled, "\n".join(map(json.dumps, rows)) + "\n")
            cfg = cfg.with_values({"data.train_path": str(shuffled)}, "demo --control")
            log.say("control: the training answers are shuffled, so there is nothing to learn but their form", "demo")
    exit_code = launch(args, cfg, folder=folder)
    if exit_code or args.dry_run:
        return exit_code
    before, after = (folder.read_json(f"eval/{name}.json") for name in ("before", "after"))
    result = {
        "exact_match_before": before["exact_match"],
        "exact_match_after": after["exact_match"],
        "n": after["n"],
        "train_seconds": folder.read_json("status.json")["train_seconds"],
        "control_exact_match": after["exact_match"] if args.control else None,
    }
    folder.write_json("demo.json", result)
    _show_samples(folder, 3)
    log.say(f"everything is in {folder.path}; the demo took {time.monotonic() - started:.0f} s", "demo")
    log.show(
        f"demo: exact match {result['exact_match_before']:.3f} -> {result['exact_match_after']:.3f} "
        f"on {result['n']} held-out prompts in {result['train_seconds']:.0f} s"
    )
    if args.json:
        print(json.dumps(result))
    return 0


def load_demo(args: Namespace) -> RunConfig:
    """The demo's config, which `args.config` then names; its rows are those shipped where the folder has none."""
    args.config = args.config or (CONFIG if Path(CONFIG).exists() else str(shipped(CONFIG)))
    cfg = load_config(args.config, args.overrides)
    paths = {"data.train_path": cfg.data.train_path, "data.val_path": cfg.data.val_path}
    missing = {key: path for key, path in paths.items() if path and not Path(path).exists()}
    if found := {key: str(shipped(path)) for key, path in missing.items() if shipped(path).exists()}:
        cfg = cfg.with_values(found, "shipped with the kit")
    return cfg.with_values({"run_name": NAME, "eval.before": True, "eval.after": True}, "demo")


def _move_aside(folder: RunFolder) -> None:
    """Rename an earlier demo after the time of its start; nothing is deleted."""
    if not folder.resolved.exists():
        return
    with folder.locked():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.resolved.stat().st_mtime))
        target = first_free(RunFolder(folder.path.with_name(f"{NAME}-{stamp}")), claim=False).path
        folder.path.rename(target)
    log.say(f"the earlier demo is now {target}", "demo")


def _show_samples(folder: RunFolder, count: int) -> None:
    """Show the first answers, before and after, next to their references, and keep them in samples/."""

    def flatten(text: str, width: int = 100) -> str:
        flat = " ".join(text.split())
        return flat if len(flat) <= width else flat[: width - 1] + "…"

    before, after = (
        [json.loads(line) for line in (folder.eval / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("before", "after")
    )
    text = ""
    for old, new in list(zip(before, after, strict=True))[:count]:
        text += f"\n  prompt    {flatten(new['prompt'])}\n  before    {flatten(old['prediction'])}\n"
        text += f"  after     {flatten(new['prediction'])}\n  expected  {flatten(new['reference'])}\n"
    log.show(text)
    write_text(folder.path / "samples" / "demo.txt", text)
