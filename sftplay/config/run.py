"""The config of a run, typed and frozen: the sections model, tuning, train and logging, and all others put together.

A string under each field is the manual. Only single values are checked here, rules between them in `load`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, PrivateAttr

from sftplay.config.cluster import SHARDED, ClusterConfig
from sftplay.config.data import CptConfig, DataConfig, DatasetConfig, EvalConfig, RewardConfig, SandboxConfig
from sftplay.config.section import Auto, NotNegative, Positive, PositiveFloat, Section, Share, UserPath
from sftplay.tasks import TASKS, TaskRow

if TYPE_CHECKING:
    from sftplay.tasks.grpo.section import GrpoConfig
    from sftplay.tasks.hrm.section import HrmConfig
    from sftplay.tasks.preference.section import PreferenceConfig
    from sftplay.tasks.reward_model.section import RewardModelConfig
    from sftplay.tasks.score.section import ScoreConfig

    TaskMode = str
else:
    TaskMode = Literal[tuple(TASKS)]

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


FlashKernel = Literal["flash_attention_2", "kernels-community/flash-attn2", "kernels-community/flash-attn3"]
FLASH_KERNELS: tuple[str, ...] = get_args(FlashKernel)
Attention = Literal["sdpa", "eager", FlashKernel]
Tracker = Literal["tensorboard", "wandb", "mlflow", "comet_ml", "clearml", "dvclive", "neptune", "swanlab", "trackio"]


class ModelConfig(Section):
    """Which model is tuned, and how it is opened."""

    name: UserPath
    """A hub name (`org/model`), a local folder, `builtin:tiny`, which needs no download, or the name or folder of a
    finished run. A run with an adapter means its base, and its adapter as model.adapter."""

    revision: str | None = None
    """Branch, tag or commit on the hub. None means the default branch; give a commit to make a run repeatable."""

    adapter: UserPath | None = None
    """A run, or a folder with an adapter, to continue from: the same adapter is trained further, on the same base. r,
    alpha, target_modules and the like must be those of the adapter. None starts a new adapter."""

    merge_adapter: bool = False
    """Merge model.adapter into the full-precision base first, and train a new adapter (or everything) on that."""

    max_seq_len: Annotated[int, Field(ge=8)] = 2048
    """Maximum length of a row in tokens. Memory grows linearly with it. data.too_long decides about longer rows."""

    trust_remote_code: bool = False
    """Run Python code that ships with the model. It can do everything that you can; leave it off unless you have read
    it."""

    allow_pickle: bool = False
    """Load weights from pickle files (pytorch_model.bin) if there is nothing else. A pickle can contain code;
    safetensors cannot."""

    attn: Attention | Auto = "auto"
    """Attention kernel. auto: flash_attention_2 if GPU and packages allow it, else sdpa, or eager for models that cap
    the scores of their attention (Gemma 2). kernels-community/...: built by the hub, for the package kernels."""


class LoraConfig(Section):
    """Which weights train on top of the frozen base (modes lora and qlora)."""

    r: Positive = 32
    """Rank of the adapter's matrices. Memory and capacity grow linearly with it."""

    alpha: PositiveFloat | None = None
    """Scale of the adapter: its output is multiplied by alpha / r. None means 2 * r."""

    dropout: Share = 0.0
    """Dropout of the adapter's inputs while training. 0.05 helps on small data; 0 is faster."""

    target_modules: list[str] | Auto = "auto"
    """Names of the linear layers that get an adapter. auto takes all but the output head, routers, out_proj of Mamba
    (PEFT refuses it) and a mixture's experts: gate_proj, up_proj, down_proj (w1, w2, w3) in a list adapt these where
    PEFT knows them."""

    modules_to_save: list[str] = Field(default_factory=list)
    """Modules trained in full and saved with the adapter. [embed_tokens, lm_head] trains all tokens, not only those of
    tuning.new_tokens."""

    dora: bool = False
    """DoRA, weight-decomposed LoRA: better at small r, slower."""

    rslora: bool = False
    """Rank-stabilised LoRA: scale by alpha / sqrt(r) instead of alpha / r, which keeps a large r useful."""


