"""Write a commented config for a data file: survey its rows, choose the task and the layout, measure lengths."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sftplay.config.commented import join_sections, print_on_one_line, write_sections
from sftplay.config.load import load_config
from sftplay.config.resolved import flow
from sftplay.config.run import RunConfig
from sftplay.config.section import Section
from sftplay.data.files import FIX_ROW, list_files, listed
from sftplay.data.layouts import LayoutOptions, detect_layout, read_layout_options, to_record
from sftplay.data.read import read_dialect, read_raw, read_rows
from sftplay.data.records import Chat, Record, Refused, Source
from sftplay.errors import ConfigErrors, DataError, MachineError
from sftplay.machine.probe import Machine
from sftplay.model.libraries import unneeded_for_rows
from sftplay.model.start_point import resolve_names
from sftplay.plan.forecast import RowLengths
from sftplay.plan.report import estimate_workload
from sftplay.plan.sizing import size_run
from sftplay.runs.inputs import check_model, known_shape
from sftplay.startup import leave_out
from sftplay.units import format_bytes, format_seconds, plural

MOST_TOKENS = 4096
"""Longest limit that is proposed; the memory of a row grows with it."""

NEXT = {"validate": "is it right?", "inspect": "what is learned of a row", "plan": "does it fit, how long does it take",
        "train": "then eval, infer, infer-batch and report"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The text of a config and the figures it rests on."""

    text: str
    model: str
    max_seq_len: int
    n_rows: int
    values: Mapping[str, tuple[Any, str]]
    """Key -> what is written, and why."""


def draft_config(data: str, overrides: Sequence[str], *, machine: Machine, out: str) -> Draft:
    """Return a config that trains on `data` here. Values of `overrides` are taken as they are, whatever was found.
    Raise ConfigErrors where an override is wrong, and DataError where the rows cannot be read, or nothing tells what is
    asked in them and what answered.
    """
    values = _Values(_load(json.dumps({"model": {"name": TOY}, "data": {"train_path": data}}), overrides))
    if "model.name" in values.given:
        check_model(resolve_names(values.cfg), asks_hub=False)
    sides = {} if "data.train_path" in values.given else find_sides(data)
    for key, path in sides.items():
        values.set(key, path, why=f"by its name in {data}")
    if "task_mode" not in values.given and (found := find_task(values.cfg)):
        values.set("task_mode", found[0], why=found[1])
        if values.cfg.train.max_steps is None:
            values.set("train.epochs", 1.0, why="answers are learned by heart soon")
    survey = survey_rows(values.cfg)
    n_rows = survey.n_rows - len(survey.refused)
    values.set("data.train_path", sides.get("data.train_path", data), why=f"layout {' and '.join(survey.layouts)}")
    if survey.columns:
        values.set("data.columns", dict(survey.columns), why="guessed from the names: look at `make inspect`")
    if survey.refused:
        why = f"{plural(len(survey.refused), 'row')} cannot be read, first {survey.refused[0]}"
        values.set("data.on_bad_row", "skip", why=why[:160])
    if values.cfg.train.max_steps is None:
        values.set("train.epochs", values.cfg.train.epochs, why="passes over the rows")
    # A run of fewer than 100 steps hardly leaves its warm-up: small data gets smaller batches.
    batch = next((size for size in (32, 16) if values.cfg.train.epochs * n_rows / size >= 100), 8)
    values.set("train.effective_batch_size", batch, why=f"rows a step, of {plural(n_rows, 'row')} found")
    values.set("train.learning_rate", "auto", why="auto takes the usual peak rate of the mode")
    mode: str = values.cfg.tuning.mode
    name, reason = values.cfg.model.name, ""
    if "model.name" not in values.given:
        guess = estimate(survey.records)
        lengths = replace(guess.within(min(limit_for(guess.at(USUAL_SHARE)), MOST_TOKENS)), count=n_rows)
        wanted = values.cfg.with_values({"model.max_seq_len": limit_for(lengths.longest)}, "init")
        choice = choose_model(wanted, machine, lengths=lengths)
        name, mode, reason = choice.name, choice.mode, choice.reason
    values.set("model.name", name, why=reason)
    values.set("tuning.mode", mode, why="lora: an adapter next to a frozen base; full: all weights")
    limit, why = _find_limit(values.cfg, measure(values.cfg, survey.records), machine=machine)
    values.set("model.max_seq_len", limit, why=why)
    for key in sorted(values.given - set(values.lines)):
        values.set(key, None, why="")
    text = _write(values.lines, survey=survey, out=out)
    model = _load(text, ()).model
    return Draft(text=text, model=model.name, max_seq_len=model.max_seq_len, n_rows=n_rows, values=values.lines)


