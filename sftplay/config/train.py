"""The section `train`: how long, how fast, and in which micro-batches a run trains."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from sftplay.config.section import Auto, NotNegative, Positive, PositiveFloat, Section, Share, UserPath

Precision = Literal["fp32", "bf16", "fp16"]
Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd"
]
Schedule = Literal[
    "cosine", "linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt", "warmup_stable_decay"
]


class ProfileConfig(Section):
    """Which steps are profiled: a trace for a viewer, and a summary in the log."""

    start: Positive = 10
    """First optimizer step of the profile. The first steps of a run are not typical."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Number of optimizer steps to profile; 0 profiles nothing. Each is slower than usual and adds some MB to the
    trace."""

    memory: bool = True
    """Also record what holds memory. On a GPU this adds a snapshot for pytorch.org/memory_viz."""


class TrainConfig(Section):
    """How long, how fast, and in which micro-batches the run trains."""

    epochs: PositiveFloat = 3.0
    """Passes over the training rows; a fraction is allowed. Ignored when max_steps is given."""

    max_steps: Positive | None = None
    """Number of optimizer steps. None means that epochs decides."""

    learning_rate: NotNegative | Auto = "auto"
    """Peak learning rate. auto: 1e-5 for full; for lora and qlora 2e-4, and 1e-4 on documents (task modes cpt and
    cpt_mixed). In task mode grpo 1e-6 for full, 1e-5 for lora and qlora; in task mode score 5e-5 for these two;
    in hrm 1e-4."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale learning_rate with the effective batch size: linear by effective_batch_size / lr_batch_size, sqrt by its
    square root, which suits Adam. More processes do not change the effective batch size, so they do not need this."""

    lr_batch_size: Positive | None = None
    """The effective batch size that learning_rate was found with. Needed by lr_scaling."""

    lr_scheduler: Schedule = "cosine"
    """Learning rate schedule after warm-up. warmup_stable_decay (WSD) stays at the peak and falls over the last
    decay_ratio of the steps, see docs/continued-pretraining.md."""

    warmup_ratio: Share = 0.03
    """Share of the steps over which the learning rate rises from 0."""

    decay_ratio: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps over which warmup_stable_decay falls, by 1 - sqrt(progress). The default is that of Hägele et
    al. 2024 (arXiv:2405.18392)."""

    min_lr_ratio: Share = 0.0
    """Where cosine and warmup_stable_decay end, as a share of the peak rate. warmup_stable_decay also rises from there.
    0.1 is usual in continued pre-training."""

    weight_decay: NotNegative = 0.0
    """Weight decay: each step moves weights towards zero by this share of them, times the learning rate."""

    max_grad_norm: NotNegative = 1.0
    """Gradient clipping: a gradient with a larger norm is scaled down to this one. 0 switches clipping off."""

    effective_batch_size: Positive = 32
    """Rows per optimizer step over all processes; completions in task mode grpo, episodes in score. It is exact:
    batch_size * grad_accum * processes equals it."""

    batch_size: Positive | Auto = "auto"
    """Rows per micro-batch and process; completions in task mode grpo. auto sizes it to the machine."""

    grad_accum: Positive | Auto = "auto"
    """Micro-batches per optimizer step and process (gradient accumulation). auto follows from the two keys above."""

    batching: Literal["examples", "tokens"] = "examples"
    """How micro-batches are formed. examples: batch_size rows each. tokens: rows of similar length, up to batch_size *
    max_seq_len tokens with padding, so that short rows share a micro-batch. A step keeps its rows and its loss."""

    probe: Literal["auto", "always", "off"] = "auto"
    """Measure a few steps on the GPU before the launch, and size the micro-batch by them. auto: only if no earlier
    probe fits this model, method and machine; always: each time; off: trust the estimate. It does nothing without a
    GPU, where a strategy other than ddp splits the run over processes, and in tasks other than sft, cpt, cpt_mixed."""

    precision: Precision | Auto = "auto"
    """Number format of the computation. auto: bf16 if the GPU has it, fp16 on older GPUs, fp32 on a CPU."""

    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: about a third slower, much less memory."""

    packing: bool | Auto = "auto"
    """Pack several rows of a step into one row of max_seq_len tokens. auto: only with a flash attention kernel."""

    loss_head: Literal["standard", "chunked", "liger"] | Auto = "auto"
    """How logits become a loss. standard: all at once. chunked: in chunks of tokens. liger: by Liger's kernel. auto:
    chunked if all logits at once would take too much memory, else standard."""

    optim: Optimizer | Auto = "auto"
    """Optimizer, by its name in transformers. auto: adamw_torch_fused."""

    neftune_alpha: PositiveFloat | None = None
    """NEFTune: strength of the noise added to embeddings while training (5 is common). None adds none."""

    eval_steps: Positive | None = None
    """Steps between two evaluations on the held-out rows. None means once an epoch; in task hrm up to ten times in
    all, and at most once a visit to each puzzle."""

    save_steps: Positive | None = None
    """Steps between two checkpoints. None means once an epoch; in task hrm up to ten times in
    all, and at most once a visit to each puzzle."""

    save_total_limit: Positive = 2
    """Number of complete checkpoints to keep. The newest and the best are never removed."""

    best_metric: Literal["loss", "acc_t2"] | None = None
    """Keep the weights of the best evaluation as the result. loss: that with the lowest held-out loss. acc_t2, in task
    mode score alone: that in which most second answers are right. None keeps the last."""

    early_stopping: Positive | None = None
    """Stop after this many evaluations without a lower held-out loss, and keep the best weights as the result. None
    means train to the end."""

    resume: UserPath = "never"
    """never, auto (newest complete checkpoint of this run name), or the path of a checkpoint."""

    dataloader_num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that fetch rows. Rows are token ids already, so 0 is nearly always fastest."""

    dataloader_pin_memory: bool | Auto = "auto"
    """Use page-locked memory for faster copies to a GPU. auto: true if there is a GPU."""

    oom_recovery: bool = True
    """true: when memory runs out inside a step, all processes run the same rows again in smaller micro-batches, and
    keep that size. false: the run ends."""

    stall_timeout: Annotated[int, Field(ge=0)] = 1800
    """Seconds that a process may spend in one phase of a step. After that the run is ended, with the stacks of all
    processes in logs/. It must be longer than the longest save and evaluation batch. 0 never ends a run."""

    time_limit: str | Positive | None = None
    """Time the run may take: 3h30m, 1-12:00:00, or seconds. The run stops in time, with a checkpoint and exit code 138,
    as after SIGUSR1. None means the end of the SLURM job if there is one, else no limit."""

    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Which steps to profile."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Any other field of TRL's SFTConfig (GRPOConfig in task mode grpo), by its own name. It is checked against the
    fields of the installed version."""

    @property
    def peak_rate(self) -> float | Auto:
        """The peak learning rate that is used: `learning_rate`, scaled as `lr_scaling` says.

        Sources: linear, Goyal et al. 2017 (arXiv:1706.02677); the square root for Adam, Malladi et al. 2022
        (arXiv:2205.10287).
        """
        if self.learning_rate == "auto" or self.lr_batch_size is None:
            return self.learning_rate
        ratio = self.effective_batch_size / self.lr_batch_size
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[self.lr_scaling]
        return self.learning_rate * factor
