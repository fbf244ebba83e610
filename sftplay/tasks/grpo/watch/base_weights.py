"""Proof that the frozen weights under an adapter stay what they were: digests at the start, each checkpoint, the end.

An adapter that is merged into 16-bit weights and taken out again leaves them changed, a little more each time. Other
kits do that whenever a second engine generates (TRL issue 6688).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sftplay import log
from sftplay.errors import RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.model.out_of_memory import gather_objects
from sftplay.train.observer import Observer

CHUNK_WORDS = 2**21
"""How many words of 8 bytes are summed at a time: the copy that this needs takes 16 MiB."""

SHOWN_NAMES = 3


class WatchBaseWeights(Observer):
    """Ends the run when a frozen weight has changed. A checkpoint of such a step is not marked complete.

    It must come before the callback that marks checkpoints. Each rank looks at the weights that it holds.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}
        """Those of the start, by the name of the weight."""

        self.checked_steps: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.digests = frozen_digests(self.trainer.model)
        self._check(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._check(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._check(state.global_step)

    def _check(self, step: int) -> None:
        if self.checked_steps[-1:] == [step]:
            return
        now = frozen_digests(self.trainer.model) if self.checked_steps else self.digests
        changed = sorted(name for name in self.digests if now.get(name) != self.digests[name])
        ranks = gather_objects((changed, combined_digest(now)), self.trainer.heartbeat)
        if everywhere := sorted({name for names, _ in ranks for name in names}):
            shown = ", ".join(everywhere[:SHOWN_NAMES]) + (" ..." if len(everywhere) > SHOWN_NAMES else "")
            raise RunError(
                f"{len(everywhere)} frozen weights have changed by step {step}: {shown}",
                where="base weights",
                fix="the adapter belongs to the weights of the start: continue from the last complete checkpoint, with "
                "grpo.generation=transformers, which merges nothing",
            )
        self.checked_steps.append(step)
        if log.is_main():
            facts = {
                "sha256": [digest for _, digest in ranks],
                "tensors": len(self.digests),
                "unchanged_at_steps": self.checked_steps,
            }
            self.folder.write_json("manifest.json", {**self.folder.read_json("manifest.json"), "base_weights": facts})


def frozen_digests(model: Any) -> dict[str, str]:
    """A digest of each weight that does not train, of the part that this rank holds; exact to the bit."""
    frozen = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    # A 4-bit weight is nothing without the scales of its blocks.
    scales = {
        f"{name}.absmax": weight.quant_state.absmax
        for name, weight in frozen.items()
        if getattr(weight, "quant_state", None) is not None
    }
    return {name: digest_of(_held(weight)) for name, weight in {**frozen, **scales}.items()}


def combined_digest(digests: dict[str, str]) -> str:
    """One digest of all."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests.items()).encode()).hexdigest()


@torch.no_grad()
def digest_of(tensor: Tensor) -> str:
    """Changes with any bit of the tensor, its dtype and its shape; computed where the tensor lies.

    It is a sum of the bytes, as words of 8, each times its own odd number, modulo 2^64. Any single change of a word
    changes it, because an odd factor can be undone; two changes cancel each other by chance once in 2^64.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    sums = [_weighted_sum(words) for words in _words(tensor)]
    if sums:
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _words(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of the tensor as int64, a chunk at a time, the last word filled up with zeros."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    for chunk in data.split(CHUNK_WORDS * 8):
        rest = -chunk.numel() % 8
        if rest or chunk.storage_offset() % 8:
            chunk = torch.cat([chunk, chunk.new_zeros(rest)])
        yield chunk.view(torch.int64)


def _weighted_sum(words: Tensor) -> Tensor:
    factors = torch.arange(1, 2 * words.numel(), 2, device=words.device)
    return (words * factors).sum()


def _held(parameter: Any) -> Tensor:
    """The part of a weight that this rank holds: FSDP and ZeRO-3 shard it."""
    held: Tensor = (
        parameter.to_local() if hasattr(parameter, "to_local") else getattr(parameter, "ds_tensor", parameter)
    )
    return held.detach()
