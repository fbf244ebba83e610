"""The section `train`: how long, how fast, and in which pieces a run trains."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from sftplay.config.schema.section import Auto, NotNegative, Positive, PositiveFloat, Section, Share

Precision = Literal["fp32", "bf16", "fp16"]
LossHead = Literal["standard", "chunked", "liger"]
Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd"
]
Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"]
Batching = Literal["examples", "tokens"]
Probe = Literal["auto", "always", "off"]
Scaling = Literal["none", "linear", "sqrt"]


class ProfileConfig(Section):
    """Which steps are looked at closely: a trace for a viewer, and a summary in the log."""

    start: Positive = 10
    """First optimizer step of the profile. The first ones of a run are not typical."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps; 0 profiles nothing. Each is slower than usual, and adds some MB to the trace."""

    memory: bool = True
    """Also record what holds memory; on a GPU a snapshot for pytorch.org/memory_viz as well."""


class TrainConfig(Section):
    """How long, how fast, and in which pieces the run trains."""

    epochs: PositiveFloat = 3.0
    """Passes over the training rows; a fraction is allowed. Ignored when max_steps is given."""

    max_steps: Positive | None = None
    """Optimizer steps. None means epochs decides."""

    learning_rate: NotNegative | Auto = "auto"
    """Peak rate. auto: 2e-4 for lora and qlora, 1e-5 for full."""

    lr_scaling: Scaling = "none"
    """Scale learning_rate with the effective batch: linear by effective_batch_size / lr_batch_size, sqrt by its root,
    which suits Adam. More processes leave the effective batch as it is, so they never ask for this."""

    lr_batch_size: Positive | None = None
    """The effective batch that learning_rate was found with. Goes with lr_scaling."""

    lr_scheduler: Schedule = "cosine"
    """Shape of the learning rate after warm-up."""

    warmup_ratio: Share = 0.03
    """Share of the steps over which the rate rises from 0."""

    weight_decay: NotNegative = 0.0
    """Pull of the weights towards zero per step, times the rate."""

    max_grad_norm: NotNegative = 1.0
    """Gradients longer than this are scaled down to it. 0 switches clipping off."""

    effective_batch_size: Positive = 32
    """Rows per optimizer step over all processes. Exact: batch_size * grad_accum * processes equals it."""

    batch_size: Positive | Auto = "auto"
    """Rows one process holds in memory at a time. auto sizes it to the machine."""

    grad_accum: Positive | Auto = "auto"
    """Pieces one optimizer step is computed in, per process. auto follows from the two above."""

    batching: Batching = "examples"
    """What a piece is measured by. examples: batch_size rows. tokens: as many rows of like length as keep rows times
    longest within batch_size * max_seq_len tokens, so that short rows share a piece. Loss and rows of a step stay."""

    probe: Probe = "auto"
    """Measure a few steps on the GPU before the launch and size the batch by them. auto: where no earlier probe fits
    this model, method and machine; always: anew each time; off: trust the estimate. Nothing without a GPU."""

    precision: Precision | Auto = "auto"
    """Number format of the computation. auto: bf16 where the GPU has it, fp16 on older GPUs, fp32 on a CPU."""

    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third slower, much less memory."""

    packing: bool | Auto = "auto"
    """Put several rows of a step side by side in one row of max_seq_len. auto: only with a flash attention kernel."""

    loss_head: LossHead | Auto = "auto"
    """How scores over the vocabulary become a loss: in one piece, in chunks of tokens, or by Liger's kernel."""

    optim: Optimizer | Auto = "auto"
    """Optimizer by transformers' name. auto: adamw_torch_fused."""

    neftune_alpha: PositiveFloat | None = None
    """Strength of the noise added to embeddings while training (5 is common). None means none."""

    eval_steps: Positive | None = None
    """Steps between two evaluations on the held-out rows. None means once an epoch."""

    save_steps: Positive | None = None
    """Steps between two checkpoints. None means once an epoch."""

    save_total_limit: Positive = 2
    """Complete checkpoints kept. The newest and the best are never removed."""

    best_metric: Literal["loss"] | None = None
    """Keep the weights of the evaluation with the lowest held-out loss as the result. None keeps the last."""

    early_stopping: Positive | None = None
    """Stop after this many evaluations without a lower held-out loss, and keep the best weights as the result.
    None means train to the end."""

    resume: str = "never"
    """never, auto (newest complete checkpoint of this run name), or the path of a checkpoint."""

    dataloader_num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that fetch rows. Rows are token ids already, so 0 is fastest nearly always."""

    dataloader_pin_memory: bool | Auto = "auto"
    """Page-locked memory for faster copies to a GPU. auto: where there is a GPU."""

    oom_recovery: bool = True
    """When memory runs out inside a step, run the step's same rows again in smaller pieces, on all processes, and go on
    with these. false: the run ends."""

    stall_timeout: Annotated[int, Field(ge=0)] = 1800
    """Seconds a process may spend in one phase of a step before the run is ended, with the stacks of all processes in
    logs/. Longer than the longest save and evaluation piece. 0 never ends it."""

    time_limit: str | Positive | None = None
    """Time the run may take: 3h30m, 1-12:00:00, or seconds. It stops in time with a checkpoint and exit code 138, as
    after SIGUSR1. None: the end of the SLURM job, where it runs in one."""

    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Steps to profile."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Anything else of TRL's SFTConfig, by its own name; checked against that library's fields."""

    @property
    def peak_rate(self) -> float | Auto:
        """The rate that trains: `learning_rate`, scaled where `lr_scaling` says so.

        Sources: linear, Goyal et al. 2017 (arXiv:1706.02677); the square root for Adam, Malladi et al. 2022
        (arXiv:2205.10287).
        """
        if self.learning_rate == "auto" or self.lr_batch_size is None:
            return self.learning_rate
        ratio = self.effective_batch_size / self.lr_batch_size
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]
        return self.learning_rate * factor
