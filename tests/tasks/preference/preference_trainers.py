"""Trainers of preferences on a tiny model and made-up pairs, without a run around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from sftplay.config.run import RunConfig
from sftplay.tasks.preference.shared_prompt import PairCollator
from sftplay.tasks.preference.trainer import PreferenceTrainer
from sftplay.train.exact_batch import StepSetup
from sftplay.train.micro_batches import MicroBatcher

RATE = 1e-3

torch.set_num_threads(1)  # for models this small more of them only wait for each other


class Table:
    """The reference's log-probabilities by the number of a row."""

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    def look_up(self, side: str, index: Tensor) -> Tensor:
        assert side == "train"
        return self.sums[index]


def tiny_model(*, lora: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A random Llama of 400 tokens; with `lora` an adapter that begins at zero on all its layers and its head."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**sizes | changes))
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))


def config_of(task: str = "dpo", **preference: Any) -> RunConfig:
    values = {"task_mode": task, "model": {"name": "builtin:tiny"}, "preference": preference}
    return RunConfig.model_validate({**values, "train": {"batch_size": 4, "grad_accum": 2}})


def make_trainer(
    folder: Path, cfg: RunConfig, model: Any, rows: list[dict[str, Any]], *, micro_batch: int = 3, batch: int = 4,
    steps: int = 1, accumulates: bool = False, head: str = "standard", before: Tensor | None = None,
    epsilon: float = 1e-8, **step: Any,
) -> PreferenceTrainer:  # fmt: skip
    """A trainer over the rows in their order; `before` are the reference's sums."""
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=micro_batch if accumulates else batch, max_steps=steps,
        gradient_accumulation_steps=batch // micro_batch if accumulates else 1, remove_unused_columns=False,
        use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=RATE, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", save_strategy="no", logging_strategy="no", weight_decay=0.0,
        max_grad_norm=0.0, average_tokens_across_devices=True, adam_epsilon=epsilon,
    )  # fmt: skip
    trainer = PreferenceTrainer(
        StepSetup(micro_batcher=None if accumulates else MicroBatcher(micro_batch), loss_head=head, **step),
        cfg=cfg, model=model, args=arguments, train_dataset=Dataset.from_list(rows), data_collator=PairCollator(0),
    )  # fmt: skip
    trainer.references = None if before is None else Table(before)
    return trainer


def run_step(trainer: PreferenceTrainer, rows: list[dict[str, Any]]) -> tuple[float, Tensor]:
    """The loss of a step over these rows, and the gradient of all weights that train."""
    trainer.model.zero_grad()
    size = trainer.args.per_device_train_batch_size
    batches = iter([PairCollator(0)(rows[at : at + size]) for at in range(0, len(rows), size)])
    windows, n = trainer.get_batch_samples(batches, len(rows) // size, torch.device("cpu"))
    loss = sum(float(trainer.training_step(trainer.model, window, n)) for window in windows)
    return loss, gradient_of(trainer.model)


def gradient_of(model: Any) -> Tensor:
    weights = [weight for _, weight in sorted(model.named_parameters()) if weight.requires_grad]
    return torch.cat([torch.zeros_like(w).flatten() if w.grad is None else w.grad.flatten() for w in weights])


def trained_of(model: Any) -> Tensor:
    return torch.cat([w.detach().flatten() for _, w in sorted(model.named_parameters()) if w.requires_grad])
