"""Measure a finished run on pairs: the model that it started from, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from sftplay.config.run import RunConfig
from sftplay.evaluate.evaluate import figures_table, ready_to_answer
from sftplay.launch.run_folder import RunFolder
from sftplay.model.load import load_result, load_untrained
from sftplay.tasks.preference.load_pairs import Pairs, load_measured
from sftplay.tasks.preference.measuring import measure, read_held_out
from sftplay.tasks.preference.reference import FILE, ReferenceKind, compute_logps, find_shares, open_reference
from sftplay.tasks.preference.spec import uses_reference
from sftplay.train.run_task import check_positions


def measure_finished(
    cfg: RunConfig, folder: RunFolder, *, tokenizer: Any, template: str | None, split: str, paths: Mapping[str, Path]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Measure the held-out pairs, or with split `test` those of data.test_path; write the figures of `before` and
    `after` to `paths`. Return them, and their table.

    `template` is the text of the run's chat template.
    Raise DataError where nothing is held out, or a test pair was trained on.
    """
    pairs = load_measured(cfg, tokenizer, folder=folder, template=template, split=split)
    reference = _find_reference(cfg, folder, pairs)
    figures = {}
    for side, path in paths.items():  # one model at a time
        load = load_untrained if side == "before" else load_result
        model = load(cfg, folder.path)
        check_positions(cfg, model, pairs.report)
        figures[side] = measure(model, pairs, cfg=cfg, path=path, reference=reference)
        del model
    return figures, figures_table(figures)


def _find_reference(cfg: RunConfig, folder: RunFolder, pairs: Pairs) -> Tensor | None:
    """The reference's log-probabilities of the held-out rows: those that the run has kept, else computed again."""
    kept = folder.path / FILE
    if not uses_reference(cfg):
        return None
    if kept.is_file() and (found := read_held_out(kept, pairs)) is not None:
        return found
    kind = ReferenceKind.find(cfg).name
    model = open_reference(cfg) if kind == "path" else load_untrained(cfg, folder.path)
    check_positions(cfg, model, pairs.report)
    is_off = kind == "base" and hasattr(model, "disable_adapter")
    settings = {"pad_token_id": pairs.renderer.tokenizer.pad_token_id, "batch_size": cfg.eval.batch_size}
    with ready_to_answer(model, cfg), model.disable_adapter() if is_off else nullcontext():
        return compute_logps(model, pairs.held_out, shares=find_shares(cfg, model), **settings).sums
