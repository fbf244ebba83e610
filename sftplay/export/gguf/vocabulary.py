"""A fast tokenizer as llama.cpp's: tokens with kinds, merges or scores, and the name of the rule that splits texts.

llama.cpp takes no regular expression from a file: it knows some rules by name. A rule of another tokenizer is written
as SentencePiece's kind of vocabulary, which splits nothing; `parity/gguf_check.py` counts what that changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf
from gguf import TokenType
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from sftplay.errors import ConfigError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_BYTES, _OWN_BYTES = "ByteLevel", "ByteLevel with its own rule"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN35 = r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
RULES: dict[tuple[str, ...], str] = {
    (_OWN_BYTES,): "gpt-2",
    ("Digits", _OWN_BYTES): "smollm",
    (_LLAMA3, _BYTES): "llama-bpe",
    (_LLAMA3.replace("{1,3}", ""), _BYTES): "qwen2",
    (_CONTRACTIONS + _QWEN35 + _TAIL, _BYTES): "qwen35",
    (rf"{_CASED}|{_UPPER}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}", _BYTES): "tekken",
    (
        rf"{_CASED}{_CONTRACTIONS}?|{_UPPER}{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
        _BYTES,
    ): "gpt-4o",
}
"""Steps of a tokenizer.json's pre_tokenizer -> llama.cpp's name of the rule (`src/llama-vocab.cpp`)."""

SPACE = "\u2581"
"""SentencePiece's character for a space."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a GGUF file says of its tokens."""

    model: str
    """`gpt2`: byte-level BPE by merges; `llama`: SentencePiece's BPE, by scores."""

    pre: str
    tokens: Sequence[str]
    kinds: Sequence[TokenType]
    merges: Sequence[str] = ()
    scores: Sequence[float] = ()
    adds_space: bool = False
    """A space goes before the text."""

    approximates: str = ""
    """The rule that has no name in llama.cpp; empty where the vocabulary is written as it is."""

    special: Mapping[str, int]
    """bos, eos, unk, pad and eot with their ids, where there are any."""

    adds_bos: bool
    adds_eos: bool
    chat_template: str | None


def describe_vocabulary(tokenizer: Any, *, rows: int, end_ids: Sequence[int] = ()) -> Vocabulary:
    """Return the vocabulary of `rows` ids: as many as the model's embedding has rows; ids without a token are unused.

    `end_ids` end an answer: the one that is not the tokenizer's own end becomes llama.cpp's end of turn. Raise
    ConfigError for a tokenizer that llama.cpp has no model for.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise _refusal(f"{type(tokenizer).__name__} is not written as GGUF, tokenizers with a tokenizer.json are")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = content["model"], {int(one["id"]): one for one in content["added_tokens"]}
    if model["type"] != "BPE":
        raise _refusal(f"a tokenizer of kind {model['type']} is not written as GGUF, BPE is")
    texts = {int(number): text for text, number in model["vocab"].items()} | {
        number: one["content"] for number, one in added.items()
    }
    if max(texts) >= rows:
        raise _refusal(f"it has the token {max(texts)}, and the model has {rows} rows of embeddings")
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ", 1)) for pair in model["merges"]]
    kinds = {number: TokenType.CONTROL if one["special"] else TokenType.USER_DEFINED for number, one in added.items()}
    rule = _name_steps(content["pre_tokenizer"])
    is_sentencepiece = bool(model.get("byte_fallback"))
    approximates = ""
    if is_sentencepiece:
        details = _sentencepiece_details(content, texts, kinds, merges)
        approximates = details.pop("approximates")
    elif rule in RULES:
        details = {"model": "gpt2", "pre": RULES[rule], "merges": [" ".join(pair) for pair in merges]}
    elif rule[-1:] == (_BYTES,) and len(rule) == 2:
        details, approximates = _unsplit_details(texts, kinds, merges, rule=rule[0]), rule[0]
    else:
        raise _refusal(f"llama.cpp knows no rule that splits texts like {content['pre_tokenizer']}")
    tokens = [details.get("texts", texts).get(number, f"[PAD{number}]") for number in range(rows)]
    details.pop("texts", None)
    if "scores" in details:
        details["scores"] += [0.0] * (rows - len(details["scores"]))
    kind_list = [kinds.get(number, TokenType.NORMAL if number in texts else TokenType.UNUSED) for number in range(rows)]
    return Vocabulary(
        tokens=tokens, kinds=kind_list, approximates=approximates, special=_find_special(tokenizer, end_ids),
        adds_bos=_adds(tokenizer, tokenizer.bos_token_id, 0) and _template_writes_bos(tokenizer),
        adds_eos=_adds(tokenizer, tokenizer.eos_token_id, -1),
        chat_template=tokenizer.chat_template, **details,
    )  # fmt: skip


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Write the vocabulary's keys."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.kinds))
    if vocabulary.model == "llama":
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(vocabulary.adds_space)
        writer.add_remove_extra_whitespaces(False)
    else:
        writer.add_token_merges(list(vocabulary.merges))
    for name, number in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_add_eos_token(vocabulary.adds_eos)
    if vocabulary.chat_template:
        writer.add_chat_template(vocabulary.chat_template)


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where="tokenizer.json", fix="name a checkout of llama.cpp: LLAMA_CPP=folder")


def _name_steps(step: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the steps of a pre_tokenizer: a regular expression, or the name of its kind."""
    if step is None:
        return ()
    if step["type"] == "Sequence":
        return tuple(name for inner in step["pretokenizers"] for name in _name_steps(inner))
    pattern = step.get("pattern", {}).get("Regex")
    if step["type"] == "Split" and pattern and step["behavior"] == "Isolated" and not step["invert"]:
        return (pattern,)
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return (_OWN_BYTES if step["use_regex"] else _BYTES,)
    if step["type"] == "Digits" and step["individual_digits"]:
        return ("Digits",)
    return (json.dumps(step),)


