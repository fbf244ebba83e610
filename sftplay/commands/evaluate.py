"""The verbs that measure a finished run on its held-out rows or its test rows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from sftplay import log
from sftplay.config.data import Metric
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.runs.finished_run import open_run, prepare_environment, report_at_end, stored_template

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Measure:
    """What one of the eval verbs measures, and the prefix of its files below eval/."""

    prefix: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """Config values that the verb sets where the command line does not."""

    split: str = "val"
    has_base: bool = True


MEASURES = {
    "eval": Measure(),
    "eval-test": Measure("test-", split="test"),
    "eval-quick": Measure("quick-", {"eval.limit": 50}, has_base=False),
    "eval-full": Measure("full-", {"eval.limit": None, "eval.metrics": list(get_args(Metric))}),
}


def evaluate(args: Namespace) -> int:
    """`eval`: the result's figures against the base's, in eval/before.json and eval/after.json.

    `eval-test`, `eval-quick` and `eval-full` put test-, quick- or full- before these names. Where documents were
    learned the figures are those of each source, in eval/perplexity.json.
    """
    measure = MEASURES["eval-test" if getattr(args, "split", "val") == "test" else args.verb]
    cfg, folder = open_run(args, measure.values, takes_puzzles=True)
    if measure.split == "test":
        _expect_test_set(cfg)
    prepare_environment(cfg)
    if not cfg.task.reads_text:
        figures, table = _measure_puzzles(cfg, folder, measure=measure)
    elif cfg.learns_documents:
        figures, table = _measure_sources(cfg, folder, measure=measure)
    else:
        figures = _measure(cfg, folder, measure=measure)
        table = _figures_table(figures) if cfg.task.turns != 2 else cfg.task.finished.ablation_table(figures)
    report_at_end(folder)
    if args.json:
        print(json.dumps(figures))
    else:
        log.show(table)
    return 0


def _expect_test_set(cfg: RunConfig) -> None:
    if cfg.data.test_path is None:
        fix = "name one: ARGS=data.test_path=FILE"
        if cfg.datasets:
            fix = "give its rows as val_path of one more source with weight: 0, and measure with `make eval`"
        raise ConfigError("there is no test set", where="data.test_path", fix=fix)


def _measure_sources(cfg: RunConfig, folder: RunFolder, *, measure: Measure) -> tuple[dict[str, Any], str]:
    """The content of perplexity.json, and its table."""
    from sftplay.data.mixture.load import load_mixture
    from sftplay.evaluate.comparison import comparison_table
    from sftplay.evaluate.sources import find_held_out, measure_sources
    from sftplay.model.load import load_base, load_result
    from sftplay.model.tokenizer import load_tokenizer

    if measure.split == "test":
        cfg = cfg.with_values({"data.val_path": cfg.data.test_path, "data.split": None}, "eval-test")

    def measured(side: str, *, tokenizer: Any, open_model: Callable[[], Any]) -> dict[str, Any]:
        held_out = find_held_out(load_mixture(cfg, tokenizer, renderer_template=template))
        if not held_out.documents and not held_out.chats:
            raise _nothing_held_out()
        path = folder.eval / f"{measure.prefix}{side}.json"
        return measure_sources(open_model(), held_out, tokenizer=tokenizer, cfg=cfg, path=path)

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    template = stored_template(tokenizer, folder)
    if measure.has_base:
        measured("before", tokenizer=load_tokenizer(cfg.model), open_model=lambda: load_base(cfg).eval())
    content = measured("after", tokenizer=tokenizer, open_model=lambda: load_result(cfg, folder.path))
    return content, comparison_table(content)


def _measure_puzzles(cfg: RunConfig, folder: RunFolder, *, measure: Measure) -> tuple[dict[str, Any], str]:
    """The figures of the result and their table. An untrained model solves nothing, so it is not measured."""
    finished = cfg.task.finished
    limit = measure.values.get("eval.limit")
    path = folder.eval / f"{measure.prefix}after.json"
    figures = finished.measure_finished(cfg, folder, split=measure.split, limit=limit, path=path)
    return {"after": figures}, finished.figures_table(figures)


def _nothing_held_out() -> DataError:
    return DataError("no held-out rows to measure on", where="data", fix="set data.val_path or data.split")


def _measure(cfg: RunConfig, folder: RunFolder, *, measure: Measure) -> dict[str, dict[str, Any]]:
    """Figures of the base (if the measure has it) and of the result."""
    from sftplay.model.load import load_result, load_untrained

    rows = _load_data(cfg, folder, split=measure.split)
    if cfg.task.turns == 2:
        return _measure_turns(cfg, folder, measure=measure, prompts=rows)
    measure_model = _measure_prompts if cfg.task.turns == 1 else _measure_examples
    if not rows.held_out:
        raise _nothing_held_out()
    figures = {}
    if measure.has_base:
        before = folder.eval / f"{measure.prefix}before.json"
        figures["before"] = measure_model(load_untrained(cfg, folder.path), rows, cfg=cfg, path=before)
    after = folder.eval / f"{measure.prefix}after.json"
    figures["after"] = measure_model(load_result(cfg, folder.path), rows, cfg=cfg, path=after)
    return figures


def _measure_turns(cfg: RunConfig, folder: RunFolder, *, measure: Measure, prompts: Any) -> dict[str, dict[str, Any]]:
    """Both turns with each kind of hint; where nothing is held out, of the problems that were trained on."""
    finished = cfg.task.finished
    figures = {}
    for side in ("before", "after") if measure.has_base else ("after",):
        role_models = finished.open_role_models(cfg, folder, untrained=side == "before")
        path = folder.eval / f"{measure.prefix}{side}.json"
        figures[side] = finished.measure_ablation(role_models, prompts, cfg=cfg, path=path)
    return figures


def _measure_examples(model: Any, examples: Any, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    from sftplay.evaluate.evaluate import evaluate as measure_model

    return measure_model(model, examples, cfg=cfg, path=path)


def _measure_prompts(model: Any, prompts: Any, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Greedy answers as long as in training, and what the rewards of the run say of them."""
    from sftplay.evaluate.rewarded import evaluate_prompts

    return evaluate_prompts(model, prompts, cfg=cfg, path=path)


def _figures_table(figures: dict[str, dict[str, Any]]) -> str:
    titles, width = {"before": "base", "after": "tuned"}, max(12, 2 + max(map(len, figures["after"])))
    lines = [" " * width + "".join(f"{titles[side]:>12}" for side in figures)]
    for key in figures["after"]:
        if isinstance(figures["after"][key], int | float):  # others are in the file
            form = "12" if key == "n" else "12.4f"
            lines.append(f"{key:{width}}" + "".join(f"{of.get(key, nan):{form}}" for of in figures.values()))
    return "\n".join(lines)


def _load_data(cfg: RunConfig, folder: RunFolder, *, split: str) -> Any:
    from sftplay.data.pipeline import load_examples, load_held_out
    from sftplay.data.prompts.load import load_held_out_prompts, load_prompts
    from sftplay.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    template = stored_template(tokenizer, folder)
    if cfg.task.learns_from_rewards:
        if split == "test":
            return load_held_out_prompts(cfg, tokenizer, path=str(cfg.data.test_path), renderer_template=template)
        return load_prompts(cfg, tokenizer, renderer_template=template)
    if split == "test":
        return load_held_out(cfg, tokenizer, path=str(cfg.data.test_path), renderer_template=template)
    checked = folder.read_json("data_report.json").get("files")
    return load_examples(cfg, tokenizer, renderer_template=template, checked=checked)
