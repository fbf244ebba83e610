"""Config and tokenizer -> rows of pairs as token ids, with the report that accounts for every row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from sftplay.config.data import DataConfig
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, expect_unchanged, fingerprint, note_lengths
from sftplay.data.layouts import read_layout_options
from sftplay.data.pipeline import (
    describe_rows,
    digest_files,
    find_inputs,
    read_report,
    refuse_trained_rows,
    training_order,
)
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Message, Refused, Source, chat_from_json
from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import resolve_template
from sftplay.data.row_outcomes import (
    SIDES,
    Example,
    Keys,
    RowOutcome,
    RowPolicies,
    Side,
    account_line,
    left_out_lines,
    source_lines,
    where_rows_went,
)
from sftplay.data.tokenize import BATCH_ROWS, KEPT_WHOLE, PLACES, SCHEMA, Input, Output, Preparation, RowFiles
from sftplay.errors import DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.preference.gate import Gate, gate_table
from sftplay.tasks.preference.pairs import sample_pairs
from sftplay.tasks.preference.render_pairs import EQUAL, PairExample, PairOptions, PairOutcome, PairProcessor, note_keys

VERSION = 2
"""To be raised when this package turns the same rows into other tokens; older caches are then not used."""

NUMBERS = [(name, pa.int64()) for name in ("prompt_tokens", "chosen_tokens", "row", "index")]
PAIRS = pa.schema([*(SCHEMA.field(name) for name in ("input_ids", "labels")), *NUMBERS, ("margin", pa.float32())])
ANSWERS = PAIRS.append(pa.field("desirable", pa.bool_()))
TEXTS = pa.schema([*PLACES, ("prompt", pa.string()), ("content", pa.string())])
"""The second stream of each side. `prompt` is a key, equal for equal prompts; `content` is JSON text."""


@dataclass(frozen=True)
class PairTexts:
    """The texts of a row, as people and generation read them."""

    prompt: tuple[Message, ...]  # the turns to answer, as far as they fit; of a text that is continued one turn
    chosen: str  # the words of the chosen side; empty for an answer that is not desirable
    rejected: str
    tools: str  # the functions that may be called, as JSON text
    beginning: str  # the prompt, where there is no chat template
    source: Source

    def prompt_ids(self, renderer: Renderer) -> list[int]:
        """Return the tokens with which generation begins."""
        if self.beginning:
            return renderer.beginning_ids(self.beginning)
        return renderer.prompt_ids(self.prompt, self.tools)


class TextRows(Sequence[PairTexts]):
    """The texts of a side, read from disk as they are needed."""

    def __init__(self, rows: Dataset) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        row = self._rows[int(number)]
        content = json.loads(row["content"])
        question = chat_from_json(content["question"])
        sides = (content["chosen"], content["rejected"])
        source = Source(row["path"], row["line"], row["record"])
        return PairTexts(question.messages[:-1], *sides, question.tools, content["beginning"], source)


@dataclass(frozen=True)
class Pairs:
    """All that a run on pairs needs from its data; docs/preferences.md has the columns."""

    train: Dataset
    held_out: Dataset | None  # None when nothing is held out
    renderer: Renderer
    report: dict[str, Any]  # the content of `data_report.json`
    fingerprint: str  # changes with any token of a row, or anything that decides which rows there are
    texts: dict[Side, Dataset]

    def records(self, side: Side) -> TextRows:
        """Return the texts of the rows of a side, in the order of the rows."""
        return TextRows(self.texts[side])

    def find_source(self, side: Side, index: int) -> str:
        """Return the place of a row, as `Source` prints it."""
        row = self.texts[side].select_columns(["path", "line", "record"])[index]
        return str(Source(**row))


def load(
    cfg: RunConfig, tokenizer: Any, *, renderer_template: str | None = None, held_out_path: str | None = None
) -> Pairs:
    """Return the pairs of `data.train_path`, and those that `data.val_path` or `data.split` holds out.

    With `held_out_path` all pairs of that file are held out, as for `data.test_path`, and `train` is empty.
    `renderer_template` is the text of a chat template that goes before `data.template`: the one stored with a model.
    Several processes may call this at once; one tokenises and the others wait.
    Raise DataError where a file cannot be read, a row is bad and the config says error, the template cannot be proven,
    or no pair is left to train on.
    """
    if held_out_path is not None:
        return _load(cfg, tokenizer, template=renderer_template, inputs=[Input(held_out_path, 1.0)], guarded=[])
    inputs, guarded = find_inputs(cfg)
    pairs = _load(cfg, tokenizer, template=renderer_template, inputs=inputs, guarded=guarded)
    report = pairs.report
    if not len(pairs.train):
        source = report["sources"].get("train", report)
        went = where_rows_went(source, refused_rows=report["refused_rows"])
        fix = "raise model.max_seq_len if rows are too long, lower data.split, or correct the refused rows"
        if n_held := source["read"] - sum(source["dropped"].values()) - source["refused"]:
            went = f"{went}, {n_held:,} held out"
        raise DataError(f"no pair is left to train on: {went}", where=cfg.rows_path, fix=fix)
    note_lengths(cfg, report)
    return pairs


def load_measured(cfg: RunConfig, tokenizer: Any, *, folder: RunFolder, template: str | None, split: str) -> Pairs:
    """Return the pairs of a finished run on which it is measured: held-out ones, or for `test` those of its test file.
    Raise DataError where there is none, or where a pair of the test file was trained on.
    """
    path = str(cfg.data.test_path) if split == "test" else None
    pairs = load(cfg, tokenizer, renderer_template=template, held_out_path=path)
    if pairs.held_out is None:
        fix = (
            "name pairs that were not trained on: ARGS=data.val_path=FILE (data.split holds out more in a new run only)"
        )
        raise DataError("no held-out rows to measure on", where="data.val_path", fix=fix)
    if path is not None:
        checked = folder.read_json("data_report.json").get("files") or {}
        options = PairOptions(
            read_layout_options(cfg.data), cfg.model.max_seq_len, cfg.data.too_long,
            takes_answers=cfg.task.takes_answers, is_plain=pairs.renderer.template is None,
        )  # fmt: skip
        refuse_trained_rows(cfg, path, files=checked, read_keys=partial(_read_answers, options))
    return pairs


def _read_answers(options: PairOptions, path: str, data: DataConfig) -> Iterator[tuple[Source, Keys]]:
    """Yield the place of each pair that can be read with the keys of its prompt and an answer, for each answer."""
    for outcome in _read_outcomes(options, path, data):
        yield from ((outcome.source, outcome.keys._replace(normal=answer)) for answer in outcome.answers)


def _read_outcomes(options: PairOptions, path: str, data: DataConfig) -> Iterator[PairOutcome]:
    """Yield the keys of each pair that can be read."""
    for source, row in read_rows(path, read_dialect(data)):
        if not isinstance(row, Refused):
            with suppress(DataError):
                outcome = PairOutcome(0, source)
                note_keys(options.read(row, source), outcome)
                yield outcome


def _load(cfg: RunConfig, tokenizer: Any, *, template: str | None, inputs: list[Input], guarded: list[Input]) -> Pairs:
    data, takes_answers = cfg.data, cfg.task.takes_answers
    digests = digest_files(data, inputs, guarded)
    path = inputs[0].path
    is_plain = template is None and data.template == "auto" and not tokenizer.chat_template
    samples = sample_pairs(cfg, path, is_plain=is_plain)
    is_plain = is_plain and bool(samples) and all(pair.texts for pair in samples)
    if template is None and not is_plain:
        template = resolve_template(data.template, tokenizer)
    chats = [] if is_plain else [chat for pair in samples for chat in pair.chats]
    renderer = Renderer.prove(tokenizer, template, samples=chats)
    needs_margin = cfg.task.section == "reward_model" and cfg.reward_model.margin
    options = PairOptions(
        read_layout_options(data), cfg.model.max_seq_len, data.too_long,
        takes_answers=takes_answers, is_plain=is_plain, needs_margin=needs_margin, keeps_end=cfg.task.gives_score,
    )  # fmt: skip
    parts = describe_rows(data, inputs, guarded=guarded, digests=digests, recipe=renderer.recipe())
    parts |= {"kind": ["pairs", VERSION], "options": [takes_answers, is_plain, needs_margin, cfg.task.gives_score]}
    folder = Path(data.processed_dir) / fingerprint(parts | {"max_seq_len": cfg.model.max_seq_len})

    def write_rows(unfinished: Path) -> None:
        preparation = PairPreparation(cfg, renderer, options=options)
        with PairFiles(unfinished, ANSWERS if takes_answers else PAIRS) as files:
            preparation.run(inputs, files, guarded=guarded)
        if takes_answers:
            add_mismatched(unfinished, max_tokens=cfg.model.max_seq_len, path=path)
        expect_unchanged(digests, data.processed_dir)

    ensure_folder(folder, write_rows)
    report = read_report(folder, digests)
    report["notes"] += weights_notes(cfg, report["preference"])
    rows = {
        name: Dataset.from_file(str(folder / f"{name}.arrow")) for side in SIDES for name in (side, f"{side}_texts")
    }
    return Pairs(
        train=rows["train"],
        held_out=rows["held_out"] if len(rows["held_out"]) else None,
        renderer=renderer,
        report=report,
        fingerprint=folder.name,
        texts={side: rows[f"{side}_texts"] for side in SIDES},
    )


def weights_notes(cfg: RunConfig, figures: Mapping[str, Any]) -> list[str]:
    """Return what to write where wanted and unwanted answers do not weigh what kto's paper advises.

    n_D weight_D / (n_U weight_U) shall lie between 1 and 4/3 (Ethayarajh 2024, section 4.2).
    """
    wanted, unwanted = (figures["trained"][side] for side in ("desirable", "undesirable"))
    if not (cfg.task.takes_answers and wanted and unwanted):
        return []
    weights = cfg.preference
    ratio = wanted * weights.desirable_weight / (unwanted * weights.undesirable_weight)
    if 0.999 <= ratio <= 1.334:
        return []
    advice = f"desirable_weight: {weights.desirable_weight / ratio:.3g}"
    if ratio > 1:
        advice = f"undesirable_weight: {weights.undesirable_weight * ratio:.3g}"
    return [f"wanted answers weigh {ratio:.2f} times the others; 1 to 1.33 is advised: preference.{advice}"]


class PairPreparation(Preparation):
    """Make token rows of the pairs of files, and judge and count each of them."""

    processor = PairProcessor
    _options: PairOptions

    def __init__(self, cfg: RunConfig, renderer: Renderer, *, options: PairOptions) -> None:
        super().__init__(cfg.data, renderer, max_tokens=options.max_tokens)
        self._options, self._data, self._gate = options, cfg.data, Gate()
        fix = "raise model.max_seq_len; or leave such pairs out with data.too_long: drop"
        self._policies = RowPolicies(cfg.data, options.max_tokens, limit="model.max_seq_len", fix_long=fix)
        self._held_answers: set[int] = set()
        self._held_prompts: set[int] = set()
        self._seen: dict[Side, set[int]] = {side: set() for side in SIDES}
        self._longest_joined = self._most_labels = 0

    def _guard(self, given: Input) -> None:
        for outcome in _read_outcomes(
            self._options, given.path, self._data
        ):  # a bad row is counted where it is measured
            self._hold_out(outcome)

    def _hold_out(self, outcome: PairOutcome) -> None:
        """Know a pair that must not be trained on: neither of its answers may follow its prompt in training."""
        self._held_prompts.add(outcome.keys.prompt)
        for key in outcome.answers:
            self._held_answers.add(key)
            self._policies.guard(key, outcome.source)

    def _take(self, outcomes: Sequence[RowOutcome], output: Output) -> None:
        kept: dict[Side, list[tuple[RowOutcome, Example]]] = {side: [] for side in SIDES}
        for outcome in outcomes:
            assert isinstance(outcome, PairOutcome)
            side: Side = "held_out" if outcome.held_out else "train"
            if examples := self._judge(outcome, side):
                kept[side] += [(outcome, example) for example in examples]
            elif outcome.refused:
                output.write_refused(outcome.source, outcome.refused)
        for side, found in kept.items():
            output.write(side, found)

    def _judge(self, outcome: PairOutcome, side: Side) -> Sequence[Example]:
        """Return the examples of a pair that is kept; count the pair, and what the gate knows of it."""
        gate, counts = self._gate, self._policies.counts[side]
        if not outcome.refused:
            if side == "held_out":
                self._hold_out(outcome)
            is_swapped = outcome.swapped in self._seen[side]
            self._seen[side].add(outcome.keys.normal)
            gate.swapped += is_swapped
            gate.white_space_only += outcome.facts is not None and outcome.facts.is_white_space_only
            if outcome.dropped == EQUAL or (is_swapped and self._data.duplicates == "drop"):
                gate.equal += outcome.dropped == EQUAL
                reason = outcome.dropped or "opposite_of_an_earlier_one"
                counts.dropped[reason] += 1
                counts.dropped_tokens[reason] += sum(outcome.lengths)
                for length in outcome.lengths:
                    counts.add_length(length)
                return []
            held = [key for key in outcome.answers if key in self._held_answers] if side == "train" else []
            if held:  # by this key the policies know it
                outcome.keys = outcome.keys._replace(normal=held[0])
                gate.contaminated += 1
            elif side == "train":
                gate.shared_prompts += outcome.keys.prompt in self._held_prompts
        examples = self._policies.keep(outcome, side)
        if examples and outcome.facts is not None:
            gate.joined += outcome.is_joined
            gate.add(outcome.facts, is_trained=side == "train")
            # What is not computed twice does not count as cut: the policies compare with the longer side.
            joined = sum(len(example.ids) // 4 for example in examples)
            longest = sum(example.longest_side for example in examples if isinstance(example, PairExample))
            counts.cut_tokens += joined - longest
            self._longest_joined = max(self._longest_joined, *(len(example.ids) // 4 for example in examples))
            self._most_labels = max(self._most_labels, *(example.n_labels for example in examples))
        return examples

    def _report(self, inputs: Sequence[Input]) -> dict[str, Any]:
        report = super()._report(inputs)
        report["unit"] = "answers" if self._options.takes_answers else "pairs"
        if not self._options.takes_answers:
            report |= {"longest_joined_tokens": self._longest_joined, "most_label_tokens": self._most_labels}
        report["preference"] = self._gate.as_json(report["duplicates"] + report["near_duplicates"])
        report["warnings"] = list(self._gate.warnings())
        if report["cut"] > (1 - KEPT_WHOLE) * report["read"]:
            what = f"{report['cut']:,} of {report['read']:,} prompts lose their first turns"
            report["warnings"].append(f"{what}, which do not fit into model.max_seq_len ({self._max_tokens:,})")
        if n_long := report["dropped"].get("too_long"):
            what = f"{n_long:,} of {report['read']:,} pairs do not fit into model.max_seq_len ({self._max_tokens:,})"
            fit = report["tokens_that_keep_99_percent"]
            report["warnings"].append(f"{what} and are left out; {fit:,} keeps 99 % of them")
        return report


class PairFiles(RowFiles):
    """Files of a folder: the rows of each side and their texts as Arrow streams, the rest as JSON."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self.schemas = {"": schema, "_texts": TEXTS}
        super().__init__(folder)
        self._count: dict[Side, int] = dict.fromkeys(SIDES, 0)

    def more_columns(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> dict[str, Any]:
        begin, self._count[side] = self._count[side], self._count[side] + len(kept)
        names = ("prompt_tokens", "chosen_tokens", "margin", "desirable", "content")
        return {
            **{name: [getattr(example, name) for _, example in kept] for name in names},
            "index": range(begin, begin + len(kept)),
            "prompt": [str(outcome.keys.prompt) for outcome, _ in kept],
        }


def add_mismatched(folder: Path, *, max_tokens: int, path: str) -> None:
    """Append to each answer of both sides the completion of a row with another prompt, which kto's KL term needs.

    Which one is fixed here, so that it depends neither on batches nor on processes: the next in a shuffled order with
    another prompt. Where all held-out rows have one prompt, they take it from the training rows.
    Raise DataError where all rows have one prompt.
    """
    tables = {side: Dataset.from_file(str(folder / f"{side}.arrow")) for side in SIDES}
    prompts = {side: Dataset.from_file(str(folder / f"{side}_texts.arrow"))["prompt"][:] for side in SIDES}
    for side in SIDES:
        lender: Side = side if len(set(prompts[side])) > 1 else "train"
        if len(set(prompts[side])) == 1 and set(prompts[lender]) <= set(prompts[side]):
            what = "kto needs answers to two prompts at least: its KL term pairs each prompt with another one's answer"
            raise DataError(what, where=path, fix="add rows with other prompts, or write task_mode: dpo for pairs")
        partners = find_mismatched(
            tables[side], prompts[side], lender=tables[lender], keys=prompts[lender], limit=max_tokens
        )
        with pa.ipc.new_stream(str(folder / f"{side}.new"), ANSWERS) as stream:
            for begin in range(0, len(partners), BATCH_ROWS):
                rows = tables[side][begin : begin + BATCH_ROWS]
                others = tables[lender][partners[begin : begin + BATCH_ROWS]]
                for column in ("input_ids", "labels"):
                    for n, tokens in enumerate(rows[column]):
                        n_prompt, n_given = rows["prompt_tokens"][n], others["prompt_tokens"][n]
                        n_lent = min(others["chosen_tokens"][n], max_tokens - n_prompt)
                        tokens += others[column][n][n_given : n_given + n_lent]
                stream.write_batch(pa.RecordBatch.from_pydict(rows, schema=ANSWERS))
    tables.clear()
    for side in SIDES:
        (folder / f"{side}.new").replace(folder / f"{side}.arrow")


def find_mismatched(
    rows: Dataset, prompts: Sequence[str], *, lender: Dataset, keys: Sequence[str], limit: int
) -> list[int]:
    """Return for each row the number of the one in `lender` that gives it a completion, one that fits if there is one
    near; `keys` are the prompts of `lender`, and some are others than the row's."""
    if not len(rows):
        return []
    order = training_order(len(lender), len(lender), seed=0)
    place = {number: at for at, number in enumerate(order)}
    lengths, found = lender["chosen_tokens"][:], []
    for number, (prompt, n_prompt) in enumerate(zip(prompts, rows["prompt_tokens"][:], strict=True)):
        begin = place.get(number, number) + 1
        after = (order[(begin + step) % len(order)] for step in range(len(order)))
        others = (one for one in after if keys[one] != prompt)
        first = next(others)
        fits = (one for one in chain([first], islice(others, 100)) if n_prompt + lengths[one] <= limit)
        found.append(next(fits, first))
    return found


def pairs_table(report: Mapping[str, Any]) -> str:
    """Format the report for people."""
    noun = report["unit"]
    lines = [account_line(report), *source_lines(report, noun), *left_out_lines(report)]
    if repeated := report["duplicates"] + report["near_duplicates"]:
        action = "left out" if "duplicate" in report["dropped"] else "kept"
        lines.append(f"  duplicates     {repeated:,} {noun} repeat an earlier one; {action}")
    if unused := report["unused_columns"]:
        columns = ", ".join(f"{name[:40]!r} ({count:,})" for name, count in unused.items())
        lines.append(f"  unused         columns {columns[:90]}")
    if typed := report["typed_specials"]:
        lines.append(f"  special        {typed:,} {noun} spell a special token; it is read as text")
    lines += [f"  {line}" for line in gate_table(report["preference"])]
    lines.append(f"  mask           by {report['mask_method']}, template {report['template_hash'][:12]}")
    longest = f"longest {report['longest_tokens']:,} tokens with its prompt, limit {report['max_seq_len']:,}"
    lines.append(f"  length         {longest}")
    lines += [f"  warning        {warning}" for warning in report["warnings"]]
    lines += [f"  note           {note}" for note in report["notes"]]
    return "\n".join(lines)
