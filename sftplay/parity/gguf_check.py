"""Hold a GGUF file against its model, by llama.cpp: tokens of texts of all scripts, and scores of all tokens."""

from __future__ import annotations

import math
import random
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from jinja2.exceptions import TemplateError

from sftplay import log
from sftplay.errors import RunError
from sftplay.export.gguf.families import find_context
from sftplay.parity.by_llama_cpp import Logprobs, answer_all, score_positions, tokenize_all
from sftplay.parity.compare import first_difference
from sftplay.parity.engine import Question

POSITIONS = 200
PROMPT_TOKENS = 256
TOP = 1024
"""Tokens whose scores are asked for; the others count as one where a vocabulary has more."""

BOUNDS = {"f32": 1e-4, "f16": 1e-4, "bf16": 2e-3, "q8_0": 1e-2, "q6_k": 5e-2, "q5_k_m": 0.15, "q4_k_m": 0.3}
"""Mixture of a file -> the largest mean Kullback-Leibler divergence from the model, in nats (of f32: at any position).

At least twice what random models of 3 and 8 layers and a trained builtin:tiny show: docs/gguf.md has the figures."""

WIDEST = 1.0
"""For mixtures of llama.cpp's own that have no bound here: a file beyond it answers otherwise."""

LEAST_SAME = 0.75
"""Share of the texts of all scripts that must have the same tokens where a splitting rule has no name in llama.cpp."""

DIALOGUES = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "One\n\ntwo"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "3?"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
)

Sequences = Sequence[tuple[Sequence[int], int]]
"""Token ids, and where the answer in them begins."""


