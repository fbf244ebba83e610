"""Variants of GRPO's loss that TRL 1.16 lacks, around its `_compute_loss`.

TRL multiplies a token's loss by its completion's advantage, and takes advantages per token as well. A ratio of at least
0 therefore enters as a factor of the advantage. What does not have this form (entropy, score centering) is added to the
loss. Log-probabilities are those of `_get_per_token_logps_and_entropies`, however the trainer computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.sampler_check import SampledRow
from sftplay.train.shared_prompt import unwrap
from sftplay.train.upstream import logit_scales, replaced_attributes

TOP_IDS, TOP_LOGPS = "sampler_top_ids", "sampler_top_logps"
"""Keys for the sampler's likeliest tokens at each place of a completion: int64 and float [rows, tokens, k]."""

STEP_TOKENS = "step_tokens"
"""Key for the number of tokens in the loss of the micro-batch's optimizer step, over all ranks."""

UNCHANGED = ("trl", "none")
"""Values of grpo.sampler_correction that change nothing here."""

MIN_TAIL = 1e-6
"""Least probability outside the sampler's likeliest tokens; the sum of the others rounds to 1 or above."""

CHUNK = 256
"""Tokens whose scores over the vocabulary are held at a time."""

Batch = dict[str, Any]


def variant_arguments(cfg: RunConfig) -> dict[str, Any]:
    """Return the arguments of GRPOConfig that switch off what is computed here."""
    grpo, arguments = cfg.grpo, dict[str, Any]()
    if grpo.sampler_correction != "trl" and grpo.generation.startswith("vllm"):
        arguments["vllm_importance_sampling_correction"] = False
    if grpo.entropy_mean == "step":
        arguments["entropy_coef"] = 0.0
    return arguments


def correction_ratio(
    old: Tensor, sampled: Tensor, mask: Tensor, *, mode: str, low: float | None, high: float
) -> Tensor:
    """Return what the loss of each token is multiplied by, float [rows, tokens] or [rows, 1].

    `old` and `sampled` are log-probabilities of the tokens by the weights that sampled and by the sampler. A token
    whose probability the sampler does not know (NaN) counts as if both had the same. Sources: TRL 1.16,
    `_generate_and_score_completions`, for the modes that it has; verl, rollout_corr_helper.py, for geometric_mask.
    """
    gap = torch.nan_to_num((old - sampled) * mask, nan=0.0)
    level, _, action = mode.partition("_")
    if level != "token":
        gap = gap.sum(-1, keepdim=True)
    if level == "geometric":
        gap = gap / mask.sum(-1, keepdim=True).clamp(min=1.0)
    ratio = gap.exp()
    if action == "truncate":
        return ratio.clamp(min=low, max=high)
    is_inside = (ratio <= high) & (ratio >= (low or 0.0))
    # The mean over tokens only chooses: it is no ratio of probabilities by which a gradient could be weighted.
    return torch.where(is_inside, torch.ones_like(ratio) if level == "geometric" else ratio, 0.0)


def centering_weights(p: Tensor, q: Tensor, *, mode: str | None, low: float | None, high: float) -> Tensor:
    """Return the coefficient of each log-probability of the model: float [..., k].

    `p` and `q` are the probabilities of the sampler's k likeliest tokens by the model and the sampler. Outside them q
    is taken for rho times p. The gradient of the sum of coefficient times log p is then the mean over the sampler of
    weight times gradient of log p, with the weights of `mode` (arXiv 2609.20807, eq. 7 to 14).
    """
    tail_q, tail_p = (1 - side.sum(-1, keepdim=True) for side in (q, p))
    rho = tail_q.clamp(min=MIN_TAIL) / tail_p.clamp(min=MIN_TAIL)
    least, one = low or 0.0, torch.ones_like(rho)
    if mode == "token_truncate":
        head, tail = p.clamp(min=least * q, max=high * q), one.clamp(min=least * rho, max=high * rho)
    elif mode == "token_mask":
        head = torch.where((p >= least * q) & (p <= high * q), p, 0.0)
        tail = torch.where((one >= least * rho) & (one <= high * rho), one, 0.0)
    else:
        head, tail = q, rho
    return head - tail * p


