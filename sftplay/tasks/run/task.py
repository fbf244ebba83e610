"""The seam between a task and what all tasks share: the functions of a task module, and their arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from datasets import Dataset

from sftplay.config.schema.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.step.window import StepSetup


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a task has made of the data."""

    train: Dataset
    """Columns `input_ids`, `labels` (int64 [tokens], -100 where nothing is learned) and `row` (int64)."""

    held_out: Dataset | None
    """The same columns; None when nothing is held out."""

    report: dict[str, Any]
    """Content of data_report.json. `files` (path -> sha256) and `sources` also go to the manifest."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """What else decides the tokens, by name: a resume names what has changed. Known names: see `fingerprint`."""

    source: Any = None
    """Whatever the task needs again when it reports or measures."""


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """Everything that a trainer is built of."""

    cfg: RunConfig
    model: Any
    tokenizer: Any
    train: Dataset
    """The rows of the whole run in training order."""

    held_out: Dataset | None
    arguments: dict[str, Any]
    """For the TRL config: every argument that the kit decides, then the user's `train.extra`."""

    callbacks: list[Any]
    step: StepSetup


class Task(Protocol):
    """What a task module defines. `tasks.run.run_task` calls these functions in this order, on every rank."""

    def load_rows(self, cfg: RunConfig, tokenizer: Any) -> Rows:
        """The data as rows. Several ranks may call it at once; DataError where no row can be trained on."""

    def report_rows(self, rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
        """Show the user what is learned; on the main rank, beside data_report.json."""

    def measure(self, model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
        """Measure `model` on the held-out rows and write `path` (eval/before.json or after.json); on the main rank."""

    def build_trainer(self, parts: TrainerParts) -> Any:
        """A Trainer whose class begins with `Window`."""
