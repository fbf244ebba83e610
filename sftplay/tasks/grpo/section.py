"""The section `grpo`: how completions are sampled, and how the model learns from their rewards.

Names are the kit's where TRL has several for one thing; `tasks.grpo.task` translates them. Rules between keys are
in `spec`.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from sftplay.config.section import Auto, NotNegative, Positive, PositiveFloat, Section

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
Generation = Literal["transformers", "continuous", "vllm_colocate", "vllm_server"]
SamplerCorrection = Literal[
    "trl", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]


class VllmConfig(Section):
    """Settings of vLLM where it generates (grpo.generation vllm_colocate and vllm_server)."""

    memory_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """vllm_colocate: share of the GPU's memory that vLLM takes for its weights and its cache. TRL's default is 0.3."""

    sleep: bool = True
    """vllm_colocate: vLLM gives its memory back while the model is updated, and takes it again to generate. It costs a
    few seconds a step. TRL's default is false."""

    tensor_parallel: Positive = 1
    """vllm_colocate: number of processes over which vLLM splits the model. It must divide the number of processes. Of a
    server that the kit starts: the GPUs of its node. TRL's default is 1."""

    sync: Literal["full", "adapter"] = "full"
    """vllm_server: what the server gets before it samples. full: all weights, merged with the adapter. adapter: the
    files of a LoRA, which it reads from the run's folder and puts on the base that it has loaded: less to send, slower
    to sample. TRL knows only full."""

    url: str | None = None
    """vllm_server: address of a server that runs. None means that the kit starts one: `make train` on this machine,
    `make submit` and `make train-ray` on a node of its own. TRL's default is port 8000 of this machine."""

    command: str | None = None
    """vllm_server: what starts the server, where the kit does. {model}, {host} and {port} become the model's name, and
    the address to listen on. None means `vllm serve` with the options that TRL needs."""

    timeout: Positive = 240
    """vllm_server: seconds to wait for the server when the run starts. TRL's default is 240."""


