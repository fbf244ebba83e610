"""Measure a finished reward model on held-out pairs, or on those of the test file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.reward.model_reward import find_score_model, open_score_model
from sftplay.tasks.preference.load_pairs import load_measured
from sftplay.tasks.reward_model.scores import measure
from sftplay.train.run_task import check_positions


def measure_finished(cfg: RunConfig, folder: RunFolder, *, split: str, limit: int | None, path: Path) -> dict[str, Any]:
    """Measure the result on the held-out pairs, or on those of data.test_path for the split `test`.

    The figures are over all of them. They are also written to `path`, with `limit` pairs next to it, None for as many
    as `eval.limit` says. Raise DataError where nothing is held out,
    or a test pair was trained on.
    """
    model, tokenizer = open_score_model(find_score_model(str(folder.path), cfg.output_dir))
    pairs = load_measured(cfg, tokenizer, folder=folder, template=tokenizer.chat_template, split=split)
    check_positions(cfg, model, pairs.report)
    shown = cfg if limit is None else cfg.with_values({"eval.limit": limit}, "eval")
    return measure(model, pairs, cfg=shown, path=path)


def figures_table(figures: dict[str, Any]) -> str:
    """Format the figures, and the calibration below them."""
    keys = [key for key, value in figures.items() if isinstance(value, int | float)]
    width = 2 + max(map(len, keys))
    lines = [f"{key:{width}}{figures[key]:{'12,' if key == 'n' else '12.4f'}}" for key in keys]
    lines += ["", "  predicted    better     pairs"]
    lines += [
        f"{found['predicted']:11.1%}{found['observed']:10.1%}{found['n']:10,}" for found in figures["calibration"]
    ]
    return "\n".join(lines)
