"""A run that starts from an earlier run's adapter continues where that one ended, or trains on the merged model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, assert_same_course, new_run, stop_and_resume, train, train_in
from peft import PeftModel
from plain_loss import mean_loss
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, RunError
from sftplay.model.load import load_base, load_result
from sftplay.runs.inputs import check_inputs

IDS = torch.arange(3, 40)[None]
N_ROWS = 12


@pytest.fixture(scope="module")
def other(tiny_llama: Path, held_out_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Twelve other rows: with an effective batch of as many, the first step sees all of them."""
    turns = [("user", "which {} boats"), ("assistant", "seven stone hills {} salt")]
    chats = [[{"role": role, "content": text.format(n)} for role, text in turns] for n in range(N_ROWS)]
    rows = tmp_path_factory.mktemp("other") / "other.jsonl"
    rows.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return Inputs(tiny_llama, rows, held_out_rows)


@pytest.fixture(scope="module")
def first(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finished]:
    """A finished run of a mode, trained once."""
    made: dict[str, Finished] = {}

    def of(mode: str = "lora") -> Finished:
        if mode not in made:
            made[mode] = train(tmp_path_factory.mktemp(mode), inputs, tuning__mode=mode, train__max_steps=6)
        return made[mode]

    return of


def second(home: Path, other: Inputs, **changes: Any) -> Finished:
    return train(home, other, **({"train__effective_batch_size": N_ROWS, "train__max_steps": 2} | changes))


def plain_base(folder: Path | str, mode: str = "lora") -> Any:
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    quantised = four_bits if mode == "qlora" else None
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, quantization_config=quantised)
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # bitsandbytes would repack, and fail on so small a model
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_first_loss_of_the_second_run_is_that_of_the_first_runs_result_on_its_rows(
    mode: str, first: Any, other: Inputs, tmp_path: Path
):
    start = first(mode).folder
    run = second(tmp_path, other, tuning__mode=mode, model__adapter=str(start.path))
    reference = PeftModel.from_pretrained(plain_base(other.model, mode), str(start.path / "adapter"))
    rows = run.trainer.train_dataset.select(range(N_ROWS))
    assert run.losses[0] == pytest.approx(mean_loss(reference, rows), abs=2e-5)
    fresh = mean_loss(plain_base(other.model, mode), rows)
    assert abs(run.losses[0] - fresh) > 0.01


