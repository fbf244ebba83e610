"""Answer every row of a file in batches. A batch is on the disk as soon as it is answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.atomic import whole_file
from sftplay.data.prompts import Prompt
from sftplay.errors import DataError, RunError
from sftplay.generate.generate import Generator, answer_batch
from sftplay.generate.partial_answers import FIX_SPACE, PartialAnswers
from sftplay.generate.prompts import PromptFile

PromptBatch = list[tuple[Prompt, list[int]]]

RowAnswer = str | dict[str, str]
"""The answer of a row: its `response`, or several columns by name."""


def check_lengths(questions: PromptFile, renderer: Any, *, generator: Generator) -> None:
    """Check before any row is answered that each can be asked and has room; raise DataError with the place of one."""
    context, answer = generator.context_tokens, generator.max_new_tokens
    for question in questions:
        n_tokens = len(question.prompt(renderer))
        if context is not None and n_tokens + answer > context:
            what = f"has {n_tokens} tokens and leaves no room for an answer of {answer}: the model reads {context}"
            fix = "shorten the row" + (", or the answers: MAX_NEW_TOKENS=" if n_tokens < context else "")
            raise DataError(what, where=str(question.source), fix=fix)


def make_answerer(generator: Generator) -> Callable[[PromptBatch], list[RowAnswer]]:
    """Return a function that answers the rows of a batch."""

    def answer(batch: PromptBatch) -> list[RowAnswer]:
        return [*answer_batch(generator, [prompt for _, prompt in batch], rows=[row.number for row, _ in batch])]

    return answer


def answer_rest(
    answer_rows: Callable[[PromptBatch], list[RowAnswer]],
    renderer: Any,
    *,
    questions: PromptFile,
    batch_size: int,
    partial: PartialAnswers,
    total: int,
) -> None:
    """Answer the rows, `total` in all, that have no answer in `partial` yet, and add the answers to it.

    The batches are the same every time, so that a resumed run gives the answers it would have given.
    """
    skipped = partial.n_batches
    log.progress(partial.n_answers, total, what="rows answered", tag="infer")  # the first batch counts for the rate
    for window in questions.windows(batch_size):
        n_batches = -(-len(window) // batch_size)
        if skipped >= n_batches:
            skipped -= n_batches
            continue
        pairs = [(question, question.prompt(renderer)) for question in window]
        pairs.sort(key=lambda pair: -len(pair[1]))  # a batch that is too large for the memory fails at once
        for start in range(skipped * batch_size, len(pairs), batch_size):
            batch = pairs[start : start + batch_size]
            partial.append(list(zip([question.number for question, _ in batch], answer_rows(batch), strict=True)))
            log.progress(partial.n_answers, total, what="rows answered", tag="infer")
        skipped = 0


def write_answered(questions: PromptFile, partial: PartialAnswers, *, out: Path, batch_size: int) -> None:
    """Write every row with its answer, in order; `out` appears whole, and `partial` is removed. Raise RunError where it
    cannot be written.
    """
    try:
        with whole_file(out) as scratch, scratch.open("w", encoding="utf-8") as handle:
            batches = partial.answers() if partial.n_batches else iter(())
            for window in questions.windows(batch_size):
                answers = {n: answer for _ in range(-(-len(window) // batch_size)) for n, answer in next(batches)}
                for question in window:
                    answer = answers[question.number]
                    row = {**question.row, **({"response": answer} if isinstance(answer, str) else answer)}
                    # A parquet file can hold values that JSON lacks, such as dates.
                    text = json.dumps(row, ensure_ascii=False, default=str)
                    try:
                        text.encode()
                    except UnicodeEncodeError:  # JSON can hold half surrogate pairs, UTF-8 cannot
                        text = json.dumps(row, default=str)
                    handle.write(f"{text}\n")
    except OSError as error:
        what = f"cannot be written ({error.strerror}); the answers are kept in {partial.path}"
        raise RunError(what, where=str(out), fix=FIX_SPACE) from error
    partial.remove()
