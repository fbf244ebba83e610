"""What each key of the section `hrm` changes, for the table of all keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from hrm_run import new_hrm_run, write_puzzles
from in_process import train_in

from sftplay import log
from sftplay.config.keys import differences, values_that_decide_weights
from sftplay.config.rules import idle_keys
from sftplay.config.run import RunConfig
from sftplay.tasks.hrm.act import FIGURES, Puzzles, all_halted, cell_losses, least_segments, reset_halted, run_segment
from sftplay.tasks.hrm.measuring import StopWhenLearned, described, refined
from sftplay.tasks.hrm.network import Grid, PuzzleModel, PuzzleTable, Reasoner
from sftplay.tasks.hrm.section import HrmConfig
from sftplay.tasks.hrm.spec import SPEC
from sftplay.tasks.hrm.task import build_model, make_rows, open_puzzles
from sftplay.tasks.hrm.trainer import AdamATan2
from sftplay.train.checkpointing import starting_weights

Check = Callable[[Any], None]

SMALL = {"hidden_size": 8, "num_heads": 2, "h_layers": 1, "l_layers": 1, "n_supervision": 3}
INPUTS, IDS = torch.tensor([[1, 2, 3], [3, 1, 0]]), torch.tensor([0, 1])
PUZZLES = Puzzles(INPUTS, INPUTS.flip(0), IDS)


def model_of(**changes: Any) -> PuzzleModel:
    torch.manual_seed(0)
    return PuzzleModel(HrmConfig(**{**SMALL, **changes}), Grid(vocab_size=4, cells=3, identifiers=2))


def of_model(look: Callable[[PuzzleModel], Any], key: str, before: Any, *, value: Any, after: Any) -> Check:
    """A check that `look` sees `after` in a model with this value of the key, and `before` in the small one."""

    def check(_: Any) -> None:
        assert look(model_of()) == before
        assert look(model_of(**{key: value})) == after

    return check


def calls(model: PuzzleModel) -> tuple[int, int]:
    """How often a segment calls the fast and the slow module."""
    seen: list[Any] = []
    real = Reasoner.forward
    with patch.object(Reasoner, "forward", lambda self, *g, **n: (seen.append(self), real(self, *g, **n))[1]):
        model(model.start(2), INPUTS, puzzle_rows=torch.zeros(2, 8))
    return sum(each is model.low for each in seen), sum(each is model.high for each in seen)


def learned(**changes: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient of the fast module's first matrix after one segment, and the segment's figures."""
    model = model_of(**changes)
    carry = reset_halted(all_halted(model, 2), PUZZLES, model=model)
    segment = run_segment(model, carry, at_least=IDS * 0)
    segment.losses.sum().backward()
    gradient = next(model.low.parameters()).grad
    assert gradient is not None
    return gradient, dict(zip(FIGURES, segment.figures.tolist(), strict=True))


def check_grad(_: Any) -> None:
    assert not torch.allclose(learned()[0], learned(grad="full_last_cycle")[0])


def check_q_continue(_: Any) -> None:
    assert learned()[1]["q_continue_loss"] > 0
    assert learned(q_continue=False)[1]["q_continue_loss"] == 0


def check_loss(_: Any) -> None:
    logits, labels = torch.randn(2, 3, 4), INPUTS
    stable, soft = (cell_losses(logits, labels, hrm=HrmConfig(loss=loss)) for loss in ("stablemax", "softmax"))
    assert not torch.allclose(stable, soft)


def check_loss_precision(_: Any) -> None:
    kinds = [cell_losses(torch.zeros(2, 3, 4), INPUTS, hrm=HrmConfig(loss_precision=p)).dtype for p in ("fp64", "fp32")]
    assert kinds == [torch.float64, torch.float32]


def check_exploration(_: Any) -> None:
    shares = [
        float((least_segments(HrmConfig(halt_exploration=p), 4000, seed=1, step=1) > 0).float().mean())
        for p in (0.1, 0.5)
    ]
    assert 0.05 < shares[0] < 0.15
    assert 0.45 < shares[1] < 0.55


