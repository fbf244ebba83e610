"""Generated tokens until a toy is learned: plain TRL beside task grpo with a key for zero-variance groups.

The toy is data/one_liners with a model of 100,000 weights that writes letters, so that a run takes seconds. It is
warmed up on the noisy answers first. Both contestants learn from the same rewards.
"""

from __future__ import annotations

import json
import random
import string
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Questions
from sftplay.data.pipeline import training_order
from sftplay.model.recomputation import recomputation_arguments
from sftplay.reward.reward_set import RewardSet
from sftplay.tasks.grpo.sampling import PromptRows
from sftplay.tasks.grpo.scoring import RewardScorer
from sftplay.tasks.grpo.task import PromptTrainer
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.exact_batch import StepSetup

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data" / "one_liners"
EVERY, SAMPLES = 4, 24
"""Steps between two measurements, and answers to each of the 27 questions in one: its standard error is below 0.02."""

RATE, TOKENS = 1e-3, 28
VALUES = {"dynamic_sampling_rounds": 1, "skip_zero_variance": True}
"""Keys of section grpo that plain TRL is compared with, and what they are set to."""

COLUMNS = ("tests", "entry_point")
Curve = list[tuple[int, int, float]]
"""Step, generated tokens, pass@1."""


def compare_dynamic_sampling(*, seeds: int, steps: int, hopeless: int, goals: Sequence[float], key: str) -> str:
    """A Markdown table. `hopeless` questions that no answer is right to stand beside the 27 that can be learned.

    `goals` are shares of sampled answers that are right. `key` is one of VALUES.
    """
    table = [f"\nGenerated tokens until sampled pass@1 of 27 questions is a goal, beside {hopeless} hopeless ones", ""]
    table += ["| seed | " + " | ".join(f"{goal}: TRL | {key} | ratio" for goal in goals) + " |"]
    table += ["| --- " * (1 + 3 * len(goals)) + "|"]
    ratios: dict[float, list[float]] = {goal: [] for goal in goals}
    with Toy(hopeless, enough=max(goals)) as toy:
        toy.warm_up()
        for seed in range(1, seeds + 1):
            curves = [toy.train(seed, steps, grpo=grpo) for grpo in (None, {key: VALUES[key]})]
            cells = [str(seed)]
            for goal in goals:
                theirs, ours = (tokens_until(goal, curve) for curve in curves)
                cells += ["-" if value is None else f"{value:.0f}" for value in (theirs, ours)]
                cells.append("-" if theirs is None or ours is None else f"{ours / theirs:.2f}")
                if theirs is not None and ours is not None:
                    ratios[goal].append(ours / theirs)
            table.append("| " + " | ".join(cells) + " |")
            print(table[-1], json.dumps(curves), file=sys.stderr, flush=True)
    means = ", ".join(f"{mean(each):.2f} until {goal} ({len(each)} seeds)" for goal, each in ratios.items() if each)
    return "\n".join([*table, "", f"Mean ratios: {means}."])


def tokens_until(goal: float, curve: Curve) -> float | None:
    """Generated tokens until pass@1 is `goal`, between two measurements by a straight line; None: it never is."""
    before = (0.0, 0.0)
    for n, (_, tokens, now) in enumerate(curve):
        if now >= goal:
            return before[0] + (goal - before[1]) / (now - before[1]) * (tokens - before[0]) if n else tokens
        before = (tokens, now)
    return None


