"""Learning from a micro-batch of GRPO: prompts computed once for their answers, in each row, and by plain TRL.

Three trainers share a model: TRL's own, and the kit's without and with shared prompts. Each computes the loss of two
groups of eight answers and its gradient; figures are CPU seconds, the fastest of some rounds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from sftplay.tasks.grpo.shared_groups import proves_equal, score_groups, trim_padding
from sftplay.train.shared_prompt import teach_attention, unwrap
from sftplay.train.upstream import fitted_tiles

GROUPS, ANSWERS = 2, 8

SHAPES = {
    "prompt : answer = 4 : 1": (256, 64, False),
    "4 : 1, answers of 1 to 64 tokens": (256, 64, True),
    "the toy": (14, 24, True),
    "the long shape": (60, 128, True),
}
"""Tokens of a prompt and of an answer at most, and whether answers are shorter."""


class KitTrainer(GRPOTrainer):
    """The learning half of the kit's trainer: shared prompts where `sharing` says so, else TRL's rows with the kit's
    tiles."""

    sharing: str = ""

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        with fitted_tiles(self.model.config.vocab_size):
            return score_groups(self, *given, **named) or super()._get_per_token_logps_and_entropies(*given, **named)


def compare_learning(model: Path, work: Path, *, rounds: int) -> str:
    """Return a table of CPU seconds a micro-batch."""
    teach_attention()
    plain, kit = (make_trainer(kind, model, work) for kind in (GRPOTrainer, KitTrainer))
    kit.model = plain.model
    if not proves_equal(kit, unwrap(kit.model)):
        raise SystemExit("the model fails the proof of shared prompts")
    lines = [
        f"\nlearning: {GROUPS} groups of {ANSWERS} answers, CPU seconds of a forward and a backward pass",
        "",
        "| shape | plain TRL | a prompt a row | once | beside a prompt a row | beside TRL "
        "| gradient, from float64 | TRL's |",
        "| --- " * 8 + "|",
    ]
    for name, shape in SHAPES.items():
        batch = make_batch(*shape)
        seconds, gradients = dict[str, float](), dict[str, torch.Tensor]()
        for _ in range(max(3, rounds)):
            for way, trainer, sharing in (("TRL", plain, ""), ("rows", kit, ""), ("once", kit, "always")):
                trainer.sharing = sharing
                took, gradients[way] = learn(
                    trainer, batch if way == "TRL" else trim_padding(batch, trims_prompts=True)
                )
                seconds[way] = min(took, seconds.get(way, took))
        plain.model.double()  # the same weights, of which the head computes in fp32
        _, exact = learn(plain, batch)
        plain.model.float()
        gaps = {way: float((found - exact).norm() / exact.norm()) for way, found in gradients.items()}
        gains = " | ".join(f"{seconds[way] / seconds['once']:.2f}x" for way in ("rows", "TRL"))
        figures = " | ".join(f"{seconds[way]:.3f}" for way in ("TRL", "rows", "once"))
        lines.append(f"| {name} | {figures} | {gains} | {gaps['once']:.1e} | {gaps['TRL']:.1e} |")
    return "\n".join(lines)


def make_trainer(kind: type[GRPOTrainer], model: Path, work: Path) -> Any:
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        train_dataset=Dataset.from_list([{"prompt": ""}]),
        args=GRPOConfig(
            output_dir=str(work), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
            per_device_train_batch_size=GROUPS * ANSWERS, activation_checkpointing=False,
        ),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def make_batch(prompt: int, answer: int, is_uneven: bool) -> dict[str, Any]:
    """A micro-batch as TRL buffers it, of random tokens."""
    draw, rows = torch.Generator().manual_seed(1), GROUPS * ANSWERS
    lengths = torch.randint(1, answer + 1, (rows, 1), generator=draw) if is_uneven else torch.full((rows, 1), answer)
    lengths[0] = answer
    mask = (torch.arange(answer) < lengths).long()
    return {
        "prompt_ids": torch.randint(3, 700, (GROUPS, prompt), generator=draw).repeat_interleave(ANSWERS, 0),
        "prompt_mask": torch.ones(rows, prompt, dtype=torch.long),
        "completion_ids": torch.randint(3, 700, (rows, answer), generator=draw) * mask,
        "completion_mask": mask,
        "advantages": torch.randn(rows, generator=draw),
        "num_items_in_batch": mask.sum(),
    }


def learn(trainer: Any, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Return the CPU seconds of loss and gradient, and the gradient."""
    trainer.model.zero_grad(set_to_none=True)
    start = time.process_time()
    trainer.compute_loss(trainer.model, batch).backward()
    took = time.process_time() - start
    return took, torch.cat([weight.grad.flatten() for weight in trainer.model.parameters()]).double()