SIDES = {
    "data.train_path": ("train",),
    "data.val_path": ("val", "valid", "validation", "dev"),
    "data.test_path": ("test",),
}
"""Key -> how the name of its file begins in a folder that holds all of a data set."""


def find_sides(data: str) -> dict[str, str]:
    """Return key -> file where a folder's files are called train..., val..., test..., one of each. Else none: all its
    files are for training. Raise DataError where some are called so and it cannot be told which to train on.
    """
    if not Path(data).is_dir():
        return {}
    called: dict[str, list[str]] = {key: [] for key in SIDES}
    files = list_files(data)
    for file in files:
        word = re.match(r"[a-z]*", file.name.lower())
        for key, words in SIDES.items():
            called[key] += [str(file)] * (word is not None and word[0] in words)
    if not called["data.val_path"] and not called["data.test_path"]:
        return {}
    if sum(map(len, called.values())) < len(files) or any(len(named) > 1 for named in called.values()):
        held_out = Path([*called["data.test_path"], *called["data.val_path"]][0]).name
        what = f"holds {held_out}, which is not for training by its name, among {len(files)} files"
        raise DataError(what, where=data, fix="name the file of training rows, or a folder with nothing else")
    return {key: named[0] for key, named in called.items() if named}


class _Values:
    """The values of the new config, each with its reason; those that the user gave stay as they are."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        typed = {key for key, origin in cfg.origins.items() if origin == "command line"}
        # A list or table that was typed is one value; of a section that was typed each key is one.
        typed = {key for key in typed if not isinstance(cfg.get_value(key), Section)}
        self.given = {key for key in typed if not any(key.startswith(f"{whole}.") for whole in typed)}
        self.lines: dict[str, tuple[Any, str]] = {}

    def set(self, key: str, value: Any, *, why: str) -> None:
        """Take a value for a key that the user did not give."""
        if key in self.given:
            value, why = self.cfg.get_value(key), "as asked"
            if isinstance(value, list | tuple):
                value = [v.model_dump(exclude_unset=True) if isinstance(v, Section) else v for v in value]
        else:
            self.cfg = self.cfg.with_values({key: value}, "init")
        self.lines[key] = (value, why)


def _load(text: str, overrides: Sequence[str]) -> RunConfig:
    with tempfile.TemporaryDirectory(prefix="sftplay-init-") as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return load_config(path, overrides)
        except ConfigErrors as errors:
            for error in (errors, *errors.problems):
                error.where = error.where.replace(f"{path}:1", "init")  # the user has not written this file
            raise


def _find_limit(cfg: RunConfig, measured: Measured, *, machine: Machine) -> tuple[int, str]:
    """A limit that keeps every row whole where model and machine can, else one that keeps nearly all, and why."""
    shape = known_shape(cfg)
    most = min(MOST_TOKENS, shape.max_positions or MOST_TOKENS) if shape else MOST_TOKENS
    longest = measured.tokens[-1]
    for tokens in (longest, measured.at(USUAL_SHARE)):
        limit = min(limit_for(tokens), most)
        tried = cfg.with_values({"model.max_seq_len": limit, "train.batch_size": "auto"}, "init")
        seen = size_run(tried, machine, shape=shape).forecast if shape else None
        if limit >= tokens and (seen is None or seen.verdict == "fits"):
            break
    why, cut = f"the longest of {plural(len(measured.tokens), 'row')} has {longest:,} tokens", measured.cut(limit)
    ending = (
        "is longer than the limit and loses its end" if cut == 1 else "are longer than the limit and lose their end"
    )
    why += f"; {plural(cut, 'row')} {ending}" if cut else ""
    return limit, why + (
        " (estimated by bytes, as its tokenizer cannot be opened here)" if measured.is_estimate else ""
    )


def command_for(verb: str, config: str) -> str:
    """Return how the user starts a verb: by make, where this process was started so."""
    words = shlex.quote(config)
    return f"make {verb} CONFIG={words}" if "MAKELEVEL" in os.environ else f"sftplay {verb} --config {words}"


def _write(lines: dict[str, tuple[Any, str]], *, survey: Survey, out: str) -> str:
    rows = plural(len(survey.records), "row") if survey.n_rows <= SURVEYED_ROWS else f"the first {SURVEYED_ROWS:,} rows"
    source = print_on_one_line(str(lines["data.train_path"][0]))
    head = [
        f"# Made by `sftplay init` on {time.strftime('%Y-%m-%d')} from {rows} of {source}, for this machine.",
        "# Every other key and its default: `sftplay manual`.",
        "#",
        *(f"# {print_on_one_line(command_for(verb, out)):<42} {what}" for verb, what in NEXT.items()),
    ]
    sections = write_sections(lines)
    if "data.val_path" not in lines:
        sections["data"].append("  # val_path: held-out rows of your own; without it one prompt in twenty is held out")
    sections.setdefault("eval", ["# eval:", *(f"#   {key}: true" for key in ("before", "after"))])
    return join_sections(head, sections)


SURVEYED_ROWS = 5_000
"""Rows from the beginning that are looked at."""

QUESTIONS = ("question", "query", "prompt", "instruction", "input", "problem", "puzzle", "task", "request", "source")
ANSWERS = ("answer", "response", "completion", "output", "canonical_solution", "solution", "code", "target", "label",
           "summary", "reply")  # fmt: skip
TEXTS = ("content", "document", "article", "body", "passage")
"""Names of columns in files that no layout knows, the likeliest first."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What the first rows of a file are."""

    layouts: tuple[str, ...]
    """The layouts of its rows, the most frequent first."""

    columns: Mapping[str, str]
    """Field -> column, where the names were guessed; empty where a layout knows them."""

    records: Sequence[Record]
    refused: tuple[str, ...]
    """Place and reason of each row that cannot be read."""

    n_rows: int
    """All rows of the file, also those behind the ones that were looked at."""