class NewTokensConfig(Section):
    """Terms of a domain that become tokens of their own, see docs/continued-pretraining.md. Each gets a row in input
    embedding and output head, which begins as the mean of the rows of its pieces, and trains."""

    path: UserPath | None = None
    """A text file with one term a line. Terms that make the vocabulary a multiple of 64 keep the output head fast on a
    GPU."""

    @property
    def is_on(self) -> bool:
        """Whether there are any."""
        return self.path is not None


class TuningConfig(Section):
    """What trains: everything, or an adapter on a frozen base in 16, 32 or 4 bits."""

    mode: Literal["full", "lora", "qlora"] = "lora"
    """full trains every weight; lora an adapter; qlora an adapter on a base held in 4 bits."""

    backend: Literal["bnb", "unsloth"] | Auto = "bnb"
    """What loads the model and adds the adapter. bnb: transformers and PEFT, 4 bits by bitsandbytes. unsloth: its
    kernels, for lora and qlora in one process (`make train-unsloth`). auto: unsloth if GPU and installed versions allow
    it, else bnb; the log says which and why."""

    quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit data type of qlora. nf4 fits normally distributed weights better."""

    double_quant: bool = True
    """Quantise the quantisation constants too: saves about 0.4 bits per weight at no measurable loss."""

    lora: LoraConfig = Field(default_factory=LoraConfig)
    """The adapter."""

    new_tokens: NewTokensConfig = Field(default_factory=NewTokensConfig)
    """Terms that become tokens of their own."""

    @property
    def trains_single_rows(self) -> bool:
        """Whether rows of new tokens train next to an adapter: at least one end of the model does not train in full."""
        ends = [name for name in self.lora.modules_to_save if any(word in name for word in ("embed", "wte", "lm_head"))]
        return self.mode != "full" and self.new_tokens.is_on and len(ends) < 2


class LoggingConfig(Section):
    """What a run logs while it trains."""

    backend: list[Tracker] | Tracker | Literal["none"] = "tensorboard"
    """Tracker or list of trackers that transformers supports; none switches them off. metrics.jsonl is always
    written."""

    steps: Positive = 10
    """Steps between two lines of metrics."""

    row_ids: bool = False
    """Write the ids of the rows that each step trained on into metrics.jsonl."""


def _add_task_sections(annotations: dict[str, Any], namespace: dict[str, Any]) -> None:
    """Add the sections that tasks define, from the table of tasks, to the body of a class of pydantic's."""
    for row in TASKS.values():
        if row.section and row.section not in annotations and (part := row.part("section")):
            section = annotations[row.section] = part.SECTION
            namespace[row.section] = Field(
                default_factory=section, description=f"{row.title}: what this task alone reads."
            )