def check_eval_halt(_: Any) -> None:
    sums = torch.tensor([[1.0, 2, 3, 4, 5, 8], [2, 3, 3, 4, 5, 8], [4, 4, 4, 6, 7, 8]])
    assert [described(sums, halt)["exact_accuracy"] for halt in ("max", "q")] == [0.5, 1.0]


def check_stop(_: Any) -> None:
    for share, ends in ((0.8, True), (0.95, False)):
        control = SimpleNamespace(should_training_stop=False, should_save=False)
        logs = {"count": 3, "exact_accuracy": 0.9}
        StopWhenLearned(share, None).on_log(None, SimpleNamespace(global_step=3), control, logs)
        assert (control.should_training_stop, control.should_save) == (ends, ends)


def check_epochs(bench: Any) -> None:
    puzzles = puzzles_of(bench)
    for epochs, steps in ((2.0, 10), (4.0, 20)):  # 40 groups in batches of 8
        home = bench.home / f"hrm-epochs-{epochs}"
        cfg, _ = new_hrm_run(home, puzzles, train__max_steps=None, hrm__epochs=epochs)
        train, held_out = open_puzzles(cfg)
        order = make_rows(cfg, train, held_out=held_out).order
        assert order is not None
        assert order.steps == steps


def puzzles_of(bench: Any) -> Path:
    folder = bench.home / "puzzles"
    return folder if folder.is_dir() else write_puzzles(folder)


class Compiled:
    """What torch.compile gives can be called, and neither measured nor asked whether it is true."""

    def __init__(self, model: PuzzleModel) -> None:
        self.model = model

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.model(*given, **named)

    def __len__(self) -> int:
        raise TypeError


def check_run(bench: Any) -> None:
    """What `run_changed` sees; one pair of runs serves all its keys."""
    if not (bench.home / "hrm-run-1").exists():
        run_changed(bench)


def run_changed(bench: Any) -> None:
    """A run of three steps in which all keys of the optimizers are changed at once."""
    updates: list[dict[str, float]] = []
    copies: list[int] = []
    compiled: list[Any] = []
    real = PuzzleTable.update

    def update(self: PuzzleTable, touched: Any, **named: float) -> int:
        updates.append(named)
        return real(self, touched, **named)

    for number, changes in enumerate((
        {},
        {"hrm__optim": "adam_atan2", "hrm__ema": 0.5, "hrm__puzzle_emb_lr": 0.25, "hrm__puzzle_emb_weight_decay": 0.5,
         "hrm__emb_sync_every": 1, "hrm__eval_limit": 16, "hrm__compile": True},
    )):  # fmt: skip
        updates.clear(), copies.clear(), compiled.clear()
        cfg, folder = new_hrm_run(
            bench.home / f"hrm-run-{number}", puzzles_of(bench), train__max_steps=3, train__eval_steps=3,
            train__warmup_ratio=0.0, train__lr_scheduler="constant", **changes,
        )  # fmt: skip
        with (
            patch.object(PuzzleTable, "update", update),
            patch.object(PuzzleTable, "copy_from_main", lambda _: copies.append(1)),
            patch.object(torch, "compile", lambda model: (compiled.append(1), Compiled(model))[1]),
        ):
            run = train_in(cfg, folder)
        hrm = cfg.hrm
        assert updates == [{"rate": hrm.puzzle_emb_lr, "weight_decay": hrm.puzzle_emb_weight_decay}] * 3
        assert isinstance(run.trainer.optimizer.optimizer, AdamATan2) == bool(number)
        assert (run.trainer.average is not None) == bool(number)
        assert len(copies) == (3 if number else 1)
        assert len(compiled) == number
        assert folder.read_json("eval/step-3.json")["n"] == (16 if number else 80)


def check_placement(bench: Any) -> None:
    """Of eight rows a process holds all, or its share."""
    puzzles = puzzles_of(bench)
    for placement, rows in (("replicated", 8), ("sharded", 4)):
        cfg, _ = new_hrm_run(bench.home / f"hrm-{placement}", puzzles, hrm__puzzle_emb_placement=placement)
        with patch.object(log, "world_size", lambda: 2):
            model = build_model(cfg, open_puzzles(cfg)[0])
        assert len(model.puzzles.rows) == rows


