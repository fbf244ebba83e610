"""The training tasks: the only table of them. A new task is a folder here and a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class TaskRow:
    """Where a task is, and what the trunk knows of it without importing it."""

    folder: str
    """Below this package. `task.py` trains; `section.py` (its keys of the config), `spec.py` (rules) and `plan.py` are
    there where the task differs from sft."""

    rates: Mapping[str, float] = field(default_factory=lambda: {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4})
    """tuning.mode -> what `train.learning_rate: auto` means: the usual peak rate."""

    section: str = ""  # the section of the config that this task alone reads
    absent: str = ""  # why that section has no effect in another task: what the other task lacks
    learns_documents: bool = False  # rows are full blocks of documents, or of documents and chats
    mixes_chats: bool = False  # documents and chats in one stream
    turns: int = 0
    """Answers that the model gives to a prompt in training, scored by rewards; 0 where it learns from labels."""

    compares_answers: bool = False  # it is measured on pairs of answers, by which one it finds likelier
    takes_answers: bool = False  # a row is one answer with a verdict, and a pair becomes two
    gives_score: bool = False  # the result scores answers and writes none
    reads_text: bool = True  # False where there is neither a tokenizer nor a pretrained model
    averages_itself: bool = False  # the task sends whole gradients itself, once a step
    splits_itself: bool = False  # the task splits its models over the processes itself, not accelerate
    measures_training_rows: bool = False  # where nothing is held out, it measures on the rows that it trains on
    trl_config: str = "SFTConfig"  # TRL's config, or the Trainer's, that takes `train.extra`
    memory_head: str = ""
    """The way to take the head's log-probabilities, where `train.loss_head` does not say it (`plan.activations`)."""

    is_probed: bool = False  # a step of it is one of sft, which `train.probe` can measure
    has_fp16: bool = True  # False where the loss would overflow fp16
    best_metrics: tuple[str, ...] = ("loss",)  # what `train.best_metric` may name
    title: str = ""  # what the task is called in a report
    headlines: tuple[tuple[str, str], ...] = ()
    """Figures of evaluations, with their names, that say whether it has learned; the most telling one first. They are
    there where the loss says nothing."""

    @property
    def learns_from_rewards(self) -> bool:
        """Whether the model answers prompts itself and learns from rewards."""
        return self.turns > 0

    def part(self, name: str) -> ModuleType | None:
        """Import `section`, `spec`, `plan`, `rows` or `finished` of the task; None where it has no such module."""
        is_there = any(Path(tasks, self.folder, f"{name}.py").is_file() for tasks in __path__)
        return import_module(f"{__name__}.{self.folder}.{name}") if is_there else None

    @property
    def finished(self) -> Any:
        """The module that measures a finished run of the task and answers with it, where it is not done as in sft."""
        return self.part("finished")

    @property
    def trainer(self) -> str:
        """The module that defines the functions of `train.task.Task`, or `run` alone instead of all that
        `train.run_task` does with them."""
        return f"{__name__}.{self.folder}.task"


DOCUMENTS = {"full": 1e-5, "lora": 1e-4, "qlora": 1e-4}

preference = partial(
    TaskRow, "preference", section="preference", absent="compares no answers", compares_answers=True,
    trl_config="TrainingArguments", headlines=(("accuracy", "Pairs right"),),
)  # fmt: skip

TASKS = {
    "sft": TaskRow("sft", is_probed=True, title="Supervised fine-tuning"),
    "cpt": TaskRow(
        "cpt", DOCUMENTS, "cpt", "has no blocks",
        learns_documents=True, is_probed=True, title="Continued pretraining",
    ),
    "cpt_mixed": TaskRow(
        "cpt", DOCUMENTS, "cpt", "has no blocks",
        learns_documents=True, mixes_chats=True, is_probed=True, title="Continued pretraining on a mixture",
    ),
    "grpo": TaskRow(
        "grpo", {"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}, "grpo", "samples no completions",
        turns=1, best_metrics=(), trl_config="GRPOConfig", memory_head="tiled",
        title="Reinforcement learning (GRPO)",
        headlines=(("pass", "Held-out pass@1"), ("reward", "Held-out reward")),
    ),
    "dpo": preference(rates={"full": 5e-7, "lora": 5e-6, "qlora": 5e-6}, title="Preferences (DPO)"),
    "ipo": preference(rates={"full": 5e-7, "lora": 5e-6, "qlora": 5e-6}, title="Preferences (IPO)"),
    "kto": preference(
        rates={"full": 5e-7, "lora": 5e-6, "qlora": 5e-6}, takes_answers=True, title="Wanted and unwanted answers (KTO)"
    ),
    "orpo": preference(rates={"full": 8e-6, "lora": 8e-5, "qlora": 8e-5}, title="Answers and preferences (ORPO)"),
    "simpo": preference(
        rates={"full": 1e-6, "lora": 1e-5, "qlora": 1e-5}, title="Preferences without a reference (SimPO)"
    ),
    "reward_model": TaskRow(
        "reward_model", {"full": 1e-5, "lora": 1e-4, "qlora": 1e-4}, "reward_model", "trains no score",
        gives_score=True, trl_config="TrainingArguments", memory_head="score",
        headlines=(("accuracy", "Pairs right"),), title="A score for answers (reward model)",
    ),
    "score": TaskRow(
        "score", {"full": 1e-5, "lora": 5e-5, "qlora": 5e-5}, "score", "plays no episodes",
        turns=2, best_metrics=("acc_t2",), averages_itself=True, splits_itself=True,
        measures_training_rows=True, memory_head="actions", title="Two-turn self-correction (BiLevel SCoRe)",
        headlines=(("acc_t2", "Second answers right"), ("acc_t1", "First answers right")),
    ),
    "hrm": TaskRow(
        "hrm", {"full": 1e-4}, "hrm", "has no model of puzzles",
        reads_text=False, best_metrics=(), averages_itself=True, has_fp16=False,
        title="A recurrent model of puzzles (HRM)",
    ),
}  # fmt: skip
"""task_mode -> its row."""