class Toy:
    """Questions, rewards and a warm model; a context manager, which ends the rewards' processes."""

    def __init__(self, hopeless: int, *, enough: float) -> None:
        self.enough = enough
        """A run ends where so many sampled answers are right."""

        rewards = [{"name": "tests", "use": "code_tests"}]
        base = {"model": {"name": "builtin:tiny", "max_seq_len": 64}, "task_mode": "grpo", "rewards": rewards}
        self.base = base | {"train": {"effective_batch_size": 64, "batch_size": 64, "grad_accum": 1}}
        self.tokenizer = letters()
        self.rewards = RewardSet(RunConfig.model_validate(self.base))
        records = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()]
        self.columns = [{key: record[key] for key in COLUMNS} for record in records]
        self.asked = [f"{record['messages'][0]['content']}: " for record in records]
        self.learnable = len(records)
        self.asked += [f"{('div', 'mod', 'pow')[n % 3]} {n // 3 + 1}: " for n in range(hopeless)]
        self.columns += [{"tests": ["assert f(0) == 'never'"] * 3, "entry_point": "f"}] * hopeless
        rows = {
            "row": list(range(len(self.asked))),
            "input_ids": self.tokenizer(self.asked)["input_ids"],
            "content": [
                json.dumps({"question": text, "columns": columns})
                for text, columns in zip(self.asked, self.columns, strict=True)
            ],
        }
        self.questions = Questions(Dataset.from_dict(rows))
        self.warm: Any = None

    def __enter__(self) -> Toy:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    def pay(self, rows: Sequence[int], completions: Sequence[str]) -> list[float]:
        """The share of tests that each completion passes."""
        columns = {key: [self.columns[row][key] for row in rows] for key in COLUMNS}
        return [value or 0.0 for value in self.rewards.score(completions, columns).by_name["tests"].values]

    def warm_up(self, steps: int = 300) -> None:
        """Imitate the noisy answers."""
        chats = [json.loads(line)["messages"] for line in (DATA / "noisy.jsonl").read_text().splitlines()]
        texts = [(f"{chat[0]['content']}: ", chat[1]["content"]) for chat in chats]
        pairs = [tuple(self.tokenizer(text)["input_ids"] for text in pair) for pair in texts]
        model, draw = tiny_model(self.tokenizer), random.Random(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(steps):
            batch = [(asked, [*answer, self.tokenizer.eos_token_id]) for asked, answer in draw.sample(pairs, 64)]
            rows = [(asked + answer, [-100] * len(asked) + answer) for asked, answer in batch]
            tokens, labels = (
                torch.nn.utils.rnn.pad_sequence(
                    [torch.tensor(row[n]) for row in rows], batch_first=True, padding_value=fill
                )
                for n, fill in ((0, 0), (1, -100))
            )
            model(input_ids=tokens, labels=labels, attention_mask=(tokens > 0).long()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - (step + 1) / steps)
        self.warm = {name: value.clone() for name, value in model.state_dict().items()}

    def train(self, seed: int, steps: int, *, grpo: dict[str, Any] | None) -> Curve:
        """A run of plain TRL, or of the kit's trainer where values of its section are given."""
        model = tiny_model(self.tokenizer)
        model.load_state_dict(self.warm)
        order = training_order(len(self.asked), steps * 8, seed=seed)
        measured = Measure(self, model)
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            common = {"model": model, "processing_class": self.tokenizer, "callbacks": [measured]}
            common["args"] = GRPOConfig(
                output_dir=name, use_cpu=True, bf16=False, seed=seed, per_device_train_batch_size=64,
                gradient_accumulation_steps=1, max_steps=steps, learning_rate=RATE, save_strategy="no",
                lr_scheduler_type="constant", num_generations=8, max_completion_length=TOKENS,
                **recomputation_arguments(recomputes=False), shuffle_dataset=False, report_to="none",
                logging_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            if grpo is None:
                rows = Dataset.from_list([{"prompt": self.asked[n], "row": n} for n in order])
                GRPOTrainer(**common, train_dataset=rows, reward_funcs=measured.pay).train()
            else:
                same = {"max_completion_length": TOKENS, "samples": 0, "logprob_check_steps": 0}
                cfg = RunConfig.model_validate({**self.base, "seed": seed, "grpo": {**same, **grpo}})
                trainer = PromptTrainer(
                    StepSetup(micro_batcher=None, loss_head="standard"), cfg=cfg, run_folder=Path(name),
                    scorer=RewardScorer(cfg, COLUMNS), questions=self.questions,
                    train_dataset=Dataset.from_dict({"prompt": [""]}), **common,
                )  # fmt: skip
                trainer.train_dataset = PromptRows(self.questions, order)
                measured.totals = trainer.sampling_totals
                trainer.train()
        return measured.curve


class Measure(TrainerCallback):
    """Samples answers to all questions now and then, with the same random numbers for each measurement."""

    def __init__(self, toy: Toy, model: Any) -> None:
        self.toy, self.model = toy, model
        self.totals = {"generated_tokens": 0}
        self.curve: Curve = []

    def pay(self, completions: Sequence[str], completion_ids: Any, row: Sequence[int], **_: Any) -> list[float]:
        """The reward of the plain script, which also counts tokens."""
        self.totals["generated_tokens"] += sum(map(len, completion_ids))
        return self.toy.pay(row, completions)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % EVERY == 0:
            with random_numbers_kept():
                now = self.sampled_pass()
            self.model.train()
            self.curve.append((state.global_step, self.totals["generated_tokens"], now))
            control.should_training_stop = control.should_training_stop or now >= self.toy.enough

    @torch.no_grad()
    def sampled_pass(self) -> float:
        torch.manual_seed(0)
        rows = [row for row in range(self.toy.learnable) for _ in range(SAMPLES)]
        asked = self.toy.tokenizer([self.toy.asked[row] for row in rows], return_tensors="pt", padding=True)
        drawn = self.model.generate(
            input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], do_sample=True, top_k=0,
            max_new_tokens=TOKENS,
        )  # fmt: skip
        texts = self.toy.tokenizer.batch_decode(drawn[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        return mean(value == 1 for value in self.toy.pay(rows, texts))


def letters() -> PreTrainedTokenizerFast:
    """One token a letter."""
    vocab = {
        token: n for n, token in enumerate(["<pad>", "<eos>", *string.ascii_lowercase, *string.digits, *" +-*:()"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_model(tokenizer: Any) -> LlamaForCausalLM:
    """Two layers of 64 numbers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.05,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
