"""The update of one micro-batch where models are in shards of torch's FSDP2, traced on one of several ranks.

Small models of real tensors are sharded by the task's own code. A process group that sends nothing stands for the other
ranks: contents are wrong, sizes are right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from oracle.live_bytes import LiveBytes
from oracle.score_update import batch_of_zeros, optimizer_with_state
from sftplay import log
from sftplay.model.recomputation import recompute
from sftplay.tasks.score.role_models import RoleModels
from sftplay.tasks.score.spec import Layout
from sftplay.tasks.score.update import score_actions

ROWS, TOKENS, LONGEST = 2, 256, 128
"""Rows of a micro-batch, their tokens, and how many of these are an action."""


class ShardBytes(LiveBytes):
    """Counts what this rank has of a tensor in shards, and weights from their gathering until they are freed."""

    def _follow(self, tensor: Any) -> None:
        super()._follow(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)

    @contextmanager
    def following_gathered(self) -> Iterator[None]:
        """FSDP2 resizes the storage of a gathered weight, which is no operator."""
        fill, empty = _fsdp_param.alloc_storage, _fsdp_param.free_storage

        def alloc_storage(tensor: Any) -> None:
            fill(tensor)
            self._follow(tensor)

        def free_storage(tensor: Any) -> None:
            if tensor.untyped_storage()._cdata in self._living:
                self._release(tensor.untyped_storage()._cdata)
            empty(tensor)

        with patch.multiple(_fsdp_param, alloc_storage=alloc_storage, free_storage=free_storage):
            yield


def config_of(vocab: int, *, tied: bool) -> LlamaConfig:
    """A small model with this vocabulary."""
    return LlamaConfig(
        vocab_size=vocab, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip


def trace_shards(config: LlamaConfig, *, ranks: int, precision: str) -> Mapping[str, int]:
    """Peak bytes of a rank: `learn`, in which guide and solver learn from two micro-batches each, and `step`."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    live = ShardBytes()
    try:
        with patch.object(log, "world_size", lambda: ranks), live.following_gathered(), live:
            _learn(config, live, precision=precision)
    finally:
        dist.destroy_process_group()
    return live.peaks_bytes


def _learn(config: LlamaConfig, live: ShardBytes, *, precision: str) -> None:
    model, layout = LlamaForCausalLM(config), Layout(placement="sharded")
    role_models = RoleModels(model, has_guide=True, guide_learns=True, has_value=False, layout=layout)
    for each in role_models.shard(precision):
        recompute(each)
    role_models.train()
    optimizer = optimizer_with_state(role_models)
    live.forget_peaks()
    batch = batch_of_zeros(ROWS, TOKENS, longest=LONGEST)
    rounded = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    live.enter_phase("learn")
    for role in ("guide", "guide", "solver", "solver"):
        with role_models.use_role(role):  # type: ignore[arg-type]
            with rounded:
                scores = score_actions(
                    role_models,
                    batch,
                    role=role,
                    temperature=1.0,
                    kl="full",  # type: ignore[arg-type]
                )
            loss = (scores.log_probs.sum() + scores.kl.sum()) / 2
            del scores
            loss.backward()
        del loss
    live.enter_phase("step")
    optimizer.step()
