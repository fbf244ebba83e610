"""The model of a finished run on disk: model/ with its weights and with what it is made of."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sftplay.atomic import whole_folder
from sftplay.config.schema.hrm import HrmConfig
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.errors import DataError
from sftplay.tasks.hrm.network.model import Grid, PuzzleModel

WEIGHTS, MODEL_CONFIG = "model.safetensors", "config.json"


def save_model(model: PuzzleModel, target: Path) -> Path:
    """Save weights, puzzle embeddings and what the model is made of; the folder appears whole or not at all."""
    content = {"model_type": "hrm", "hrm": model.hrm.model_dump(mode="json"), "grid": vars(model.grid)}
    with whole_folder(target, replaces=True) as scratch:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, scratch / WEIGHTS)
        (scratch / MODEL_CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return target


def load_model(folder: Path, *, device: str = "cpu") -> PuzzleModel:
    """The model that `save_model` has saved, for measuring.

    Raises:
        DataError: the folder holds no such model.
    """
    path = folder / MODEL_CONFIG
    try:
        content = json.loads(path.read_bytes())
        model = PuzzleModel(HrmConfig.model_validate(content["hrm"]), Grid(**content["grid"]))
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "name a finished run of task mode hrm"
        raise DataError(f"holds no model of puzzles ({reason})", where=str(path), fix=fix) from error
    return model.to(device).eval()


def expect_its_kind(model: PuzzleModel, puzzles: PuzzleFolder) -> None:
    """Raise DataError where the model has learned puzzles of another kind than these."""
    grid = model.grid
    puzzles.expect_kind(cells=grid.cells, words=grid.vocab_size, identifiers=grid.identifiers, of="the run's model")
