"""The section `cluster`: how the processes of a run share the work and talk to each other."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sftplay.config.schema.section import Positive, Section

Strategy = Literal["auto", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tensor", "pipeline"]
Launcher = Literal["auto", "torchrun", "accelerate", "deepspeed"]
CommHook = Literal["none", "fp16", "bf16", "powersgd"]
NcclDebug = Literal["VERSION", "WARN", "INFO", "TRACE"]

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


class NcclConfig(Section):
    """By which ways processes reach each other, where the libraries choose wrongly. What is left out is left to them;
    docs/networks.md says how to find out."""

    socket_ifname: str | None = None
    """Network interfaces to talk through, comma between (`ip -br addr` lists them). Set it on several nodes where ranks
    wait for each other at the start: a bridge of Docker's or a management network was taken. NCCL and gloo use it."""

    debug: NcclDebug | None = None
    """What NCCL writes into logs/rank*.log: WARN its errors in words, INFO also which interfaces and ways it takes. Set
    INFO to look at a launch that fails or is slow, and remove it afterwards."""

    ib_disable: bool | None = None
    """Keep off InfiniBand and RoCE. Set it to see whether they are at fault; sockets are much slower."""

    ib_hca: str | None = None
    """InfiniBand adapters to use, such as mlx5_0,mlx5_1. Set it where some belong to a storage network."""

    ib_gid_index: Annotated[int, Field(ge=0)] | None = None
    """Place of the address that RoCE uses in the adapter's table (`show_gids`). Set it where NCCL picks one that the
    network does not carry; NCCL chooses by itself since 2.21."""

    p2p_disable: bool | None = None
    """Keep GPUs of a node from reading each other's memory. Set it where a run hangs at its first exchange on one node,
    as under PCIe access control in virtual machines; slower."""

    shm_disable: bool | None = None
    """Keep processes of a node off shared memory. Set it where a container's /dev/shm is small and cannot be enlarged;
    slower."""

    flight_recorder: Annotated[int, Field(ge=0)] | None = None
    """Exchanges that each rank remembers, to be written to logs/flight-recorder-rank* when one takes longer than
    cluster.timeout. None means torch's 2000; 0 remembers none. Raise it where a step has more."""


class ClusterConfig(Section):
    """How several processes share the work."""

    strategy: Strategy = "auto"
    """What each process holds: ddp everything; zero1 a share of the optimizer's state, zero2 of the gradients too,
    zero3 of the weights too; fsdp as zero3, by torch itself; hsdp fsdp on each node, nodes being copies. auto: the
    first of ddp, zero3 and fsdp that fits. tensor and pipeline are refused. docs/strategies.md lists what goes
    together."""

    launcher: Launcher = "auto"
    """What starts several processes; the run is the same. auto: torchrun. deepspeed starts zero1, zero2 and zero3, on
    one node. A single process is started directly."""

    deepspeed: str | None = None
    """Your own DeepSpeed file for zero1, zero2 and zero3, such as deepspeed_configs/zero2_offload.json. JSON with
    comments; None takes what the strategy needs."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Times the run is started again from its last checkpoint, by itself, when a process dies."""

    comm: CommConfig = Field(default_factory=CommConfig)
    """Traffic of gradients."""

    timeout: Positive = 1800
    """Seconds an exchange between processes may wait for the last of them before the run fails. Preparing rows and
    fetching files is no part of it. A run that stands still is ended by train.stall_timeout, with all stacks, where
    that is shorter; keep this one shorter to get NCCL's flight recorder."""

    nccl: NcclConfig = Field(default_factory=NcclConfig)
    """Ways between processes."""
