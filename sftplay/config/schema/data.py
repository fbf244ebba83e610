"""The sections about rows: `data`, where they are and what happens to the awkward ones, and `eval`.

Reading a row is `data.formats`' business; rules between keys are in `data_rules`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sftplay.config.schema.section import Auto, Positive, Section, Share

Metric = Literal["exact_match", "rouge_l", "chrf"]
Layout = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "system_user_assistant",
    "prompt_completion",
    "question_answer",
    "text",
]
Column = Literal[
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "user",
    "assistant",
    "prompt",
    "completion",
    "question",
    "answer",
    "text",
    "tools",
    "history",
]
"""What `data.columns` may map; `data.formats` reads rows by these names."""


class DataConfig(Section):
    """Where the rows are and what happens to the awkward ones."""

    train_path: str
    """Rows to learn: a file (jsonl, json, csv, tsv, parquet; the text ones also as .gz), a folder of such files, or a
    data set's hub name."""

    val_path: str | None = None
    """Held-out rows, same formats. None splits them off the training rows, see split."""

    test_path: str | None = None
    """Rows for `eval --split test`, never seen in training."""

    format: Layout | Auto = "auto"
    """Layout of a row. auto looks at each row's keys."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Names that differ in your file, as field: column (`{question: frage}`). A field that is not listed keeps its own
    name."""

    encoding: str = "auto"
    """Encoding of text files by Python's name for it (cp1252, shift_jis). auto takes UTF-8, or UTF-16 and UTF-32 where
    they show. A byte order mark is always believed."""

    delimiter: str = "auto"
    """The one character between the cells of a csv or tsv file. auto finds it in the header."""

    system: str | None = None
    """System prompt of every chat that has none of its own, in training, eval and infer; `make style` writes it. None
    adds none."""

    split: Share | None = None
    """Share of the training rows held out when there is no val_path, chosen by a hash of the prompt, so that the
    same prompt is always on the same side. None means 0.05; 0 holds out nothing."""

    template: str = "auto"
    """Chat template: auto takes the tokenizer's own, chatml the plain ChatML, else the path of a Jinja file."""

    on_bad_row: Literal["error", "skip"] = "error"
    """An unreadable row: stop with exit code 4, or leave it out, count it and list it with file and line."""

    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """A row longer than max_seq_len: cut its end, leave it out, or stop with exit code 4."""

    duplicates: Literal["keep", "drop"] = "keep"
    """A row equal to an earlier one, or differing only in white space, case or Unicode's spelling: train on it again,
    or leave it out. Both are counted."""

    leaks: Literal["error", "drop"] = "error"
    """A training row that also stands in val_path or test_path, compared in the same way: stop with exit code 4, or
    leave it out of training."""

    processed_dir: str = ".cache/processed"
    """Folder of the tokenised rows, kept from run to run; safe to delete."""


class EvalConfig(Section):
    """Measuring a model on the held-out rows."""

    before: bool = False
    """Measure the untrained model when the run starts."""

    after: bool = False
    """Measure the result when the run ends."""

    limit: Positive | None = 200
    """Most prompts answered; the loss always uses every held-out row. None means all."""

    max_new_tokens: Positive = 128
    """Longest answer in tokens."""

    batch_size: Positive = 16
    """Prompts answered side by side."""

    metrics: list[Metric] = Field(default=["exact_match"], min_length=1)
    """What answers are compared by, with surrounding white space removed."""