def find_task(cfg: RunConfig) -> tuple[str, str] | None:
    """Return the task that most of the first rows are for, and why, where that is not fine-tuning."""
    rows = [row for _, row in islice(read_rows(cfg.rows_path, read_dialect(cfg.data)), SURVEYED_ROWS)]
    columns = Counter(
        task
        for row in rows
        if not isinstance(row, Refused)
        for task, names in TASK_COLUMNS.items()
        if all(row.get(name) is not None for name in names)
    )
    labels = [str(row.get("label")).strip().lower() for row in rows if not isinstance(row, Refused)]
    if 10 * sum(label not in VERDICTS for label in labels) > len(rows):  # classes, not verdicts
        del columns["kto"]
    task, count = columns.most_common(1)[0] if columns else ("", 0)
    return (task, f"rows have {listed(TASK_COLUMNS[task])}; see docs/preferences.md") if 2 * count > len(rows) else None


TASK_COLUMNS = {"dpo": ("chosen", "rejected"), "kto": ("prompt", "completion", "label")}
"""Task -> columns by which its rows are known."""

VERDICTS = ("true", "false", "1", "0", "1.0", "0.0", "nan", "none")
"""What stands in a column of verdicts, or in one of its gaps."""


def survey_rows(cfg: RunConfig) -> Survey:
    """Return the survey of `data.train_path`, read as the section `data` says. Raise DataError where the file cannot be
    read, has no rows, or the layout of most of its rows cannot be found.
    """
    path = cfg.rows_path
    surveyed = list(islice(read_rows(path, read_dialect(cfg.data)), SURVEYED_ROWS))
    if not surveyed:
        raise DataError("has no rows", where=path, fix="name a file with at least one row")
    reading, columns, part = read_layout_options(cfg.data), {}, cfg.task.part("rows")
    objects = [row for _, row in surveyed if not isinstance(row, Refused)]
    known = sum(detect_layout(row) is not None for row in objects)
    if not part and reading.format == "auto" and not reading.columns and 2 * known < len(objects):
        columns = _guess_columns(objects, path)
        reading = replace(reading, columns=tuple(columns.items()))
    if part:
        records, refused, layouts, fixes = _read(
            surveyed, partial(part.read_record, cfg=cfg), name=lambda _: "of pairs"
        )
    else:
        read_row = partial(to_record, reading=reading)
        records, refused, layouts, fixes = _read(surveyed, read_row, name=partial(_name_layout, reading=reading))
    if 2 * len(refused) > len(surveyed):  # the file is not what it was taken for
        reasons = "".join(f"\n  {reason}" for reason in refused[:3])
        what = f"{len(refused):,} of its first {len(surveyed):,} rows cannot be read{reasons}"
        fix = "name its layout with data.format=..., its columns with data.columns.question=... or the like"
        if 2 * len(objects) < len(surveyed) or fixes[FIX_ROW] == len(refused):  # no other layout would read them
            fix = "mend what each line names"
        elif part:  # a task that reads its own rows knows no layouts by name
            fix = "; ".join(filter(None, fixes)) or "name another file"
        raise DataError(what, where=path, fix=fix)
    n_rows = len(surveyed)
    if n_rows == SURVEYED_ROWS:  # the time that is promised is that of all rows
        n_rows = sum(1 for _ in read_raw(path, read_dialect(cfg.data)))
    return Survey(
        layouts=tuple(layout for layout, _ in layouts.most_common()), columns=columns, records=records,
        refused=tuple(refused), n_rows=n_rows,
    )  # fmt: skip


