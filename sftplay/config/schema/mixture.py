"""The sections about continued pre-training: `datasets`, the sources of a mixture, and `cpt`, how they become blocks.

Rules between keys are in `rules.cpt`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sftplay.config.schema.section import NotNegative, Positive, Section, Share, UserPath

SourceType = Literal["cpt", "chat"]


class DatasetConfig(Section):
    """One source of a mixture. An entry is named on the command line by its name or its number, from 0:
    `datasets.chat.weight=0`, `datasets.1.weight=0`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]
    """Name of the source in logs, metrics and reports: letters, digits, `_`, `.` and `-`. Each source has its own."""

    path: UserPath
    """Rows of the source: a file (jsonl, json, csv, tsv, parquet; all but parquet also as .gz), a folder of such files,
    or the hub name of a dataset."""

    type: SourceType
    """cpt: documents, every token is learned. chat: chats, learned and masked exactly as task_mode sft does it."""

    weight: NotNegative = 1.0
    """Share of this source in what is trained on, counted as cpt.weights_of says. Weights are divided by their sum. 0:
    the source is not trained on, only measured."""

    val_path: UserPath | None = None
    """Held-out rows of the source. None splits them off its rows, see split."""

    split: Share | None = None
    """Share of the source's rows that is held out when it has no val_path; a document is held out as a whole. None
    means data.split."""


class CptConfig(Section):
    """Continued pre-training: documents of tokens, packed into full blocks."""

    block_size: Annotated[int, Field(ge=8)] | None = None
    """Tokens of a block, which is the row of this task. None means model.max_seq_len."""

    cross_document: bool = False
    """Let tokens attend to the documents before theirs in a block, as the classical concatenation does. false: each
    document is computed as if it stood alone; nothing is learned from unrelated text, and packing changes no loss."""

    weights_of: Literal["trainable_tokens", "examples"] = "trainable_tokens"
    """What datasets.weight is a share of. trainable_tokens: tokens that are learned. examples: documents and chats."""

    on_source_end: Literal["repeat", "stop"] = "repeat"
    """What happens when a source has been read once and the run goes on. repeat: read it again in a new order. stop:
    the run ends."""

    streaming: bool = False
    """Read and tokenise the sources while training reads them, not before. The blocks are the same. Needs
    train.max_steps or train_tokens, and no split of held-out rows."""

    train_tokens: Positive | None = None
    """Tokens to train on; the number of steps follows from it. None: train.max_steps or train.epochs decides."""
