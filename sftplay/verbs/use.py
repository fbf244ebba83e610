"""The verbs that measure a finished run, and how every verb opens one."""

from __future__ import annotations

import json
import logging
import os
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, get_args

from sftplay import log
from sftplay.config.data_section import Metric
from sftplay.config.load import load_config
from sftplay.config.schema import RunConfig
from sftplay.errors import ConfigError, DataError
from sftplay.launch.command import cache_environment, offline_environment, quiet_environment
from sftplay.launch.folder import RunFolder, find_run
from sftplay.model.source import is_local
from sftplay.verbs.look import leave_report


@dataclass(frozen=True)
class Measure:
    """What one of the eval verbs measures, and how its files below eval/ begin."""

    prefix: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    """Config values it sets where the command line does not."""

    split: str = "val"
    has_base: bool = True


MEASURES = {
    "eval": Measure(),
    "eval-test": Measure("test-", split="test"),
    "eval-quick": Measure("quick-", {"eval.limit": 50}, has_base=False),
    "eval-full": Measure("full-", {"eval.limit": None, "eval.metrics": list(get_args(Metric))}),
}


def evaluate(args: Namespace) -> int:
    """`eval`: the result's figures beside the base's, in eval/before.json and eval/after.json.

    `eval-test`, `eval-quick` and `eval-full` put test-, quick- or full- before these names.
    """
    measure = MEASURES["eval-test" if getattr(args, "split", "val") == "test" else args.verb]
    cfg, folder = open_run(args, measure.values)
    if measure.split == "test" and cfg.data.test_path is None:
        raise ConfigError("there is no test set", where="data.test_path", fix="name one: ARGS=data.test_path=FILE")
    prepare_environment(cfg)
    figures = _measure(cfg, folder, measure)
    leave_report(folder)
    if args.json:
        print(json.dumps(figures))
    else:
        log.show(_figures_table(figures))
    return 0


def _measure(cfg: RunConfig, folder: RunFolder, measure: Measure) -> dict[str, dict[str, Any]]:
    """Figures of the base, where it is asked for, and of the result."""
    from sftplay.deliver.evaluate import evaluate as measure_model
    from sftplay.model.load import load_base, load_result

    examples = _data_of(cfg, folder, measure.split)
    if examples.held_out is None:
        raise DataError("no held-out rows to measure on", where="data", fix="set data.val_path or data.split")
    figures = {}
    if measure.has_base:
        before = folder.eval / f"{measure.prefix}before.json"
        figures["before"] = measure_model(load_base(cfg).eval(), examples, cfg, before)
    after = folder.eval / f"{measure.prefix}after.json"
    figures["after"] = measure_model(load_result(cfg, folder.path), examples, cfg, after)
    return figures


def _figures_table(figures: dict[str, dict[str, Any]]) -> str:
    titles = {"before": "base", "after": "tuned"}
    lines = [" " * 12 + "".join(f"{titles[side]:>12}" for side in figures)]
    for key in figures["after"]:
        form = "12" if key == "n" else "12.4f"
        lines.append(f"{key:12}" + "".join(f"{of[key]:{form}}" for of in figures.values()))
    return "\n".join(lines)


def open_run(args: Namespace, values: Mapping[str, Any] = MappingProxyType({})) -> tuple[RunConfig, RunFolder]:
    """The finished run a command line means, and its config with what may be said anew for using it.

    `values` are a verb's own for some keys; what the command line says goes before them.

    Raises:
        ConfigError: there is no such run, or it has no result yet.
    """
    given = load_config(args.config, args.overrides)
    folder = find_run(given, args.config, args.run)
    if folder.result is None:
        raise ConfigError("this run has no result yet", where=str(folder.path), fix="finish it with `make resume`")
    cfg = load_config(folder.resolved)
    own = {key: value for key, value in values.items() if given.origins.get(key) != "command line"}
    given = given.with_values(own, args.verb)
    # What shapes the weights comes from the run; how they are used may be said anew.
    wanted = {"eval": given.eval.model_dump(), "data.test_path": given.data.test_path}
    if given.data.val_path != cfg.data.val_path:
        wanted["data.val_path"] = given.data.val_path
    return cfg.with_values(wanted, "command line"), folder


def prepare_environment(cfg: RunConfig) -> None:
    """Quieten the heavy libraries; to be called before the first of them is imported."""
    log.say("loading libraries and model", "use")
    os.environ.update(quiet_environment() | cache_environment())
    if is_local(cfg.model.name):
        # With nothing to download, the bars of libraries only get between the lines.
        os.environ.update(offline_environment())
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends packages nobody asked for
    from sftplay.tasks.worker import quiet_libraries

    quiet_libraries()


def open_tongue(cfg: RunConfig, folder: RunFolder) -> tuple[Any, Any]:
    """The tokenizer that lies with the result, and the renderer of the chat template there."""
    from sftplay.data.render import Renderer
    from sftplay.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    return tokenizer, Renderer.prove(tokenizer, stored_template(tokenizer, folder), [])


def _data_of(cfg: RunConfig, folder: RunFolder, split: str) -> Any:
    from sftplay.data.pipeline import load_examples, load_held_out
    from sftplay.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    template = stored_template(tokenizer, folder)
    if split == "test":
        return load_held_out(cfg, tokenizer, str(cfg.data.test_path), renderer_template=template)
    return load_examples(cfg, tokenizer, template)


def stored_template(tokenizer: Any, folder: RunFolder) -> str | None:
    """The chat template that lies with the result; said aloud where it is not the one the run was trained with."""
    from sftplay.data.templates import template_hash

    template: str | None = tokenizer.chat_template
    trained = folder.read_json("manifest.json").get("template_sha256")
    stored = template_hash(template or "")
    if trained is not None and trained != stored:
        log.say(f"warning: the chat template in {folder.result} is not the one this run was trained with:", "use")
        log.say(f"its sha256 is {stored}, the run's was {trained}; it is used as it stands", "use")
    return template
