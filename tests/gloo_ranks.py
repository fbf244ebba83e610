"""Work on several ranks that talk over gloo: forked from the test, so that what it has prepared is there."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def on_ranks(world: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """What `work` gives on each of so many ranks; `folder` is an empty one."""

    def one(rank: int) -> None:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(work()))
        torch.distributed.barrier()
        os._exit(0)

    folder.mkdir(parents=True, exist_ok=True)
    children = [multiprocessing.get_context("fork").Process(target=one, args=(rank,)) for rank in range(world)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * world
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]
