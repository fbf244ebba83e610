"""The verbs that use a finished run: measure it, talk to it, let it answer a file."""

from __future__ import annotations

import json
import logging
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.load import load_config
from sftplay.config.schema import RunConfig
from sftplay.data.formats import Reading, Row, read_prompt
from sftplay.data.records import Message, Refused, Source
from sftplay.data.sources import files_of, read_rows
from sftplay.errors import ConfigError, DataError
from sftplay.launch.command import cache_environment, offline_environment, quiet_environment
from sftplay.launch.folder import RunFolder, find_run, write_text
from sftplay.model.source import is_local


def evaluate(args: Namespace) -> int:
    """`eval`: the result's figures beside the base's, in eval/before.json and eval/after.json (or test-*.json)."""
    cfg, folder = _open_run(args)
    if args.split == "test" and cfg.data.test_path is None:
        raise ConfigError("there is no test set", where="data.test_path", fix="name one: ARGS=data.test_path=FILE")
    _prepare_environment(cfg)
    from sftplay.deliver.evaluate import evaluate as measure
    from sftplay.model.load import load_base, load_result

    examples = _data_of(cfg, folder, args.split)
    if examples.held_out is None:
        raise DataError("no held-out rows to measure on", where="data", fix="set data.val_path or data.split")
    prefix = "test-" if args.split == "test" else ""
    figures = {}
    for name, load in (("before", lambda: load_base(cfg).eval()), ("after", lambda: load_result(cfg, folder.path))):
        figures[name] = measure(load(), examples, cfg, folder.eval / f"{prefix}{name}.json")
    if args.json:
        print(json.dumps(figures))
        return 0
    log.show(f"{'':12}{'base':>12}{'tuned':>12}")
    for key, value in figures["after"].items():
        base = figures["before"][key]
        log.show(f"{key:12}{base:12}{value:12}" if key == "n" else f"{key:12}{base:12.4f}{value:12.4f}")
    return 0


def infer(args: Namespace) -> int:
    """`infer`: a dialogue on standard input and output, one line a turn; an empty line or end of input ends it."""
    cfg, folder = _open_run(args)
    speaker, renderer = _open_speaker(cfg, folder, base=args.base)
    from sftplay.deliver.generate import stream_answer

    log.say(f"talking to {'the base of ' if args.base else ''}{folder.path}; an empty line ends it", "infer")
    turns = [Message("system", cfg.data.system)] if cfg.data.system else []
    while True:
        sys.stdout.write("> " if sys.stdin.isatty() else "")
        sys.stdout.flush()
        words = sys.stdin.readline().strip()
        if not words:
            return 0
        turns.append(Message("user", words))
        pieces = []
        for piece in stream_answer(speaker, renderer.prompt_ids(turns)):
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
        print()
        turns.append(Message("assistant", "".join(pieces)))


def infer_batch(args: Namespace) -> int:
    """`infer-batch`: the rows of a file (`messages` or `prompt`), in order, each with a `response`."""
    cfg, folder = _open_run(args)
    asked = _read_prompts(args.input, cfg)
    speaker, renderer = _open_speaker(cfg, folder, base=False)
    from sftplay.deliver.generate import answer_all

    prompts = []
    for source, _, messages, tools in asked:
        try:
            prompts.append(renderer.prompt_ids(messages, tools))
        except DataError as error:
            raise DataError(error.what, where=str(source), fix=error.fix) from error
    answers = answer_all(
        speaker,
        prompts,
        batch_size=cfg.eval.batch_size,
        progress=lambda done: log.status(f"answered {done}/{len(asked)}", "infer"),
    )
    rows = [{**row, "response": answer} for (_, row, _, _), answer in zip(asked, answers, strict=True)]
    # A parquet file can hold values that JSON has no word for, dates among them.
    lines = [json.dumps(row, ensure_ascii=False, default=str) for row in rows]
    write_text(Path(args.out), "".join(f"{line}\n" for line in lines))
    log.say(f"{len(rows)} answers in {args.out}", "infer")
    return 0


def _read_prompts(path: str, cfg: RunConfig) -> list[tuple[Source, Row, tuple[Message, ...], str]]:
    """Every row of the file with its place, the messages to answer (the run's system prompt first) and the tools."""
    reading = Reading(system=cfg.data.system)
    found: list[tuple[Source, Row, tuple[Message, ...], str]] = []
    for file in files_of(path):
        for source, row in read_rows(str(file)):
            if isinstance(row, Refused):
                raise DataError(row.reason, where=str(source), fix="correct the row")
            found.append((source, row, *read_prompt(row, source, reading)))
    return found


def _open_run(args: Namespace) -> tuple[RunConfig, RunFolder]:
    given = load_config(args.config, args.overrides)
    folder = find_run(given, args.config, args.run)
    if folder.result is None:
        raise ConfigError("this run has no result yet", where=str(folder.path), fix="finish it with `make resume`")
    cfg = load_config(folder.resolved)
    # What shapes the weights comes from the run; how they are used may be said anew.
    wanted = {"eval": given.eval.model_dump(), "data.test_path": given.data.test_path}
    if given.data.val_path != cfg.data.val_path:
        wanted["data.val_path"] = given.data.val_path
    return cfg.with_values(wanted, "command line"), folder


def _prepare_environment(cfg: RunConfig) -> None:
    log.say("loading libraries and model", "use")
    os.environ.update(quiet_environment() | cache_environment())
    if is_local(cfg.model.name):
        # With nothing to download, the bars of libraries only get between the lines.
        os.environ.update(offline_environment() | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"})
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it recommends packages nobody asked for
    from sftplay.tasks.worker import quiet_libraries

    quiet_libraries()


def _open_speaker(cfg: RunConfig, folder: RunFolder, *, base: bool) -> tuple[Any, Any]:
    _prepare_environment(cfg)
    from sftplay.data.render import Renderer
    from sftplay.deliver.generate import Speaker
    from sftplay.model.load import load_base, load_result
    from sftplay.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    renderer = Renderer.prove(tokenizer, _stored_template(tokenizer, folder), [])
    model = load_base(cfg).eval() if base else load_result(cfg, folder.path)
    return Speaker(model, tokenizer, renderer.end_token_ids, cfg.eval.max_new_tokens), renderer


def _data_of(cfg: RunConfig, folder: RunFolder, split: str) -> Any:
    from sftplay.data.pipeline import load_examples, load_held_out
    from sftplay.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(cfg.model, str(folder.result))
    template = _stored_template(tokenizer, folder)
    if split == "test":
        return load_held_out(cfg, tokenizer, str(cfg.data.test_path), renderer_template=template)
    return load_examples(cfg, tokenizer, template)


def _stored_template(tokenizer: Any, folder: RunFolder) -> str | None:
    """The chat template that lies with the result; said aloud where it is not the one the run was trained with."""
    from sftplay.data.templates import template_hash

    template: str | None = tokenizer.chat_template
    trained = folder.read_json("manifest.json").get("template_sha256")
    stored = template_hash(template or "")
    if trained is not None and trained != stored:
        log.say(f"warning: the chat template in {folder.result} is not the one this run was trained with:", "use")
        log.say(f"its sha256 is {stored}, the run's was {trained}; it is used as it stands", "use")
    return template
