"""A head of one score, the scores of both answers of a pair, the loss of Bradley and Terry, and held-out figures."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.evaluate.evaluate import evenly_spaced, ready_to_answer
from sftplay.model.weights import take_own_format
from sftplay.reward.model_reward import quiet_transformers
from sftplay.tasks.preference.measuring import EvaluateHeldOut, share_right
from sftplay.tasks.preference.reference import compute_rows, pass_settings
from sftplay.tasks.preference.shared_prompt import join_sides, keeps_sides_apart, split_sides
from sftplay.train.metrics import write_measured
from sftplay.train.micro_batches import Batch, can_compute
from sftplay.train.shared_prompt import attends_to_all, unwrap
from sftplay.train.upstream import find_attention

CARRIED = (
    "hf_quantizer", "hf_device_map", "is_quantized", "is_loaded_in_4bit", "quantization_method", "is_4bit_serializable",
)  # fmt: skip
"""What `from_pretrained` has noted on a model in 4 bits, and what Trainer and PEFT look for."""


class ScoreHead(nn.Linear):
    """A head without a bias that computes in fp32 under autocast too: in bf16 two scores near 4 differ by 1/64."""

    places: Tensor | None = None  # int64 [rows, k]: the only tokens to score; None: all
    _found: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return scores [rows, tokens, 1]; where `places` are set, `take` gives theirs, and all are that of the last.

        The class around it picks one score of each row, and a row that holds two answers has two.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            if self.places is None:
                return nn.functional.linear(hidden.float(), self.weight.float())
            states = hidden.gather(1, self.places[:, :, None].expand(-1, -1, hidden.shape[-1]))
            self._found = nn.functional.linear(states.float(), self.weight.float())
            return self._found[:, -1:].expand(-1, hidden.shape[1], -1)

    def take(self) -> Tensor:
        """Return the scores at `places`, fp32 [rows, k], once."""
        assert self._found is not None
        found, self._found = self._found.squeeze(-1), None
        return found


def to_score_model(model: Any, *, pad_token_id: int, seed: int) -> Any:
    """Return a model for sequence classification with one label on the weights of the causal `model`.

    Its head is new, and the same for the same seed. The text config gets the pad token: the score of a row is that of
    its last token that is none (transformers 5.17, modeling_layers.py, `GenericForSequenceClassification`).

    Raises:
        ConfigError: transformers has no such class for it, or one of another make.
    """
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    config.get_text_config().pad_token_id = pad_token_id
    classes = AutoModelForSequenceClassification._model_mapping
    name, base = type(model).__name__, model.base_model
    if type(config) not in classes:
        raise _refusal(f"transformers has no class that gives a score for a {name}")
    with quiet_transformers(), torch.device("meta"):
        scored = classes[type(config)]._from_config(config)
    head = next((head for head in SEQ_CLS_HEAD_NAMES if isinstance(getattr(scored, head, None), nn.Linear)), None)
    if head is None or type(scored.base_model) is not type(base) or getattr(scored, head).bias is not None:
        raise _refusal(f"{type(scored).__name__} is no {name} with one linear layer instead of its output head")
    setattr(scored, scored.base_model_prefix, base)
    width, std = getattr(scored, head).in_features, getattr(config.get_text_config(), "initializer_range", None) or 0.02
    setattr(scored, head, make_head(width, std=std, like=model.get_input_embeddings().weight, seed=seed))
    if left := [path for path, weight in scored.named_parameters() if weight.is_meta]:
        raise _refusal(f"{type(scored).__name__} has more weights than a {name}: {left[0]}")
    scored.register_load_state_dict_pre_hook(take_own_format)
    for note in CARRIED:
        if note in vars(model):
            setattr(scored, note, getattr(model, note))
    return scored.train(model.training)


def make_head(width: int, *, std: float, like: Tensor, seed: int) -> ScoreHead:
    """Return a new head, normal around 0, with the dtype and on the device of `like`."""
    head = ScoreHead(width, 1, bias=False, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        head.weight.copy_(torch.empty_like(head.weight).normal_(std=std, generator=torch.Generator().manual_seed(seed)))
    return head.to(device=like.device, dtype=like.dtype)


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where="model.name", fix="choose another model: Llama, Qwen, Mistral and Gemma have one")


def find_score_head(model: Any) -> ScoreHead:
    """Return the head of a score model that computes: with an adapter the copy that trains."""
    head = next(getattr(model, name) for name in SEQ_CLS_HEAD_NAMES if hasattr(model, name))
    return head.modules_to_save[head.active_adapters[0]] if hasattr(head, "modules_to_save") else head


def pair_scores(model: Any, batch: Batch, *, shares: bool) -> Tensor:
    """Compute the scores of a batch of `PairCollator`, fp32 [pairs, 2], chosen answers first.

    With `shares` the prompt of a pair is computed once, which `prove` allows; else each answer has a row, and `model`
    may be wrapped by DDP, FSDP or DeepSpeed. The score of an answer is that of its last token that is no padding, as
    plain transformers reads it.
    """
    base = unwrap(model)
    pad = base.config.get_text_config().pad_token_id
    if not shares:
        inputs = split_sides(batch, [True, True]).inputs
        ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
        return model(**{**inputs, "input_ids": ids}, use_cache=False).logits.float().view(2, -1).t()
    places = torch.arange(batch["input_ids"].shape[1], device=batch["input_ids"].device)
    counts = (batch["input_ids"] != pad) & (batch["attention_mask"] == 1)
    is_chosen = places < (batch["prompt_tokens"] + batch["chosen_tokens"])[:, None]
    ends = torch.stack([(places * (counts & side)).argmax(1) for side in (is_chosen, ~is_chosen)], dim=1)
    with _scored_at(find_score_head(base), ends) as head:
        model(**join_sides(batch, find_attention(base)).inputs, use_cache=False)
        return head.take()


@contextmanager
def _scored_at(head: ScoreHead, ends: Tensor) -> Iterator[ScoreHead]:
    """Inside, the head scores the places `ends` only, int64 [rows, 2]."""
    head.places = ends
    try:
        yield head
    finally:
        head.places = None


def pair_losses(scores: Tensor, margin: Tensor | None, *, center: float) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) + center * (chosen + rejected)^2 for each pair of `scores`
    [pairs, 2].

    Ouyang et al. 2022 (arXiv:2203.02155), equation 1; the margin is that of Touvron et al. 2023 (arXiv:2307.09288),
    equation 2, the last part that of Eisenstein et al. 2023 (arXiv:2312.09244), as in trl 1.16, reward_trainer.py.
    """
    ahead = scores[:, 0] - scores[:, 1]
    losses = -logsigmoid(ahead if margin is None else ahead - margin)
    return losses + center * scores.sum(1).square() if center else losses


