"""Which weights a command measures: those of a finished run, what it started from, or those that a config names."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.load import load_config
from sftplay.config.schema.run import RunConfig
from sftplay.control.finished_run import load_renderer, open_run
from sftplay.control.inputs import check_model
from sftplay.control.model_shape import known_shape
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder, find_run
from sftplay.machine.probe import probe
from sftplay.model.start_point import resolve_names
from sftplay.plan.sizing.decisions import decide_numerics

UNTRAINED = "-untrained"
"""What is added to a config's stem for the folder of what is measured of its model without a run."""


@dataclass(frozen=True)
class Subject:
    """A model that can be opened."""

    cfg: RunConfig
    """A run's resolved config; or one whose names are resolved, with precision and attention decided."""

    folder: RunFolder
    """Where figures go: the run's folder, or one that no run has."""

    run: bool
    """Whether `folder` is that of a run."""

    base: bool
    """Whether the weights are those before training."""

    def describe(self) -> dict[str, Any]:
        """What figures say of it."""
        model = self.cfg.model
        names = {"run": str(self.folder.path) if self.run else None, "model": model.name, "adapter": model.adapter}
        step = None if self.base else self.folder.read_json("status.json").get("step")
        return {**names, "weights": "start" if self.base else "result", "step": step}

    def open(self) -> tuple[Any, Any, Any]:
        """Model, in evaluation mode, tokenizer and renderer. It imports the heavy libraries.

        Raises:
            SftplayError: what `load_tokenizer`, `Renderer.prove` and `load_result` or `load_untrained` raise.
        """
        from sftplay.model.load import load_base, load_result, load_untrained

        if self.run:
            tokenizer, renderer = load_renderer(self.cfg, self.folder)
            load = load_untrained if self.base else load_result
            return load(self.cfg, self.folder.path), tokenizer, renderer
        from sftplay.data.encode.render import Renderer
        from sftplay.data.template.templates import resolve_template
        from sftplay.model.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(self.cfg.model)
        template = resolve_template(self.cfg.data.template, tokenizer)
        return load_base(self.cfg).eval(), tokenizer, Renderer.prove(tokenizer, template, samples=[])


def find_subject(args: Namespace) -> Subject:
    """What the command line means: a run of the config where there is one, else the model that the config names.

    Raises:
        ConfigError: the run that is named is not there or has no result; the model or adapter is not there.
    """
    given = load_config(args.config, args.overrides)
    try:
        find_run(given, args.config, run=args.run)
    except ConfigError:
        if args.run:
            raise
        return _untrained(given, args.config)
    try:
        cfg, folder = open_run(args, needs_result=not args.base)
    except ConfigError as error:
        fix = f"{error.fix}; what it started from is measured with ARGS=--base"
        raise ConfigError(error.what, where=error.where, fix=fix) from error
    own = {"cluster.launcher": given.cluster.launcher, "sandbox": given.sandbox.model_dump()}
    cfg = cfg.with_values(own, "command line")
    return Subject(cfg, folder, run=True, base=args.base)


def _untrained(given: RunConfig, config_path: str) -> Subject:
    cfg = resolve_names(given)
    check_model(cfg, asks_hub=True)
    decided = decide_numerics(cfg, probe(), shape=known_shape(cfg))
    open_keys = {"train.precision": cfg.train.precision, "model.attn": cfg.model.attn}
    cfg = cfg.with_values({key: decided[key].value for key, value in open_keys.items() if value == "auto"}, "auto")
    adapter = f" with the adapter {cfg.model.adapter}" if cfg.model.adapter else ""
    log.say(f"no run of {config_path} yet: measuring {cfg.model.name}{adapter} as it is", "eval")
    folder = RunFolder(Path(cfg.output_dir) / f"{Path(config_path).stem}{UNTRAINED}")
    return Subject(cfg, folder, run=False, base=True)