class GrpoConfig(Section):
    """How completions are sampled and how the model learns from their rewards (task mode grpo). A row is a prompt;
    train.effective_batch_size counts completions."""

    num_generations: Annotated[int, Field(ge=2)] = 8
    """Completions that are sampled for each prompt, and compared with each other: a group. At least 2; more give a
    better estimate and cost more. It must divide the completions of a rollout batch. TRL's default is 8."""

    max_completion_length: Positive = 512
    """Most tokens of a completion. Longer ones are cut off there and count as truncated. TRL's default is 512."""

    max_prompt_length: Positive | None = None
    """Most tokens of a prompt; data.too_long decides about longer ones. None means model.max_seq_len less
    max_completion_length. TRL 1.16 has no such limit."""

    steps_per_generation: Positive = 1
    """Optimizer steps that train on one rollout batch of completions. 1 is on policy. More generate in larger batches,
    and learn from completions of older weights. TRL counts micro-batches: its value is this one times
    train.grad_accum."""

    num_iterations: Positive = 1
    """Times that the completions of one rollout batch are learned from. TRL's default is 1."""

    loss_type: LossType = "dapo"
    """How the losses of tokens become one. dapo: the mean over all tokens of the step. grpo: the mean over completions
    of each one's mean. dr_grpo: the sum over max_completion_length. bnpo: the mean over each micro-batch's tokens.
    cispo, sapo, vespo: other bounds on the ratio to the older weights. luspo: completions count by their length; it
    needs importance_sampling_level sequence. TRL's default is dapo."""

    dr_grpo_divisor: Positive | None = None
    """loss_type dr_grpo: what the sum of a completion's losses is divided by, a constant (Dr. GRPO, arXiv 2503.20783).
    None means max_completion_length, as in TRL."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether the ratio to the older weights is taken of each token, or of a whole completion (GSPO, arXiv 2507.18071).
    sequence goes with loss_type grpo or luspo. TRL's default is token."""

    epsilon: PositiveFloat = 0.2
    """How far the ratio to the older weights may fall below 1 before it is cut off. TRL's default is 0.2."""

    epsilon_high: PositiveFloat | None = None
    """How far it may rise above 1 (clip-higher, DAPO, arXiv 2503.14476, takes 0.28). None means epsilon. loss_type
    cispo (arXiv 2506.13585) cuts the ratio itself off here, and wants 5. TRL's default is None."""

    delta: PositiveFloat | None = None
    """A second upper bound of the ratio, for completions that were worse than their group. It must be above 1 +
    epsilon. None sets none, as TRL does."""

    beta: NotNegative = 0.0
    """Weight of the distance (KL) to the model that the run started with. 0 needs no such model; above 0, an adapter is
    switched off to be it, and mode full holds a second copy of the weights. TRL's default is 0."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What the distance of a reward from its group's mean is divided by: the standard deviation of the group, that of
    the whole batch, or nothing. TRL's default is group."""

    aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Whether rewards are added by their weights before they are compared in the group, or compared one by one and then
    added (GDPO). TRL's default is sum_then_normalize."""

    mask_truncated_completions: bool = False
    """Learn nothing from completions that were cut off at max_completion_length. TRL's default is false."""

    overlong_buffer: Positive | None = None
    """A penalty for length, added to the reward: 0 up to this many tokens before max_completion_length, then falling to
    -1 there (soft overlong punishment, DAPO, arXiv 2503.14476, eq. 13). In completions of several turns only what the
    model wrote counts. None sets none, as TRL does."""

    top_entropy_quantile: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Share of the tokens that are learned from: those where the model was least sure. 0.2 is usual; 1 takes all. TRL's
    default is 1."""

    entropy_coef: float = 0.0
    """Reward for being unsure: this times the mean entropy is added to what is maximised. TRL's default is 0."""

    entropy_mean: Literal["micro_batch", "step"] = "micro_batch"
    """What the mean entropy of entropy_coef is taken over: the tokens of each micro-batch, as TRL does, so that it
    depends on train.batch_size; or all tokens of the step (A3C, arXiv 1602.01783)."""

    off_policy_mask_threshold: PositiveFloat | None = None
    """Learn nothing from completions that were worse than their group and that the model has moved away from by more
    than this, in nats a token (DeepSeek-V3.2, arXiv 2512.02556). 0.5 is usual. None learns from all, as TRL does."""

    sampler_correction: SamplerCorrection = "trl"
    """How the loss corrects for a sampler that gives other probabilities than the model that learns: by their ratio,
    of each token or of the completion. truncate cuts the ratio off at sampler_ratio_min and _max (token_truncate: TIS,
    fengyao.notion.site/off-policy-rl). mask learns nothing where it lies outside (token_mask: IcePop, arXiv
    2510.18855; geometric_mask: of a completion, by the mean of its tokens, richardli.xyz/rl-collapse-3). trl corrects
    vLLM by sequence_mask, as TRL does, and nothing else; none corrects nothing."""

    sampler_ratio_min: PositiveFloat | None = None
    """Lower bound of the ratio of sampler_correction: below 1. IcePop takes 0.5. None sets none, as TRL does."""

    sampler_ratio_max: PositiveFloat = 3.0
    """Upper bound of the ratio of sampler_correction: above 1. TIS takes 2, IcePop 5. TRL's default is 3."""

    score_centering: Positive | None = None
    """Subtract from the gradient of each token what the sampler's probabilities would add on average (Score Centering,
    arXiv 2609.20807), which lets a model drift that learns from a sampler with other probabilities. The number of the
    sampler's likeliest tokens that are compared; the paper takes 128. None subtracts nothing, as TRL does."""

    temperature: PositiveFloat = 1.0
    """Temperature of sampling. Higher samples more widely. TRL's default is 1."""

    top_p: Probability = 1.0
    """Sample from the most likely tokens whose probabilities add up to this. 1 takes all. TRL's default is 1."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many most likely tokens. 0 takes all. TRL's default is 0."""

    min_p: Probability | None = None
    """Sample only tokens with at least this share of the likeliest token's probability. None sets no limit, as TRL
    does."""

    repetition_penalty: PositiveFloat = 1.0
    """Divides the score of tokens that have occurred. 1 changes nothing. TRL's default is 1."""

    generation: Generation = "transformers"
    """What samples the completions. transformers: the trained model itself. continuous: the same with transformers'
    continuous batching. vllm_colocate: vLLM on the training GPUs. vllm_server: a vLLM server on other GPUs, which
    `make submit` and `make train-ray` start, or you. TRL's default is the first."""

    generation_rows: Positive | None = None
    """Completions that a process samples at the same time (generation transformers, continuous); the rest follow. None
    means as many as fit into memory next to the model. TRL samples all at once."""

    share_prompts: bool | Auto = "auto"
    """Compute a prompt once for all its completions in a micro-batch while the model learns and where it scores them.
    auto: where that costs less, which the plan and each micro-batch decide, and a proof with the model's own weights
    shows that it changes nothing. true does so always, and refuses a model that fails the proof; false never, as
    TRL."""

    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Settings of vLLM."""

    dynamic_sampling_rounds: Annotated[int, Field(ge=0)] = 0
    """Most times per rollout batch that groups with equal rewards, which teach nothing, are sampled again, each with
    another prompt (dynamic sampling, DAPO). Above 0, prompts whose last groups were such also skip their next turns. 0
    samples once, as TRL does."""

    skip_zero_variance: bool = False
    """Sample nothing for a prompt whose last groups had equal rewards, for its next turns (at most four): a step takes
    fewer tokens. At least one prompt is sampled. The loss is divided as if all were sampled. Not with
    dynamic_sampling_rounds, placebo_reward, bnpo, vLLM or sharded weights. TRL samples all."""

    logprob_check_steps: Annotated[int, Field(ge=0)] = 10
    """Every so many steps the sampler is compared with the model that learns (sampler_gap and sampler_kl in the
    metrics). Such a step computes one more forward pass, of one micro-batch. 0 never compares."""

    stop_without_signal: Annotated[int, Field(ge=0)] = 20
    """Stop the run after this many steps in which all groups had equal rewards, so that nothing was learned. 0 never
    stops. TRL goes on."""

    samples: Annotated[int, Field(ge=0)] | None = None
    """Completions of each step that are written to samples/, with rewards and verdicts. None means all, 0 none."""

    placebo_reward: Literal["random", "constant"] | None = None
    """An experiment that must not learn: the model gets random or constant rewards, and the true ones are measured
    only, as true_reward. None gives the true ones."""

    environment: str | None = None
    """What answers the model's turns: a function of yours, `path.py:make` or `module:make`, or a shipped environment by
    name. It returns an object with reset and step (docs/environments.md). Each completion has a copy of it in a process
    of its own. None: a completion is one turn, or as many as its calls of grpo.tools ask for. TRL calls it
    environment_factory."""

    environment_options: dict[str, Any] = Field(default_factory=dict)
    """What the environment is made with, by name: `{size: 5}` calls make(size=5)."""

    tools: list[str] = Field(default_factory=list)
    """Functions that the model may call: `path.py:NAME` or `module:NAME`, typed and documented, or shipped tools by
    name. The chat template shows them to the model, and the answer goes back to it as a turn of role tool."""

    tool_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Arguments of tools that the config gives and the model neither sees nor sets, by the name of the function:
    `{search: {folder: pages}}`."""

    max_turns: Positive = 10
    """Most turns of the model in a completion, where an environment or tools answer it. max_completion_length counts
    the tokens of all turns, what is answered included. TRL sets no limit (max_tool_calling_iterations)."""

    step_deadline: PositiveFloat = 10.0
    """Seconds that an environment may take for reset or step, and a tool for a call. A tool that takes longer is ended,
    and the model reads so; an environment that does ends the completion, from which nothing is learned. TRL waits for
    ever."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Any other field of TRL's GRPOConfig, by its own name. It is checked against the fields of the installed
    version."""

    @property
    def step_multiple(self) -> int:
        """Completions of a step must be a multiple of it, so that every rollout batch holds whole groups."""
        return self.num_generations // math.gcd(self.num_generations, self.steps_per_generation)


SECTION = GrpoConfig