def prove(model: Any) -> bool:
    """Return whether pairs of a few tokens have the same scores with a shared prompt as apart, and neither side has a
    gradient from the other. False where this process does not hold the weights.
    """
    base = unwrap(model)
    if not attends_to_all(base) or not can_compute(base):
        return False
    return keeps_sides_apart(base, lambda batch, shares: pair_scores(base, batch, shares=shares), near_zero=1.0)


BINS = 10


def compute_figures(scores: Tensor, rows: Any, *, cfg: RunConfig) -> dict[str, Any]:
    """Compute the figures of held-out pairs from their scores [pairs, 2].

    `accuracy` is the share of pairs whose chosen answer has the higher score; ties count half. `stderr` is its standard
    error, `margin` the mean of the difference. The loss takes the margins of the rows where the config says so.
    """
    margin = torch.tensor(rows["margin"][:], dtype=torch.float64) if cfg.reward_model.margin else None
    scores = scores.double()
    ahead = scores[:, 0] - scores[:, 1]
    accuracy, n = share_right(scores), len(scores)
    losses = pair_losses(scores, margin, center=cfg.reward_model.center)
    return {
        "n": n,
        "loss": float(losses.mean()),
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / n),
        "margin": float(ahead.mean()),
        "rewards/chosen": float(scores[:, 0].mean()),
        "rewards/rejected": float(scores[:, 1].mean()),
        **describe_calibration(ahead, rows=rows["row"][:], seed=cfg.seed),
    }