def _guess_columns(rows: Sequence[Mapping[str, Any]], path: str) -> dict[str, str]:
    """A question's and an answer's column, or one of texts, by their names. Raise DataError where no two columns have
    such names.
    """
    filled = Counter(name for row in rows for name, value in row.items() if isinstance(value, str) and value.strip())
    texts = {name for name, count in filled.items() if 2 * count > len(rows) and not name.lower().endswith("_id")}
    question, answer = (next((name for name in names if name in texts), None) for names in (QUESTIONS, ANSWERS))
    if question and answer:
        return {"question": question, "answer": answer}
    text = next((name for name in TEXTS if name in texts), None)
    if text and not question and not answer:
        return {"text": text}
    names = list(dict.fromkeys(name for row in rows[:SURVEYED_ROWS] for name in row))  # in the order of the file
    example = [name for name in names if name in texts] if len(texts) == 2 else ["ASKED", "ANSWERED"]
    words = [f"data.columns.{field}={flow(name)}" for field, name in zip(("question", "answer"), example, strict=True)]
    fix = f"say which is which: {shlex.join(words)}"
    raise DataError(f"no layout is known for its columns {listed(names)}", where=path, fix=fix)


def _read(
    rows: Sequence[tuple[Source, Any]], read_row: Callable[..., Record], *, name: Callable[[Any], str]
) -> tuple[list[Record], list[str], Counter[str], Counter[str]]:
    """The records, the reasons of the rows that cannot be read, and how many rows have a layout or need a remedy."""
    records, refused, layouts, fixes = list[Record](), list[str](), Counter[str](), Counter[str]()
    for source, row in rows:
        try:
            if isinstance(row, Refused):
                refused.append(f"{source} {row.reason}")
                continue
            records.append(read_row(row, source))
        except DataError as error:
            refused.append(f"{source} {error.what}")
            fixes[error.fix] += 1
            continue
        layouts[name(row)] += 1
    return records, refused, layouts, fixes


def _name_layout(row: Mapping[str, Any], *, reading: LayoutOptions) -> str:
    fields = {column: field for field, column in reading.columns}
    names = [fields.get(name, name) for name, value in row.items() if value is not None]
    return reading.format if reading.format != "auto" else detect_layout(names, fields.values()) or "none"


MODELS = (
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-4B-Instruct-2507",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
)
"""Instruction-tuned models that need no accepted licence (Apache 2.0), the largest first."""

TOY = "builtin:tiny"