def test_result_is_one_adapter_on_the_same_base_that_plain_peft_loads(first: Any, other: Inputs, tmp_path: Path):
    start = first().folder
    run = second(tmp_path, other, model__adapter=str(start.path / "adapter"))
    adapter_config = json.loads((run.folder.path / "adapter" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(other.model.resolve())
    before, after = (
        load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (start.path, run.folder.path)
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    plain = PeftModel.from_pretrained(plain_base(other.model), str(run.folder.path / "adapter"))
    assert torch.equal(logits(plain), logits(run.trainer.model.eval()))
    assert torch.equal(logits(plain), logits(load_result(run.cfg, run.folder.path)))


@pytest.mark.parametrize("mode", ["qlora", "full"])
def test_merged_start_has_the_logits_of_base_and_adapter(mode: str, first: Any, other: Inputs, tmp_path: Path):
    start = first().folder
    cfg, folder = new_run(tmp_path, other, tuning__mode=mode, model__adapter=str(start.path), model__merge_adapter=True)
    beside = logits(PeftModel.from_pretrained(plain_base(other.model), str(start.path / "adapter")))
    if mode == "full":
        assert (logits(load_base(cfg)) - beside).abs().max() < 1e-5
        return
    run = train_in(cfg, folder)
    assert (logits(plain_base(folder.path / "base")) - beside).abs().max() < 1e-5
    # The run and `eval` start from that base, in 4 bits.
    begun = plain_base(folder.path / "base", mode)
    assert torch.equal(logits(load_base(cfg)), logits(begun))
    adapter_config = json.loads((folder.path / "adapter" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str((folder.path / "base").resolve())
    plain = PeftModel.from_pretrained(begun, str(folder.path / "adapter"))
    assert torch.equal(logits(plain), logits(run.trainer.model.eval()))
    assert AutoTokenizer.from_pretrained(adapter_config["base_model_name_or_path"]).chat_template


@pytest.mark.parametrize("merges", [False, True])
def test_run_from_a_run_of_a_builtin_model_keeps_a_base_of_its_own(
    merges: bool, other: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # What is built for a builtin name is not the point here, and takes a minute.
    monkeypatch.setattr("sftplay.model.builtin.ensure_builtin", lambda *_, **__: other.model)
    start = train(tmp_path / "first", other, model__name="builtin:tiny", train__max_steps=2)
    folder = str(start.folder.path)
    options = {"model__adapter": folder, "model__name": "builtin:tiny"} if merges else {"model__name": folder}
    run = second(tmp_path / "second", other, model__merge_adapter=merges, **options)
    own = run.folder.path / "base"
    adapter_config = json.loads((run.folder.path / "adapter" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(own.resolve())
    kept, given = (load_file(path / "model.safetensors") for path in (own, other.model))
    assert torch.equal(*(weights["model.layers.0.mlp.up_proj.weight"] for weights in (kept, given))) != merges
    plain = PeftModel.from_pretrained(plain_base(own), str(run.folder.path / "adapter"))
    assert torch.equal(logits(plain), logits(run.trainer.model.eval()))


@pytest.mark.parametrize(("mode", "merges"), [("qlora", False), ("full", True)])
def test_resumed_run_ends_bit_for_bit_where_an_undisturbed_one_ends(
    mode: str, merges: bool, first: Any, other: Inputs, tmp_path: Path
):
    start = first("lora" if merges else mode).folder
    options = {
        "tuning__mode": mode, "model__adapter": str(start.path), "model__merge_adapter": merges,
        "train__max_steps": 4, "tuning__lora__dropout": 0.2,
    }  # fmt: skip
    whole = train(tmp_path / "whole", other, **options)
    assert_same_course(whole, stop_and_resume(tmp_path / "stopped", other, 2, **options))


@pytest.mark.contract
@pytest.mark.parametrize("merges", [False, True])
def test_infer_batch_answers_from_the_right_base(merges: bool, first: Any, other: Inputs, tmp_path: Path):
    start = first().folder
    run = second(tmp_path, other, model__adapter=str(start.path), model__merge_adapter=merges)
    asked, out = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    asked.write_text(json.dumps({"prompt": "why salt"}) + "\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--in", str(asked), "--out", str(out)]
    assert main(["infer-batch", *words]) == 0
    tokenizer = AutoTokenizer.from_pretrained(run.folder.path / "adapter")
    adapter_config = json.loads((run.folder.path / "adapter" / "adapter_config.json").read_text())
    plain = PeftModel.from_pretrained(
        plain_base(adapter_config["base_model_name_or_path"]), str(run.folder.path / "adapter")
    ).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "why salt"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected = plain.generate(**prompt, do_sample=False, max_new_tokens=4)[0, prompt["input_ids"].shape[1] :]
    answer = json.loads(out.read_text())["response"]
    assert answer == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__merge_adapter": True}, "no adapter to merge"),
        ({"model__adapter": "nowhere"}, "no run or adapter 'nowhere'"),
        ({"model__adapter": "unfinished"}, "has no result yet"),
        ({"model__name": "unfinished"}, "has no result yet"),
        ({"model__name": "org/model", "model__adapter": "finished"}, "belongs to .*, not to org/model"),
        ({"tuning__mode": "full", "model__adapter": "finished"}, "full trains every weight"),
        ({"tuning__lora__r": 8, "model__adapter": "finished"}, "8 here, .* has 4"),
        ({"tuning__lora__dora": True, "model__adapter": "finished"}, "true here, .* has false"),
    ],
)
def test_start_that_is_not_there_or_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, first: Any, other: Inputs, tmp_path: Path
):
    unfinished = tmp_path / "outputs" / "unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "config.resolved.yaml").write_text("seed: 1\n")
    (tmp_path / "outputs" / "finished").symlink_to(first().folder.path)
    cfg, _ = new_run(tmp_path, other, **changes)
    with pytest.raises(ConfigError, match=message):
        check_inputs(cfg)


def test_values_that_are_not_finite_are_never_merged(first: Any, other: Inputs, tmp_path: Path):
    from safetensors.torch import save_file

    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    source = first().folder.path / "adapter"
    (spoilt / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    weights = load_file(source / "adapter_model.safetensors")
    weights[min(weights)].fill_(float("inf"))
    save_file(weights, spoilt / "adapter_model.safetensors", metadata={"format": "pt"})
    cfg, folder = new_run(tmp_path, other, model__adapter=str(spoilt), model__merge_adapter=True)
    with pytest.raises(RunError, match="cannot be merged"):
        train_in(cfg, folder)
    assert not (folder.path / "base").exists()


@pytest.mark.contract
def test_secret_of_the_environment_is_in_no_file_and_no_line(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    secret = "hf_" + "FakeTokenOfThisTest"
    monkeypatch.setenv("HF_TOKEN", secret)
    run = train(tmp_path, inputs, train__max_steps=2, logging__backend="tensorboard")
    files = [path for path in run.folder.path.rglob("*") if path.is_file()]
    assert (run.folder.checkpoints / "checkpoint-2" / "training_args.bin") in files
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert secret not in "".join(capsys.readouterr())
    assert load_config(run.folder.resolved).run_name == "run"
