"""TRL's own trainers on the same batches, where they are right: the same losses and weights after twenty steps.

TRL 1.16's nll of ORPO takes the prompt in, and its sigmoid loss no smoothing: plain loops stand for those.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from pair_rows import make_pairs
from plain_preference import sums_of
from preference_trainers import RATE, config_of, make_trainer, tiny_model, trained_of
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

STEPS, BATCH = 20, 4


@pytest.fixture(scope="module")
def start() -> Any:
    return tiny_model(pad_token_id=0)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def learned_rows(kto: bool = False) -> list[dict[str, Any]]:
    """Pairs whose completions are learned whole: TRL has no gaps in them."""
    rows = make_pairs(12, seed=11, kto=kto)
    return [{**row, "labels": [-100] * row["prompt_tokens"] + row["input_ids"][row["prompt_tokens"] :]} for row in rows]


def split(row: dict[str, Any]) -> list[list[int]]:
    p, end = row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
    return [row["input_ids"][:p], row["input_ids"][p:end], row["input_ids"][end:]]


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": RATE,
        "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", "save_strategy": "no",
        "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": False,
        "activation_checkpointing": False, "weight_decay": 0.0, "max_grad_norm": 0.0, "max_length": None,
    }  # fmt: skip


def losses_of(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def tokenized(trainer: type[Any]) -> type[Any]:
    """The trainer class for rows that are token ids already."""
    return type(trainer.__name__, (trainer,), {"_prepare_dataset": lambda self, dataset, *_: dataset})


def check(folder: Path, rows: list[dict[str, Any]], start: Any, cfg: Any, theirs: Any) -> None:
    with torch.no_grad():
        before = sums_of(start, rows)
    ours = make_trainer(folder, cfg, copy.deepcopy(start), rows, steps=STEPS, before=before)
    losses = []
    step = ours.training_step
    ours.training_step = lambda *given: losses.append(step(*given)) or losses[-1]
    ours.train()
    theirs.train()
    assert [float(loss) for loss in losses] == pytest.approx(losses_of(theirs), rel=1e-5, abs=1e-6)
    assert float((trained_of(ours.model) - trained_of(start)).abs().max()) > 5 * RATE
    assert float((trained_of(ours.model) - trained_of(theirs.model)).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("task", "given", "loss_type", "beta"),
    [
        ("dpo", {}, "sigmoid", 0.1),
        pytest.param("dpo", {"loss": "hinge", "beta": 0.5}, "hinge", 0.5, marks=pytest.mark.slow),
        pytest.param("dpo", {"loss": "robust", "label_smoothing": 0.2}, "robust", 0.1, marks=pytest.mark.slow),
        ("ipo", {}, "ipo", 0.1),
    ],
    ids=["sigmoid", "hinge", "robust", "ipo"],
)
def test_dpo_and_ipo_train_as_trl(
    task: str, given: dict[str, Any], loss_type: str, beta: float, start: Any, tokenizer: Any, tmp_path: Path
):
    rows = learned_rows()
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    theirs = tokenized(DPOTrainer)(
        model=copy.deepcopy(start), ref_model=copy.deepcopy(start), processing_class=tokenizer,
        args=DPOConfig(
            **arguments(tmp_path), loss_type=loss_type, beta=beta, label_smoothing=given.get("label_smoothing", 0.0)
        ),
        train_dataset=Dataset.from_list([dict(zip(names, split(row), strict=True)) for row in rows]),
    )  # fmt: skip
    check(tmp_path, rows, start, config_of(task, **given), theirs)


def test_kto_trains_as_trl_with_its_mismatched_answers(start: Any, tokenizer: Any, tmp_path: Path):
    rows = learned_rows(kto=True)
    names = ("prompt_ids", "completion_ids", "KL_completion_ids")
    theirs = tokenized(KTOTrainer)(
        model=copy.deepcopy(start), ref_model=copy.deepcopy(start), processing_class=tokenizer,
        args=KTOConfig(**arguments(tmp_path), beta=0.2, desirable_weight=1.3, undesirable_weight=0.8),
        train_dataset=Dataset.from_list(
            [dict(zip(names, split(row), strict=True)) | {"label": row["desirable"]} for row in rows]
        ),
    )  # fmt: skip
    cfg = config_of("kto", beta=0.2, desirable_weight=1.3, undesirable_weight=0.8)
    check(tmp_path, rows, start, cfg, theirs)


def test_simpo_trains_as_trls_cpo_trainer(start: Any, tokenizer: Any, tmp_path: Path):
    rows, columns = learned_rows(), []
    for row in rows:
        prompt, *sides = split(row)
        columns.append({"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)})
        for name, side in zip(("chosen", "rejected"), sides, strict=True):
            ids = prompt + side
            columns[-1] |= {
                f"{name}_input_ids": ids,
                f"{name}_attention_mask": [1] * len(ids),
                f"{name}_labels": [-100] * len(prompt) + side,
            }
    texts = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * len(rows))
    settings = {**arguments(tmp_path), "max_length": 512, "remove_unused_columns": False}
    theirs = CPOTrainer(
        model=copy.deepcopy(start), processing_class=tokenizer,
        args=CPOConfig(**settings, loss_type="simpo", beta=2.0, simpo_gamma=0.6, cpo_alpha=0.0),
        train_dataset=texts,
    )  # fmt: skip
    theirs.train_dataset = Dataset.from_list(columns)
    check(tmp_path, rows, start, config_of("simpo", gamma=0.6), theirs)
