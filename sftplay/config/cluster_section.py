"""The section `cluster`: how the processes of a run share the work and talk to each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sftplay.config.section import Positive, Section

Strategy = Literal["auto", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tensor", "pipeline"]
CommHook = Literal["none", "fp16", "bf16", "powersgd"]

SHARDED = ("fsdp", "hsdp", "zero1", "zero2", "zero3")
"""Strategies in which a process holds only a part of weights, gradients or optimizer."""

SPLIT_WEIGHTS = ("fsdp", "hsdp", "zero3")
"""Those in which it holds only a part of the weights."""


class CommConfig(Section):
    """What travels between the processes of plain data parallelism (ddp)."""

    hook: CommHook = "none"
    """Compress gradients on their way: fp16, bf16 (NCCL only), or powersgd (lossy, its state is not in checkpoints).
    Worth it on slow networks only; measure with make comm-check."""

    bucket_cap_mb: Positive | None = None
    """MB of gradients that DDP sends at a time. None means torch's 25."""

    static_graph: bool = False
    """Promise DDP that every step uses the same weights in the same order."""


class ClusterConfig(Section):
    """How several processes share the work."""

    strategy: Strategy = "auto"
    """What each process holds: ddp everything; zero1 a share of the optimizer's state, zero2 of the gradients too,
    zero3 of the weights too; fsdp as zero3, by torch itself; hsdp fsdp on each node, nodes being copies. auto: the
    first of ddp, zero3 and fsdp that fits. tensor and pipeline are refused. docs/strategies.md lists what goes
    together."""

    deepspeed: str | None = None
    """Your own DeepSpeed file for zero1, zero2 and zero3, such as deepspeed_configs/zero2_offload.json. JSON with
    comments; None takes what the strategy needs."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Times the run is started again from its last checkpoint, by itself, when a process dies."""

    comm: CommConfig = Field(default_factory=CommConfig)
    """Traffic of gradients."""
