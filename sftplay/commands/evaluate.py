"""The verbs that measure a finished run on its held-out rows or its test rows."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from sftplay import log
from sftplay.config.data import Metric, row_paths
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.runs.finished_run import open_run, prepare_environment, report_at_end, stored_template


@dataclass(frozen=True)
class Measure:
    """What one of the eval verbs measures, and the prefix of its files below eval/."""

    prefix: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # config values that the command line does not set
    split: str = "val"
    has_base: bool = True


MEASURES = {
    "eval": Measure(),
    "eval-test": Measure("test-", split="test"),
    "eval-quick": Measure("quick-", {"eval.limit": 50}, has_base=False),
    "eval-full": Measure("full-", {"eval.limit": None, "eval.metrics": list(get_args(Metric))}),
}


def evaluate(args: Namespace) -> int:
    """`eval`: the result's figures against the base's, in eval/before.json and after.json, or of each source of
    documents in perplexity.json; `eval-test` and the others put test-, quick- or full- before these names."""
    measure = MEASURES["eval-test" if getattr(args, "split", "val") == "test" else args.verb]
    cfg, folder = open_run(args, measure.values, takes_puzzles=True, takes_scores=True)
    if measure.split == "test" and cfg.data.test_path is None:
        fix = "name one: ARGS=data.test_path=FILE"
        if cfg.datasets:
            fix = "give its rows as val_path of one more source with weight: 0, and measure with `make eval`"
        raise ConfigError("there is no test set", where="data.test_path", fix=fix)
    if measure.split == "val" and cfg.task.reads_text:
        _expect_rows(cfg)
    prepare_environment(cfg)
    if not cfg.task.reads_text or cfg.task.gives_score:  # untrained, a model solves no puzzle and gives random scores
        path, limit = folder.eval / f"{measure.prefix}after.json", measure.values.get("eval.limit")
        after = cfg.task.finished.measure_finished(cfg, folder, split=measure.split, limit=limit, path=path)
        figures, table = {"after": after}, cfg.task.finished.figures_table(after)
    elif cfg.task.compares_answers:
        sides = ("before", "after") if measure.has_base else ("after",)
        paths = {side: folder.eval / f"{measure.prefix}{side}.json" for side in sides}
        from sftplay.model.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(cfg.model, str(folder.result))
        figures, table = cfg.task.finished.measure_finished(
            cfg, folder, tokenizer=tokenizer, template=stored_template(tokenizer, folder), split=measure.split,
            paths=paths,
        )  # fmt: skip
    elif cfg.learns_documents:
        figures, table = _measure_sources(cfg, folder, measure=measure)
    else:
        figures, table = _measure(cfg, folder, measure=measure)
    report_at_end(folder)
    if args.json:
        print(json.dumps(figures))
    else:
        log.show(table)
    return 0


def _expect_rows(cfg: RunConfig) -> None:
    """Raise DataError where a file that the run has trained on is gone: `open_run` takes no other path of it."""
    from sftplay.data.read import is_hub_name

    trained = (path for key, path in row_paths(cfg) if key not in ("data.val_path", "data.test_path"))
    if gone := next((path for path in trained if not (is_hub_name(path) or Path(path).exists())), None):
        fix = "put it back, as the run was trained on it"
        if not cfg.learns_documents:
            fix += ", or measure other rows: make eval-test ARGS=data.test_path=FILE"
        raise DataError("there is no such file", where=gone, fix=fix)


def _measure_sources(cfg: RunConfig, folder: RunFolder, *, measure: Measure) -> tuple[dict[str, Any], str]:
    """The content of perplexity.json, and its table."""
    from sftplay.data.mixture.load import load_mixture
    from sftplay.evaluate.comparison import comparison_table
    from sftplay.evaluate.perplexity import find_held_out, measure_sources
    from sftplay.model.load import load_base, load_result
    from sftplay.model.tokenizer import load_tokenizer

    if measure.split == "test":
        from sftplay.data.pipeline import refuse_trained_rows

        refuse_trained_rows(cfg, str(cfg.data.test_path), files=folder.read_json("data_report.json").get("files") or {})
        cfg = cfg.with_values({"data.val_path": cfg.data.test_path, "data.split": None}, "eval-test")

    def measured(side: str, *, tokenizer: Any, open_model: Callable[[], Any]) -> dict[str, Any]:
        held_out = find_held_out(load_mixture(cfg, tokenizer, renderer_template=template))
        _expect_held_out(held_out.documents or held_out.chats)
        path = folder.eval / f"{measure.prefix}{side}.json"
        return measure_sources(open_model(), held_out, tokenizer=tokenizer, cfg=cfg, path=path)

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    template = stored_template(tokenizer, folder)
    if measure.has_base:
        measured("before", tokenizer=load_tokenizer(cfg.model), open_model=lambda: load_base(cfg).eval())
    content = measured("after", tokenizer=tokenizer, open_model=lambda: load_result(cfg, folder.path))
    return content, comparison_table(content)


def _measure(cfg: RunConfig, folder: RunFolder, *, measure: Measure) -> tuple[dict[str, dict[str, Any]], str]:
    """Figures of the base (if the measure has it) and of the result, and their table.

    A run in two turns is measured with each kind of hint; where nothing is held out, on the problems that were trained
    on. A run on prompts: by greedy answers as long as in training, and what its rewards say of them.
    """
    from sftplay.evaluate.evaluate import evaluate as measure_examples
    from sftplay.evaluate.evaluate import figures_table
    from sftplay.evaluate.rewarded import evaluate_prompts
    from sftplay.model.load import load_result, load_untrained
    from sftplay.train.run_task import check_positions

    rows, figures = _load_data(cfg, folder, split=measure.split), {}
    paths = {side: folder.eval / f"{measure.prefix}{side}.json" for side in ("before", "after")}
    if not measure.has_base:
        del paths["before"]
    if cfg.task.turns == 2:
        finished = cfg.task.finished
        for side, path in paths.items():
            role_models = finished.open_role_models(cfg, folder, untrained=side == "before")
            figures[side] = finished.measure_ablation(role_models, rows, cfg=cfg, path=path)
        return figures, finished.ablation_table(figures)
    _expect_held_out(rows.held_out)
    measure_model: Callable[..., dict[str, Any]] = evaluate_prompts if cfg.task.turns == 1 else measure_examples
    for side, path in paths.items():
        load = load_untrained if side == "before" else load_result
        model = load(cfg, folder.path)  # one at a time
        check_positions(cfg, model, rows.report)
        figures[side] = measure_model(model, rows, cfg=cfg, path=path)
        del model
    return figures, figures_table(figures)


NAME_ROWS = "name rows that were not trained on: ARGS=data.val_path=FILE (data.split holds out more in a new run only)"


def _expect_held_out(rows: Any) -> None:
    if not rows:
        raise DataError("no held-out rows to measure on", where="data.val_path", fix=NAME_ROWS)


def _load_data(cfg: RunConfig, folder: RunFolder, *, split: str) -> Any:
    from sftplay.data.load_prompts import load_held_out_prompts, load_prompts, read_prompt_keys
    from sftplay.data.pipeline import load_examples, load_held_out, refuse_trained_rows
    from sftplay.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    template = stored_template(tokenizer, folder)
    named: dict[str, Any] = {"renderer_template": template}
    if cfg.task.learns_from_rewards:
        from sftplay.environments.processes import EnvironmentSpec, describe_tools

        named["tools"] = describe_tools(EnvironmentSpec.from_config(cfg))
    checked = folder.read_json("data_report.json").get("files")
    if split == "test":
        read_keys = read_prompt_keys if cfg.task.learns_from_rewards else None
        refuse_trained_rows(cfg, str(cfg.data.test_path), files=checked or {}, read_keys=read_keys)
        load = load_held_out_prompts if cfg.task.learns_from_rewards else load_held_out
        return load(cfg, tokenizer, path=str(cfg.data.test_path), **named)
    if cfg.task.learns_from_rewards:
        return load_prompts(cfg, tokenizer, **named)
    return load_examples(cfg, tokenizer, renderer_template=template, checked=checked)