def check_start(bench: Any) -> None:
    """The run's model has the weights of the file, and a resume sees another content of the file."""
    puzzles, file = puzzles_of(bench), bench.home / "step_7"
    cfg, _ = new_hrm_run(bench.home / "hrm-start", puzzles, hrm__start_from=str(file))
    model = build_model(cfg.with_values({"hrm.start_from": None}, "test"), open_puzzles(cfg)[0])
    torch.save({name: torch.ones_like(weight) for name, weight in model.state_dict().items()}, file)
    assert (build_model(cfg, open_puzzles(cfg)[0]).tokens == 1).all()
    assert list(starting_weights(cfg)) == [str(file)]


def check_free_keys(_: Any) -> None:
    """What is measured may change in a resume, what is learned may not; other tasks have no use for the section."""
    hrm = {"task_mode": "hrm", "model": {"name": "builtin:hrm"}, "tuning": {"mode": "full"}}
    configs = [RunConfig.model_validate({**hrm, "hrm": each}) for each in ({}, {"eval_limit": 3}, {"epochs": 3.0})]
    values = [values_that_decide_weights(cfg) for cfg in configs]
    assert not list(SPEC.broken_rules(configs[0]))
    assert [key for key, *_ in differences(values[0], values[1])] == []
    assert [key for key, *_ in differences(values[0], values[2])] == ["hrm.epochs"]
    other = RunConfig.model_validate({"model": {"name": "builtin:tiny"}})
    assert {f"hrm.{name}" for name in HrmConfig.model_fields} <= {key for key, *_ in idle_keys(other)}


def shape(name: str) -> Callable[[PuzzleModel], Any]:
    return lambda model: dict(model.named_parameters())[name].shape[0]


OF_HRM: dict[str, Check] = {
    "start_from": check_start,
    "arch": of_model(lambda model: model.high is model.low, "arch", False, value="single", after=True),
    "grad": check_grad,
    "hidden_size": of_model(lambda m: m.tokens.shape[1], "hidden_size", 8, value=16, after=16),
    "num_heads": of_model(lambda m: m.low.blocks[0].attention.heads, "num_heads", 2, value=4, after=4),
    "expansion": of_model(
        shape("low.blocks.0.feed_forward.gate_up.weight"), "expansion", 64, value=10.0, after=128
    ),
    "h_layers": of_model(lambda m: len(m.high.blocks), "h_layers", 1, value=2, after=2),
    "l_layers": of_model(lambda m: len(m.low.blocks), "l_layers", 1, value=3, after=3),
    "h_cycles": of_model(calls, "h_cycles", (4, 2), value=3, after=(6, 3)),
    "l_cycles": of_model(calls, "l_cycles", (4, 2), value=3, after=(6, 2)),
    "positions": of_model(lambda m: m.places is not None, "positions", False, value="learned", after=True),
    "rope_theta": of_model(
        lambda m: m.rotation is not None and round(float(m.rotation.cos[1, 0, 1]), 3), "rope_theta", 1.0, value=1.0,
        after=0.54,
    ),
    "n_supervision": of_model(
        lambda m: len(list(refined(m, INPUTS, identifiers=IDS))), "n_supervision", 3, value=5, after=5
    ),
    "halt_exploration": check_exploration,
    "q_continue": check_q_continue,
    "eval_halt": check_eval_halt,
    "loss": check_loss,
    "loss_precision": check_loss_precision,
    "epochs": check_epochs,
    "stop_at_exact": check_stop,
    "eval_limit": check_free_keys,
    "puzzle_emb_placement": check_placement,
    "puzzle_emb_dim": of_model(lambda m: m.prefix, "puzzle_emb_dim", 1, value=9, after=2),
    "puzzle_emb_len": of_model(lambda m: m.prefix, "puzzle_emb_len", 1, value=16, after=16),
    "optim": check_run,
    **dict.fromkeys(
        ("ema", "puzzle_emb_lr", "puzzle_emb_weight_decay", "emb_sync_every", "compile"), check_run
    ),
}  # fmt: skip
