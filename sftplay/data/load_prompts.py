"""Load prompts with the columns that rewards read, and report what was left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from sftplay import log
from sftplay.config.data import DataConfig
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, expect_unchanged, fingerprint
from sftplay.data.layouts import read_layout_options
from sftplay.data.pipeline import describe_rows, digest_files, find_inputs, read_report, sample_records
from sftplay.data.problem import published_test_id
from sftplay.data.prompts import Prompt, read_beginning, read_reward_columns, to_prompt
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Refused, Source
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
    compute_keys,
    is_held_out,
    left_out_lines,
    total,
    where_rows_went,
)
from sftplay.data.tokenize import REFUSED, REPORT, Input, refused_line
from sftplay.errors import DataError

FIELDS = {"row": pa.int64(), "input_ids": pa.list_(pa.int64()), "content": pa.string()}
SCHEMA = pa.schema(FIELDS | {"path": pa.string(), "line": pa.int64(), "record": pa.int64()})
"""`content` is JSON text: in Arrow's own columns each object would get the keys of all the others."""


@dataclass(frozen=True)
class Question:
    row: int  # the row's number in its file, from 0
    ids: list[int]
    question: str  # the words of its last turn, or the beginning of a plain text
    columns: dict[str, Any]  # the columns that rewards read, by name
    turns: Sequence[dict[str, Any]] = ()  # the prompt as messages, where an environment may add to it


class Questions:
    """Prompts by their number, read from disk as they are needed."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Question:
        row = self.rows[number]
        content = json.loads(row["content"])
        turns = content.get("turns", ())
        return Question(row["row"], row["input_ids"], content["question"], content["columns"], turns)

    @property
    def row_numbers(self) -> list[int]:
        return list(self.rows["row"])

    def find_place(self, number: int) -> str:
        """Return the place of the row, as `Source` prints it."""
        row = self.rows[number]
        return str(Source(row["path"], row["line"], row["record"]))


@contextmanager
def open_writer(path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that appends a row of SCHEMA to a new file; the rows are written many at a time."""
    rows: list[dict[str, Any]] = []
    with pa.ipc.new_stream(str(path), SCHEMA) as stream:

        def append(row: dict[str, Any]) -> None:
            rows.append(row)
            if len(rows) == 256:
                stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
                rows.clear()

        yield append
        if rows:
            stream.write_batch(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))


def prompts_table(report: Mapping[str, Any]) -> str:
    lines = [account_line(report, ["kept"])]
    for name, source in report["sources"].items():
        mean = source["tokens"] / max(1, source["examples"])
        lines.append(f"  {name:<14} {source['examples']:,} prompts of {mean:,.0f} tokens   {source['path']}")
    lines += left_out_lines(report)
    if repeated := report["duplicates"] + report["near_duplicates"]:
        action = "left out" if "duplicate" in report["dropped"] else "kept"
        lines.append(f"  duplicates     {repeated:,} prompts repeat an earlier one; {action}")
    lines.append(f"  columns        {', '.join(report['columns'])[:90]}")
    lines.append(f"  length         longest {report['longest_tokens']:,} tokens, limit {report['max_prompt_tokens']:,}")
    lines += [f"  warning        {warning}" for warning in report["warnings"]]
    lines += [f"  note           {note}" for note in report["notes"]]
    return "\n".join(lines)


@dataclass(frozen=True)
class Prompts:
    """All that a run on prompts needs from its data. A side without rows is empty."""

    train: Questions
    held_out: Questions
    renderer: Renderer
    report: dict[str, Any]  # the content of `data_report.json`
    fingerprint: str  # changes with any prompt or column, held out or not
    tools: str = ""  # the tools that all prompts show, as JSON text in OpenAI's form; empty for none


def load_prompts(
    cfg: RunConfig, tokenizer: Any, *, renderer_template: str | None = None, tools: str | None = None
) -> Prompts:
    """Return the prompts of `data.train_path`, and those that `data.val_path` or `data.split` holds out.

    `renderer_template` is the text of a chat template that goes before `data.template`: the one stored with a model.
    `tools` are those that the prompts show, as `describe_tools` writes them; None where completions have one turn. A
    prompt of more than `cfg.prompt_tokens` tokens is left out, or ends the run where `data.too_long` says error: a
    question is not cut. Several processes may call this at once; one reads and the others wait.

    Raise DataError where a file cannot be read, a row has no question and the config says error, or no prompt is left.
    """
    inputs, guarded = find_inputs(cfg)
    prompts = _load(cfg, tokenizer, template=renderer_template, inputs=inputs, guarded=guarded, tools=tools)
    if not len(prompts.train):
        report = prompts.report
        went = where_rows_went(report["sources"].get("train", report), refused_rows=report["refused_rows"])
        fix = f"{_fix_long(cfg)}; lower data.split; or correct the refused rows"
        raise DataError(f"no prompt is left to train on: {went}", where=cfg.rows_path, fix=fix)
    return prompts