@dataclass(frozen=True)
class Choice:
    """A model, how it is tuned, why, and how long that takes."""

    name: str
    mode: str
    reason: str
    seconds: float = 0.0


def choose_model(cfg: RunConfig, machine: Machine, *, lengths: RowLengths) -> Choice:
    """Return the largest model that fits and takes at most 8 hours, else the quickest that fits, else the toy."""
    fitting = []
    for name in MODELS:
        for mode in ("lora", "qlora") if machine.gpus else ("lora",):
            tried = cfg.with_values({"model.name": name, "tuning.mode": mode}, "init")
            sized = size_run(tried, machine, shape=known_shape(tried), lengths=lengths)
            seen = sized.forecast
            if seen is None or seen.verdict != "fits":
                continue
            work = estimate_workload(sized.cfg, seen.setting, lengths=lengths)
            time = f", about {format_seconds(work.seconds)} in all" if work.seconds is not None else ""
            sizes = f"{format_bytes(seen.peak_bytes)} of {format_bytes(seen.budget_bytes)} planned"
            fitting.append(Choice(name, mode, f"fits this machine: {sizes}{time}", work.seconds or 0.0))
            if fitting[-1].seconds <= 8 * 3600:
                return fitting[-1]
    if fitting:
        quickest = min(fitting, key=lambda choice: choice.seconds)
        return replace(quickest, reason=f"{quickest.reason}; train.max_steps makes it shorter")
    return Choice(TOY, "lora", "no model of use fits into the memory here; this one shows the way only")


USUAL_SHARE = 0.99


@dataclass(frozen=True)
class Measured:
    """Tokens of each row, ascending, before anything is cut."""

    tokens: Sequence[int]
    is_estimate: bool
    """Computed from bytes, because the tokenizer cannot be opened here."""

    def at(self, share: float) -> int:
        """Return the length that this share of the rows does not exceed."""
        return self.tokens[min(len(self.tokens) - 1, math.ceil(share * len(self.tokens)) - 1)]

    def cut(self, limit: int) -> int:
        """Count the rows that are longer than `limit`."""
        return sum(n > limit for n in self.tokens)

    def within(self, limit: int) -> RowLengths:
        """Return the lengths of the rows when they are cut at `limit`."""
        kept = [min(n, limit) for n in self.tokens]
        return RowLengths(longest=kept[-1], mean=sum(kept) / len(kept), count=len(kept))


def estimate(records: Sequence[Record]) -> Measured:
    """Return the rows' lengths by their bytes."""
    tokens = []
    for record in records:
        texts, n_turns = [record.tools if isinstance(record, Chat) else record.text], 0
        if isinstance(record, Chat):
            texts += [
                message.content + "".join(call.arguments for call in message.calls) for message in record.messages
            ]
            n_turns = len(record.messages)
        # English text has 4 to 5 UTF-8 bytes a token in a large vocabulary, code and Chinese about 3. A chat template
        # writes about 8 tokens around a turn: names, marks, line ends.
        n_bytes = len("".join(texts).encode("utf-8", "replace"))
        tokens.append(math.ceil(n_bytes / 3) + 8 * n_turns)
    return Measured(sorted(tokens), is_estimate=True)


def measure(cfg: RunConfig, records: Sequence[Record]) -> Measured:
    """Return the rows' lengths by the model's tokenizer and chat template, or by bytes where it cannot be opened."""
    leave_out(unneeded_for_rows(cfg.model))
    from sftplay.data.render.render import Renderer
    from sftplay.data.render.templates import resolve_template
    from sftplay.model.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(cfg.model)
    except MachineError:
        return estimate(records)
    has_chats = any(isinstance(record, Chat) for record in records)
    try:
        template = resolve_template(cfg.data.template, tokenizer) if has_chats or tokenizer.chat_template else None
        rendered = Renderer.prove(tokenizer, template, samples=records[:32]).render(records)
    except DataError:  # training says so with its remedy
        return estimate(records)
    lengths = sorted(len(example.input_ids) for example in rendered if not example.problem)
    return Measured(lengths, is_estimate=False) if lengths else estimate(records)


def limit_for(tokens: int) -> int:
    """Return the next round number of tokens."""
    return max(64, math.ceil(tokens / 64) * 64)
