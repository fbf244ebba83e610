"""What is to be learned, by transformers alone: prefix rendering and offsets; and chats to try it on."""

from __future__ import annotations

import importlib.resources
import re
from typing import Any

from sftplay.data.records import Chat, Message, Source

Turns = list[dict[str, Any]]

CONTROL = re.compile(r"<\|[A-Za-z_\"]+\|?>|<[a-z_]+\|>|<｜[^｜>]*｜>|<(?:start|end)_of_(?:turn|utterance)>|\[/?INST\]")
"""What looks like a control token in the chat templates that trl ships."""


def shipped_templates() -> dict[str, str]:
    """The chat templates inside the installed trl, by name."""
    folder = importlib.resources.files("trl") / "chat_templates"
    files = [path for path in folder.iterdir() if path.name.endswith(".jinja")]
    return {path.name.removesuffix(".jinja"): path.read_text(encoding="utf-8") for path in files}


def make_chat(*texts: str, system: str = "", tools: str = "") -> Chat:
    """A chat in which user and assistant speak by turns."""
    turns = [Message("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)]
    lead = [Message("system", system)] if system else []
    return Chat((*lead, *turns), Source("rows.jsonl", 1), tools=tools)


def decode_learned(tokenizer: Any, *examples: Any) -> str:
    """The text that is learned in all of the rendered examples."""
    return "".join(tokenizer.decode([id for id in example.labels if id != -100]) for example in examples)


def render_text(tokenizer: Any, template: str, turns: Turns, **options: Any) -> str:
    """The turns as transformers writes them."""
    return str(tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options))


def learned_span(tokenizer: Any, template: str, turns: Turns, **how: Any) -> tuple[int, int]:
    """Where the last turn lies: from the end of the prompt that asks for it to the end of the text.

    `unlearned` is what a template writes after the very last turn only and no model has to learn; `closing` is what
    ends a turn of a template that writes no end token.
    """
    tools = how.get("tools")
    begin = len(render_text(tokenizer, template, turns[:-1], add_generation_prompt=True, tools=tools))
    text = render_text(tokenizer, template, turns, tools=tools).rstrip().removesuffix(how.get("unlearned", "")).rstrip()
    return begin, len(text + how.get("closing", ""))


def reference(tokenizer: Any, template: str, turns: Turns, **how: Any) -> tuple[list[int], list[int]]:
    """Ids and labels when all assistant turns are learned, or with `last_only` only the last."""
    text = render_text(tokenizer, template, turns, tools=how.get("tools")) + how.get("closing", "")
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    answers = answers[-1:] if how.get("last_only") else answers
    spans = [learned_span(tokenizer, template, turns[: index + 1], **how) for index in answers]
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if any(start <= left and right <= end for start, end in spans) else -100
        for token, (left, right) in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]
    return found["input_ids"], labels


def one_a_turn(tokenizer: Any, template: str, turns: Turns, **how: Any) -> list[tuple[list[int], list[int]]]:
    """The same as one example for each assistant turn, with everything before it."""
    ends = [index + 1 for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    return [reference(tokenizer, template, turns[:end], last_only=True, **how) for end in ends]
