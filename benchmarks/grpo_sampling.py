"""The sampling phase of task grpo beside TRL's call of `generate`, on the same model, prompts and random numbers."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.tasks.grpo.generate import PromptSampler

ROOT = Path(__file__).resolve().parents[1]
TOY_ROWS = ROOT / "data" / "mistaken_words" / "train.jsonl"
LONG_ROWS = ROOT / "data" / "word_problems" / "train.jsonl"
ANSWERS, PROMPTS = 8, 8

SHAPES = {
    "toy": {"rows": TOY_ROWS, "tokens": 24},
    "long": {"rows": LONG_ROWS, "tokens": 128},
    "uneven": {"rows": LONG_ROWS, "tokens": 128, "few_shot": 2, "uneven": True},
    "uneven, larger model": {"rows": LONG_ROWS, "tokens": 48, "few_shot": 2, "uneven": True, "larger": True},
}
"""Toy and long are those of `--only speed`. The uneven shapes end at any token with a chance of 1 in 20, after a prompt
with two more problems. The larger model has random weights, 6 layers of 384 numbers and 4096 words."""


def compare_sampling(warm: Path, *, rounds: int) -> str:
    """Return a table: medians of the rounds, in CPU seconds of this thread, the two ways in turn."""
    lines = [
        f"\nsampling: {PROMPTS} prompts x {ANSWERS} answers, median of {rounds} rounds each", "",
        "| shape | tokens of a prompt | of an answer, mean and most | TRL, CPU s | SFT-Play | ratio | same answers |",
        "| --- " * 7 + "|",
    ]  # fmt: skip
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            trainer, prompts = build(Path(folder), warm, **shape)
            sampler = PromptSampler(AdaptiveBatches(len(prompts), "generation"), rows_per_prompt=ANSWERS)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            answers: dict[bool, Any] = {}
            ask_trl = partial(trainer._generate_single_turn, prompts, None, {}, ANSWERS)
            assert sampler.is_usable(trainer.model.eval(), ask_trl)
            for n in range(rounds):
                for ours in (True, False):
                    began = time.thread_time()
                    answers[ours] = sample(trainer, prompts, sampler if ours else None, seed=n)
                    seconds[ours].append(time.thread_time() - began)
        lengths = list(map(len, answers[True]))
        old, new = median(seconds[False]), median(seconds[True])
        lines.append(
            f"| {name} | {mean(map(len, prompts)):.0f} | {mean(lengths):.0f}, {max(lengths)} | {old:.3f} | {new:.3f} "
            f"| {old / new:.2f}x | {'yes' if answers[True] == answers[False] else 'no'} |"
        )
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def build(
    folder: Path, warm: Path, *, rows: Path, tokens: int, few_shot: int = 0, uneven: bool = False, larger: bool = False
) -> tuple[Any, list[list[int]]]:
    """Return TRL's trainer and the prompts of a rollout batch."""
    tokenizer = AutoTokenizer.from_pretrained(warm / "model", padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(warm / "model", dtype=torch.float32)
    if larger:
        config = LlamaConfig(
            vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
            num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    asked = [ask(json.loads(line)) for line in rows.read_text(encoding="utf-8").splitlines()[: PROMPTS + few_shot]]
    prompts = []
    for n in range(PROMPTS):
        messages = [{"role": "user", "content": " ".join([*asked[PROMPTS:], asked[n]])}]
        prompts += [tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)] * ANSWERS
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        args=GRPOConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=ANSWERS,
            num_generations=ANSWERS, max_completion_length=tokens, report_to="none", disable_tqdm=True,
        ),
    )  # fmt: skip
    if uneven:
        end_by_chance(trainer.model, tokenizer.eos_token_id)
    return trainer, prompts


def ask(record: dict[str, Any]) -> str:
    return str(record["question"] if "question" in record else record["messages"][0]["content"])


def end_by_chance(model: Any, end: int, *, chance: float = 1 / 20) -> None:
    """Give the end token this chance at every token, whatever the model would say."""

    def set_end(_module: Any, _given: Any, scores: torch.Tensor) -> torch.Tensor:
        others = scores.index_fill(-1, torch.tensor([end]), -torch.inf).logsumexp(-1)
        odds = torch.tensor(chance / (1 - chance)).log()
        return scores.index_copy(-1, torch.tensor([end]), (others + odds)[..., None])

    model.get_output_embeddings().register_forward_hook(set_end)


def sample(trainer: Any, prompts: list[list[int]], sampler: PromptSampler | None, *, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    trainer.model.eval()
    with sampler.within(trainer.model) if sampler else nullcontext():
        return list(trainer._generate_single_turn(prompts, None, {}, ANSWERS)[0])