def _rank_scores(merges: Sequence[tuple[str, ...]]) -> dict[str, float]:
    """Return text -> score: SentencePiece joins first what has the highest one."""
    scores: dict[str, float] = {}
    for rank, pair in enumerate(merges):
        scores.setdefault("".join(pair), -float(rank + 1))
    return scores


def _sentencepiece_details(
    content: Mapping[str, Any], texts: Mapping[int, str], kinds: dict[int, TokenType], merges: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """Return the fields of a SentencePiece vocabulary (Llama 2, Mistral, Gemma), and set the kinds of its tokens."""
    normalizers = content["normalizer"] or {}
    steps = normalizers.get("normalizers", [normalizers] if normalizers else [])
    prepends = any(step["type"] == "Prepend" for step in steps)
    before = content["pre_tokenizer"] or {}
    approximates = ""
    is_no_op = before.get("type") == "Split" and before.get("pattern") == {"String": " "}  # all are replaced by now
    if before and not is_no_op and before.get("type") != "Metaspace":
        raise _refusal(f"llama.cpp has no such pre_tokenizer: {json.dumps(before)}")
    if before.get("type") == "Metaspace":
        scheme = before.get("prepend_scheme", "always")
        prepends = scheme != "never"
        approximates = "a space before the first word alone" if scheme == "first" else ""
    elif not any(step == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE} for step in steps):
        raise _refusal(f"llama.cpp has no such normalizer: {json.dumps(content['normalizer'])}")
    scores = _rank_scores(merges)
    for number, text in texts.items():
        if number in kinds:
            if text == content["model"].get("unk_token"):
                kinds[number] = TokenType.UNKNOWN
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            kinds[number] = TokenType.BYTE
    last = -float(len(merges) + 1)
    by_id = [scores.get(texts.get(number, ""), last) for number in range(max(texts) + 1)]
    return {"model": "llama", "pre": "default", "scores": by_id, "adds_space": prepends, "approximates": approximates}


def _unsplit_details(
    texts: Mapping[int, str], kinds: dict[int, TokenType], merges: Sequence[tuple[str, ...]], *, rule: str
) -> dict[str, Any]:
    """Return a byte-level vocabulary as SentencePiece's, for a rule that llama.cpp has no name for.

    No token crosses the rule's borders, so most texts are joined alike without it. Digits in pairs from the left are
    pairs of one score: the leftmost is joined first.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    value = {letter: byte for byte, letter in bytes_to_unicode().items()}
    scores = _rank_scores(merges)
    has_pairs = r"\p{N}{1,2}" in rule
    written, by_id = {}, []
    for number in range(max(texts) + 1):
        text = texts.get(number, "")
        if number in kinds or not text:
            written[number] = text or f"[PAD{number}]"
            by_id.append(0.0)
            continue
        raw = bytes(value[letter] for letter in text)
        try:
            if len(raw) > 1 and text not in scores:
                raise UnicodeDecodeError("utf-8", raw, 0, 1, "no merge makes it")
            written[number] = raw.decode().replace(" ", SPACE)
        except UnicodeDecodeError:
            written[number] = f"<0x{raw[0]:02X}>" if len(raw) == 1 else f"<{raw.hex()}>"
            kinds[number] = TokenType.BYTE if len(raw) == 1 else TokenType.UNUSED
        is_pair = has_pairs and len(raw) == 2 and raw.isdigit()
        by_id.append(0.0 if is_pair else scores.get(text, -float(len(merges) + 1)))
    return {"model": "llama", "pre": "default", "scores": by_id, "texts": written}


def _find_special(tokenizer: Any, end_ids: Sequence[int]) -> dict[str, int]:
    found = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    other = [number for number in end_ids if number != tokenizer.eos_token_id]
    found["eot"] = other[0] if other else None
    return {name: number for name, number in found.items() if number is not None}


def _adds(tokenizer: Any, special: int | None, place: int) -> bool:
    """Tell whether the tokenizer puts this id around a plain text."""
    ids = tokenizer("a").input_ids
    return special is not None and len(ids) > 1 and ids[place] == special


def _template_writes_bos(tokenizer: Any) -> bool:
    """Tell whether prompts of the chat template begin with BOS; True where there is no template.

    llama.cpp and Ollama put it before every prompt or before none.
    """
    if not tokenizer.chat_template:
        return True
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError:
        return True
    return str(text).startswith(tokenizer.bos_token)
