"""The prompts that a run and an engine are both asked: held-out ones of the run, or rows of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.layouts import read_layout_options
from sftplay.data.mixture.load import load_mixture
from sftplay.data.pipeline import load_examples
from sftplay.data.prompts import Prompt
from sftplay.data.read import read_dialect
from sftplay.data.records import Message, Source
from sftplay.errors import DataError
from sftplay.evaluate.evaluate import evenly_spaced
from sftplay.export.merge_check import QUESTIONS
from sftplay.generate.prompts import PromptFile
from sftplay.launch.run_folder import RunFolder
from sftplay.parity.engine import Question

TEXT_TOKENS = 128
"""Tokens of a held-out document that an engine is asked to go on with."""


def choose_questions(
    cfg: RunConfig, folder: RunFolder, renderer: Any, *, file: str, count: int, room: int | None,
    falls_back: bool = False,
) -> tuple[list[Question], str]:  # fmt: skip
    """Return at most `count` questions, evenly spaced over the rows, and where they come from.

    A row is left out, and that is said, where plain transformers with the run's own tokenizer gives other ids than
    training had, since every plain client would (a row that types control tokens); and where it has more than `room`
    tokens, None for any number. Where none is left and `falls_back`, the kit's own questions are asked.

    Raises:
        DataError: no row is left to ask.
    """
    prompts, origin = _read_prompts(cfg, folder, renderer, file=file)
    asked, odd, long = [], 0, 0
    for prompt in prompts:
        question = _to_question(prompt, renderer)
        if question is None:
            odd += 1
        elif room is not None and len(question.prompt_ids) > room:
            long += 1
        else:
            asked.append(question)
    if odd:
        what = "types control tokens, or is refused by the template" if odd == 1 else "type control tokens"
        log.say(f"note: {odd:,} of {len(prompts):,} {origin} rows are not asked ({what})", "parity")
    if long:
        log.say(f"note: {long:,} of {len(prompts):,} {origin} rows are longer than the model reads", "parity")
    if not asked and falls_back:
        built_in = [_to_question(prompt, renderer) for prompt in _built_in(cfg, renderer)]
        asked, origin = [question for question in built_in if question is not None], "built-in"
    if not asked:
        fix = "name a file with other rows: IN=rows.jsonl"
        raise DataError(f"none of {len(prompts):,} {origin} rows can be asked", where=file or str(folder.path), fix=fix)
    return evenly_spaced(asked, count), origin


def _read_prompts(cfg: RunConfig, folder: RunFolder, renderer: Any, *, file: str) -> tuple[list[Prompt], str]:
    if file:
        return list(PromptFile(file, read_layout_options(cfg.data), read_dialect(cfg.data))), file
    try:
        if prompts := list(_held_out(cfg, folder, renderer)):
            return prompts, "held-out"
    except DataError as error:
        log.say(f"note: the run's rows cannot be read any more ({error.what})", "parity")
    return _built_in(cfg, renderer), "built-in"


def _built_in(cfg: RunConfig, renderer: Any) -> list[Prompt]:
    """Return the kit's own questions, behind the run's system prompt."""
    place = Source("built-in", 1)
    lead = (Message("system", cfg.data.system),) if cfg.data.system and renderer.template else ()
    return [
        Prompt(n, place, {}, (*lead, Message("user", text)), "") if renderer.template
        else Prompt(n, place, {}, (), "", text)
        for n, text in enumerate(QUESTIONS)
    ]  # fmt: skip


def _held_out(cfg: RunConfig, folder: RunFolder, renderer: Any) -> Iterator[Prompt]:
    """Yield the held-out rows as prompts: chats without their last turn, texts by their beginning."""
    tokenizer, template = renderer.tokenizer, renderer.template
    if cfg.task.learns_from_rewards:
        from sftplay.data.load_prompts import load_prompts

        asked = load_prompts(cfg, tokenizer, renderer_template=template, tools="").held_out
        for row in (asked[n] for n in range(len(asked))):
            messages = (Message("user", row.question),)
            lead = (Message("system", cfg.data.system),) if cfg.data.system else ()
            yield Prompt(row.row, Source("held-out", row.row + 1), {}, (*lead, *messages), "")
        return
    chats: Sequence[Any] = ()
    if cfg.learns_documents:
        held_out = load_mixture(cfg, tokenizer, renderer_template=template).held_out
        texts = [row for rows in held_out.values() for row in evenly_spaced(rows, 64)]
    else:
        checked = folder.read_json("data_report.json").get("files")
        examples = load_examples(cfg, tokenizer, renderer_template=template, checked=checked)
        chats, texts = examples.held_out_chats, [] if examples.held_out is None else examples.held_out
    for n, chat in enumerate(chats):
        yield Prompt(n, chat.source, {}, chat.prompt, chat.tools)
    for n, row in enumerate([] if chats else texts):
        ids = list(row["input_ids"])
        text = tokenizer.decode(ids[: max(1, min(TEXT_TOKENS, len(ids) // 2))], skip_special_tokens=True)
        yield Prompt(n, Source("held-out", n + 1), {}, (), "", text)


def _to_question(prompt: Prompt, renderer: Any) -> Question | None:
    """Return the prompt as a client sends it; None where a plain client's would have other ids than training's."""
    tokenizer = renderer.tokenizer
    try:
        ids = prompt.prompt(renderer)
        text = prompt.beginning or renderer.prompt_text(prompt.messages, prompt.tools)
    except DataError:
        return None
    messages = None if prompt.beginning else [message.as_json() for message in prompt.messages]
    question = Question(prompt.number, messages, text, ids, json.loads(prompt.tools or "[]"))
    return question if ids and encode(tokenizer, question) == ids else None


def encode(tokenizer: Any, question: Question) -> list[int]:
    """Return the prompt's ids as plain transformers with this tokenizer and its chat template makes them."""
    if question.messages is None:
        return list(tokenizer(question.text)["input_ids"])
    return list(
        tokenizer.apply_chat_template(
            list(question.messages), tools=list(question.tools) or None, add_generation_prompt=True, tokenize=True,
            return_dict=False,
        )
    )  # fmt: skip
