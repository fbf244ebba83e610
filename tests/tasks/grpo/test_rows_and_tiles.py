"""What the trainer is spared beside TRL: rows are not looked into, and no score is computed that nobody uses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from grpo_toy import letter_tokenizer, tiny_llama
from trl.kernels import chunked_logprob
from trl.trainer import utils

from sftplay.data.load_prompts import Questions
from sftplay.tasks.grpo.sampling import PromptRows
from sftplay.train.upstream import fitted_tiles


def test_rows_go_to_the_trainer_as_they_are_and_each_is_read_once():
    content = [json.dumps({"question": f"q{n}", "columns": {"tests": [f"t{n}"]}}) for n in range(3)]
    questions = Questions(Dataset.from_dict({"row": [4, 5, 6], "input_ids": [[1], [2], [3]], "content": content}))
    rows = PromptRows(questions, [2, 0])
    batch = [rows[0], rows[0], rows[1]]
    assert all(sent is row for sent, row in zip(send_to_device(batch, torch.device("cpu")), batch, strict=True))
    expected = {"prompt": [3], "row": 6, "question": "q2", "columns": {"tests": ["t2"]}}
    assert batch[0] == batch[1] == expected
    copied = deepcopy(batch[0]["prompt"])
    assert copied == [3]
    assert copied is not batch[0]["prompt"] is not batch[1]["prompt"]
    questions.rows = None  # nothing more is read
    assert rows[0] == expected
    with pytest.raises(TypeError):
        PromptRows(questions)[1]


def test_log_probabilities_and_gradients_are_those_of_trls_own_width(monkeypatch: pytest.MonkeyPatch):
    tokenizer = letter_tokenizer()
    widths: list[int] = []
    real = chunked_logprob._forward_tile

    def noted(tile: torch.Tensor, stride: int, *given: Any, **named: Any) -> None:
        widths.append(stride)
        real(tile, stride, *given, **named)

    monkeypatch.setattr(chunked_logprob, "_forward_tile", noted)
    ids = torch.randint(3, len(tokenizer), (4, 9), generator=torch.Generator().manual_seed(0))
    seen = []
    for width in (10**9, len(tokenizer)):
        model = utils.add_fused_lm_head(fresh := tiny_llama(tokenizer)) or fresh
        with fitted_tiles(width):
            found = model(input_ids=ids, labels=ids, fused_lm_head=True)
        found.loss.backward()
        seen.append((found.log_probs.detach(), model.lm_head.weight.grad))
    assert widths == [32_768, len(tokenizer)]
    for wide, narrow in zip(*seen, strict=True):
        assert torch.equal(wide, narrow)
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == 32_768


def test_scores_of_prompts_and_padding_are_not_computed_and_the_others_are_trls(monkeypatch: pytest.MonkeyPatch):
    tokenizer = letter_tokenizer()
    tiles: list[tuple[int, int]] = []
    real = chunked_logprob._forward_tile

    def noted(tile: torch.Tensor, stride: int, *given: Any, **named: Any) -> None:
        tiles.append((len(tile), stride))
        real(tile, stride, *given, **named)

    monkeypatch.setattr(chunked_logprob, "_forward_tile", noted)
    ids = torch.randint(3, len(tokenizer), (4, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 6:] = -100
    seen = []
    for spared in (nullcontext(), fitted_tiles(len(tokenizer))):
        model = utils.add_fused_lm_head(fresh := tiny_llama(tokenizer)) or fresh
        with spared:
            found = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (found.log_probs * torch.linspace(-1, 1, 8)).sum().backward()
        seen.append((found.log_probs.detach(), {name: each.grad for name, each in model.named_parameters()}))
    assert tiles == [(4 * 8, 32_768), (4 * 5 - 3, len(tokenizer))]
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == 32_768
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-6)
