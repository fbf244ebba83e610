"""The training tasks: the only table of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskRow:
    """Where a task is, and what the trunk knows of it without importing it."""

    folder: str
    """Below this package: `spec.py` is the task without torch, `task.py` trains."""

    section: str = ""
    """The section of the config that this task alone reads."""

    absent: str = ""
    """Why that section has no effect in another task: what the other task lacks."""

    learns_documents: bool = False
    """Rows are full blocks of documents, or of documents and chats."""

    learns_from_rewards: bool = False
    """The model answers prompts itself and learns from what rewards pay."""

    reads_text: bool = True
    """False where there is neither a tokenizer nor a pretrained model."""

    has_plan: bool = False
    """Whether `plan.py` is in the folder too: what the plan asks this task."""

    best_metrics: tuple[str, ...] = ("loss",)
    """What `train.best_metric` may name."""

    @property
    def spec(self) -> str:
        """The module that holds the task's SPEC (`config.rules.task_spec`)."""
        return f"{__name__}.{self.folder}.spec"

    @property
    def plan(self) -> str:
        """The module that holds the task's PLAN (`plan.task_plan`)."""
        return f"{__name__}.{self.folder}.plan"

    @property
    def trainer(self) -> str:
        """The module that defines the functions of `train.task.Task`, or `run` alone instead of all that
        `train.run_task` does with them."""
        return f"{__name__}.{self.folder}.task"


TASKS = {
    "sft": TaskRow("sft"),
    "cpt": TaskRow("cpt", "cpt", "has no blocks", learns_documents=True),
    "cpt_mixed": TaskRow("cpt", "cpt", "has no blocks", learns_documents=True),
    "grpo": TaskRow("grpo", "grpo", "draws no completions", learns_from_rewards=True, has_plan=True, best_metrics=()),
    "score": TaskRow(
        "score", "score", "plays no episodes", learns_from_rewards=True, has_plan=True, best_metrics=("acc_t2",)
    ),
    "hrm": TaskRow("hrm", "hrm", "has no model of puzzles", reads_text=False, has_plan=True, best_metrics=()),
}
"""task_mode -> its row."""
