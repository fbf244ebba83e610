"""Twenty steps of each loss against plain float64 loops from the papers; steps do not depend on how they are cut."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pair_rows import make_pairs
from plain_preference import batch_loss, sums_of
from preference_trainers import RATE, config_of, gradient_of, make_trainer, run_step, tiny_model, trained_of

from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder
from sftplay.train.exact_batch import Replay

CASES = [
    ("dpo", {}),
    ("dpo", {"label_smoothing": 0.1, "rpo_alpha": 0.5}),
    ("dpo", {"loss": "hinge", "beta": 0.3}),
    ("dpo", {"loss": "robust", "label_smoothing": 0.2}),
    ("ipo", {}),
    ("orpo", {}),
    ("simpo", {"gamma": 0.6}),
    ("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.7}),
]
NAMES = [" ".join([task, *(f"{key}={value}" for key, value in given.items())]) for task, given in CASES]
BATCH, ROWS = 4, 12
EPSILON = 1e-5
"""AdamW divides each gradient by its own size and this; else rounding moves a weight with a gradient of nearly 0."""


@pytest.fixture(scope="module")
def starts() -> dict[bool, Any]:
    return {lora: tiny_model(lora=lora) for lora in (False, True)}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(("task", "given"), CASES, ids=NAMES)
def test_twenty_steps_end_at_the_weights_of_a_plain_loop_in_float64(
    task: str, given: dict[str, Any], lora: bool, starts: Any, tmp_path: Path
):
    rows = make_pairs(ROWS, seed=1, kto=task == "kto")
    plain = copy.deepcopy(starts[lora]).double()
    with torch.no_grad():
        before = sums_of(plain, rows)
    trainer = make_trainer(
        tmp_path,
        config_of(task, **given),
        copy.deepcopy(starts[lora]),
        rows,
        steps=20,
        before=before.float(),
        epsilon=EPSILON,
    )
    first, gradient = run_step(trainer, rows[:BATCH])
    expected = batch_loss(plain, rows[:BATCH], {"task": task, **given}, before)
    expected.backward()
    wanted = gradient_of(plain)
    assert first == pytest.approx(expected.item(), rel=1e-5)
    assert float((gradient - wanted).norm() / wanted.norm()) <= 1e-5
    trainer.model.zero_grad()
    trainer.train()
    optimizer = torch.optim.AdamW(
        [w for w in plain.parameters() if w.requires_grad], lr=RATE, weight_decay=0.0, eps=EPSILON
    )
    start = trained_of(plain)
    for step in range(20):
        optimizer.zero_grad()
        window = [rows[(step * BATCH + n) % ROWS] for n in range(BATCH)]
        batch_loss(plain, window, {"task": task, **given}, before).backward()
        optimizer.step()
    assert float((trained_of(plain) - start).abs().max()) > 5 * RATE
    apart = (trained_of(trainer.model) - trained_of(plain)).abs()
    assert float(apart.quantile(0.999)) <= 1e-6
    assert float(apart.max()) <= 1e-5


def test_the_first_loss_is_ln_2_where_the_reference_is_the_start(starts: Any, tmp_path: Path):
    rows = make_pairs(8, seed=2)
    with torch.no_grad():
        before = sums_of(copy.deepcopy(starts[True]).double(), rows).float()
    trainer = make_trainer(tmp_path, config_of(), copy.deepcopy(starts[True]), rows, batch=8, before=before)
    loss, _ = run_step(trainer, rows)
    assert loss == pytest.approx(math.log(2), abs=1e-6)
    figures = trainer.take_figures({})
    assert figures["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert figures["kl"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("task", ["dpo", "orpo", "kto"])
@pytest.mark.parametrize("head", ["standard", "chunked"])
def test_a_step_is_the_same_in_micro_batches_of_any_size_and_accumulated_by_the_trainer(
    task: str, head: str, starts: Any, tmp_path: Path
):
    rows, before = make_pairs(8, seed=3, kto=task == "kto"), -60 * torch.rand(8, 2, generator=torch.manual_seed(1))
    found = []
    for micro_batch, accumulates in ((8, False), (3, False), (1, False), (2, True)):
        trainer = make_trainer(
            tmp_path, config_of(task), copy.deepcopy(starts[False]), rows, micro_batch=micro_batch, batch=8,
            accumulates=accumulates, head=head, before=before,
        )  # fmt: skip
        found.append((*run_step(trainer, rows), trainer.take_figures({})))
    (loss, gradient, figures), *others = found
    assert figures["loss"] == pytest.approx(loss, rel=1e-6)
    for other_loss, other_gradient, other_figures in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert float((other_gradient - gradient).norm() / gradient.norm()) <= 1e-6
        assert other_figures == pytest.approx(figures, rel=1e-5)


def test_the_reference_point_of_kto_is_above_0_and_that_of_all_rows_of_the_step(starts: Any, tmp_path: Path):
    rows, before = make_pairs(8, seed=3, kto=True), torch.full((8, 2), -1000.0)
    point = float((sums_of(starts[False], rows).detach() - before)[:, 1].mean())
    for micro_batch, accumulates in ((3, False), (2, True)):
        trainer = make_trainer(
            tmp_path, config_of("kto"), copy.deepcopy(starts[False]), rows, micro_batch=micro_batch, batch=8,
            accumulates=accumulates, before=before,
        )  # fmt: skip
        run_step(trainer, rows)
        assert trainer.take_figures({})["reference_point"] == pytest.approx(point, rel=1e-6)
    assert point > 500


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_a_step_that_ran_out_of_memory_is_run_again_with_the_same_result(task: str, starts: Any, tmp_path: Path):
    rows, before = make_pairs(8, seed=4, kto=task == "kto"), torch.full((8, 2), -50.0)

    def run(fails: bool) -> tuple[float, torch.Tensor, dict[str, Any], int]:
        folder = RunFolder(tmp_path / f"{task}{fails}")
        folder.create()
        cfg, calls = config_of(task), [0]
        trainer = make_trainer(
            tmp_path, cfg, copy.deepcopy(starts[False]), rows, micro_batch=4, batch=8, before=before,
            replay=Replay(cfg, folder),
        )  # fmt: skip

        def fail(model: Any, *_: Any) -> None:
            calls[0] += model.training and torch.is_grad_enabled()
            if fails and calls[0] == 2:
                calls[0] += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        trainer.model.register_forward_pre_hook(fail)
        loss, gradient = run_step(trainer, rows)
        return loss, gradient, trainer.take_figures({}), trainer.micro_batcher.micro_batch

    plain, replayed = run(False), run(True)
    assert (plain[3], replayed[3]) == (4, 2)
    assert replayed[0] == pytest.approx(plain[0], rel=1e-6)
    assert float((replayed[1] - plain[1]).norm() / plain[1].norm()) <= 1e-6
    assert replayed[2] == pytest.approx(plain[2], rel=1e-5)  # no row is counted twice


def test_figures_of_kto_are_means_over_the_wanted_and_the_other_answers(starts: Any, tmp_path: Path):
    rows = make_pairs(8, seed=5, kto=True)
    before = sums_of(starts[False], rows).detach() - torch.arange(16.0).reshape(8, 2)
    trainer = make_trainer(tmp_path, config_of("kto"), copy.deepcopy(starts[False]), rows, batch=8, before=before)
    run_step(trainer, rows)
    figures = trainer.take_figures({})
    wanted = [0.1 * 2 * n for n, row in enumerate(rows) if row["desirable"]]
    others = [0.1 * 2 * n for n, row in enumerate(rows) if not row["desirable"]]
    assert wanted
    assert others
    assert figures["rewards/chosen"] == pytest.approx(sum(wanted) / len(wanted), rel=1e-4)
    assert figures["rewards/rejected"] == pytest.approx(sum(others) / len(others), rel=1e-4)
    assert figures["rewards/margins"] == pytest.approx(figures["rewards/chosen"] - figures["rewards/rejected"])
    assert figures["reference_point"] == pytest.approx(8.0, rel=1e-4)


def test_rows_whose_loss_alone_is_not_finite_are_named(starts: Any, tmp_path: Path):
    rows, before = make_pairs(8, seed=6), torch.full((8, 2), -50.0)
    before[5, 1] = math.nan
    trainer = make_trainer(tmp_path, config_of(), copy.deepcopy(starts[False]), rows, batch=8, before=before)
    run_step(trainer, rows)
    assert trainer.rows_not_finite() == [rows[5]["row"]]
    assert sorted(trainer.last_rows) == [row["row"] for row in rows]


def test_dropout_is_off(starts: Any, tmp_path: Path):
    from peft import LoraConfig, get_peft_model

    model = tiny_model(attention_dropout=0.5)
    model = get_peft_model(model, LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"], init_lora_weights=False))
    rows, before = make_pairs(4, seed=7), torch.full((4, 2), -50.0)
    trainer = make_trainer(tmp_path, config_of(), model, rows, before=before)
    assert run_step(trainer, rows)[0] == run_step(trainer, rows)[0]


def test_a_model_that_fails_the_proof_is_refused_only_where_a_shared_prompt_is_asked_for(tmp_path: Path):
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    rows = make_pairs(4)
    trainer = make_trainer(tmp_path, config_of(), MistralForCausalLM(config), rows)
    assert not trainer.shares_prompt
    with pytest.raises(ConfigError) as raised:
        make_trainer(tmp_path, config_of(shared_prompt=True), MistralForCausalLM(config), rows)
    assert raised.value.where == "preference.shared_prompt true"