def prepare_prompts(cfg: RunConfig, tokenizer: Any, *, called: str, tools: str | None = None) -> Prompts:
    """Call `load_prompts` with a status line, and give the tokenizer the chat template of the prompts."""
    log.status(f"preparing the {called} of {cfg.rows_path}", "data")
    prompts = load_prompts(cfg, tokenizer, tools=tools)
    if prompts.renderer.template is not None:
        tokenizer.chat_template = prompts.renderer.template
    return prompts


def load_held_out_prompts(
    cfg: RunConfig, tokenizer: Any, *, path: str, renderer_template: str | None, tools: str | None = None
) -> Prompts:
    """Return all prompts of one file as the held-out side, as for `data.test_path`; `train` is empty."""
    return _load(cfg, tokenizer, template=renderer_template, inputs=[Input(path, 1.0)], guarded=[], tools=tools)


def read_prompt_keys(path: str, data: DataConfig) -> Iterator[tuple[Source, Keys]]:
    """Yield the place and the keys of each row with a question; its content is the question alone."""
    reading = read_layout_options(data)
    for number, (source, row) in enumerate(read_rows(path, read_dialect(data))):
        if not isinstance(row, Refused):
            with suppress(DataError):
                keys = compute_keys(to_prompt(row, source, number=number, reading=reading).unanswered)
                yield source, Keys(keys.content, keys.prompt, keys.prompt)


def _load(
    cfg: RunConfig,
    tokenizer: Any,
    *,
    template: str | None,
    inputs: list[Input],
    guarded: list[Input],
    tools: str | None,
) -> Prompts:
    data, max_tokens = cfg.data, cfg.prompt_tokens
    digests = digest_files(data, inputs, guarded)
    path = inputs[0].path
    _, first = next(iter(read_rows(path, read_dialect(data))), (None, {}))
    is_plain = not isinstance(first, Refused) and bool(read_beginning(first, reading=read_layout_options(data)))
    if template is None and not (is_plain and not tokenizer.chat_template):
        template = resolve_template(data.template, tokenizer)
    renderer = Renderer.prove(tokenizer, template, samples=sample_records(data, path))
    parts = describe_rows(data, inputs, guarded=guarded, digests=digests, recipe=renderer.recipe())
    parts |= {"kind": "prompts", "max_tokens": max_tokens}
    if cfg.task.turns == 2:
        parts["asked"] = "the last turn"
    turns = None
    if cfg.task.turns == 1 and cfg.task.learns_from_rewards and (cfg.grpo.environment or cfg.grpo.tools):
        assert tools is not None, "the prompts would not show the tools"
        turns = (cfg.grpo.environment is not None, tools)
        parts["turns"] = turns
    folder = Path(data.processed_dir) / fingerprint(parts)

    def write_prompts(unfinished: Path) -> None:
        _Pass(cfg, renderer, max_tokens=max_tokens, turns=turns).run(inputs, guarded, folder=unfinished)
        expect_unchanged(digests, data.processed_dir)

    ensure_folder(folder, write_prompts)
    train, held_out = (Questions(Dataset.from_file(str(folder / f"{side}.arrow"))) for side in SIDES)
    return Prompts(train, held_out, renderer, read_report(folder, digests), folder.name, tools or "")


