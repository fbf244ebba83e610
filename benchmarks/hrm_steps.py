"""The training step alone: the kit's beside the plain script's, in turn in one process. Used by hrm.py."""

from __future__ import annotations

import time
from statistics import median

import torch

from benchmarks.plain_hrm import Trainer
from sftplay.tasks.hrm.act import Puzzles, all_halted, least_segments, reset_halted, run_segment
from sftplay.tasks.hrm.network import Grid, PuzzleModel
from sftplay.tasks.hrm.section import HrmConfig

BATCH, CELLS, WORDS = 64, 16, 6
NAMES = ("hidden_size", "num_heads", "expansion", "h_layers", "l_layers", "h_cycles", "l_cycles", "positions",
         "q_continue", "halt_exploration", "puzzle_emb_lr", "puzzle_emb_weight_decay")  # fmt: skip


class KitStep:
    """The kit's step on the rows of a batch: halting, loss, gradients, optimizer, table."""

    def __init__(self, hrm: HrmConfig) -> None:
        self.model = PuzzleModel(hrm, Grid(vocab_size=WORDS, cells=CELLS, identifiers=1))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.carry, self.steps = all_halted(self.model, BATCH), 0

    def step(self, puzzles: Puzzles) -> None:
        hrm, table = self.model.hrm, self.model.puzzles
        self.steps += 1
        carry = reset_halted(self.carry, puzzles, model=self.model)
        at_least = least_segments(hrm, BATCH, seed=0, step=self.steps)
        segment = run_segment(self.model, carry, at_least=at_least)
        (segment.losses.sum() / BATCH).backward()
        self.carry = segment.carry
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert table is not None
        table.update(table.take(), rate=hrm.puzzle_emb_lr, weight_decay=hrm.puzzle_emb_weight_decay)


def compare_steps(hrm: HrmConfig, *, steps: int) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds of a step of each, medians of so many steps of both in turn."""
    kit = KitStep(hrm)
    job = {name: getattr(hrm, name) for name in NAMES} | {
        "multiple": 32, "vocab_size": WORDS, "seq_len": CELLS, "puzzle_emb_dim": hrm.hidden_size,
        "num_puzzle_identifiers": 1, "halt_max": hrm.n_supervision, "learning_rate": 2e-3, "weight_decay": 0.1,
        "batch": BATCH,
    }  # fmt: skip
    plain = Trainer(job)
    cells, ids = torch.randint(1, WORDS, (BATCH, CELLS)), torch.zeros(BATCH, dtype=torch.int64)
    contestants = {
        "SFT-Play": lambda: kit.step(Puzzles(cells, cells, ids)),
        "plain script": lambda: plain.step({"inputs": cells, "labels": cells, "ids": ids}),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for n in range(steps + 5):
        for name, run in contestants.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if n >= 5:
                spent[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {name: (median(w for w, _ in each), median(c for _, c in each)) for name, each in spent.items()}
