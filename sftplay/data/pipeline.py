"""Config and tokenizer -> rows of token ids to train on and held out, in their order; every record is accounted for.

Rows are tokenised once and kept in `data.processed_dir`; the training order is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, cast

from datasets import Dataset

from sftplay import log
from sftplay.config.data import DataConfig, held_out_share
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, expect_unchanged, fingerprint, is_sound, kept_digest, note_lengths
from sftplay.data.layouts import read_layout_options, to_record
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Chat, Record, Refused, Source, Text, chat_from_json
from sftplay.data.render.render import Recipe, Renderer
from sftplay.data.render.templates import resolve_template
from sftplay.data.row_outcomes import SIDES, Keys, Side, compute_keys, is_held_out, where_rows_went
from sftplay.data.tokenize import CHATS, REFUSED, REPORT, Input, Preparation, RowFiles
from sftplay.errors import DataError, SftplayError

CODE_VERSION = 5
"""To be raised when `sftplay.data` turns the same rows into other tokens; older caches are then not used."""

READERS = ("tokenizers", "jinja2", "pyarrow")
"""Libraries that decide, together with our own code and Python, which tokens a row becomes."""


@dataclass(frozen=True)
class Examples:
    """Everything a run needs of its data.

    The data sets have the columns `input_ids` and `labels` (int64 [tokens]; labels are -100 where nothing is learned)
    and `row` (int64: the record's place in its file, from 0).
    """

    train: Dataset
    held_out: Dataset | None  # None when nothing is held out
    held_out_chats: list[Chat]
    """The chats behind `held_out`, one for each of its distinct records and in that order; plain texts have none."""

    renderer: Renderer
    report: dict[str, Any]  # the content of `data_report.json`
    places: dict[Side, Dataset]
    """For each side the fields of the record's `Source` of each example, in the order of the examples."""

    def find_source(self, side: Side, index: int) -> str:
        """Return the place of an example's record, as `Source` prints it."""
        return str(Source(**self.places[side][index]))


def load_examples(
    cfg: RunConfig, tokenizer: Any, *, renderer_template: str | None = None, checked: Mapping[str, str] | None = None
) -> Examples:
    """Return the rows of `data.train_path`, and of `data.val_path` or the share of prompts that `data.split` holds out.

    `renderer_template` is the text of a chat template that goes before `data.template`: the one stored with a model.
    `checked` is for a caller that needs `held_out` only: the `files` of the report of a run on the same rows, which
    checked them for bad rows and leaks. While these files are unchanged, rows to train on may be left out of `train`.
    Several processes may call this at once; one tokenises and the others wait.
    Raise DataError where a file cannot be read, a row is bad and the config says error, the template cannot be proven,
    no training row keeps a token to learn, or most of what is to be learned lies behind the cut, unless the config
    writes data.too_long.
    """
    if part := cfg.task.part("rows"):  # rows of another shape
        return cast("Examples", part.load_examples(cfg, tokenizer, renderer_template=renderer_template))
    inputs, guarded = find_inputs(cfg)
    examples = _load(cfg, tokenizer, template=renderer_template, inputs=inputs, guarded=guarded, checked=checked)
    report = examples.report
    train = report["sources"].get("train")
    if len(examples.train):
        note_lengths(cfg, report)
    elif report["files"] != checked:
        counts = train or report
        what = f"no row is left to train on: {where_rows_went(counts, refused_rows=report['refused_rows'])}"
        fix = "raise model.max_seq_len if rows were cut, lower data.split, or correct the refused rows"
        if counts["read"] == counts["refused"] > 0:
            fix = "correct these rows, or name their layout with data.format and their columns with data.columns"
        elif counts["read"] == counts["dropped"].get("leak"):
            fix = "name other rows to train on: all of these are held out, or problems of a published test"
        elif not train and not cfg.data.val_path and examples.held_out:
            what, fix = (
                f"{what}, all held out",
                "write data.split: 0, or give held-out rows of your own as data.val_path",
            )
        raise DataError(what, where=cfg.rows_path, fix=fix)
    if train and train["lost_to_cut_share"] > 0.5 and "data.too_long" not in cfg.origins:
        from sftplay.plan.find_shape import advise_length

        raise DataError(
            f"{train['lost_to_cut_share']:.0%} of the tokens to learn lie behind the cut at {cfg.model.max_seq_len:,}"
            f" tokens; the longest row has {train['longest_tokens']:,}",
            where=cfg.rows_path,
            fix=f"{advise_length(cfg.model, train['tokens_that_keep_99_percent'])};"
            " or data.too_long: drop, or truncate where the cut is meant",
        )
    return examples


def load_held_out(cfg: RunConfig, tokenizer: Any, *, path: str, renderer_template: str | None = None) -> Examples:
    """Return all rows of one file as the held-out side, as for `data.test_path`; `train` is empty.
    Raise DataError for the same reasons as `load_examples`.
    """
    if part := cfg.task.part("rows"):
        found = part.load_examples(cfg, tokenizer, renderer_template=renderer_template, held_out_path=path)
        return cast("Examples", found)
    return _load(cfg, tokenizer, template=renderer_template, inputs=[Input(path, 1.0)])


ReadKeys = Callable[[str, DataConfig], Iterator[tuple[Source, Keys]]]


def refuse_trained_rows(
    cfg: RunConfig, path: str, *, files: Mapping[str, str], read_keys: ReadKeys | None = None
) -> None:
    """Raise DataError where a row of `path` was trained on, by the content in its normal form.

    `files` are those of the report of the run: the gate of its training has compared the rows of all of them with those
    to train on.
    `read_keys` yields what counts as content of the rows of a file, several of one place where each would be known.
    """
    read_keys = read_keys or _read_keys
    data, rows_path = cfg.data, cfg.rows_path
    if path != rows_path and files.get(path) == kept_digest(path, data.processed_dir):
        return
    try:
        is_as_trained = files.get(rows_path) == kept_digest(rows_path, data.processed_dir)
    except SftplayError:  # the rows are elsewhere
        is_as_trained = False
    if not is_as_trained:
        log.say(f"note: {rows_path} is not what it was in training, so no row of {path} is compared with it", "eval")
        return
    dropped = data.val_path if data.contamination == "drop" else None
    not_trained = {keys.normal for _, keys in read_keys(dropped, data)} if dropped else set()
    tested = {keys.normal: source for source, keys in read_keys(path, data) if keys.normal not in not_trained}
    share = 0.0 if data.val_path else held_out_share(cfg)
    found = {
        str(tested[keys.normal]): f"{source} is held out as well, at {tested[keys.normal]}"
        for source, keys in read_keys(rows_path, data)
        if keys.normal in tested and not is_held_out(keys, share)
    }
    if trained := list(found.values()):
        shown = "\n  ".join(trained[:5]) + (f"\n  and {len(trained) - 5:,} more" if len(trained) > 5 else "")
        fix = "take them out of the test file: figures on rows that were trained on say nothing"
        raise DataError(f"{len(trained):,} of its rows were trained on\n  {shown}", where=path, fix=fix)


def _read_keys(path: str, data: DataConfig) -> Iterator[tuple[Source, Keys]]:
    """Yield the place and the keys of each row that can be read."""
    reading = read_layout_options(data)
    for source, row in read_rows(path, read_dialect(data)):
        if not isinstance(row, Refused):
            with suppress(DataError):
                yield source, compute_keys(to_record(row, source, reading=reading))


def find_inputs(cfg: RunConfig) -> tuple[list[Input], list[Input]]:
    """Return the files to train and measure on, and those whose rows must not be trained on."""
    inputs = [Input(cfg.rows_path, held_out_share(cfg))]
    if cfg.data.val_path:
        inputs = [Input(cfg.rows_path, 0.0), Input(cfg.data.val_path, 1.0)]
    return inputs, [Input(cfg.data.test_path, 1.0)] if cfg.data.test_path else []


def digest_files(data: DataConfig, inputs: Sequence[Input], guarded: Sequence[Input]) -> dict[str, str]:
    """Return path -> digest of the files; a missing one ends the run before any work."""
    return {given.path: kept_digest(given.path, data.processed_dir) for given in (*inputs, *guarded)}


def read_report(folder: Path, digests: Mapping[str, str]) -> dict[str, Any]:
    """Read the data report of prepared rows, and write into it where they lie and what they were made of."""
    report: dict[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    for source in (report, *report["sources"].values()):
        source["refused_rows"] = str(folder / REFUSED)
    return report | {"fingerprint": folder.name, "files": digests}


def _load(
    cfg: RunConfig,
    tokenizer: Any,
    *,
    template: str | None,
    inputs: Sequence[Input],
    guarded: Sequence[Input] = (),
    checked: Mapping[str, str] | None = None,
) -> Examples:
    digests = digest_files(cfg.data, inputs, guarded)
    samples = sample_records(cfg.data, inputs[0].path)
    # Plain texts need no template, and many base models have none.
    is_plain = bool(samples) and all(isinstance(sample, Text) for sample in samples) and not tokenizer.chat_template
    if template is None and not is_plain:
        template = resolve_template(cfg.data.template, tokenizer)
    renderer = Renderer.prove(tokenizer, template, samples=samples)
    parts = describe_rows(cfg.data, inputs, guarded=guarded, digests=digests, recipe=renderer.recipe())
    parts |= {"max_seq_len": cfg.model.max_seq_len}
    folder = Path(cfg.data.processed_dir) / fingerprint(parts)
    only_held_out = digests == checked and any(given.share for given in inputs) and not is_sound(folder)
    if only_held_out:
        inputs, guarded = [given for given in inputs if given.share], ()
        folder = folder.with_name(fingerprint(parts | {"side": "held_out"}))
    preparation = Preparation(cfg.data, renderer, max_tokens=cfg.model.max_seq_len, only_held_out=only_held_out)

    def write_rows(unfinished: Path) -> None:
        with RowFiles(unfinished) as files:
            preparation.run(inputs, files, guarded=guarded)
        expect_unchanged(digests, cfg.data.processed_dir)

    ensure_folder(folder, write_rows)
    names = [*SIDES, *(f"{side}_places" for side in SIDES)]
    rows = {name: Dataset.from_file(str(folder / f"{name}.arrow")) for name in names}
    chats = (folder / CHATS).read_text(encoding="utf-8").splitlines()
    return Examples(
        train=rows["train"],
        held_out=rows["held_out"] if len(rows["held_out"]) else None,
        held_out_chats=[chat_from_json(json.loads(line)) for line in chats],
        renderer=renderer,
        report=read_report(folder, digests),
        places={side: rows[f"{side}_places"] for side in SIDES},
    )


def describe_rows(
    data: DataConfig, inputs: Sequence[Input], *, guarded: Sequence[Input], digests: Mapping[str, str], recipe: Recipe
) -> dict[str, Any]:
    """Return everything that decides which tokens the rows become, except their length; json values."""
    return {
        "code": [CODE_VERSION, platform.python_version(), *map(version, READERS)],
        "files": [[given.path, digests[given.path], given.share] for given in inputs],
        "guarded": [[one.path, digests[one.path], *([one.share] if one.share < 1 else [])] for one in guarded],
        "renderer": asdict(recipe),
        "reading": [data.format, data.columns, data.system, data.encoding, data.delimiter],
        "policies": [data.on_bad_row, data.too_long, data.duplicates, data.contamination],
    }


def sample_records(data: DataConfig, path: str) -> list[Record]:
    """Return the readable rows among the first 32; the full pass reports the others together with all bad rows."""
    records = []
    reading = read_layout_options(data)
    for source, value in islice(read_rows(path, read_dialect(data)), 32):
        if not isinstance(value, Refused):
            with suppress(DataError):
                records.append(to_record(value, source, reading=reading))
    return records


def training_order(n_rows: int, n_needed: int, *, seed: int) -> list[int]:
    """Return `n_needed` row indices: seeded permutations of all rows, one after the other, the last one broken off.

    Only `Random.random()` is called: it is the one method with a sequence that Python promises never to change
    (docs.python.org/3/library/random.html, "Notes on Reproducibility"); `shuffle` carries no such promise.
    """
    if n_rows < 1:
        raise ValueError("an order needs at least one row")
    order: list[int] = []
    for epoch in range(math.ceil(n_needed / n_rows)):
        generator = Random((seed << 32) | epoch)
        keys = [generator.random() for _ in range(n_rows)]
        order.extend(sorted(range(n_rows), key=keys.__getitem__))
    return order[:n_needed]


def order_hash(order: Iterable[int]) -> str:
    """Return the hex sha256 of the indices as little-endian 64-bit integers; it goes to the manifest."""
    digest = hashlib.sha256()
    for index in order:
        digest.update(index.to_bytes(8, "little"))
    return digest.hexdigest()


def steps_for(n_rows: int, epochs: float, *, effective_batch: int) -> int:
    """Count the optimizer steps that show every row `epochs` times, rounded up to a whole step; at least 1.

    `epochs` is taken as the decimal number that was written: 0.1 of 30 rows is 3 rows, not 3.0000000000000004.
    """
    return max(1, math.ceil(n_rows * Fraction(str(epochs)) / effective_batch))
