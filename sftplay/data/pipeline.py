"""Config and tokenizer -> training and held-out rows of token ids, with the report that accounts for every record.

Rows are tokenised once and kept in `data.processed_dir`; the order in which they are trained is `order`'s business.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from sftplay.config.schema import RunConfig
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.formats import to_chat
from sftplay.data.preparation import CHATS, REFUSED, REPORT, Input, Preparation, Side
from sftplay.data.records import Chat, Refused, chat_from_json
from sftplay.data.render import Renderer
from sftplay.data.sources import content_digest, read_rows
from sftplay.data.tally import report_table as report_table
from sftplay.data.templates import resolve_template
from sftplay.errors import DataError

CODE_VERSION = 1
"""Raised when `sftplay.data` turns the same rows into other tokens, so that older caches are not taken for new ones."""

DEFAULT_SPLIT = 0.05
SAMPLE_ROWS = 32
"""Rows from the beginning of the file on which the mask method is proven."""


@dataclass(frozen=True)
class Examples:
    """Everything a run needs of its data.

    The data sets have the columns `input_ids` and `labels` (int64 [tokens]; labels are -100 where nothing is learned)
    and `row` (int64: the record's place in its file, from 0).
    """

    train: Dataset
    held_out: Dataset | None
    """None when nothing is held out."""

    held_out_chats: list[Chat]
    """The records behind `held_out`, one for each of its distinct `row`s and in that order."""

    renderer: Renderer
    report: dict[str, Any]
    """The content of `data_report.json`."""


def load_examples(cfg: RunConfig, tokenizer: Any, renderer_template: str | None = None) -> Examples:
    """The rows of `data.train_path`, and of `data.val_path` or the share of prompts that `data.split` holds out.

    `renderer_template` is the text of a chat template that goes before `data.template`: the one stored with a model.
    Several processes may call this at once; one tokenises and the others wait.

    Raises:
        DataError: a file cannot be read, a row is bad and the config says error, the template cannot be proven, or no
            training row keeps a token to learn.
    """
    split = DEFAULT_SPLIT if cfg.data.split is None else cfg.data.split
    inputs = [Input(cfg.data.train_path, split)]
    if cfg.data.val_path:
        inputs = [Input(cfg.data.train_path, 0.0), Input(cfg.data.val_path, 1.0)]
    examples = _load(cfg, tokenizer, renderer_template, inputs=inputs)
    if not len(examples.train):
        raise _nothing_to_learn(cfg.data.train_path, examples.report)
    return examples


def load_held_out(cfg: RunConfig, tokenizer: Any, path: str, *, renderer_template: str | None = None) -> Examples:
    """All rows of one file as the held-out side, as for `data.test_path`; `train` is empty.

    Raises:
        DataError: as `load_examples`.
    """
    return _load(cfg, tokenizer, renderer_template, inputs=[Input(path, 1.0)])


def _load(cfg: RunConfig, tokenizer: Any, template: str | None, *, inputs: Sequence[Input]) -> Examples:
    if template is None:
        template = resolve_template(cfg.data.template, tokenizer)
    digests = [content_digest(given.path) for given in inputs]  # first: a missing file is said before any work
    renderer = Renderer.prove(tokenizer, template, _samples(cfg, inputs[0].path))
    parts = {
        "code": CODE_VERSION,
        "files": [[given.path, digest, given.share] for given, digest in zip(inputs, digests, strict=True)],
        "tokenizer": _tokenizer_hash(tokenizer),
        "template": renderer.template_hash,
        "mask": renderer.method,
        "max_seq_len": cfg.model.max_seq_len,
        "options": [cfg.data.format, cfg.data.on_bad_row, cfg.data.too_long],
    }
    folder = Path(cfg.data.processed_dir) / fingerprint(parts)
    ensure_folder(folder, lambda new: Preparation(cfg.data, renderer, cfg.model.max_seq_len).run(inputs, new))
    return _opened(folder, renderer)


def _samples(cfg: RunConfig, path: str) -> list[Chat]:
    """The readable ones of the first rows; the others are reported by the full pass, with all their company."""
    chats = []
    for source, value in islice(read_rows(path), SAMPLE_ROWS):
        if isinstance(value, Refused):
            continue
        try:
            chats.append(to_chat(value, source, cfg.data.format))
        except DataError:
            continue
    return chats


def _tokenizer_hash(tokenizer: Any) -> str:
    state = tokenizer.backend_tokenizer.to_str() + json.dumps(tokenizer.special_tokens_map, sort_keys=True)
    return hashlib.sha256(state.encode()).hexdigest()


def _opened(folder: Path, renderer: Renderer) -> Examples:
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    lines = (folder / CHATS).read_text(encoding="utf-8").splitlines()
    held_out = _rows(folder, "held_out")
    refused = str(folder / REFUSED)
    for source in report["sources"].values():
        source["refused_rows"] = refused
    return Examples(
        train=_rows(folder, "train"),
        held_out=held_out if len(held_out) else None,
        held_out_chats=[chat_from_json(json.loads(line)) for line in lines],
        renderer=renderer,
        report={**report, "refused_rows": refused, "fingerprint": folder.name},
    )


def _rows(folder: Path, side: Side) -> Dataset:
    return Dataset.from_file(str(folder / f"{side}.arrow"))


def _nothing_to_learn(path: str, report: dict[str, Any]) -> DataError:
    source = report["sources"].get("train", report)
    reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in source["dropped"].items()]
    reasons += [f"{source['refused']:,} refused, see {report['refused_rows']}"] if source["refused"] else []
    return DataError(
        f"no row is left to train on: {source['read']:,} read" + "".join(f", {reason}" for reason in reasons),
        where=path,
        fix="raise model.max_seq_len if rows were cut, lower data.split, or correct the refused rows",
    )