def aggregate(trainer: Any, per_token: Tensor, mask: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Make one loss of those of tokens, float [rows, tokens], as the trainer's loss_type does in training (trl 1.16,
    `_compute_loss`)."""
    accum, total = trainer.current_gradient_accumulation_steps, (per_token * mask).sum()
    match trainer.loss_type:
        case "grpo" | "sapo":
            return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / accum
        case "bnpo":
            return total / mask.sum().clamp(min=1.0) / accum
        case "dr_grpo":
            return total / (per_token.size(0) * trainer.max_completion_length) / accum
        case "luspo":
            return (per_token * mask).sum(-1).mean() / accum
    steps = trainer.args.steps_per_generation / accum
    return total * steps * trainer.accelerator.num_processes / inputs["num_items_in_batch"].clamp(min=1.0)


class LossVariants:
    """What a run's config changes in the loss of its trainer; nothing where no key asks for it."""

    def __init__(self, cfg: RunConfig, trainer: Any) -> None:
        """Raise ConfigError where score centering does not know how the model makes its scores."""
        grpo = cfg.grpo
        self.trainer = trainer
        self.mode = None if grpo.sampler_correction in UNCHANGED else grpo.sampler_correction
        self.low, self.high = grpo.sampler_ratio_min, grpo.sampler_ratio_max
        self.top = min(grpo.score_centering or 0, trainer.model.config.get_text_config().vocab_size)
        self.entropy_coef = grpo.entropy_coef if grpo.entropy_mean == "step" else 0.0
        self.divisor = grpo.dr_grpo_divisor
        self._inputs: Batch | None = None  # of the micro-batch in `applied`, as are the next four
        self._mask = self._logps = self._entropies = self._hidden = torch.empty(0)
        self._sampled: Sequence[Any] | None = None
        self._cut = (0, 0)  # tokens, or completions, whose ratio was cut off, of so many since the last line
        if self.top and (scales := logit_scales(trainer.model)):
            what = f"the model changes its scores by {', '.join(scales)}, which score centering does not know"
            raise ConfigError(what, where="grpo.score_centering", fix="remove it, or choose another model")

    @property
    def needs_sampler(self) -> bool:
        """Whether each rollout batch needs the sampler's log-probabilities."""
        return bool(self.mode or self.top)

    def keep_sampled(self, rows: Sequence[Any] | None) -> None:
        """Remember what the sampler said of the completions of the rollout batch, before TRL makes tensors of it."""
        self._sampled = rows if self.top else None

    def add_likeliest(self, batch: Batch) -> Batch:
        """Return TRL's rollout batch with the sampler's likeliest tokens."""
        rows, self._sampled = self._sampled, None
        if rows is None:
            return batch
        shape = (*batch["completion_ids"].shape, self.top)
        ids = torch.zeros(shape, dtype=torch.long)
        logps = torch.full(shape, -torch.inf)
        for number, row in enumerate(rows):
            if isinstance(row, SampledRow) and row.top is not None:
                ids[number, : len(row)], logps[number, : len(row)] = row.top
        device = batch["completion_ids"].device
        return {**batch, TOP_IDS: ids.to(device), TOP_LOGPS: logps.to(device)}

    def count_step_tokens(self, batches: Sequence[Batch], *, accum: int, masks: Sequence[Tensor]) -> None:
        """Write into each micro-batch of a rollout batch how many tokens its step's loss has. Every rank calls it."""
        if not self.entropy_coef:
            return
        counts = torch.stack([mask.sum() for mask in masks]).view(-1, accum).sum(1)
        steps = self.trainer.accelerator.reduce(counts, reduction="sum")
        for number, batch in enumerate(batches):
            batch[STEP_TOKENS] = steps[number // accum]

    @contextmanager
    def applied(self, inputs: Batch, *, mask: Tensor, sampled: Tensor | None) -> Iterator[Batch]:
        """Give the inputs for TRL's `_compute_loss`; inside, the trainer must call `see` with its log-probabilities.

        `mask`: which tokens are in the loss. `sampled`: their log-probabilities by the sampler, where they are known.
        """
        self._inputs, self._mask = {**inputs}, mask
        self._logps = torch.full_like(mask, torch.nan, dtype=torch.float32) if sampled is None else sampled.float()
        with ExitStack() as stack:
            if self.divisor is not None:
                stack.enter_context(replaced_attributes(self.trainer, max_completion_length=self.divisor))
            if self.top:
                hook = unwrap(self.trainer.model).base_model.register_forward_hook(self._keep_hidden)
                stack.callback(hook.remove)
            try:
                yield self._inputs
            finally:
                self._inputs, self._mask = None, torch.empty(0)
                self._logps = self._entropies = self._hidden = self._mask

    def _keep_hidden(self, _module: Any, _given: Any, output: Any) -> None:
        self._hidden = output.last_hidden_state

    def see(self, logps: Tensor, entropies: Tensor | None) -> None:
        """Take the log-probabilities of the tokens by the model, before TRL reads the advantages of the inputs."""
        inputs, mask = self._inputs, self._mask
        if inputs is None:
            return
        self._entropies = mask if entropies is None else entropies
        if self.mode is None:
            return
        old = inputs.get("old_per_token_logps")
        old = (logps if old is None else old).detach().float()
        ratio = correction_ratio(old, self._logps, mask, mode=self.mode, low=self.low, high=self.high)
        is_cut = (ratio == 0) | (ratio == self.high) | (ratio == (self.low or -1.0))
        counted = mask.bool() if self.mode.startswith("token") else mask.any(1, keepdim=True)
        self._cut = (self._cut[0] + int((is_cut & counted).sum()), self._cut[1] + int(counted.sum()))
        if self.trainer.loss_type == "vespo":  # it takes the ratio into its own weight
            inputs["importance_sampling_ratio"] = ratio
        else:
            advantages = inputs["advantages"]
            inputs["advantages"] = (advantages[:, None] if advantages.dim() == 1 else advantages) * ratio

    def complete_loss(self, loss: Tensor, advantages: Tensor) -> Tensor:
        """Return the loss of the micro-batch in `applied`: TRL's, and what is added. `advantages`: of its rows."""
        inputs = self._inputs
        assert inputs is not None
        if self.entropy_coef:
            entropy = (self._entropies * self._mask).sum() / inputs[STEP_TOKENS].clamp(min=1.0)
            loss = loss - self.entropy_coef * entropy * self.trainer.accelerator.num_processes
        if self.top and TOP_IDS in inputs:
            per_token = (advantages[:, None] if advantages.dim() == 1 else advantages) * self._centering_term(inputs)
            loss = loss + aggregate(self.trainer, per_token, self._mask, inputs)
        return loss

    def _centering_term(self, inputs: Batch) -> Tensor:
        """The sum of coefficient times log-probability of each token's place, float [rows, tokens]."""
        is_known = self._mask.bool() & torch.isfinite(inputs[TOP_LOGPS][..., 0])
        length = inputs["completion_ids"].size(1)
        assert len(self._hidden) == len(is_known), "a row of the forward pass is a completion"
        hidden = self._hidden[:, -length - 1 : -1][is_known]
        head = self.trainer.accelerator.unwrap_model(self.trainer.model).get_output_embeddings()
        parts = (hidden, inputs[TOP_IDS][is_known], inputs[TOP_LOGPS][is_known].float())
        terms = [hidden.new_zeros(0, dtype=torch.float32)]
        for states, ids, sampled in zip(*(part.split(CHUNK) for part in parts), strict=True):
            terms.append(checkpoint(self._center, states, head.weight, head.bias, ids, sampled, use_reentrant=False))
        return is_known.new_zeros(is_known.shape, dtype=torch.float32).masked_scatter(is_known, torch.cat(terms))

    def _center(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, sampled: Tensor) -> Tensor:
        scores = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).float() / self.trainer.temperature
        logps = scores.log_softmax(-1).gather(1, ids)
        weights = centering_weights(logps.detach().exp(), sampled.exp(), mode=self.mode, low=self.low, high=self.high)
        return (weights * logps).sum(-1)

    def take_figures(self, heartbeat: Heartbeat) -> dict[str, float | None]:
        """Return the share of ratios that the sampler's correction cut off since the last line; every rank calls it."""
        if self.mode is None:
            return {}
        ranks, self._cut = gather_objects(self._cut, heartbeat), (0, 0)
        cut, count = (sum(rank[n] for rank in ranks) for n in (0, 1))
        return {"sampler_cut_share": cut / count if count else None}