class RunConfig(Section):
    """One run, complete. `origins` remembers where each value that is not a default came from."""

    task_mode: TaskMode = "sft"
    """The task. sft: supervised fine-tuning on the assistant's turns. cpt (also written dapt): continued pre-training
    on every token of documents. cpt_mixed: documents and chats in one stream, see datasets. grpo: the model samples
    completions of prompts and learns from their rewards, see rewards and grpo. dpo, ipo, orpo, simpo: the model learns
    from pairs which of two answers is better, kto from single answers with a verdict, see preference. reward_model: a
    score for answers is learned from pairs. score: a solver answers twice, with the hint of a guide between, and both
    learn, see rewards and score. hrm: a small recurrent model learns puzzles from nothing, see hrm."""

    run_name: str | None = None
    """Folder below output_dir. None means the name of the config and the time."""

    output_dir: UserPath = "outputs"
    """Folder of all run folders."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    """Seed of the data order, the initial adapter weights and dropout."""

    model: ModelConfig
    """Which model is tuned."""

    tuning: TuningConfig = Field(default_factory=TuningConfig)
    """What trains."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """How it trains."""

    data: DataConfig = Field(default_factory=DataConfig)
    """What it trains on."""

    datasets: list[DatasetConfig] = Field(default_factory=list)
    """The sources of a mixture."""

    cpt: CptConfig = Field(default_factory=CptConfig)
    """How documents become blocks (task modes cpt and cpt_mixed)."""

    eval: EvalConfig = Field(default_factory=EvalConfig)
    """How it is evaluated."""

    rewards: list[RewardConfig] = Field(default_factory=list)
    """Rewards that score answers: `reward-check` tries them, `eval` measures them on the held-out prompts."""

    if TYPE_CHECKING:
        grpo: GrpoConfig
        preference: PreferenceConfig
        reward_model: RewardModelConfig
        score: ScoreConfig
        hrm: HrmConfig
    else:
        _add_task_sections(__annotations__, vars())

    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where programs of a model run."""

    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    """What is logged."""

    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """How its processes work together."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def learns_documents(self) -> bool:
        """Whether rows are full blocks of documents, or of documents and chats."""
        return self.task.learns_documents

    @property
    def task(self) -> TaskRow:
        """The row of the task in the table of all."""
        return TASKS[self.task_mode]

    @property
    def sources(self) -> list[DatasetConfig]:
        """What cpt and cpt_mixed read: `datasets`, or the documents of data.train_path as the only source."""
        if self.datasets or self.data.train_path is None:
            return self.datasets
        path, val_path = self.data.train_path, self.data.val_path
        return [DatasetConfig(name="documents", path=path, type="cpt", val_path=val_path, split=self.data.split)]

    @property
    def rows_path(self) -> str:
        """The path of the training rows, or of the first source; empty only in a config that is refused."""
        return self.data.train_path or next((source.path for source in self.datasets), "")

    @property
    def row_tokens(self) -> int:
        """The most tokens of a row that is trained on; a prompt and its completion are one."""
        if self.task.turns == 1:
            return self.prompt_tokens + self.grpo.max_completion_length
        return (self.cpt.block_size if self.learns_documents else None) or self.model.max_seq_len

    @property
    def prompt_tokens(self) -> int:
        """The most tokens of a prompt (task mode grpo), or of a problem, which stands in two prompts (score)."""
        if self.task.turns == 2:
            return self.model.max_seq_len - self.score.max_new_tokens - self.score.max_hint_tokens
        return self.grpo.max_prompt_length or self.model.max_seq_len - self.grpo.max_completion_length

    def count_steps(self, tokens: int) -> int:
        """Count the steps that train on at least so many tokens: a block repeats one token of the block before it."""
        return max(1, math.ceil(tokens / (self.train.effective_batch_size * (self.row_tokens - 1))))

    @property
    def accelerate_shards(self) -> bool:
        """Whether accelerate splits the model over the processes. Task score splits its models itself."""
        return self.cluster.strategy in SHARDED and not self.task.splits_itself

    @property
    def packs_rows(self) -> bool:
        """Whether rows of a step are packed into one. Blocks of documents are packed already."""
        return self.train.packing is True and not self.learns_documents

    @property
    def origins(self) -> dict[str, str]:
        """Dotted key -> `file:line` or `command line`, for every value that is not a default."""
        return self._origins

    def describe_origin(self, key: str, *, unset: str = "default") -> str:
        """Return where a key was written and the key itself, for an error; `unset` stands for a key that was not."""
        return f"{self._origins.get(key, unset)} {key}".strip()

    def get_value(self, dotted: str) -> Any:
        """Return the value of a dotted key; also of one below `data.columns` and `extra`, and of an entry of a list."""
        value: Any = self
        for name in dotted.split("."):
            if isinstance(value, dict):
                value = value[name]
            else:
                value = value[int(name)] if isinstance(value, list) else getattr(value, name)
        return value

    def with_origins(self, origins: dict[str, str]) -> RunConfig:
        """Return a copy that remembers these origins and no others."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy

    def with_values(self, values: dict[str, Any], origin: str) -> RunConfig:
        """Return a copy with dotted keys replaced, their sections checked again; `origin` is remembered for each."""
        # pydantic takes the sections that stay as they are, objects of their classes, without a second check.
        changed = {dotted.partition(".")[0] for dotted in values}
        tree = dict(self) | self.model_dump(include=changed)
        for dotted, value in values.items():
            *path, last = dotted.split(".")
            branch: Any = tree
            for part in path:
                branch = branch[int(part) if isinstance(branch, list) else part]
            branch[last] = value
        return RunConfig.model_validate(tree).with_origins(self._origins | dict.fromkeys(values, origin))
