"""Answers of plain transformers and PEFT, as anybody gets them from the folder; the kit does not touch the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft import AutoPeftModelForCausalLM
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sftplay import log
from sftplay.errors import RunError
from sftplay.model.hub import first_line
from sftplay.model.source import ADAPTER_CONFIG
from sftplay.model.tokenizer import shipped_end_ids
from sftplay.parity.engine import Answer, EngineReply, Question
from sftplay.parity.questions import encode

READ_ERRORS = (
    OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, AssertionError, ImportError, SafetensorError
)  # fmt: skip
"""What the libraries raise for a folder that they cannot open."""


def answer_all(
    folder: Path, questions: Sequence[Question], *, max_new_tokens: int, end_ids: Sequence[int] = (),
    trusts_code: bool = False,
) -> EngineReply:  # fmt: skip
    """Return greedy answers of the model or adapter in `folder`, computed in fp32.

    An adapter's base is the one that its config names. `end_ids` end an answer in addition to the folder's own: a
    base that was not made for chats does not know the end of a turn.

    Raises:
        RunError: the folder cannot be opened.
    """
    try:
        model, tokenizer = open_served(folder, trusts_code=trusts_code)
        answers = []
        for n, question in enumerate(questions):
            answers.append(_answer(model, tokenizer, question, max_new_tokens=max_new_tokens, end_ids=end_ids))
            log.progress(n + 1, len(questions), what="answered by transformers", tag="parity")
    except READ_ERRORS as error:
        what = f"plain transformers cannot use it ({first_line(error)})"
        raise RunError(what, where=str(folder), fix="make it again") from error
    by_peft = f" and PEFT {peft.__version__}" if (folder / ADAPTER_CONFIG).is_file() else ""
    template = tokenizer.chat_template
    return EngineReply(f"transformers {transformers.__version__}{by_peft}", answers, template, "float32")


def open_served(folder: Path, *, trusts_code: bool) -> tuple[Any, Any]:
    """Return model and tokenizer of a folder as plain transformers or PEFT open them, in fp32."""
    kind = AutoPeftModelForCausalLM if (folder / ADAPTER_CONFIG).is_file() else AutoModelForCausalLM
    with warnings.catch_warnings():  # an adapter that fits nothing is reported by `causes`
        warnings.filterwarnings("ignore", message=".*(missing adapter keys|tie_word_embeddings).*")
        model = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=trusts_code).eval()
    has_tokenizer = kind is AutoModelForCausalLM or (folder / "tokenizer_config.json").is_file()
    source = folder if has_tokenizer else model.peft_config["default"].base_model_name_or_path
    return model, AutoTokenizer.from_pretrained(source, trust_remote_code=trusts_code)


@torch.no_grad()
def _answer(model: Any, tokenizer: Any, question: Question, *, max_new_tokens: int, end_ids: Sequence[int]) -> Answer:
    ids = encode(tokenizer, question)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = shipped_end_ids(inner.generation_config)
    # Nothing else of the folder's own settings, such as a repetition penalty, belongs to a greedy answer.
    inner.generation_config = GenerationConfig(eos_token_id=known or None)
    out = inner.generate(
        input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted({*known, *end_ids}) or None,
            output_logits=True, return_dict_in_generate=True, pad_token_id=tokenizer.pad_token_id,
        ),
    )  # fmt: skip
    answer = out.sequences[0, len(ids) :].tolist()
    scores = [step[0].float().log_softmax(-1) for step in out.logits]
    return Answer(ids, answer, [float(step[token]) for step, token in zip(scores, answer, strict=True)])
