"""The section `cluster`: how the processes of a run share the work and communicate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from sftplay.config.section import Positive, Problem, Section, UserPath

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig

Strategy = Literal["auto", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tensor", "pipeline"]
Launcher = Literal["auto", "torchrun", "accelerate", "deepspeed", "ray"]

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}

SHARDED = ("fsdp", "hsdp", *ZERO_STAGES)
"""Strategies in which a process holds only a shard of the weights, gradients or optimizer state."""

SPLIT_WEIGHTS = ("fsdp", "hsdp", "zero3")  # strategies in which a process holds only a shard of the weights


class CommConfig(Section):
    """How gradients are exchanged in data parallelism (ddp)."""

    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Gradient compression: fp16, bf16 (NCCL only), or powersgd (lossy; its state is not in checkpoints). It helps on
    slow networks only; measure with `make comm-check`. The tasks score and hrm send gradients whole."""

    bucket_cap_mb: Positive | None = None
    """MB of gradients in one bucket of DDP. None means torch's 25."""

    static_graph: bool = False
    """Promise DDP that every step uses the same weights in the same order."""


class NcclConfig(Section):
    """Network settings of NCCL and gloo, for cases where they choose wrongly. The libraries decide every key that is
    left out. docs/networks.md says how to find the right values."""

    socket_ifname: str | None = None
    """Network interfaces to use, separated by commas (`ip -br addr` lists them). NCCL and gloo use it. Set it when
    ranks on several nodes wait for each other at the start: a Docker bridge or a management network was chosen."""

    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """What NCCL writes into logs/rank*.log. WARN explains errors; INFO also names interfaces and transports. Set INFO
    to examine a launch that fails or is slow, and remove it afterwards."""

    ib_disable: bool | None = None
    """Do not use InfiniBand and RoCE. Set it to see whether they cause a problem; sockets are much slower."""

    ib_hca: str | None = None
    """InfiniBand adapters to use, such as mlx5_0,mlx5_1. Set it when some adapters belong to a storage network."""

    ib_gid_index: Annotated[int, Field(ge=0)] | None = None
    """Index of RoCE's address in the adapter's GID table (`show_gids`). Set it when NCCL picks an address that the
    network does not route. NCCL 2.21 and later choose it themselves."""

    p2p_disable: bool | None = None
    """Do not let GPUs of a node read each other's memory. Set it when a run hangs at its first collective on one node,
    as under PCIe access control in virtual machines. It is slower."""

    shm_disable: bool | None = None
    """Do not use shared memory between processes of a node. Set it when a container's /dev/shm is small and cannot be
    enlarged. It is slower."""

    flight_recorder: Annotated[int, Field(ge=0)] | None = None
    """Number of collectives that each rank records, for logs/flight-recorder-rank* when one takes longer than
    cluster.timeout. None means torch's 2000; 0 records none. Raise it when a step has more."""


class ClusterConfig(Section):
    """How several processes share the work."""

    strategy: Strategy = "auto"
    """What each process holds. ddp: everything. zero1: a shard of the optimizer state; zero2: also of the gradients;
    zero3: also of the weights. fsdp: as zero3, by torch itself. hsdp: fsdp on each node, nodes are replicas. auto: the
    first of ddp, zero3 and fsdp that fits. tensor and pipeline are refused. docs/strategies.md lists which combinations
    work."""

    launcher: Launcher = "auto"
    """What starts several processes; the run is the same. auto: torchrun. deepspeed starts only zero1, zero2 and zero3,
    on one node. ray: Ray Train, as `make train-ray` does. A single process is started directly."""

    deepspeed: UserPath | None = None
    """Your own DeepSpeed file for zero1, zero2 and zero3, such as deepspeed_configs/zero2_offload.json: JSON, comments
    allowed. None means the settings that the strategy needs."""

    max_restarts: Annotated[int, Field(ge=0)] = 0
    """Number of times that the run is started again from its last checkpoint when a process dies."""

    comm: CommConfig = Field(default_factory=CommConfig)
    """How gradients are exchanged."""

    timeout: Positive = 1800
    """Seconds that a collective may wait for the slowest process before the run fails. Preparing rows and downloading
    files do not count. If train.stall_timeout is shorter, it ends a hanging run first, with all stacks; keep this one
    shorter to get NCCL's flight recorder."""

    nccl: NcclConfig = Field(default_factory=NcclConfig)
    """Network settings."""

    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Price of one GPU for an hour, or of the machine where a run uses none, in any currency. `plan`, `status` and
    reports then show what a run costs."""


STRATEGY = "cluster.strategy"
BACKEND = "tuning.backend"


def broken_cluster_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Yield combinations that upstream cannot run, and settings that the strategy or backend would not follow."""
    strategy, zero = cfg.cluster.strategy, ", ".join(ZERO_STAGES)
    uses_zero = strategy in (*ZERO_STAGES, "auto")
    if strategy != "auto":
        yield from _blocked(cfg)
    if cfg.cluster.deepspeed is not None and not uses_zero:
        what = f"names a DeepSpeed file, but {STRATEGY} {strategy} does not use one"
        fix = f"write {STRATEGY}: {zero}; or remove cluster.deepspeed"
        yield Problem(("cluster.deepspeed", STRATEGY), what, fix=fix)
    if cfg.cluster.launcher == "deepspeed" and not uses_zero:
        what = f"deepspeed starts runs of {zero} only, but {STRATEGY} is {strategy}"
        fix = f"write cluster.launcher: torchrun or accelerate; or {STRATEGY}: {zero}"
        yield Problem(("cluster.launcher", STRATEGY), what, fix=fix)
    if cfg.tuning.backend == "unsloth":
        if strategy not in ("auto", "ddp"):  # in a single process, auto becomes ddp
            what = f"{strategy} needs several processes, and {BACKEND} unsloth trains in one"
            yield Problem((STRATEGY, BACKEND), what, fix=f"write {BACKEND}: bnb")
        yield from unsloth_conflicts(cfg)


