"""Random models and small tokenizers of the families that are written as GGUF, as their makers publish them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
ROWS = 640
"""Rows of the embeddings: more than the tokenizers have tokens."""

# Of the tokenizer.json of Meta-Llama-3-8B, Qwen2-7B and Mistral-Nemo-Base-2407 on the hub.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' "
    "+ '\\n\\n' + message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% set ns = namespace(before='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.before = message['content'] + '\\n\\n' %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' + ns.before "
    "+ message['content'] + '<end_of_turn>\\n' }}{% set ns.before = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% elif message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


@cache
def read_corpus() -> tuple[str, ...]:
    files = [ROOT / "data" / "base" / name for name in ("alice.txt", "pep_0703.txt")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines(keepends=True)][:3000]
    numbers = [
        f"{number % 1000} {number % 100:02d}{number % 7}\n" for number in range(4000)
    ]  # so that digits are joined
    from sftplay.parity.gguf_check import make_texts  # it needs the extra `gguf`

    return (*lines, *numbers, *make_texts(200, seed=1))


def byte_level(
    rule: str, special: list[str], *, chat: str, bos: str = "", eos: str, composes: bool = False, ignores: bool = False
) -> Any:
    """A byte-level BPE tokenizer with the rule."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores))
    steps = [
        pre_tokenizers.Split(Regex(rule), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=560, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(read_corpus(), trainer)
    return finish(tokenizer, special, chat=chat, bos=bos, eos=eos)


def sentencepiece(special: list[str], *, chat: str, bos: str, eos: str, prepends: bool) -> Any:
    """A tokenizer as transformers makes of SentencePiece's BPE: with byte fallback, and all pairs that make a token."""
    draft = Tokenizer(models.BPE())
    draft.normalizer = normalizers.Replace(" ", "\u2581")
    draft.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581*[^\u2581]*"), behavior="isolated")
    trainer = trainers.BpeTrainer(vocab_size=330, limit_alphabet=100, show_progress=False)
    draft.train_from_iterator([text for text in read_corpus() if text.isascii()], trainer)
    pieces = sorted(draft.get_vocab(), key=draft.get_vocab().__getitem__)
    names = ["<unk>", bos, eos, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {text: number for number, text in enumerate([*names, *(piece for piece in pieces if piece not in names)])}
    merges = [
        pair
        for piece in pieces
        if len(piece) > 1
        for pair in sorted(
            ((piece[:at], piece[at:]) for at in range(1, len(piece)) if piece[:at] in vocab and piece[at:] in vocab),
            key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
        )
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prepends else replace
    if not prepends:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return finish(tokenizer, special, chat=chat, bos=bos, eos=eos, unk="<unk>")


def finish(tokenizer: Tokenizer, special: list[str], *, chat: str, bos: str, eos: str, unk: str = "") -> Any:
    names = dict.fromkeys([name for name in (unk, bos, eos, *special) if name])
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    given = {"bos_token": bos or None, "unk_token": unk or None}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, pad_token=eos, chat_template=chat, **given
    )


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "llama3": cache(
        lambda: byte_level(
            LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"], chat=LLAMA3_CHAT,
            bos="<|begin_of_text|>", eos="<|eot_id|>", ignores=True,
        )
    ),
    "qwen2": cache(
        lambda: byte_level(
            QWEN2, ["<|endoftext|>", "<|im_start|>"], chat=CHATML, eos="<|im_end|>", composes=True,
        )
    ),
    "tekken": cache(
        lambda: byte_level(TEKKEN, ["[INST]", "[/INST]"], chat=MISTRAL_CHAT, bos="<s>", eos="</s>", ignores=True)
    ),
    "llama2": cache(
        lambda: sentencepiece(["[INST]", "[/INST]"], chat=MISTRAL_CHAT, bos="<s>", eos="</s>", prepends=True)
    ),
    "gemma": cache(
        lambda: sentencepiece(
            ["<start_of_turn>", "<end_of_turn>"], chat=GEMMA_CHAT, bos="<bos>", eos="<eos>", prepends=False,
        )
    ),
}  # fmt: skip

SHAPE: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15,
}  # fmt: skip
ROPE = {"rope_theta": 20_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 50_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
PLAIN = {"rope_type": "default", **ROPE}
LINEAR = {"rope_type": "linear", "factor": 4.0, **ROPE}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama3", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False}),
    "llama-biases": (
        "Llama", "llama2", {"rope_parameters": LINEAR, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", "tekken", {"rope_parameters": PLAIN, "sliding_window": None}),
    "qwen2": ("Qwen2", "qwen2", {"head_dim": 16, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen2", {"rope_parameters": PLAIN, "tie_word_embeddings": False}),
    "qwen3-moe": ("Qwen3Moe", "qwen2", {"rope_parameters": PLAIN, **EXPERTS}),
    "gemma3": (
        "Gemma3", "gemma",
        {
            "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 50, "_sliding_window_pattern": 6,
            "rope_parameters": GEMMA_ROPE,
        },
    ),
}  # fmt: skip
"""Name -> the class of transformers, the tokenizer, and what the config says beside SHAPE."""


def make_model(name: str, **changes: Any) -> tuple[Any, Any]:
    """A random model in fp32 and its tokenizer; norms and biases are random too, not ones and zeros."""
    family, tokenizer_name, more = FAMILIES[name]
    tokenizer = TOKENIZERS[tokenizer_name]()
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(
        **{**SHAPE, **more, **changes},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval(), tokenizer