def describe_calibration(ahead: Tensor, *, rows: Sequence[int], seed: int) -> dict[str, Any]:
    """Compare the probability that one answer is better, sigmoid of the difference of scores, with how often it is.

    The chosen answer is always the better one, so a hash decides which answer of a pair the probability is about.
    `calibration` holds bins of equal width, those without a pair left out; `calibration_error` is the mean over pairs
    of the distance between both in their bin (expected calibration error, Guo et al. 2017, arXiv:1706.04599).
    """
    first = torch.tensor([bool(hashlib.sha256(f"{seed} {row}".encode()).digest()[0] & 1) for row in rows])
    chances = torch.where(first, ahead, -ahead).sigmoid()
    numbers = (chances * BINS).long().clamp(max=BINS - 1)
    bins = []
    for number in range(BINS):
        inside = numbers == number
        if count := int(inside.sum()):
            predicted, observed = float(chances[inside].mean()), float(first[inside].double().mean())
            bins.append({"from": number / BINS, "n": count, "predicted": predicted, "observed": observed})
    error = sum(found["n"] * abs(found["predicted"] - found["observed"]) for found in bins) / max(1, len(ahead))
    return {"calibration": bins, "calibration_error": error}


def measure(model: Any, pairs: Any, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Measure `model` on all held-out pairs; write `path` (.json), and `eval.limit` of them with scores (.jsonl)."""
    rows, pad = pairs.held_out, model.config.get_text_config().pad_token_id
    log.say(f"measuring the model ({path.stem}) on {len(rows):,} held-out pairs", "eval")
    with ready_to_answer(model, cfg):
        scores = compute_scores(model, rows, shares=False, pad_token_id=pad, batch_size=cfg.eval.batch_size)
    figures = compute_figures(scores, rows, cfg=cfg)
    write_measured(path, figures, lines=describe_pairs(scores, pairs, limit=cfg.eval.limit))
    log.say(f"{path.stem}: {format_summary(figures)}", "eval")
    return figures


def compute_scores(model: Any, rows: Any, *, shares: bool, **settings: Any) -> Tensor:
    """Compute the scores of all `rows`, fp32 [rows, 2]; `settings` are those of `compute_rows`."""
    (scores,) = compute_rows(lambda batch: [pair_scores(model, batch, shares=shares).float()], model, rows, **settings)
    return scores


def describe_pairs(scores: Tensor, pairs: Any, *, limit: int | None) -> list[dict[str, Any]]:
    """Describe at most `limit` pairs for people, evenly spaced over all."""
    texts, lines = pairs.records("held_out"), list[dict[str, Any]]()
    for number in evenly_spaced(range(len(scores)), limit):
        read, (chosen, rejected) = texts[number], scores[number].tolist()
        line = {
            "row": pairs.held_out[number]["row"],
            "prompt": read.beginning or read.prompt[-1].content,
            "chosen": read.chosen,
            "rejected": read.rejected,
            "scores": [chosen, rejected],
            "margin": chosen - rejected,
            "correct": chosen > rejected,
        }
        lines.append(line)
    return lines


def format_summary(figures: Mapping[str, Any]) -> str:
    """Format the figures that say most, for a line."""
    right = f"{figures['accuracy']:.1%} +- {figures['stderr']:.1%} right"
    sure = f"calibration error {figures['calibration_error']:.3f}"
    return f"loss {figures['loss']:.4f}  {right}  margin {figures['margin']:.4f}  {sure}  (n {figures['n']})"


class EvaluateScores(EvaluateHeldOut):
    """Measures held-out pairs by their scores."""

    def compute(self) -> tuple[dict[str, Any], Tensor]:
        scores = compute_scores(rows=self.pairs.held_out, **pass_settings(self.trainer))
        return compute_figures(scores, self.pairs.held_out, cfg=self.cfg), scores

    def describe(self, computed: Tensor) -> list[dict[str, Any]]:
        return describe_pairs(computed, self.pairs, limit=self.cfg.eval.limit)

    def summarize(self, figures: Mapping[str, Any]) -> str:
        return format_summary(figures)
