"""Hold a GGUF file against the model it was written from, by llama.cpp: tokens of texts, and scores of all tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from sftplay.parity.texts import make_texts

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
    normalize = backend.normalizer.normalize_str if backend.normalizer and not _escapes_spaces(backend) else str
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


def _escapes_spaces(backend: Any) -> bool:
    """A normalizer that writes spaces as SentencePiece does is llama.cpp's own."""
    return "\u2581" in str(backend.normalizer.normalize_str("a b"))


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
