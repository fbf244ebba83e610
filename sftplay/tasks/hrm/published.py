"""The model on disk: model/ of a finished run, with its weights and with what it is made of; published checkpoints."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sftplay.atomic import whole_folder
from sftplay.errors import DataError
from sftplay.tasks.hrm.network import Grid, PuzzleModel
from sftplay.tasks.hrm.section import HrmConfig

WEIGHTS, MODEL_CONFIG = "model.safetensors", "config.json"

PUBLISHED_NAMES = (
    ("_orig_mod.", ""),  # torch.compile's
    ("model.inner.", ""),
    ("embed_tokens.embedding_weight", "tokens"),
    ("embed_pos.embedding_weight", "places"),
    ("puzzle_emb.weights", "puzzles.rows"),
    ("lm_head.", "head."),
    ("H_init", "start_high"),
    ("L_init", "start_low"),
    ("H_level.layers.", "own_high.blocks."),
    ("L_level.layers.", "low.blocks."),
    ("self_attn.qkv_proj.", "attention.qkv."),
    ("self_attn.o_proj.", "attention.out."),
    ("mlp.gate_up_proj.", "feed_forward.gate_up."),
    ("mlp.down_proj.", "feed_forward.down."),
)
"""Parts of the weights' names in HRM's code (github.com/sapientinc/HRM, commit 42410da, models/hrm/hrm_act_v1.py) and
ours. TRM's code has the same, without the slow module. Queries, keys and values, gate and up lie in the same order."""


def save_model(model: PuzzleModel, target: Path) -> Path:
    """Save weights, puzzle embeddings and what the model is made of; the folder appears whole or not at all."""
    content = {"model_type": "hrm", "hrm": model.hrm.model_dump(mode="json"), "grid": vars(model.grid)}
    with whole_folder(target, replaces=True) as scratch:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, scratch / WEIGHTS)
        (scratch / MODEL_CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return target


def load_model(folder: Path, *, device: str = "cpu") -> PuzzleModel:
    """Load the model that `save_model` has saved, for measuring.

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


def load_published(model: PuzzleModel, path: Path) -> None:
    """Give `model` the weights of a checkpoint that HRM's or TRM's own code has saved.

    Raises:
        DataError: the file is none, or its model has other sizes.
    """
    try:
        weights = {}
        for name, weight in torch.load(path, map_location="cpu", weights_only=True).items():
            for published, ours in PUBLISHED_NAMES:
                name = name.replace(published, ours)
            weights[name] = weight
        model.load_state_dict(weights)
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        what = f"holds no weights ({next(iter(str(error).splitlines()), type(error).__name__)})"
        raise DataError(what, where=str(path), fix="name a file step_N of HRM's or TRM's own code") from error
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        what = f"does not fit the model of this config: {' '.join(lines[1:3]) or lines[0]}"
        fix = "write the sizes of its all_config.yaml in the section hrm, and take the puzzles that it has learned"
        raise DataError(what, where=str(path), fix=fix) from error
