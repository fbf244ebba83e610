"""The three modes on a tiny model: what is trained, what is left behind, and whether plain libraries agree."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, train
from peft import AutoPeftModelForCausalLM, PeftModel
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from sftplay.data.pipeline import training_order
from sftplay.errors import DataError
from sftplay.model.load import load_result
from sftplay.model.recomputation import is_recomputing

MODES = ("full", "lora", "qlora")
RATES = {"full": 0.01, "lora": 0.05, "qlora": 0.05}


@pytest.fixture(scope="module")
def runs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finished]:
    """One run a mode: 16 steps of 8 rows over 70 rows, measured before and after."""
    return {
        mode: train(
            tmp_path_factory.mktemp(mode), inputs, tuning__mode=mode, train__learning_rate=RATES[mode],
            train__max_steps=16, train__batch_size=4, train__save_steps=4, eval__before=True, eval__after=True,
        )
        for mode in MODES
    }  # fmt: skip


def figures(run: Finished, name: str) -> dict[str, Any]:
    return json.loads((run.folder.eval / f"{name}.json").read_text())


@pytest.mark.parametrize("mode", MODES)
def test_loss_falls(mode: str, runs: dict[str, Finished]):
    run = runs[mode]
    assert [line["step"] for line in run.metrics] == list(range(1, 17))
    # A pair of width 4 on a random base learns little: 0.1 nats, with steps 0.03 apart from one another.
    assert sum(run.losses[-4:]) / 4 < sum(run.losses[:4]) / 4 - 0.03
    assert figures(run, "after")["loss"] < figures(run, "before")["loss"] - 0.05
    # 70 rows in the planned order, and the label tokens that they have.
    order = training_order(70, 16 * 8, seed=42)
    row_ids = [row for line in run.metrics for rank in line["row_ids"] for row in rank]
    assert row_ids == order
    assert sorted(order[:70]) == list(range(70))
    per_row = {row["row"]: sum(label != -100 for label in row["labels"]) for row in run.trainer.train_dataset}
    label_tokens = [sum(per_row[row] for row in row_ids[start : start + 8]) for start in range(0, 16 * 8, 8)]
    assert [line["label_tokens"] for line in run.metrics] == label_tokens


def plain_model(run: Finished) -> Any:
    """The result as somebody without this kit opens it."""
    mode = run.cfg.tuning.mode
    if mode == "full":
        return AutoModelForCausalLM.from_pretrained(run.folder.path / "model")
    if mode == "lora":
        return AutoPeftModelForCausalLM.from_pretrained(run.folder.path / "adapter")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    base = AutoModelForCausalLM.from_pretrained(run.cfg.model.name, quantization_config=quantization)
    model = PeftModel.from_pretrained(base, run.folder.path / "adapter")
    # In evaluation mode bitsandbytes 0.50 repacks the weights where the CPU has AVX512-BF16 and rounds their scales.
    # No dropout is set, so training mode computes the same on the weights the run was trained on.
    return model.train()


def plain_loss(model: Any, tokenizer: Any, path: Path) -> float:
    """Mean loss over the answers' tokens and their end token, row by row, from the chat template alone."""
    total, count = 0.0, 0
    for line in path.read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        answer = tokenizer(messages[-1]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        total += float(functional.cross_entropy(scores[len(prompt) - 1 : -1], torch.tensor(answer), reduction="sum"))
        count += len(answer)
    return total / count


@pytest.mark.parametrize("mode", MODES)
def test_plain_libraries_find_the_same_held_out_loss_in_the_result(
    mode: str, runs: dict[str, Finished], inputs: Inputs
):
    run = runs[mode]
    result = run.folder.result
    assert result is not None
    actual = plain_loss(plain_model(run), AutoTokenizer.from_pretrained(result), inputs.held_out)
    assert actual == pytest.approx(figures(run, "after")["loss"], abs=1e-3)
    assert figures(run, "after")["loss"] == pytest.approx(run.trainer.evaluate()["eval_loss"], abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_manifest_counts_what_trains_and_real_4_bit_layers(mode: str, runs: dict[str, Finished], inputs: Inputs):
    run = runs[mode]
    manifest = json.loads((run.folder.path / "manifest.json").read_text())
    model = manifest["model"]
    packed = [p for p in run.trainer.model.parameters() if p.dtype == torch.uint8]
    assert model["four_bit_layers"] == len(packed) == (14 if mode == "qlora" else 0)
    assert model["trainable_dtypes"] == ["float32"]
    trained = sum(p.numel() for p in run.trainer.model.parameters() if p.requires_grad)
    assert model["trainable_parameters"] == trained
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(run.cfg.model.name).parameters())
    assert model["parameters"] == base + (trained if mode != "full" else 0)
    assert manifest["seed"] == 42
    assert manifest["steps"] == 16
    assert {"kit", "git_commit", "machine", "template_sha256", "order_sha256", "data", "sizing"} <= set(manifest)
    config = run.folder.path.parents[1] / "run.yaml"
    (line,) = (n for n, text in enumerate(config.read_text().splitlines(), 1) if "learning_rate" in text)
    assert manifest["origins"]["train.learning_rate"] == f"{config}:{line}"
    assert "train.weight_decay" not in manifest["origins"]
    assert manifest["data_files"].keys() == {str(inputs.train), str(inputs.held_out)}


@pytest.mark.parametrize("mode", MODES)
def test_run_folder_holds_what_interfaces_promise(mode: str, runs: dict[str, Finished]):
    run = runs[mode]
    result = run.folder.path / ("model" if mode == "full" else "adapter")
    assert run.folder.result == result
    assert (result / "tokenizer.json").is_file()
    assert (result / "chat_template.jinja").is_file()
    assert not list(run.folder.path.glob(".*.part"))
    status = json.loads((run.folder.path / "status.json").read_text())
    (rank,) = status["ranks"]
    assert {"pid", "distributed_type", "world_size", "model_class", "fingerprint"} <= set(rank)
    assert status["attempts"][0]["from_step"] == 0
    assert status["last_checkpoint"].endswith("checkpoint-16")
    names = {"step", "attempt", "loss", "learning_rate", "grad_norm", "label_tokens", "tokens_per_s", "padding_share"}
    assert all(names <= set(line) for line in run.metrics)
    report = json.loads((run.folder.path / "data_report.json").read_text())
    accounted = report["kept"] + report["cut"] + sum(report["dropped"].values()) + report["refused"]
    assert report["read"] == accounted == 82
    answers = [json.loads(line) for line in (run.folder.eval / "after.jsonl").read_text().splitlines()]
    assert figures(run, "after")["n"] == len(answers) == 4
    assert all(set(row) == {"row", "prompt", "reference", "prediction", "correct"} for row in answers)


def test_gradient_checkpointing_changes_memory_not_losses(inputs: Inputs, tmp_path: Path):
    options = {"tuning__mode": "qlora", "train__max_steps": 3}
    plain = train(tmp_path / "off", inputs, **options)
    recomputed = train(tmp_path / "on", inputs, train__gradient_checkpointing=True, **options)
    assert not is_recomputing(plain.trainer.model)
    assert is_recomputing(recomputed.trainer.model)
    assert recomputed.losses == pytest.approx(plain.losses, rel=1e-6)


@pytest.mark.parametrize(("head", "packing"), [("standard", True), ("chunked", False)])
def test_head_and_packing_change_speed_not_losses(
    head: str, packing: bool, inputs: Inputs, tmp_path: Path, runs: dict[str, Finished]
):
    run = train(
        tmp_path, inputs, train__loss_head=head, train__packing=packing, train__max_steps=16, train__batch_size=2,
        train__learning_rate=RATES["lora"], eval__after=True,
    )  # fmt: skip
    assert run.losses == pytest.approx(runs["lora"].losses, rel=1e-4)
    assert figures(run, "after")["loss"] == pytest.approx(figures(runs["lora"], "after")["loss"], rel=1e-4)


def test_16_bit_run_with_modules_trained_in_full_can_be_measured(inputs: Inputs, tmp_path: Path):
    run = train(
        tmp_path, inputs, train__precision="bf16", tuning__lora__modules_to_save=["lm_head", "embed_tokens"],
        train__max_steps=2, eval__after=True,
    )  # fmt: skip
    dtypes = {p.dtype for p in run.trainer.model.parameters() if p.requires_grad}
    assert dtypes == {torch.float32}
    assert torch.bfloat16 in {p.dtype for p in run.trainer.model.parameters()}
    assert figures(run, "after")["loss"] == pytest.approx(run.trainer.evaluate()["eval_loss"], rel=0.02)
    (stored,) = (value for name, value in run.weights.items() if "lm_head" in name)
    assert not torch.equal(stored, stored.bfloat16().float())  # not rounded on its 16-bit base
    head = load_result(run.cfg, run.folder.path).get_base_model().lm_head.modules_to_save["default"].weight
    assert torch.equal(head, stored)


def test_full_16_bit_run_trains_fp32_weights_and_saves_16_bits(inputs: Inputs, tmp_path: Path):
    run = train(tmp_path, inputs, tuning__mode="full", train__precision="bf16", train__max_steps=2, eval__after=True)
    manifest = json.loads((run.folder.path / "manifest.json").read_text())
    assert manifest["model"]["trainable_dtypes"] == ["float32"]
    plain = AutoModelForCausalLM.from_pretrained(run.folder.path / "model")
    assert plain.dtype == torch.bfloat16
    actual = plain_loss(plain, AutoTokenizer.from_pretrained(run.folder.path / "model"), inputs.held_out)
    assert actual == pytest.approx(figures(run, "after")["loss"], abs=0.02)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")  # what is wanted here
def test_tied_head_trained_in_full_is_saved_apart_from_its_embedding(inputs: Inputs, tmp_path: Path):
    tied = tmp_path / "tied"
    shutil.copytree(inputs.model, tied)
    model = AutoModelForCausalLM.from_pretrained(tied)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tied)
    run = train(
        tmp_path, Inputs(tied, inputs.train, inputs.held_out), tuning__lora__modules_to_save=["lm_head"],
        eval__after=True,
    )  # fmt: skip
    plain = AutoPeftModelForCausalLM.from_pretrained(run.folder.path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tied)
    embedding = plain.get_base_model().model.embed_tokens.weight
    head = plain.get_base_model().lm_head
    head = head.modules_to_save["default"].weight
    assert torch.equal(embedding, base.model.embed_tokens.weight)
    assert not torch.equal(head, embedding)
    actual = plain_loss(plain, AutoTokenizer.from_pretrained(run.folder.path / "adapter"), inputs.held_out)
    assert actual == pytest.approx(figures(run, "after")["loss"], abs=1e-3)


@pytest.mark.parametrize(
    "wish",
    [{"eval__after": True}, {"eval__before": True}, {"train__early_stopping": 1}, {"train__best_metric": "loss"}],
)
def test_wish_for_held_out_rows_where_none_were_held_out_is_refused(
    wish: dict[str, Any], inputs: Inputs, tmp_path: Path
):
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(inputs.train.read_text().splitlines()[:8]) + "\n")
    with pytest.raises(DataError, match="held out"):
        train(tmp_path, inputs, data__train_path=str(few), data__val_path=None, data__split=1e-9, **wish)


def test_result_of_an_earlier_attempt_is_replaced_whole(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stale = tmp_path / "outputs" / "run" / "adapter"
    stale.mkdir(parents=True)
    (stale / "stale.bin").write_text("old")
    (stale.parent / ".adapter.part").mkdir()
    run = train(tmp_path, inputs, train__max_steps=1, train__warmup_ratio=0.03)
    assert not (stale / "stale.bin").exists()
    assert sorted(p.name for p in run.folder.path.glob(".adapter*")) == []
    assert run.metrics[-1]["learning_rate"] == 0
    assert "the only step is warm-up at rate 0 and changes nothing" in capsys.readouterr().out
