"""Variants of the loss: values and gradients against stock TRL where it has them, else against the papers' equations.

The reference is a loop over tokens in float64, from full softmaxes; it shares nothing with the trainer.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_run import grpo_options
from grpo_toy import grpo_trainer, letter_tokenizer, tiny_llama
from in_process import Inputs, train
from test_length_order import loss_and_gradient, make_batches
from trl import GRPOTrainer

from sftplay.heartbeat import Heartbeat
from sftplay.reward.reward_set import BatchRewards, RewardSet
from sftplay.reward.table import RewardValues
from sftplay.tasks.grpo.sampler_check import SAMPLER_LOGPS, record_logprobs
from sftplay.tasks.grpo.scoring import ScoredBatch, replace_rows
from sftplay.tasks.grpo.section import GrpoConfig
from sftplay.tasks.grpo.shared_groups import order_by_length
from sftplay.tasks.grpo.variants import (
    STEP_TOKENS,
    TOP_IDS,
    TOP_LOGPS,
    LossVariants,
    correction_ratio,
)

ROWS, ACCUM = 4, 2
VOCAB = len(letter_tokenizer())


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class VariantTrainer(GRPOTrainer):
    """TRL's trainer with the variants around its loss, as the kit's trainer has them."""

    variants: LossVariants | None = None

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*given, **named)
        if self.variants is not None and torch.is_grad_enabled():
            self.variants.see(found[0], found[1])
        return found

    def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        if self.variants is None:
            return super().compute_loss(model, inputs, *given, **named)
        mask, sampled = inputs["completion_mask"], inputs.get(SAMPLER_LOGPS)
        with self.variants.applied(inputs, mask=mask, sampled=sampled) as changed:
            loss = super().compute_loss(model, changed, *given, **named)
            return self.variants.complete_loss(loss, inputs["advantages"])


def make_trainer(folder: Path, grpo: dict[str, Any] | None = None, **named: Any) -> Any:
    """A trainer with TRL's arguments `named`, and the kit's keys `grpo` where given."""
    trainer = grpo_trainer(
        folder, rows=[{"prompt": "ab"}] * 4, kind=VariantTrainer, per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUM, **named,
    )  # fmt: skip
    if grpo is not None:
        trainer.variants = LossVariants(SimpleNamespace(grpo=GrpoConfig(**grpo)), trainer)  # type: ignore[arg-type]
    return trainer


def with_sampler(batches: list[dict[str, Any]], deviation: float = 0.6) -> list[dict[str, Any]]:
    """The micro-batches with a sampler near the older policy, one of whose values is unknown."""
    draw = torch.Generator().manual_seed(8)
    for batch in batches:
        noise = torch.randn(batch["completion_ids"].shape, generator=draw)
        batch[SAMPLER_LOGPS] = batch["old_per_token_logps"] + deviation * noise * batch["completion_mask"]
        batch[SAMPLER_LOGPS][0, 0] = torch.nan
    return batches


# ---- the reference: loops over tokens in float64 ----


def full_logps(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Log-softmax over the vocabulary at each token of each completion, without padding: float64 [tokens, vocab]."""
    found = []
    for n in range(len(batch["advantages"])):
        prompt = batch["prompt_ids"][n][batch["prompt_mask"][n].bool()]
        completion = batch["completion_ids"][n][batch["completion_mask"][n].bool()]
        scores = model(input_ids=torch.cat([prompt, completion])[None]).logits[0]
        found.append(scores[len(prompt) - 1 : -1].double().log_softmax(-1))
    return found


