"""The sections about rows: `data`, where they are and what happens to unusual ones, and `eval`.

Rows are read in `sftplay.data`; rules between keys are in `rules.data`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sftplay.config.schema.section import Auto, Positive, Section, Share, UserPath
from sftplay.places import cache_root

Metric = Literal["exact_match", "rouge_l", "chrf"]
Layout = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "system_user_assistant",
    "prompt_completion",
    "question_answer",
    "mbpp",
    "humaneval",
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
"""What `data.columns` may map; `data.layouts` reads rows by these names."""


class DataConfig(Section):
    """Where the rows are and what happens to unusual ones."""

    train_path: UserPath | None = None
    """Training rows: a file (jsonl, json, csv, tsv, parquet; all but parquet also as .gz), a folder of such files, or
    the hub name of a dataset. Required, unless datasets names the sources of a mixture."""

    val_path: UserPath | None = None
    """Held-out rows, in the same formats. None splits them off the training rows, see split."""

    test_path: UserPath | None = None
    """Rows for `eval --split test`, never seen in training."""

    format: Layout | Auto = "auto"
    """Layout of a row. auto finds it by the keys of each row."""

    columns: dict[Column, str] = Field(default_factory=dict)
    """Column names of your file where they differ, as field: column (`{question: frage}`). A field that is not listed
    keeps its own name."""

    encoding: str = "auto"
    """Encoding of text files, by its name in Python (cp1252, shift_jis). auto: UTF-16 or UTF-32 if it is detected, else
    UTF-8. A byte order mark always decides."""

    delimiter: str = "auto"
    """The one character between the cells of a csv or tsv file. auto finds it in the header."""

    system: str | None = None
    """System prompt for every chat that has none of its own, in training, eval and infer; `make style` writes it. None
    adds none."""

    split: Share | None = None
    """Share of the training rows that is held out when there is no val_path. A hash of the prompt chooses them, so the
    same prompt is always on the same side. None means 0.05; 0 holds out nothing."""

    template: UserPath = "auto"
    """Chat template: auto for the tokenizer's own, chatml for plain ChatML, else the path of a Jinja file."""

    on_bad_row: Literal["error", "skip"] = "error"
    """What happens to a row that cannot be read. error: stop with exit code 4. skip: leave it out, count it, and list
    it with file and line."""

    too_long: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to a row longer than max_seq_len. truncate: cut its end; where that would lose more than half of
    what the rows teach, only if it is written down. drop: leave it out. error: stop with exit code 4. In task mode grpo
    it is about prompts, which are never cut: truncate leaves them out too, see grpo.max_prompt_length."""

    duplicates: Literal["keep", "drop"] = "keep"
    """What happens to a row that equals an earlier one, or differs only in white space, case or Unicode normalisation.
    keep: train on it again. drop: leave it out. Both are counted."""

    contamination: Literal["error", "drop"] = "error"
    """What happens to a training row that is also in val_path or test_path, compared in the same way, or that belongs
    to the published test problems of MBPP or HumanEval. error: stop with exit code 4. drop: leave it out of
    training."""

    processed_dir: UserPath = str(cache_root() / "processed")
    """Folder of the tokenised rows, which later runs use again; safe to delete."""


class EvalConfig(Section):
    """Evaluation of a model on the held-out rows."""

    before: bool = False
    """Evaluate the untrained model when the run starts."""

    after: bool = False
    """Evaluate the result when the run ends."""

    limit: Positive | None = 200
    """Maximum number of prompts to answer; the loss always uses every held-out row. None means all."""

    max_new_tokens: Positive = 128
    """Maximum length of an answer in tokens."""

    batch_size: Positive = 16
    """Number of prompts that are answered at the same time."""

    metrics: list[Metric] = Field(default=["exact_match"], min_length=1)
    """Metrics that compare an answer with its reference, without surrounding white space."""

    stride: Positive | None = None
    """Tokens by which the window slides over held-out documents (task modes cpt and cpt_mixed); the window is a block.
    Smaller gives each token more text before it, and takes longer. None means half the window."""
