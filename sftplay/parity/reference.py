"""The trained model in plain transformers and fp32, and the base it was trained from: what engines are held against."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.export.export import load_whole
from sftplay.export.merge import load_unquantised, move_to_gpu
from sftplay.export.merge_check import merge_by_peft
from sftplay.generate.generate import Generator
from sftplay.launch.run_folder import RunFolder
from sftplay.model.load import attach_for_merging


@dataclass(frozen=True)
class TokenScores:
    """What a model says of an answer, place by place, and of the place behind its last token."""

    logprobs: list[float]
    """Of each token of the answer."""

    best: list[int]
    """The likeliest token at each place; one more than the answer has tokens."""

    best_logprobs: list[float]
    end_logprobs: list[float]
    """Of the likeliest end token, at the same places as `best`."""


class Reference:
    """The run's trained model. It is loaded on first use; `close` frees its memory."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, *, tokenizer: Any, end_ids: Sequence[int]) -> None:
        self.cfg, self.folder, self.tokenizer, self.end_ids = cfg, folder, tokenizer, list(end_ids)
        self.has_adapter = (folder.path / "adapter").is_dir()
        self._model: Any = None

    @property
    def model(self) -> Any:
        """The base with the adapter attached, or the whole model; fp32, in evaluation mode."""
        if self._model is None:
            log.status("opening the trained model in fp32", "parity")
            if self.has_adapter:
                base = load_unquantised(self.cfg, self.folder, dtype=torch.float32)
                with warnings.catch_warnings():  # an adapter that fits nothing is reported by `causes`
                    warnings.filterwarnings("ignore", message=".*missing adapter keys.*")
                    self._model = attach_for_merging(base, self.folder.path / "adapter")
            else:
                self._model, _ = load_whole(self.cfg, self.folder, dtype="fp32")
            self._model.eval()
            move_to_gpu(self._model)
        return self._model

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Return the greedy answers, an end token included."""
        generator = Generator(self.model, self.tokenizer, self.end_ids, max_new_tokens)
        answers = []
        for n, prompt in enumerate(prompts):
            ids = torch.tensor([list(prompt)])
            answers.append(generator.generate(ids, torch.ones_like(ids))[0, len(prompt) :].tolist())
            log.progress(n + 1, len(prompts), what="answered by the trained model", tag="parity")
        return answers

    @property
    def all_end_ids(self) -> list[int]:
        """The tokens that end an answer of the trained model."""
        return Generator(self.model, self.tokenizer, self.end_ids, 1).all_end_ids

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenScores]:
        """Return what the trained model says of each (prompt, answer)."""
        return score_pairs(self.model, pairs, end_ids=self.all_end_ids)

    def score_base(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[TokenScores] | None:
        """Return what the model says that the run started from; None where it cannot be opened any more."""
        if self.has_adapter:
            with self.model.disable_adapter():
                return self.score(pairs)
        end_ids = self.all_end_ids
        self.close()
        with suppress(MachineError):
            base = load_unquantised(self.cfg, self.folder, dtype=torch.float32).eval()
            # A run may have added rows for new tokens, which its base lacks.
            if base.get_input_embeddings().num_embeddings > max(max(map(max, pair)) for pair in pairs if all(pair)):
                return score_pairs(base, pairs, end_ids=end_ids)
        return None

    def merged(self) -> nn.Module:
        """Return the whole model, adapter merged in fp32; after that only this can be asked for."""
        if not self.has_adapter:
            return self.model
        self._model = merge_by_peft(self.model.cpu())
        self.has_adapter = False
        return self._model

    def close(self) -> None:
        """Free the model's memory."""
        self._model = None
        gc.collect()


@torch.no_grad()
def score_pairs(
    model: Any, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, end_ids: Sequence[int]
) -> list[TokenScores]:
    """Return what `model` says of each (prompt, answer), each in a pass of its own."""
    device, vocabulary = next(model.parameters()).device, model.get_input_embeddings().num_embeddings
    found = []
    for prompt, answer in pairs:
        # An engine with another vocabulary may answer what this model cannot read.
        ids = [token if token < vocabulary else 0 for token in (*prompt, *answer)]
        logits = model(input_ids=torch.tensor([ids], device=device)).logits[0, len(prompt) - 1 :].float()
        scores = logits.log_softmax(-1).cpu()
        best = scores.max(-1)
        answered = torch.tensor(ids[len(prompt) :], dtype=torch.long)
        ends = scores[:, list(end_ids)].max(-1).values if end_ids else torch.full((len(scores),), -torch.inf)
        found.append(
            TokenScores(
                scores[: len(answer)].gather(1, answered[:, None])[:, 0].tolist(),
                best.indices.tolist(), best.values.tolist(), ends.tolist(),
            )
        )  # fmt: skip
    return found
