"""The functions of a task module, and their arguments: the border between a task and what all tasks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.train.exact_batch import StepSetup


@dataclass(frozen=True, kw_only=True)
class RowOrder:
    """Facts about rows that a task has put in training order: exactly steps x effective batch."""

    steps: int
    steps_per_epoch: int
    """Also the steps between measurements and between checkpoints where the config gives none. A task that cannot be
    measured once an epoch gives another number."""

    digest: str  # changes with any row of the run, held out or not, and with its place


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The data of a task as rows."""

    train: Any
    """A Dataset, or with an `order` any sequence, of rows: `input_ids`, `labels` (int64 [tokens], -100 where nothing is
    learned), `row` (int64); `position_ids` and `source` (a number) where rows hold documents or are mixed."""

    held_out: Any  # the same; not a Dataset, it has `label_tokens` and `padded_to(multiple)`; None: nothing is held out
    report: dict[str, Any]
    """Content of data_report.json. `files` (path -> sha256) and `sources` also go to the manifest."""

    recipe: dict[str, Any] = field(default_factory=dict)
    """Other things that decide the tokens, by name: a resume names what has changed. Known names: see `fingerprint`."""

    source: Any = None  # whatever the task needs again when it reports or measures
    order: RowOrder | None = None
    """Given where `train` holds the rows of the whole run in training order. None: the kit orders a Dataset."""

    source_names: tuple[str, ...] = ()  # names of a mixture's sources, by the numbers in the rows
    learned_tokens: int = 0  # tokens that an epoch teaches
    trainer_evaluates: bool = True  # False where the task measures the held-out rows itself, by a callback


@dataclass(frozen=True, kw_only=True)
class TrainerParts:
    """Everything that a trainer is built of."""

    cfg: RunConfig
    model: Any
    tokenizer: Any
    train: Any  # the rows of the whole run in training order
    held_out: Any
    rows: Rows
    folder: RunFolder
    arguments: dict[str, Any]  # for the TRL config: every argument that the kit decides, then the user's `train.extra`
    callbacks: list[Any]
    step: StepSetup


class Task(Protocol):
    """The functions of a task module. `train.run_task` calls these functions in this order, on every rank."""

    def load_rows(self, cfg: RunConfig, tokenizer: Any) -> Rows:
        """The data as rows. Several ranks may call it at once; DataError where no row can be trained on."""

    def report_rows(self, rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
        """Show the user what is learned; on the main rank, next to data_report.json."""

    def measure(self, model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
        """Measure `model` on the held-out rows and write `path` (eval/before.json or after.json); on the main rank."""

    def build_trainer(self, parts: TrainerParts) -> Any:
        """A Trainer with the attributes of `StepTrainerMixin` (train.exact_batch), which most classes extend.

        A callback that the task adds is attached if it is an `Observer`.
        """

    # A task may also have `reshape_model(model, tokenizer, *, cfg)`, which returns another model on the weights of the
    # loaded one, and then `load_result(cfg, path)`, which opens the result in a run's folder.
