"""A reward model that trains on pairs: its steps against plain torch and TRL, its result in plain transformers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from in_process import assert_same_course, built, stop_and_resume, train
from pairs import RUN, pair_inputs
from peft import AutoPeftModelForSequenceClassification
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from sftplay.model.recomputation import recomputation_arguments
from sftplay.tasks.reward_model.scores import to_score_model

FULL = {
    **RUN, "tuning__mode": "full", "train__learning_rate": 3e-4, "train__lr_scheduler": "constant",
    "reward_model__margin": True, "reward_model__center": 0.01, "train__weight_decay": 0.1, "seed": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tiny_llama, tmp_path_factory):
    return pair_inputs(tiny_llama, tmp_path_factory.mktemp("pairs"), margin=0.5)


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    return train(tmp_path_factory.mktemp("whole"), pairs, **FULL, eval__after=True)


@pytest.fixture(scope="module")
def adapted(pairs, tmp_path_factory):
    home = tmp_path_factory.mktemp("adapted")
    changes = {"tuning__lora__dropout": 0.0, "train__eval_steps": 2, "eval__before": True, "eval__after": True}
    return train(home, pairs, **RUN, **changes)


def sides(row):
    """The two texts of a row, as token ids."""
    p, end = row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
    return row["input_ids"][:end], row["input_ids"][:p] + row["input_ids"][end:]


def plain_loss(model, rows, *, center):
    """Each text by itself in the plain class, and the loss of Bradley and Terry written out."""
    losses = []
    for row in rows:
        chosen, rejected = (model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in sides(row))
        losses.append(-logsigmoid(chosen - rejected - row["margin"]) + center * (chosen + rejected) ** 2)
    return torch.stack(losses).mean()


def test_losses_and_weights_of_whole_steps_are_those_of_plain_torch_pair_by_pair(whole, pairs, tmp_path):
    start = built(tmp_path, pairs, **FULL).trainer
    model, rows = start.model.double().eval(), whole.trainer.train_dataset
    cfg = whole.cfg.train
    decayed = [[p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": part, "weight_decay": decay} for part, decay in zip(decayed, (0.1, 0.0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=3e-4)
    losses = []
    for step in range(4):
        loss = plain_loss(model, rows.select(range(8 * step, 8 * step + 8)), center=0.01)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.max_grad_norm)
        optimizer.step()
    assert whole.losses == pytest.approx(losses, abs=1e-5)
    assert losses[0] - losses[-1] > 1e-3  # steps that change nothing would agree too
    ours = {name.partition("/")[2]: tensor for name, tensor in whole.weights.items()}
    assert set(ours) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(ours[name].double(), tensor.double(), atol=1e-5, rtol=0)


def test_loss_and_gradient_of_a_batch_are_those_of_trl(pairs, tmp_path):
    ours = built(tmp_path, pairs, **FULL).trainer
    ours.model.save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(pairs.model)
    rows = ours.train_dataset.select(range(8))
    chosen, rejected = zip(*map(sides, rows), strict=True)
    given = {"chosen_ids": chosen, "rejected_ids": rejected, "margin": rows["margin"][:]}
    arguments = RewardConfig(
        str(tmp_path / "trl"), center_rewards_coefficient=0.01, report_to="none", use_cpu=True, bf16=False,
        per_device_train_batch_size=8, max_length=None, **recomputation_arguments(recomputes=False),
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    theirs = RewardTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(given), processing_class=tokenizer
    )
    batch = theirs.data_collator([theirs.train_dataset[n] for n in range(8)])
    expected = theirs.compute_loss(theirs.model, batch)
    expected.backward()
    loss = ours.training_step(ours.model, ours.data_collator(list(rows)), 8)
    assert float(loss) == pytest.approx(expected.item(), abs=1e-6)
    gradients = {name: parameter.grad for name, parameter in ours.model.named_parameters()}
    for name, parameter in theirs.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_any_micro_batch_makes_the_same_steps(whole, pairs, tmp_path):
    other = train(tmp_path, pairs, **FULL, train__batch_size=1)
    assert whole.cfg.train.batch_size > 1
    assert other.losses == pytest.approx(whole.losses, abs=2e-6)
    for name, tensor in whole.weights.items():
        torch.testing.assert_close(other.weights[name], tensor, atol=4e-6, rtol=0)


def test_a_window_without_memory_is_run_again_in_smaller_micro_batches(whole, pairs, tmp_path, monkeypatch):
    from sftplay.train.train_run import TrainRun

    real, failed = TrainRun.train, []

    def train_hooked(self, trainer):
        def fail_once(model, *_):
            if model.training and not failed:
                failed.append(True)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        trainer.model.register_forward_pre_hook(fail_once)
        return real(self, trainer)

    monkeypatch.setattr(TrainRun, "train", train_hooked)
    run = train(tmp_path, pairs, **FULL)
    assert failed
    assert run.trainer.replay.times == 1
    assert run.losses == pytest.approx(whole.losses, abs=2e-6)


def test_a_run_that_was_stopped_ends_with_the_same_bits(adapted, pairs, tmp_path):
    changes = {"tuning__lora__dropout": 0.0, "train__eval_steps": 2, "eval__before": True, "eval__after": True}
    assert_same_course(stop_and_resume(tmp_path, pairs, 2, **RUN, **changes), adapted)


def test_a_line_of_metrics_has_the_scores_of_both_sides_and_the_pairs_that_are_right(whole, pairs, tmp_path):
    model, line = built(tmp_path, pairs, **FULL).trainer.model.eval(), whole.metrics[0]
    rows = whole.trainer.train_dataset.select(range(8))
    with torch.no_grad():
        scores = torch.tensor([[float(model(input_ids=torch.tensor([ids])).logits) for ids in sides(r)] for r in rows])
    assert line["rewards/chosen"] == pytest.approx(float(scores[:, 0].mean()), abs=1e-6)
    assert line["rewards/rejected"] == pytest.approx(float(scores[:, 1].mean()), abs=1e-6)
    assert line["rewards/margins"] == pytest.approx(float((scores[:, 0] - scores[:, 1]).mean()), abs=1e-6)
    assert line["rewards/accuracies"] == float((scores[:, 0] > scores[:, 1]).double().mean())


def scores_in_plain_transformers(model, folder, lines):
    """The scores of lines of eval/after.jsonl, all in one padded batch by the tokenizer's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        [{"role": "user", "content": line["prompt"]}, {"role": "assistant", "content": line[side]}]
        for line in lines
        for side in ("chosen", "rejected")
    ]
    batch = tokenizer.apply_chat_template(chats, padding=True, return_dict=True, return_tensors="pt")
    assert (batch["attention_mask"] == 0).any()
    with torch.no_grad():
        return model.eval()(**batch).logits[:, 0]


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_plain_transformers_gives_the_result_s_scores(mode, whole, adapted):
    run = {"full": whole, "lora": adapted}[mode]
    lines = [json.loads(line) for line in (run.folder.eval / "after.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    if mode == "full":
        model = AutoModelForSequenceClassification.from_pretrained(run.folder.result)
        assert model.config.pad_token_id == 0
    else:
        model = AutoPeftModelForSequenceClassification.from_pretrained(run.folder.result, num_labels=1)
    expected = torch.tensor([score for line in lines for score in line["scores"]])
    found = scores_in_plain_transformers(model, run.folder.result, lines)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert found.std() > 1e-3


def test_held_out_figures_are_those_of_their_lines(adapted):
    for name in ("before", "step-2", "step-4", "after"):
        figures = adapted.folder.read_json(f"eval/{name}.json")
        lines = [json.loads(line) for line in (adapted.folder.eval / f"{name}.jsonl").read_text().splitlines()]
        ahead = torch.tensor([line["scores"][0] - line["scores"][1] for line in lines], dtype=torch.float64)
        assert figures["n"] == len(lines) == 12
        assert figures["accuracy"] == pytest.approx(float((ahead > 0).double().mean()))
        assert figures["margin"] == pytest.approx(float(ahead.mean()))
        assert figures["loss"] == pytest.approx(float(-logsigmoid(ahead).mean()))
        assert sum(found["n"] for found in figures["calibration"]) == 12
    before, after = (adapted.folder.read_json(f"eval/{name}.json") for name in ("before", "after"))
    assert after["accuracy"] > before["accuracy"]


def test_the_adapter_s_head_trains_in_full_and_the_base_stays(adapted):
    weights = {name.rpartition("/")[2] for name in adapted.weights}
    assert "base_model.model.score.weight" in weights
    trained = {name for name, p in adapted.trainer.model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "score.modules_to_save" in name for name in trained)
    assert {p.dtype for p in adapted.trainer.model.parameters() if p.requires_grad} == {torch.float32}


def test_a_new_head_is_decided_by_the_seed_alone(tiny_llama):
    from transformers import AutoModelForCausalLM

    heads = []
    for seed in (1, 1, 2):
        torch.rand(3)
        model = AutoModelForCausalLM.from_pretrained(tiny_llama)
        heads.append(to_score_model(model, pad_token_id=0, seed=seed).score.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert float(heads[0].detach().std()) == pytest.approx(0.02, rel=0.5)


def test_the_weights_of_the_causal_model_are_shared_not_copied(tiny_llama):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    scored = to_score_model(model, pad_token_id=0, seed=0)
    assert scored.model is model.model
    assert not any(parameter.is_meta for parameter in scored.parameters())


def test_the_qlora_head_is_in_full_precision(pairs, tmp_path):
    run = train(tmp_path, pairs, **RUN, tuning__mode="qlora", train__max_steps=2)
    head = run.trainer.model.base_model.model.score.modules_to_save["default"]
    assert head.weight.dtype == torch.float32
    assert run.folder.read_json("manifest.json")["model"]["four_bit_layers"] > 0
    assert SimpleNamespace(**run.metrics[0]).loss == pytest.approx(0.693, abs=0.02)