def check_files(
    files: Mapping[str, Path], model: Any, tokenizer: Any, *, questions: Sequence[Question], approximates: str,
    texts: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Hold GGUF files, by the names of their mixtures, against the model in fp32; return the figures of parity.json.

    `questions` and `texts` are the run's. Raise RunError with the first thing that is wrong.
    """
    reference_model = model.float()
    first = next(iter(files.values()))
    run_texts = [question.text for question in questions]
    tokens = check_tokens(first, tokenizer, [*run_texts, *texts], approximates=approximates)
    dialogues = check_template(first, tokenizer, questions)
    # Of a long prompt the end alone: all scores of all its tokens would have to be held.
    sequences = make_sequences(reference_model, [question.prompt_ids[-PROMPT_TOKENS:] for question in questions])
    reference = reference_logprobs(reference_model, sequences)
    scores = {}
    for number, (quant, file) in enumerate(files.items()):
        scores[file.name] = check_scores(file, sequences, reference, quant=quant)
        log.progress(number + 1, len(files), what="files held against the model", tag="export")
    version = f"llama.cpp (xllamacpp {metadata.version('xllamacpp')})"
    return {"engine": version, "tokens": tokens, "dialogues": dialogues, "files": scores}


def check_template(file: Path, tokenizer: Any, questions: Sequence[Question] = ()) -> int:
    """Return how many prompts llama.cpp reads as the tokens that the model learned: DIALOGUES, but those that the chat
    template refuses, and the run's own `questions`. Raise RunError where one differs.
    """
    asked: list[Question] = []
    for dialogue in DIALOGUES if tokenizer.chat_template else ():
        with suppress(TemplateError):
            ids = tokenizer.apply_chat_template(dialogue, add_generation_prompt=True, tokenize=True, return_dict=False)
            asked.append(Question(len(asked), dialogue, "", ids))
    asked += questions
    answers = answer_all(file, asked, max_new_tokens=0).answers if asked else ()
    for question, answer in zip(asked, answers, strict=True):
        if list(question.prompt_ids) != list(answer.prompt_ids):
            found, learned = tokenizer.decode(answer.prompt_ids), tokenizer.decode(question.prompt_ids)
            what = f"llama.cpp reads {question.messages or question.text!r} as {found!r}, the model learned {learned!r}"
            raise RunError(
                what, where=file.name, fix="simplify the chat template; llama.cpp's Jinja reads less than Python's"
            )
    return len(asked)


def check_tokens(file: Path, tokenizer: Any, own_texts: Sequence[str], *, approximates: str) -> dict[str, Any]:
    """Compare llama.cpp's tokens of 1,000 texts of all scripts and of the run's own texts with the tokenizer's.

    The run's own must be the same. Of the others a share may differ only where `approximates` names a rule that
    llama.cpp lacks. llama.cpp does not compose characters (NFC): where the tokenizer does, composed texts are compared,
    and texts that differ otherwise are counted as `not_composed`. Raise RunError with the first difference.
    """
    texts, run_texts = make_texts(), list(dict.fromkeys(own_texts))
    backend = tokenizer.backend_tokenizer
    # A normalizer that writes spaces as SentencePiece does is llama.cpp's own.
    is_known = not backend.normalizer or "\u2581" in str(backend.normalizer.normalize_str("a b"))
    normalize = str if is_known else backend.normalizer.normalize_str
    normalized = [normalize(text) for text in texts]
    found = tokenize_all(file, [*texts, *normalized, *run_texts])
    expected = [tokenizer(text, add_special_tokens=False).input_ids for text in (*texts, *run_texts)]
    wrong = [number for number in range(len(texts)) if found[len(texts) + number] != expected[number]]
    wrong_own = [
        number for number in range(len(run_texts)) if found[2 * len(texts) + number] != expected[len(texts) + number]
    ]
    figures = {
        "texts": len(texts), "same": len(texts) - len(wrong),
        "own_texts": len(run_texts), "own_same": len(run_texts) - len(wrong_own),
        "not_composed": sum(found[number] != expected[number] for number in range(len(texts))) - len(wrong),
        "approximates": approximates, "first": texts[wrong[0]] if wrong else None,
    }  # fmt: skip
    is_near = bool(approximates) and len(wrong) <= (1 - LEAST_SAME) * len(texts)
    if wrong_own or (wrong and not is_near):
        text = run_texts[wrong_own[0]] if wrong_own else normalized[wrong[0]]
        engine_ids = found[2 * len(texts) + wrong_own[0]] if wrong_own else found[len(texts) + wrong[0]]
        model_ids = tokenizer(text, add_special_tokens=False).input_ids
        place = first_difference(engine_ids, model_ids)
        what = (
            f"llama.cpp reads {len(wrong)} of {len(texts):,} texts and {len(wrong_own)} of {len(run_texts)} of its run "
            f"as other tokens: at token {place} of {text[:80]!r} it has "
            f"{tokenizer.convert_ids_to_tokens(engine_ids[place : place + 3])}, the model learned "
            f"{tokenizer.convert_ids_to_tokens(model_ids[place : place + 3])}"
        )
        fix = "the pre-tokenizer's name or the vocabulary is wrong: report it with tokenizer.json"
        if approximates:
            fix = f"llama.cpp has no rule {approximates!r}; a newer one may: LLAMA_CPP=folder, or serve it by vLLM"
        raise RunError(what, where=file.name, fix=fix)
    return figures


def make_sequences(model: Any, prompts: Sequence[Sequence[int]], *, positions: int = POSITIONS) -> Sequences:
    """Return the prompts with the model's greedy answers, not ended by an end token, `positions` tokens in all."""
    context = find_context(model.config)
    tokens_each = min(math.ceil(positions / len(prompts)), context // 2)
    room = context - tokens_each
    sequences = []
    for prompt in prompts:
        ids = list(prompt)[-room:]
        begin, given, cache = len(ids), ids, None
        with torch.inference_mode():
            for _ in range(tokens_each):
                done = model(
                    input_ids=torch.tensor([given], device=model.device), past_key_values=cache, use_cache=True
                )
                given, cache = [int(done.logits[0, -1].argmax())], done.past_key_values
                ids = ids + given
        sequences.append((ids, begin))
    return sequences


def reference_logprobs(model: Any, sequences: Sequences) -> list[torch.Tensor]:
    """Return the model's log-probabilities at each position of the answers, fp32 [positions, vocabulary]."""
    found = []
    with torch.inference_mode():
        for ids, begin in sequences:
            logits = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0, begin - 1 :]
            found.append(logits.float().log_softmax(-1).cpu())
    return found


def check_scores(file: Path, sequences: Sequences, reference: Sequence[torch.Tensor], *, quant: str) -> dict[str, Any]:
    """Compare llama.cpp's scores with the model's at each position. Raise RunError where they are beyond the bound."""
    figures = measure_scores(file, sequences, reference)
    bound = BOUNDS.get(quant, WIDEST)
    exact = quant == "f32"
    value = figures["max_kl" if exact else "mean_kl"]
    if not value <= bound or (exact and figures["same_tokens"] < figures["positions"]):
        what = (
            f"llama.cpp answers otherwise than the model: {figures['same_tokens']} of {figures['positions']} greedy "
            f"tokens are the same, and the divergence is {value:.3g} where {quant} may have {bound:g}"
        )
        fix = "take a wider format" if quant.startswith("q") and value < 10 * bound else "report it with config.json"
        raise RunError(what, where=file.name, fix=fix)
    return figures | {"kind": quant, "bound": bound}


def measure_scores(file: Path, sequences: Sequences, reference: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the numbers of positions, of greedy tokens and of whole answers that are the same, the divergences and the
    largest difference of the log-probability of the model's own token."""
    replies = score_positions(file, sequences, top=min(TOP, reference[0].shape[1]))
    divergences, same, worst, same_answers = [], 0, 0.0, 0
    for rows, steps in zip(reference, replies, strict=True):
        before = same
        for row, step in zip(rows, steps, strict=True):
            divergences.append(divergence(row, step))
            best, chosen = int(row.argmax()), max(step, key=lambda token: step[token])
            same += best == chosen or float(row[best] - row[chosen]) < 1e-4
            worst = max(worst, abs(float(row[best]) - step.get(best, -math.inf)))
        same_answers += same - before == len(steps)
    return {
        "positions": len(divergences), "same_tokens": same, "same_answers": same_answers, "max_kl": max(divergences),
        "mean_kl": sum(divergences) / len(divergences), "max_logprob_diff": worst,
    }  # fmt: skip


def divergence(reference: torch.Tensor, found: Mapping[int, float] | Logprobs) -> float:
    """Return KL(reference || found) in nats; tokens that `found` lacks are taken as one."""
    tokens = list(found)
    expected = reference.double()[tokens]
    scores = torch.tensor([found[token] for token in tokens], dtype=torch.float64)
    total = float((expected.exp() * (expected - scores)).sum())
    if len(tokens) < len(reference):
        rest = max(0.0, 1.0 - float(expected.exp().sum()))
        missing = max(1e-12, 1.0 - float(scores.exp().sum()))
        total += rest * math.log(rest / missing) if rest > 1e-9 else 0.0
    return max(total, 0.0)  # in this order a NaN stays one


SCRIPTS = {
    "Latin": (0x41, 0x7A), "Latin with marks": (0xC0, 0x24F), "Vietnamese": (0x1EA0, 0x1EF9), "Greek": (0x391, 0x3CE),
    "Cyrillic": (0x410, 0x45F), "Armenian": (0x531, 0x586), "Hebrew": (0x591, 0x5EA), "Arabic": (0x621, 0x669),
    "Syriac": (0x710, 0x74A), "Devanagari": (0x905, 0x96F), "Bengali": (0x985, 0x9EF), "Gurmukhi": (0xA05, 0xA74),
    "Tamil": (0xB85, 0xBEF), "Telugu": (0xC05, 0xC6F), "Sinhala": (0xD85, 0xDF4), "Thai": (0xE01, 0xE59),
    "Lao": (0xE81, 0xEDD), "Tibetan": (0xF00, 0xF6C), "Burmese": (0x1000, 0x104F), "Georgian": (0x10A0, 0x10FA),
    "Hangul jamo": (0x1100, 0x11FF), "Ethiopic": (0x1200, 0x135A), "Cherokee": (0x13A0, 0x13F4),
    "Khmer": (0x1780, 0x17E9),
    "Mongolian": (0x1810, 0x1878), "Hiragana": (0x3041, 0x3096), "Katakana": (0x30A1, 0x30FA), "Han": (0x4E00, 0x9FA5),
    "Hangul": (0xAC00, 0xD7A3), "fullwidth": (0xFF01, 0xFF5E), "Gothic": (0x10330, 0x1034A),
    "letters of mathematics": (0x1D400, 0x1D7FF),
    "Han, rare": (0x20000, 0x2A6D6),
}  # fmt: skip
"""Name -> first and last code point."""

_WORDS = (
    "the", "quick", "brown", "foxes", "don't", "jump", "over", "Anna's", "12", "lazy", "dogs;", "we'll", "see,",
    "they've", "said", "I'm", "here", "and", "you're", "not", "HE'S", "naive", "café", "œuvre", "Straße",
    "ångström", "mañana", "İstanbul", "ﬁne",
)  # fmt: skip
_SPACES = (
    " ", " ", " ", "  ", "   ", "     ", "\t", "\n", "\r\n", "\n\n", "\r\n\r\n", " \n", "\n  ", "\t\t", "\u00a0",
    "\u3000", "\u2009",
)  # fmt: skip
_SIGNS = (
    *"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "...", "--", "->", "!=", "«»", "“x”", "‘y’", "–", "—", "…", "€", "№", "±",
    "、", "。",
)  # fmt: skip
_EMOJI = (
    "😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "1️⃣", "❤️", "🧑🏿‍🚀",
)  # fmt: skip
_MARKS = (
    "e\u0301", "a\u0308", "n\u0303", "o\u0302\u0323", "ọ\u0302", "\u1100\u1161\u11a8", "क\u094dष", "x\u0338", "\u0301y",
)  # fmt: skip
_CODE = (
    "def f(x):\n    return x**2  # squared\n", "for (int i=0;i<10;++i){\n\tsum+=a[i];\n}\n",
    "<a href=\"x.html\">y</a>\r\n",
    "SELECT * FROM t WHERE a_b >= 3.14;", "\\frac{1}{2} $x_{12}$", "https://example.org/a/b?c=1&d=%20",
    "x = {'a': [1, 2, 3]}",
    "#include <stdio.h>\n\n\n", "if x:\n        pass\n\n    else", "0x1F 1e-5 3,141.59 2026-11-27 12:34:56",
    "\u200bzero\u200dwidth\ufeff",
)  # fmt: skip


def make_texts(count: int = 1000, *, seed: int = 7) -> list[str]:
    """Return texts of words, numbers, white space, signs, emoji, combining marks and code, of all scripts."""
    source = random.Random(seed)
    kinds = [_words, _numbers, _script_words, _script_words, _mixed, _mixed, _code, _anything]
    return [kinds[number % len(kinds)](source) for number in range(count)]


def _words(source: random.Random) -> str:
    words = source.choices(_WORDS, k=source.randint(1, 12))
    return "".join(word + source.choice(_SPACES) for word in words)


def _numbers(source: random.Random) -> str:
    parts = []
    for _ in range(source.randint(1, 6)):
        digits = "".join(source.choices("0123456789", k=source.randint(1, 9)))
        parts.append(source.choice(("", "-", "$", "x", "v")) + digits + source.choice((" ", "", ".", ",", "%", " kg ")))
    return "".join(parts)


def _script_words(source: random.Random) -> str:
    first, last = SCRIPTS[source.choice(list(SCRIPTS))]
    text = ""
    for _ in range(source.randint(1, 6)):
        for _ in range(source.randint(1, 8)):
            letter = chr(source.randint(first, last))
            text += letter if unicodedata.category(letter) != "Cn" else ""
        text += source.choice(_SPACES)
    return text


def _mixed(source: random.Random) -> str:
    makers: tuple[Callable[[], str], ...] = (
        lambda: source.choice(_WORDS),
        lambda: source.choice(_SPACES),
        lambda: source.choice(_SIGNS),
        lambda: source.choice(_EMOJI),
        lambda: source.choice(_MARKS),
        lambda: str(source.randint(0, 99999)),
        lambda: _script_words(source),
    )
    return "".join(source.choice(makers)() for _ in range(source.randint(2, 10)))


def _code(source: random.Random) -> str:
    return "".join(source.choices(_CODE, k=source.randint(1, 3)))


def _anything(source: random.Random) -> str:
    letters = (
        chr(source.choice((source.randint(1, 0x2FF), source.randint(0x300, 0xD7FF), source.randint(0x1F300, 0x1FAFF))))
        for _ in range(source.randint(1, 16))
    )
    return "".join(letter for letter in letters if unicodedata.category(letter) not in ("Cn", "Co", "Cs"))