def token_loss(ratio: torch.Tensor, logp: torch.Tensor, advantage: float, keys: dict[str, Any]) -> torch.Tensor:
    low, high = keys.get("epsilon", 0.2), keys.get("epsilon_high", keys.get("epsilon", 0.2))
    if keys["loss_type"] == "cispo":  # arXiv 2506.13585, eq. 4
        return -ratio.detach().clamp(max=high) * advantage * logp
    first = ratio if keys.get("delta") is None else ratio.clamp(max=keys["delta"])
    return -torch.minimum(first * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def reference_step(model: Any, batches: list[dict[str, Any]], keys: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Loss and gradient of an optimizer step by the equations; `keys` are those of the section grpo."""
    model.zero_grad(set_to_none=True)
    tokens = sum(int(batch["completion_mask"].sum()) for batch in batches)
    rows = sum(len(batch["advantages"]) for batch in batches)
    total: Any = 0.0
    for batch in batches:
        for n, logps in enumerate(full_logps(model, batch)):
            kept = batch["completion_mask"][n].bool()
            ids, advantage = batch["completion_ids"][n][kept], float(batch["advantages"][n])
            old = batch["old_per_token_logps"][n][kept].double()
            new = logps[range(len(ids)), ids]
            length = len(ids)
            log_ratio = new - old
            if keys.get("importance_sampling_level") == "sequence":  # arXiv 2507.18071, eq. 7
                log_ratio = log_ratio.mean().expand(length)
            lost = token_loss(log_ratio.exp(), new, advantage, keys)
            if keys.get("off_policy_mask_threshold") is not None:  # arXiv 2512.02556, eq. 9
                is_far = (old - new.detach()).mean() > keys["off_policy_mask_threshold"]
                lost = lost * (0.0 if advantage < 0 and is_far else 1.0)
            if (mode := keys.get("sampler_correction")) is not None:
                sampled = batch[SAMPLER_LOGPS][n][kept].double()
                gap = torch.where(sampled.isnan(), 0.0, old - sampled)
                low, high = keys.get("sampler_ratio_min") or 0.0, keys["sampler_ratio_max"]
                if mode == "geometric_mask":
                    lost = lost * float(low <= math.exp(gap.mean()) <= high)
                for t in range(length) if mode == "token_mask" else ():
                    weight = math.exp(gap[t])
                    lost[t] = lost[t] * (weight if low <= weight <= high else 0.0)
            if TOP_IDS in batch:
                lost = lost + advantage * centred(
                    logps, batch[TOP_LOGPS][n][kept].double(), batch[TOP_IDS][n][kept], keys
                )
            divisor = {
                "grpo": length * rows, "dr_grpo": keys.get("dr_grpo_divisor", 12) * rows, "dapo": tokens,
                "cispo": tokens,
            }[keys["loss_type"]]  # fmt: skip
            total = total + lost.sum() / divisor
            total = total - keys.get("entropy_coef", 0.0) * -(logps.exp() * logps).sum() / tokens  # of the whole step
    total.backward()
    return float(total.detach()), torch.cat([each.grad.flatten() for each in model.parameters()]).double()


def centred(logps: torch.Tensor, top_logps: torch.Tensor, top_ids: torch.Tensor, keys: dict[str, Any]) -> torch.Tensor:
    """The mean over the sampler of weight times log-probability, at each token: arXiv 2609.20807, eq. 7 to 14.

    The sampler's whole distribution is built: its head as recorded, its tail as the model's, scaled.
    """
    found = []
    for logp, head_logps, head in zip(logps, top_logps, top_ids, strict=True):
        p, q = logp.detach().exp(), torch.empty_like(logp)
        outside = torch.ones_like(p, dtype=torch.bool)
        outside[head] = False
        q[head] = head_logps.exp()
        if outside.any():
            q[outside] = p[outside] * (1 - head_logps.exp().sum()) / p[outside].sum()
        ratio, low, high = p / q, keys.get("sampler_ratio_min") or 0.0, keys.get("sampler_ratio_max", 3.0)
        weight = {
            None: torch.ones_like(p), "token_truncate": ratio.clamp(low, high),
            "token_mask": torch.where((ratio >= low) & (ratio <= high), ratio, 0.0),
        }[keys.get("sampler_correction")]  # fmt: skip
        found.append((q * weight * logp).sum())
    return torch.stack(found)


def assert_same(trainer: Any, batches: list[dict[str, Any]], expected: tuple[float, torch.Tensor]) -> None:
    got, gradient = loss_and_gradient(trainer, batches)
    assert got == pytest.approx(expected[0], rel=1e-5, abs=2e-6)
    assert float((gradient - expected[1]).norm() / expected[1].norm()) < 1e-5


# ---- what TRL has under keys of the kit ----


@pytest.mark.parametrize(
    "keys",
    [
        {"loss_type": "dapo", "epsilon_high": 0.28},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06},
        {"loss_type": "cispo", "epsilon_high": 1.5},
        {"loss_type": "dr_grpo", "delta": 1.6},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
    ],
    ids=["clip-higher", "GSPO", "CISPO", "Dr. GRPO, two-sided", "off-policy mask"],
)
def test_loss_and_gradient_are_those_of_the_papers_equation(tmp_path: Path, keys: dict[str, Any]):
    trainer = make_trainer(tmp_path, keys, **keys)
    batches = make_batches(VOCAB, batches=ACCUM, extra=("old_per_token_logps",))
    assert_same(trainer, batches, reference_step(trainer.model, batches, keys))


# ---- what the kit adds ----


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """TRL's trainer as if vLLM had sampled, with its rollout batch: it makes ratios by a mode and bounds."""
    trainer = make_trainer(tmp_path_factory.mktemp("of trl"), loss_type="grpo")
    (batch,) = with_sampler(make_batches(VOCAB, batches=1, extra=("old_per_token_logps",)))
    kept = [mask.bool() for mask in batch["completion_mask"]]
    lists = [[row[mask].tolist() for row, mask in zip(batch[key], kept, strict=True)]
             for key in ("completion_ids", SAMPLER_LOGPS)]  # fmt: skip
    prompts = [row[mask.bool()].tolist() for row, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    trainer.use_vllm, trainer.num_generations = True, ROWS

    def rollout(mode: str, low: float | None, high: float) -> dict[str, Any]:
        trainer.vllm_importance_sampling_correction, trainer.vllm_importance_sampling_mode = True, mode
        trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max = low, high
        trainer.vllm_generation = None
        texts = ["x" * n for n in range(ROWS)]
        trainer._generate = lambda _: (prompts, lists[0], None, texts, lists[1], {}, None, None)
        torch.manual_seed(0)
        return trainer._generate_and_score_completions([{"prompt": "ab"}] * ROWS)  # type: ignore[no-any-return]

    return trainer, rollout


@pytest.mark.parametrize(
    ("mode", "loss_type"),
    [
        ("token_truncate", "dapo"), ("token_mask", "cispo"), ("sequence_truncate", "sapo"), ("sequence_mask", "grpo"),
        ("token_truncate", "vespo"),
    ],
)  # fmt: skip
def test_the_correction_for_the_sampler_is_trls(tmp_path: Path, of_trl: Any, mode: str, loss_type: str):
    trainer, rollout = of_trl
    low, high = (0.05, 60.0) if mode.startswith("sequence") else (0.3, 1.3)
    batch = rollout(mode, low, high)
    ratio = correction_ratio(
        batch["old_per_token_logps"], batch[SAMPLER_LOGPS], batch["completion_mask"], mode=mode, low=low, high=high
    )
    expected = batch["importance_sampling_ratio"]
    assert torch.equal(ratio, expected)
    assert 0 < int(((ratio == 0) | (ratio == high) | (ratio == low)).sum()) < ratio.numel()  # some are cut off
    trainer.loss_type, trainer.epsilon_high = loss_type, 1.5
    corrected = loss_and_gradient(trainer, [batch])
    keys = {"sampler_correction": mode, "sampler_ratio_min": low, "sampler_ratio_max": high}
    own = make_trainer(tmp_path, {**keys, "loss_type": loss_type}, loss_type=loss_type, epsilon_high=1.5)
    own.model.load_state_dict(trainer.model.state_dict())
    plain = {key: value for key, value in batch.items() if key != "importance_sampling_ratio"}
    assert_same(own, [plain], corrected)
    del plain["old_per_token_logps"]  # on policy it is the model itself, and TRL's ratio to it is 1
    assert_same(own, [plain], corrected)
    share = own.variants.take_figures(Heartbeat())["sampler_cut_share"]
    assert 0 < share < 1


@pytest.mark.parametrize("mode", ["geometric_mask", "token_mask"])
def test_a_correction_on_top_of_an_older_policy_is_the_papers(tmp_path: Path, mode: str):
    keys = {"loss_type": "dapo", "sampler_correction": mode, "sampler_ratio_min": 0.8, "sampler_ratio_max": 1.2}
    trainer = make_trainer(tmp_path, keys, loss_type="dapo")
    batches = with_sampler(make_batches(VOCAB, batches=ACCUM, extra=("old_per_token_logps",)))
    assert_same(trainer, batches, reference_step(trainer.model, batches, keys))
    assert 0 < trainer.variants.take_figures(Heartbeat())["sampler_cut_share"] < 1


@pytest.mark.parametrize("loss_type", ["grpo", "cispo"])
def test_the_entropy_bonus_over_a_step_depends_on_no_micro_batch(tmp_path: Path, loss_type: str):
    keys: dict[str, Any] = {"loss_type": loss_type, "entropy_coef": 0.3, "entropy_mean": "step"}
    keys |= {"epsilon_high": 1.5} if loss_type == "cispo" else {}
    high = {"epsilon_high": 1.5} if loss_type == "cispo" else {}
    trainer = make_trainer(tmp_path, keys, loss_type=loss_type, **high)
    batches = make_batches(VOCAB, batches=ACCUM, extra=("old_per_token_logps",))
    expected = reference_step(trainer.model, batches, keys)
    for cut in (batches, order_by_length(batches, accum=ACCUM, trims_prompts=True), halved(batches)):
        masks = [batch["completion_mask"] for batch in cut]
        trainer.variants.count_step_tokens(cut, accum=len(cut), masks=masks)
        trainer.args.steps_per_generation = len(cut)
        assert_same(trainer, cut, expected)
    trainer.variants.count_step_tokens(batches, accum=1, masks=[batch["completion_mask"] for batch in batches])
    assert [int(batch[STEP_TOKENS]) for batch in batches] == [int(each["completion_mask"].sum()) for each in batches]


def halved(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows in twice as many micro-batches."""
    half = ROWS // 2
    return [
        {key: value if value.ndim == 0 else value[at : at + half] for key, value in batch.items() if key != STEP_TOKENS}
        for batch in batches
        for at in (0, half)
    ]


def test_the_constant_of_dr_grpo_is_the_one_that_is_written(tmp_path: Path):
    keys = {"loss_type": "dr_grpo", "dr_grpo_divisor": 7}
    trainer = make_trainer(tmp_path, keys, loss_type="dr_grpo")
    batches = make_batches(VOCAB, batches=ACCUM, extra=("old_per_token_logps",))
    assert_same(trainer, batches, reference_step(trainer.model, batches, keys))
    assert trainer.max_completion_length == 12
    stock = make_trainer(tmp_path, loss_type="dr_grpo", max_completion_length=7)
    stock.model.load_state_dict(trainer.model.state_dict())
    assert_same(trainer, batches, loss_and_gradient(stock, batches))


def with_likeliest(batches: list[dict[str, Any]], k: int, sampler: Any) -> list[dict[str, Any]]:
    """The micro-batches with the `k` likeliest tokens of a sampler, and its probabilities of the sampled ones."""
    for batch in batches:
        shape = (*batch["completion_ids"].shape, k)
        batch[TOP_IDS], batch[TOP_LOGPS] = torch.zeros(shape, dtype=torch.long), torch.full(shape, -torch.inf)
        batch[SAMPLER_LOGPS] = torch.zeros(shape[:2])
        with torch.no_grad():
            for n, logps in enumerate(full_logps(sampler, batch)):
                top = logps.topk(k)
                batch[TOP_IDS][n, : len(logps)], batch[TOP_LOGPS][n, : len(logps)] = top.indices, top.values.float()
                ids = batch["completion_ids"][n, : len(logps)]
                batch[SAMPLER_LOGPS][n, : len(logps)] = logps[range(len(ids)), ids].float()
        batch["old_per_token_logps"] = batch[SAMPLER_LOGPS].clone()
    return batches


@pytest.mark.parametrize(
    ("k", "loss_type", "correction"),
    [
        (VOCAB, "dapo", None), (5, "grpo", None), (5, "dr_grpo", "token_truncate"), (5, "cispo", "token_mask"),
    ],
)  # fmt: skip
def test_score_centering_subtracts_the_mean_over_the_sampler(
    tmp_path: Path, k: int, loss_type: str, correction: str | None
):
    keys: dict[str, Any] = {"loss_type": loss_type, "score_centering": k}
    if correction:
        keys |= {"sampler_correction": correction, "sampler_ratio_min": 0.9, "sampler_ratio_max": 1.1}
    keys |= {"epsilon_high": 1.5} if loss_type == "cispo" else {}
    named = {"epsilon_high": 1.5} if loss_type == "cispo" else {}
    trainer = make_trainer(tmp_path, keys, loss_type=loss_type, **named)
    sampler = tiny_llama(letter_tokenizer())
    with torch.no_grad():
        for weight in sampler.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    batches = with_likeliest(make_batches(VOCAB, batches=1), k, sampler)
    trainer.args.steps_per_generation = 1
    _, expected = reference_step(trainer.model, batches, keys)
    # Values differ by what has no gradient: the sum of p times log p of the tail is left out.
    _, gradient = loss_and_gradient(trainer, batches)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-4
    _, uncentred = loss_and_gradient(trainer, [without_likeliest(batch) for batch in batches])
    assert float((gradient - uncentred).norm() / uncentred.norm()) > 1e-2


def without_likeliest(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key not in (TOP_IDS, TOP_LOGPS)}


def test_score_centering_adds_no_gradient_where_the_sampler_is_the_model(tmp_path: Path):
    trainer = make_trainer(tmp_path, {"score_centering": 5})
    batches = with_likeliest(make_batches(VOCAB, batches=1), 5, trainer.model)
    trainer.args.steps_per_generation = 1
    _, gradient = loss_and_gradient(trainer, batches)
    trainer.variants = None
    _, expected = loss_and_gradient(trainer, [without_likeliest(batch) for batch in batches])
    assert float((gradient - expected).norm() / expected.norm()) < 1e-5


def test_the_likeliest_tokens_are_those_of_the_distribution_that_was_sampled_from():
    model: Any = tiny_llama(letter_tokenizer())
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    torch.manual_seed(0)
    with record_logprobs(model, top=3) as rows, torch.no_grad():
        drawn = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=6, top_k=0,
            eos_token_id=None, temperature=0.7,
        )  # fmt: skip
        scores = (model(input_ids=drawn).logits[:, 2:-1] / 0.7).log_softmax(-1)
    for row, expected in zip(rows, scores, strict=True):
        assert row.top is not None
        found_ids, logps = row.cut(4).top or row.top
        assert found_ids.shape == (4, 3)
        assert torch.equal(found_ids, expected[:4].topk(3).indices)
        assert torch.allclose(logps, expected[:4].topk(3).values, atol=1e-5)
        assert len(row.cut(4)) == 4


# ---- lengths ----


def test_the_penalty_for_length_is_added_to_what_is_learned_from_and_counts_tokens():
    rewards = BatchRewards({"right": RewardValues([1.0, 0.0, None])}, [None] * 3, frozenset({"right"}))
    batch = ScoredBatch(weights=(2.0,), rows=[0, 1, 2], completions=["a", "b", "c"], rewards=rewards,
                        lengths=[7, 8, 9], penalties=[-0.5, 0.0, -1.0])  # fmt: skip
    assert batch.training_rewards == [1.5, 0.0, None]
    assert batch.true_rewards == [2.0, 0.0, None]
    matrix = batch.make_reward_matrix()
    assert matrix[:2] == [[1.0, -0.5], [0.0, 0.0]]
    assert all(math.isnan(value) for value in matrix[2])
    assert batch.compute_figures(3)["overlong_penalty"] == -0.5
    both = ScoredBatch.concatenate([batch, batch])
    assert both.penalties == [-0.5, 0.0, -1.0] * 2
    nothing = replace(batch, rows=[], completions=[], lengths=[], penalties=[],
                      rewards=BatchRewards({"right": RewardValues([])}, []))  # fmt: skip
    assert ScoredBatch.concatenate([nothing, batch]).lengths == [7, 8, 9]  # a rank may have sampled nothing
    assert [line["tokens"] for line in both.make_sample_lines([0.0] * 6)] == [7, 8, 9] * 2
    assert replace_rows(batch, ScoredBatch.concatenate([batch]), places=[2, 1, 0]).lengths == [9, 8, 7]
    assert replace_rows(batch, ScoredBatch.concatenate([batch]), places=[2, 1, 0]).penalties == [-1.0, 0.0, -0.5]


def test_rewards_for_length_get_the_tokens_of_a_completion():
    cfg: Any = SimpleNamespace(
        rewards=[
            SimpleNamespace(name="length", use="length", weight=1.0, options={"most": 3}, deadline=60.0, judges=None),
        ],
        sandbox=None,
    )
    with RewardSet(cfg) as rewards:
        scored = rewards.score(["one", "one"], {}, completion_ids=[[5, 6, 7], [5, 6, 7, 8]])
    assert scored.by_name["length"].values == [1.0, 0.0]


# ---- a whole run ----


def test_a_run_with_every_variant_records_its_sampler_and_stays_near_the_plain_one(prompts: Inputs, tmp_path: Path):
    usual = {"train__max_steps": 3, "train__batch_size": 2, "grpo__steps_per_generation": 3}
    plain = train(tmp_path / "plain", prompts, **grpo_options(prompts, **usual))
    variants = {"grpo__sampler_correction": "token_mask", "grpo__sampler_ratio_min": 0.5, "grpo__score_centering": 8}
    run = train(tmp_path / "run", prompts, **grpo_options(prompts, **usual, **variants))
    for line, other in zip(run.metrics, plain.metrics, strict=True):
        assert line["sampler_cut_share"] == 0.0  # in fp32 the sampler is the model
        assert "sampler_cut_share" not in other
        assert line["reward"] == other["reward"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-4)


@pytest.mark.slow
def test_continuous_batching_is_corrected_by_what_it_says_of_its_tokens(prompts: Inputs, tmp_path: Path):
    changes = {"train__max_steps": 2, "tuning__mode": "lora", "grpo__generation": "continuous"}
    # Tokens beyond the first 20 are never sampled: each of the others is likelier than the model says.
    keys: dict[str, Any] = {"grpo__temperature": 0.7, "grpo__top_k": 20, "grpo__sampler_correction": "token_mask"}
    for low, cut in ((None, 0.0), (0.9, 1.0)):
        run = train(
            tmp_path / str(low), prompts, **grpo_options(prompts, **changes, **keys, grpo__sampler_ratio_min=low)
        )
        assert [line["sampler_cut_share"] for line in run.metrics] == [cut] * 2


@pytest.mark.slow
def test_a_run_that_stops_inside_a_rollout_batch_goes_on_with_all_that_its_variants_need(
    prompts: Inputs, tmp_path: Path
):
    from in_process import assert_same_course, stop_and_resume

    options = grpo_options(
        prompts, train__max_steps=4, train__batch_size=4, grpo__steps_per_generation=2, grpo__entropy_coef=0.01,
        grpo__entropy_mean="step", grpo__sampler_correction="token_truncate", grpo__score_centering=8,
        grpo__overlong_buffer=4, grpo__dynamic_sampling_rounds=1,
    )  # fmt: skip
    whole = train(tmp_path / "whole", prompts, **options)
    again = stop_and_resume(tmp_path / "again", prompts, 3, **options)
    assert_same_course(whole, again)