def unsloth_conflicts(cfg: RunConfig) -> Iterator[Problem]:
    """Yield every key that unsloth would not follow, whatever backend is asked for.

    Source: unsloth and unsloth_zoo 2026.10.9.
    """
    model, tuning, train = cfg.model, cfg.tuning, cfg.train
    in_4_bits = tuning.mode == "qlora"
    # It reopens an adapter with a base that it chooses by the adapter's own file.
    continued = model.adapter is not None and not model.merge_adapter
    has_loss, new = train.loss_head in ("chunked", "liger"), tuning.new_tokens.is_on
    # Key, whether it conflicts, what would happen, what to write instead.
    table = [
        ("tuning.mode", tuning.mode == "full", "full is not offered", "tuning.mode: lora or qlora"),
        # Both loaders write nf4 and double quantisation into a BitsAndBytesConfig of their own.
        ("tuning.quant_type", in_4_bits and tuning.quant_type != "nf4",
         f"{tuning.quant_type} would be ignored for nf4", "tuning.quant_type: nf4"),
        ("tuning.double_quant", in_4_bits and not tuning.double_quant, "false would be ignored",
         "tuning.double_quant: true"),
        ("model.adapter", continued, "an adapter cannot be continued", "model.merge_adapter: true"),
        ("tuning.new_tokens.path", new, "the rows of new tokens would not train", "tuning.new_tokens.path: null"),
        ("model.attn", model.attn == "eager", "eager would be ignored for its own attention", "model.attn: auto"),
        # Its attention separates packed rows by a list of lengths from its own trainer, not by the position ids.
        ("task_mode", cfg.learns_documents, f"{cfg.task_mode} would not keep the documents of a block apart",
         "task_mode: sft"),
        ("train.packing", train.packing is True, "packed rows would not be kept apart", "train.packing: auto"),
        ("train.loss_head", has_loss, f"{train.loss_head} would meet a loss of its own", "train.loss_head: auto"),
    ]  # fmt: skip
    for key, conflicts, what, remedy in table:
        if conflicts:
            yield Problem((key, BACKEND), f"{what}, with {BACKEND} unsloth", fix=f"write {remedy}, or {BACKEND}: bnb")


def _blocked(cfg: RunConfig) -> Iterator[Problem]:
    """A blocked combination; with train.precision auto, one that is blocked in every precision."""
    mode, strategy, precision = cfg.tuning.mode, cfg.cluster.strategy, cfg.train.precision
    if strategy not in ("tensor", "pipeline"):  # every other one goes with every mode and precision
        return
    from sftplay.config.matrix import METHODS, PRECISIONS, TABLE

    cells = dict(zip(PRECISIONS, TABLE[mode, strategy], strict=True))
    asked = [cells[precision]] if precision in cells else list(cells.values())
    if all(cell.state == "blocked" for cell in asked):
        always = all(cell.state == "blocked" for method in METHODS for cell in TABLE[method, strategy])
        what = f"{strategy}{'' if always else f' with tuning.mode {mode}'}: {asked[0].why}"
        keys = (STRATEGY,) if always else (STRATEGY, "tuning.mode", "train.precision")
        yield Problem(keys, what, fix=f"write {asked[0].nearest}")