class _Pass:
    """One pass over the files: questions in, token ids and columns on disk, every row counted."""

    def __init__(
        self, cfg: RunConfig, renderer: Renderer, *, max_tokens: int, turns: tuple[bool, str] | None = None
    ) -> None:
        """`turns`: whether an environment may add to prompts, and the tools that they show; None for single turns."""
        self._renderer, self._max_tokens, self._turns = renderer, max_tokens, turns
        self._asks_last_turn = cfg.task.turns == 2
        self._reading = read_layout_options(cfg.data)
        self._dialect = read_dialect(cfg.data)
        self._columns: dict[str, None] = {}
        self._policies = RowPolicies(cfg.data, max_tokens, limit="the most for a prompt", fix_long=_fix_long(cfg))

    def run(self, inputs: list[Input], guarded: list[Input], *, folder: Path) -> None:
        for prompt in (prompt for given in guarded for prompt in self._prompts(given.path)):
            if isinstance(prompt, Prompt):
                self._policies.guard(compute_keys(prompt.unanswered).prompt, prompt.source)
        with ExitStack() as files:
            writers = {side: files.enter_context(open_writer(folder / f"{side}.arrow")) for side in SIDES}
            refused = files.enter_context((folder / REFUSED).open("w", encoding="utf-8"))
            # Held-out rows go first: a training row must be compared with all of them.
            for given in reversed(inputs):
                for prompt in self._prompts(given.path):
                    outcome, row = self._check(prompt, share=given.share)
                    side: Side = "held_out" if outcome.held_out else "train"
                    if self._policies.keep(outcome, side):
                        writers[side](row)
                    elif outcome.refused:
                        refused.write(refused_line(outcome.source, outcome.refused))
        self._policies.check()
        (folder / REPORT).write_text(json.dumps(self._report(inputs)), encoding="utf-8")

    def _prompts(self, path: str) -> Iterator[Prompt | RowOutcome]:
        for number, (source, row) in enumerate(read_rows(path, self._dialect)):
            try:
                if isinstance(row, Refused):
                    yield RowOutcome(number, source, refused=row.reason)
                else:
                    yield to_prompt(row, source, number=number, reading=self._reading)
            except DataError as error:
                yield RowOutcome(number, source, refused=error.what, fix=error.fix)

    def _check(self, prompt: Prompt | RowOutcome, *, share: float) -> tuple[RowOutcome, dict[str, Any]]:
        if isinstance(prompt, RowOutcome):
            prompt.held_out = share == 1.0
            return prompt, {}
        keys, source = compute_keys(prompt.unanswered), prompt.source
        outcome = RowOutcome(prompt.number, source, held_out=share == 1.0 or is_held_out(keys, share))
        outcome.keys = Keys(keys.content, keys.prompt, keys.prompt)
        outcome.tested = published_test_id(prompt.row)
        columns = read_reward_columns(prompt.row, source, reading=self._reading)
        try:
            if "completions" in columns:
                what = "has a column 'completions', the name by which rewards get the answers"
                raise DataError(what, fix="give the column another name")
            if self._asks_last_turn and (more := prompt.extra_content(self._reading.system)):
                fix = "put what matters into the last turn, or write data.on_bad_row: skip"
                raise DataError(not_asked(more), fix=fix)
            if self._turns is not None:
                prompt = self._with_tools(prompt)
            ids = prompt.prompt(self._renderer)
        except DataError as error:
            outcome.refused, outcome.fix = error.what, error.fix
            return outcome, {}
        outcome.lengths = [len(ids)]
        if len(ids) > self._max_tokens:
            outcome.dropped = "too_long"
            return outcome, {}
        # Nothing of a prompt is learned; the report only needs the number of tokens of an example.
        outcome.examples = [Example(bytes(4 * len(ids)), b"", 0, is_cut=False, ends_learned=False)]
        self._columns |= dict.fromkeys(columns)
        given: dict[str, Any] = {"question": prompt.question, "columns": columns}
        if self._turns and self._turns[0]:
            given["turns"] = [turn.as_json() for turn in prompt.messages]
        content = json.dumps(given, default=str)
        place = {"path": source.path, "line": source.line, "record": source.record}
        return outcome, {"row": prompt.number, "input_ids": ids, "content": content, **place}

    def _with_tools(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the run's tools. Raise DataError where it is no chat, or has tools of its own."""
        assert self._turns is not None
        if prompt.beginning:
            raise DataError("is a plain text, which nothing can answer", fix="give the row a prompt or messages")
        if self._turns[1] and prompt.tools:
            fix = "remove its tools, or grpo.tools"
            raise DataError("has tools of its own, but those of the config are called", fix=fix)
        return replace(prompt, tools=self._turns[1] or prompt.tools)

    def _report(self, inputs: list[Input]) -> dict[str, Any]:
        paths = {"train": inputs[0].path, "held_out": inputs[-1].path}
        counts = self._policies.counts
        used = [side for side in SIDES if counts[side].read]
        notes, warnings = [], []
        if inputs[-1].share and not counts["held_out"].examples:
            notes.append("nothing is held out: too few prompts; raise data.split or give data.val_path")
        if n_long := counts["train"].dropped["too_long"]:
            what = f"{n_long:,} of {counts['train'].read:,} prompts have more than {self._max_tokens:,} tokens"
            warnings.append(f"{what} and are left out; the longest has {counts['train'].longest:,}")
        return {
            **total(counts.values()).as_json(),
            "mask_method": self._renderer.method,
            "template_hash": self._renderer.template_hash,
            "max_prompt_tokens": self._max_tokens,
            "columns": list(self._columns),
            "sources": {side: {"path": paths[side], **counts[side].as_json()} for side in used},
            "warnings": warnings,
            "notes": notes,
        }


def not_asked(more: str) -> str:
    """Return why a row with `more` than a question does not fit two-turn episodes: they ask only a question."""
    return f"has {more}, but task mode score asks the words of the last turn alone"


def _fix_long(cfg: RunConfig) -> str:
    if cfg.task.turns == 2:
        return "raise model.max_seq_len, or lower score.max_new_tokens or score.max_hint_tokens"
    return "raise grpo.max_prompt_length or model.max_seq_len, or lower grpo.max_completion_length"
