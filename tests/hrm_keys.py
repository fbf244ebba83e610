"""What keys of the section `hrm` change in a run, for the table of all keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hrm_run import new_hrm_run, write_puzzles
from in_process import train_in

from sftplay import log
from sftplay.tasks.hrm.act import FIGURES, Puzzles, all_halted, cell_losses, reset_halted, run_segment
from sftplay.tasks.hrm.network import Grid, PuzzleModel, PuzzleTable, Reasoner
from sftplay.tasks.hrm.section import HrmConfig
from sftplay.tasks.hrm.task import build_model, make_rows, open_puzzles
from sftplay.tasks.hrm.trainer import AdamATan2
from sftplay.train.checkpointing import starting_weights

INPUTS, IDS = torch.tensor([[1, 2, 3], [3, 1, 0]]), torch.tensor([0, 1])


def model_of(**changes: Any) -> PuzzleModel:
    torch.manual_seed(0)
    small = {"hidden_size": 8, "num_heads": 2, "h_layers": 1, "l_layers": 1, "n_supervision": 3}
    return PuzzleModel(HrmConfig(**{**small, **changes}), Grid(vocab_size=4, cells=3, identifiers=2))


def check_cycles(_: Any) -> None:
    """How often a segment calls the fast and the slow module."""
    real = Reasoner.forward
    for changes, expected in (({}, (4, 2)), ({"h_cycles": 3}, (6, 3)), ({"l_cycles": 3}, (6, 2))):
        model, seen = model_of(**changes), []
        with patch.object(
            Reasoner, "forward", lambda self, *g, seen=seen, **n: (seen.append(self), real(self, *g, **n))[1]
        ):
            model(model.start(2), INPUTS, puzzle_rows=torch.zeros(2, 8))
        assert tuple(sum(each is module for each in seen) for module in (model.low, model.high)) == expected


def learned(**changes: Any) -> tuple[torch.Tensor, float]:
    """The gradient of the fast module's first matrix after one segment, and the loss of going on."""
    model = model_of(**changes)
    carry = reset_halted(all_halted(model, 2), Puzzles(INPUTS, INPUTS.flip(0), IDS), model=model)
    segment = run_segment(model, carry, at_least=IDS * 0)
    segment.losses.sum().backward()
    gradient = next(model.low.parameters()).grad
    assert gradient is not None
    return gradient, dict(zip(FIGURES, segment.figures.tolist(), strict=True))["q_continue_loss"]


def check_grad(_: Any) -> None:
    assert not torch.allclose(learned()[0], learned(grad="full_last_cycle")[0])


def check_q_continue(_: Any) -> None:
    assert learned()[1] > 0 == learned(q_continue=False)[1]


def check_loss_precision(_: Any) -> None:
    kinds = [cell_losses(torch.zeros(2, 3, 4), INPUTS, hrm=HrmConfig(loss_precision=p)).dtype for p in ("fp64", "fp32")]
    assert kinds == [torch.float64, torch.float32]


def check_placement(bench: Any) -> None:
    """Of eight rows a process holds all, or its share."""
    for placement, rows in (("replicated", 8), ("sharded", 4)):
        cfg, _ = new_hrm_run(bench.home / f"hrm-{placement}", puzzles_of(bench), hrm__puzzle_emb_placement=placement)
        with patch.object(log, "world_size", lambda: 2):
            model = build_model(cfg, open_puzzles(cfg)[0])
        assert len(model.puzzles.rows) == rows


def puzzles_of(bench: Any) -> Path:
    folder: Path = bench.home / "puzzles"
    return folder if folder.is_dir() else write_puzzles(folder)


def check_table(bench: Any) -> None:
    """The keys of the puzzle table, the optimizer, and the number of puzzles measured, in a run of three steps."""
    real = PuzzleTable.update
    for number, changes in enumerate((
        {"hrm__emb_sync_every": 1, "hrm__eval_limit": 16},
        {"hrm__puzzle_emb_lr": 0.25, "hrm__puzzle_emb_weight_decay": 0.5, "hrm__optim": "adam_atan2"},
    )):  # fmt: skip
        updates: list[dict[str, float]] = []
        copies: list[int] = []

        def update(self: PuzzleTable, touched: Any, *, updates: list[Any] = updates, **named: float) -> int:
            updates.append(named)
            return real(self, touched, **named)

        steps = {"train__max_steps": 3, "train__eval_steps": 3}
        constant = {"train__warmup_ratio": 0.0, "train__lr_scheduler": "constant"}
        home = bench.home / f"hrm-{next(bench.numbers)}"
        cfg, folder = new_hrm_run(home, puzzles_of(bench), **steps, **constant, **changes)
        with (
            patch.object(PuzzleTable, "update", update),
            patch.object(PuzzleTable, "copy_from_main", lambda _, copies=copies: copies.append(1)),
        ):
            run = train_in(cfg, folder)
        assert isinstance(run.trainer.optimizer.optimizer, AdamATan2) == bool(number)
        assert updates == [{"rate": (0.05, 0.25)[number], "weight_decay": (0.1, 0.5)[number]}] * 3
        assert (len(copies), folder.read_json("eval/step-3.json")["n"]) == ((3, 16), (1, 80))[number]


def check_start(bench: Any) -> None:
    """The run's model has the weights of the file, and a resume sees another content of the file."""
    file = bench.home / "step_7"
    cfg, _ = new_hrm_run(bench.home / "hrm-start", puzzles_of(bench), hrm__start_from=str(file))
    model = build_model(cfg.with_values({"hrm.start_from": None}, "test"), open_puzzles(cfg)[0])
    torch.save({name: torch.ones_like(weight) for name, weight in model.state_dict().items()}, file)
    assert (build_model(cfg, open_puzzles(cfg)[0]).tokens == 1).all()
    assert list(starting_weights(cfg)) == [str(file)]


def check_rope(_: Any) -> None:
    models = [model_of(), model_of(rope_theta=1.0)]
    angles = [round(float(model.rotation.cos[1, 0, 1]), 3) for model in models if model.rotation is not None]
    assert angles == [1.0, 0.54]


def check_epochs(bench: Any) -> None:
    for epochs, steps in ((2.0, 10), (4.0, 20)):  # 40 groups in batches of 8
        home = bench.home / f"hrm-epochs-{epochs}"
        cfg, _ = new_hrm_run(home, puzzles_of(bench), train__max_steps=None, hrm__epochs=epochs)
        train, held_out = open_puzzles(cfg)
        order = make_rows(cfg, train, held_out=held_out).order
        assert order is not None
        assert order.steps == steps


def check_expansion(_: Any) -> None:
    models = [model_of(), model_of(expansion=10.0)]
    assert [len(m.state_dict()["low.blocks.0.feed_forward.gate_up.weight"]) for m in models] == [64, 128]


OF_HRM: dict[str, Callable[[Any], None]] = {
    "start_from": check_start,
    "h_cycles": check_cycles,
    "l_cycles": check_cycles,
    "grad": check_grad,
    "q_continue": check_q_continue,
    "loss_precision": check_loss_precision,
    "puzzle_emb_placement": check_placement,
    "rope_theta": check_rope,
    "expansion": check_expansion,
    "epochs": check_epochs,
    **dict.fromkeys(("puzzle_emb_lr", "puzzle_emb_weight_decay", "emb_sync_every", "eval_limit", "optim"), check_table),
}
