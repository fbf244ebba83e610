"""The sections of a run's YAML, typed and frozen; a string under each field is the manual.

It checks single values only. Rules between fields live in `rules`, reading files in `load`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from sftplay.config.cluster_section import ClusterConfig as ClusterConfig
from sftplay.config.data_section import DataConfig as DataConfig
from sftplay.config.data_section import EvalConfig as EvalConfig
from sftplay.config.section import Auto, NotNegative, Positive, PositiveFloat, Share
from sftplay.config.section import Section as Section

Precision = Literal["fp32", "bf16", "fp16"]
Backend = Literal["bnb", "unsloth"]
LossHead = Literal["standard", "chunked", "liger"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Optimizer = Literal[
    "adamw_torch", "adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adafactor", "sgd"
]
Schedule = Literal["cosine", "linear", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"]
Batching = Literal["examples", "tokens"]
Probe = Literal["auto", "always", "off"]
Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "clearml", "dvclive", "neptune", "swanlab", "trackio"]


class ModelConfig(Section):
    """Which model is tuned, and how it is opened."""

    name: str
    """A hub name (`org/model`), a local folder, `builtin:tiny`, which needs no download, or a finished run: its name or
    folder. A run with an adapter means its base and, as model.adapter, its adapter."""

    revision: str | None = None
    """Branch, tag or commit on the hub. None means the hub's default branch; use a commit to repeat a run."""

    adapter: str | None = None
    """A run, or a folder with an adapter, to start from: its weights train on, as one adapter on the same base. r,
    alpha, target_modules and the like must be those of the adapter. None starts a new one."""

    merge_adapter: bool = False
    """Merge model.adapter into the full-precision base first, and train a new adapter (or everything) on that."""

    max_seq_len: Annotated[int, Field(ge=8)] = 2048
    """Longest row in tokens. Memory grows linearly with it; `data.too_long` says what happens to longer rows."""

    trust_remote_code: bool = False
    """Run Python code that ships with the model. It can do anything you can; leave it off unless you have read it."""

    allow_pickle: bool = False
    """Open weights that are only there as pickles (pytorch_model.bin), which can hide code. Safetensors cannot."""

    attn: Attention | Auto = "auto"
    """Attention kernel. auto takes flash_attention_2 where GPU and package allow it, else sdpa."""


class LoraConfig(Section):
    """Which weights train beside the frozen base (modes lora and qlora)."""

    r: Positive = 32
    """Width of the low-rank pair. Memory and capacity grow linearly with it."""

    alpha: PositiveFloat | None = None
    """Update scale: the pair is multiplied by alpha / r. None means 2 * r."""

    dropout: Share = 0.0
    """Share of the pair's inputs dropped while training. 0.05 helps on small data; 0 is faster."""

    target_modules: list[str] | Auto = "auto"
    """Names of the linear layers that get a pair. auto takes every linear layer but the output head."""

    modules_to_save: list[str] = Field(default_factory=list)
    """Modules trained in full and saved with the adapter, such as embed_tokens or lm_head after adding tokens."""

    dora: bool = False
    """Weight-decomposed LoRA: better at small r, slower."""

    rslora: bool = False
    """Scale by alpha / sqrt(r) in place of alpha / r, which keeps large r useful."""


class TuningConfig(Section):
    """What trains: everything, or an adapter on a frozen base in 16/32 or in 4 bits."""

    mode: Literal["full", "lora", "qlora"] = "lora"
    """full trains every weight; lora an adapter; qlora an adapter on a base held in 4 bits."""

    backend: Backend | Auto = "bnb"
    """Who opens the model and puts the adapter on it. bnb: transformers and PEFT, 4 bits by bitsandbytes. unsloth: its
    kernels, for lora and qlora in one process (make train-unsloth). auto: unsloth where a GPU and the versions
    installed allow it, else bnb; the log says which and why."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit code of qlora. nf4 fits normally distributed weights better."""

    double_quant: bool = True
    """Quantise the scales too: saves about 0.4 bit a weight at no measurable loss."""

    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Shape of the adapter."""


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


class LoggingConfig(Section):
    """What a run writes down while it trains."""

    backend: list[Tracker] | Tracker | Literal["none"] = "tensorboard"
    """Tracker or list of trackers that transformers supports; none switches them off. metrics.jsonl is always there."""

    steps: Positive = 10
    """Steps between two lines of metrics."""

    row_ids: bool = False
    """Write the ids of the rows each step trained on into metrics.jsonl."""


class RunConfig(Section):
    """One run, complete. `origins` remembers where each value that is not a default came from."""

    task_mode: Literal["sft"] = "sft"
    """The task. sft: supervised fine-tuning on the assistant's turns."""

    run_name: str | None = None
    """Folder below output_dir. None means the config's name and the time."""

    output_dir: str = "outputs"
    """Where run folders go."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the data order, the adapter's start and dropout."""

    model: ModelConfig
    """Which model is tuned."""

    tuning: TuningConfig = Field(default_factory=TuningConfig)
    """What trains."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """How it trains."""

    data: DataConfig
    """On what it trains."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """How it is measured."""

    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """What is written down."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """How its processes work together."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key -> `file:line` or `command line`, for every value that is not a default."""
        return self._origins

    def with_values(self, values: dict[str, Any], origin: str) -> RunConfig:
        """A copy with dotted keys replaced and checked again; `origin` is remembered for each."""
        tree = self.model_dump()
        for dotted, value in values.items():
            *path, last = dotted.split(".")
            branch = tree
            for part in path:
                branch = branch[part]
            branch[last] = value
        changed = RunConfig.model_validate(tree)
        changed._origins = {**self._origins, **dict.fromkeys(values, origin)}
        return changed
