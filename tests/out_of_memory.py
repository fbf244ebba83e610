"""Lets memory run out from outside: a module for PYTHONPATH that raises torch's own error in a worker, at a wished
micro-step. The kit does not know of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

HOOK = """
import json, os, sys

wanted = [tuple(each) for each in json.loads(os.environ["OUT_OF_MEMORY"])]
rank = int(os.environ.get("RANK", "0"))
mine = {(step, micro): where for r, step, micro, where in wanted if r in (rank, None)}

if "sftplay.tasks.worker" in sys.orig_argv:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    now = {"step": 1, "micro": 0, "armed": None}

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def stepped(*_):
        now.update(step=now["step"] + 1, micro=0)

    def before_step(*_):
        where = mine.pop((now["step"], 0), None)
        if where == "optimizer":
            marker = os.environ["OUT_OF_MEMORY_ONCE"]
            if not os.path.exists(marker):
                open(marker, "w").close()
                fail()

    look_up, multiply = torch.nn.Embedding.forward, torch.nn.Linear.forward

    def embedding(self, ids):
        if torch.is_grad_enabled() and self.training:
            now["micro"] += 1
            where = mine.pop((now["step"], now["micro"]), None)
            if where == "forward":
                fail()
            now["armed"] = where if where in ("backward", "bad gradient") else None
            if where == "bad loss":
                return look_up(self, ids) * float("nan")
        elif not self.training and len(ids) > int(os.environ.get("OUT_OF_MEMORY_EVAL_ROWS", 10**6)):
            fail()
        return look_up(self, ids)

    def linear(self, x):
        out = multiply(self, x)
        if now["armed"] and out.requires_grad:
            out.register_hook(fail if now["armed"] == "backward" else lambda gradient: gradient * float("nan"))
            now["armed"] = None
        return out

    if os.environ.get("OUT_OF_MEMORY_OVERLAPS"):
        from sftplay.train.exact_batch import Replay

        made = Replay.__init__

        def made_overlapping(self, *args):
            made(self, *args)
            self.sends_afterwards = False

        Replay.__init__ = made_overlapping

    torch.nn.Embedding.forward, torch.nn.Linear.forward = embedding, linear
    register_optimizer_step_post_hook(stepped)
    register_optimizer_step_pre_hook(before_step)
"""


def hooked(folder: Path, failures: list[tuple[int | None, int, int, str]], **more: str) -> dict[str, Any]:
    """Options for the `sftplay` fixture with which memory runs out at each (rank, step, micro-step of it, where).

    Steps and micro-steps count from 1, of all attempts at a step; rank None means every rank. `where` is forward or
    backward; bad loss or bad gradient (numbers that are not finite instead); or with micro-step 0 optimizer (once,
    whatever is started after it). What a run remembers of it stays in `folder`. `more` are variables: the rows
    an evaluation cannot hold (OUT_OF_MEMORY_EVAL_ROWS), gradients that travel within the last piece, which the kit has
    on GPUs only (OUT_OF_MEMORY_OVERLAPS).
    """
    path = folder / "hook"
    path.mkdir(exist_ok=True)
    (path / "sitecustomize.py").write_text(HOOK)
    env = {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]), "OUT_OF_MEMORY": json.dumps(failures)}
    return {"env": {**env, "OUT_OF_MEMORY_ONCE": str(folder / "ran-out"), **more}, "cwd": folder}
