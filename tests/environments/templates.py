"""Tokenizers of letters with the chat templates of known families, for tests of turns."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import CHATML

FOLDER = Path(trl.__file__).parent / "chat_templates"
CHATML_TOKENS = ("<|im_end|>", "<|im_start|>")
LLAMA_TOKENS = (
    "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>",
)  # fmt: skip
GEMMA_TOKENS = (
    "<turn|>", "<bos>", "<|turn>", "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|tool_call>",
    "<tool_call|>", '<|"|>', "<|tool>", "<tool|>",
)  # fmt: skip

SPECIAL = {"llama3_1": LLAMA_TOKENS, "llama3": LLAMA_TOKENS, "gemma4": GEMMA_TOKENS}
"""The special tokens of a family, first the one that ends a turn. All others have ChatML's."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Computes",
            "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "What"}}},
        },
    }
    for name in ("compute", "look")
]


def read_template(name: str) -> str:
    """The text of a template: the kit's ChatML, or a file of TRL, which has those of the families."""
    return CHATML if name == "chatml" else (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def make_tokenizer(name: str) -> Any:
    """A tokenizer with a token for each byte, the family's special tokens, and its chat template."""
    end, *others = SPECIAL.get(name, CHATML_TOKENS)
    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    # A few joined letters, so that texts that are cut at another place have other tokens.
    pairs = [("o", "n"), (".", "Ċ"), ("l", "l"), ("e", "r")]
    vocabulary = {**letters, **{a + b: len(letters) + n for n, (a, b) in enumerate(pairs)}}
    inner = Tokenizer(models.BPE(vocabulary, pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    begin = next((token for token in others if token in ("<bos>", "<|begin_of_text|>")), None)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=end, pad_token="<pad>", bos_token=begin, additional_special_tokens=others,
        chat_template=read_template(name),
    )  # fmt: skip


@cache
def make_renderer(name: str) -> Renderer:
    """The kit's renderer of a family."""
    tokenizer = make_tokenizer(name)
    return Renderer.prove(tokenizer, tokenizer.chat_template, samples=[])


def whole_ids(name: str, turns: list[dict[str, Any]], *, tools: bool) -> list[int]:
    """The ids of a whole dialogue with the header of the next answer, by transformers itself."""
    return list(
        make_tokenizer(name).apply_chat_template(
            turns, tools=TOOLS if tools else None, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


TOOLS_TEXT = json.dumps(TOOLS)
