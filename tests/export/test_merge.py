"""A merged model answers as PEFT with the adapter does, and `merge-test` sees when it does not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import Finished, Inputs, new_run, train
from lively import lively_model
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export import merge as merging
from sftplay.export import merge_check
from sftplay.export.export import export
from sftplay.export.merge import merge
from sftplay.launch.run_folder import RunFolder
from sftplay.model.adapter import add_adapter
from sftplay.model.load import load_base
from sftplay.model.tokenizer import load_tokenizer
from sftplay.train.run_task import save_result

pytestmark = pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers)")
"""PEFT's advice on embeddings in an adapter, which is what these runs are about."""
IDS = torch.arange(3, 390)[None, :60]
END = 2
"""Id of <|im_end|> in the tiny tokenizer."""


@pytest.fixture(scope="session")
def tied_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with one weight for input embedding and head."""
    folder = tmp_path_factory.mktemp("models") / "tied-llama"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    assert not any("lm_head" in name for name in load_file(folder / "model.safetensors"))
    return folder


def finished(home: Path, inputs: Inputs, **changes: Any) -> tuple[RunConfig, RunFolder]:
    """A run as it ends, with an adapter of random values far from zero instead of a trained one."""
    cfg, folder = new_run(home, inputs, **changes)
    torch.manual_seed(3)
    with torch.no_grad():
        model = add_adapter(load_base(cfg), cfg.tuning.lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        save_result(model, load_tokenizer(cfg.model), cfg=cfg, folder=folder, base=cfg.model.name)
    return cfg, folder


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.float()


def peft_scores(base: Path, folder: RunFolder, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The scores of PEFT with the adapter on the base."""
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), folder.path / "adapter")
    return scores(loaded)


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"dora": True},
        {"modules_to_save": ["lm_head", "norm"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "dora": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
def test_merged_model_computes_what_peft_computes(
    lora: dict[str, Any], tied: bool, inputs: Inputs, tied_llama: Path, tmp_path: Path
):
    base = tied_llama if tied else inputs.model
    started = Inputs(base, inputs.train, inputs.held_out)
    cfg, folder = finished(tmp_path, started, tuning__lora={"r": 4, **lora})
    expected = peft_scores(base, folder)
    untuned = scores(AutoModelForCausalLM.from_pretrained(base))
    out = merge(cfg, folder, out=tmp_path / "merged")
    actual = scores(AutoModelForCausalLM.from_pretrained(out))
    assert float((actual - expected).abs().max()) < 1e-5 < 0.05 < float((expected - untuned).abs().max())
    touches_ends = {"lm_head", "embed_tokens"} & {
        name for names in lora.values() if isinstance(names, list) for name in names
    }
    is_one = tied and not touches_ends
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] == is_one
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) != is_one


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run trained by the kit on a base with long answers that depend on every token of the prompt."""
    home = tmp_path_factory.mktemp("merge")
    base = Path(shutil.copytree(inputs.model, home / "base"))
    lively_model(base).save_pretrained(base)
    started = Inputs(base, inputs.train, inputs.held_out)
    return train(home, started, tuning__mode="qlora", train__learning_rate=0.05)


@pytest.fixture(scope="module")
def merged(run: Finished) -> Path:
    return merge(run.cfg, run.folder, out=run.folder.path / "merged")


@pytest.fixture(scope="module")
def simple(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunFolder]:
    """A run with a random adapter, for what does not depend on how it was trained."""
    return finished(tmp_path_factory.mktemp("simple"), inputs)


def test_merge_test_agrees_and_says_of_a_4_bit_run_how_far_the_rounding_was(
    run: Finished, merged: Path, capsys: pytest.CaptureFixture[str]
):
    figures = merge_check.test_merge(run.cfg, run.folder, merged=merged)
    assert figures["max_abs_logit_diff"] <= figures["tolerance"] < 0.01
    assert (figures["texts_equal"], figures["n"], figures["prompts"]) == (True, 8, "held-out")
    # Codes of 4 bits are some per cent away from a weight, a thousand times what fp32 sums lose.
    assert figures["quantised"]["max_abs_logit_diff"] > 100 * figures["max_abs_logit_diff"]
    assert "no error of merging" in capsys.readouterr().out


def test_prompts_of_a_run_that_learns_from_rewards_are_its_held_out_ones(tiny_llama: Path, tmp_path: Path):
    given = grpo_inputs(tiny_llama, tmp_path / "rows")
    cfg, folder = new_run(tmp_path, given, **grpo_options(given))
    tokenizer = load_tokenizer(cfg.model)
    prompts, origin = merge_check.choose_prompts(cfg, folder, tokenizer=tokenizer)
    asked = [json.loads(line)["prompt"] for line in given.held_out.read_text().splitlines()]
    assert (origin, len(prompts)) == ("held-out", min(8, len(asked)))
    assert all(any(question in tokenizer.decode(ids) for question in asked) for ids in prompts)


@pytest.mark.parametrize(
    "merges", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["trained on", "merged first"]
)
def test_run_that_began_with_an_adapter_is_merged_into_the_base_it_was_trained_on(
    merges: bool, inputs: Inputs, tmp_path: Path
):
    _, earlier = finished(tmp_path / "first", inputs)
    changes = {"model__adapter": str(earlier.path), "model__merge_adapter": merges, "train__learning_rate": 1e-4}
    second = train(tmp_path / "second", inputs, **changes)
    expected = scores(AutoPeftModelForCausalLM.from_pretrained(second.folder.path / "adapter"))
    out = merge(second.cfg, second.folder, out=tmp_path / "merged")
    assert float((scores(AutoModelForCausalLM.from_pretrained(out)) - expected).abs().max()) < 1e-5
    # At so low a rate, most of what it knows is the earlier adapter's, with weights far from zero.
    at_start = peft_scores(inputs.model, earlier)
    untuned = scores(AutoModelForCausalLM.from_pretrained(inputs.model))
    assert float((expected - at_start).abs().mean()) < 0.1 * float((expected - untuned).abs().mean())
    assert merge_check.test_merge(second.cfg, second.folder, merged=out)["texts_equal"]
    exported = export(second.cfg, second.folder, out=tmp_path / "exported")
    assert (exported / "adapter").is_dir() != merges  # on a base nobody else has it would be of no use
    sentence = "had been merged into the base before" if merges else "was trained on"
    assert f"the adapter of an earlier run {sentence}" in (exported / "README.md").read_text()


def altered(merged: Path, target: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    shutil.copytree(merged, target)
    weights = load_file(target / "model.safetensors")
    weights[name] = change(weights[name]).contiguous()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def raise_one(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[7] += 0.02 * value.abs().max()
    return value


@pytest.fixture(scope="module")
def sound(simple: tuple[RunConfig, RunFolder], tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """The folder of `simple`, merged in a dtype, once."""
    home = tmp_path_factory.mktemp("sound")

    def merge_folder(dtype: Any) -> Path:
        target = home / f"merged-{dtype}"
        return target if target.exists() else merge(*simple, out=target, dtype=dtype)

    return merge_folder


@pytest.mark.parametrize(
    ("dtype", "name", "change"),
    [
        (None, "model.layers.0.input_layernorm.weight", lambda value: value * 1.1),
        ("bf16", "model.embed_tokens.weight", raise_one),  # a token that no prompt holds: only the weights show it
        ("bf16", "lm_head.weight", lambda value: value * float("nan")),
    ],
)
def test_merge_test_catches_one_altered_tensor_and_names_it(
    dtype: Any,
    name: str,
    change: Any,
    simple: tuple[RunConfig, RunFolder],
    sound: Callable[[Any], Path],
    tmp_path: Path,
):
    with pytest.raises(RunError, match=rf"altered: {re.escape(name)}[;)]") as caught:
        merge_check.test_merge(*simple, merged=altered(sound(dtype), tmp_path / "altered", name, change))
    assert caught.value.exit_code == 5


def test_merge_test_catches_another_adapter_and_another_template(
    simple: tuple[RunConfig, RunFolder], sound: Callable[[Any], Path], inputs: Inputs, tmp_path: Path
):
    cfg, folder = finished(tmp_path, inputs, tuning__lora={"r": 4, "alpha": 9.0})
    with pytest.raises(RunError, match=r"altered: model\.layers\.0.*scores differ by"):
        merge_check.test_merge(cfg, folder, merged=sound(None))
    changed = Path(shutil.copytree(sound(None), tmp_path / "changed"))
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(RunError, match="chat template"):
        merge_check.test_merge(*simple, merged=changed)


@pytest.mark.parametrize(
    ("base_dtype", "dtype", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, "bf16", torch.bfloat16),
        (torch.bfloat16, "fp32", torch.float32),
    ],
)
def test_each_merged_weight_is_rounded_once(
    base_dtype: torch.dtype, dtype: Any, expected: torch.dtype, inputs: Inputs, tmp_path: Path
):
    base = Path(shutil.copytree(inputs.model, tmp_path / "base"))
    AutoModelForCausalLM.from_pretrained(base, dtype=base_dtype).save_pretrained(base)
    lora = {"r": 4, "modules_to_save": ["embed_tokens"]}
    cfg, folder = finished(tmp_path, Inputs(base, inputs.train, inputs.held_out), tuning__lora=lora)
    out = merge(cfg, folder, out=tmp_path / "merged", dtype=dtype)
    exact = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder.path / "adapter"
    ).merge_and_unload()
    actual = load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")
    for name, value in exact.named_parameters():
        assert actual[name].dtype == expected
        assert torch.equal(actual[name], value.to(expected)), name


def test_values_that_fp16_cannot_hold_are_refused(inputs: Inputs, tmp_path: Path):
    base = Path(shutil.copytree(inputs.model, tmp_path / "base"))
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 1e5
    model.save_pretrained(base)
    cfg, folder = finished(tmp_path, Inputs(base, inputs.train, inputs.held_out))
    with pytest.raises(RunError, match=r"lm_head\.weight holds values that float16 cannot hold"):
        merge(cfg, folder, out=tmp_path / "merged", dtype="fp16")
    assert merge(cfg, folder, out=tmp_path / "merged", dtype="bf16").is_dir()


@pytest.mark.parametrize("fault", ["a value beyond fp16", "a weight that is not there"])
def test_a_whole_result_is_exported_as_it_was_trained_or_not_at_all(fault: str, inputs: Inputs, tmp_path: Path):
    cfg, folder = new_run(tmp_path, inputs, tuning__mode="full")
    model = AutoModelForCausalLM.from_pretrained(inputs.model)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = 1e5
    model.save_pretrained(folder.path / "model")
    load_tokenizer(cfg.model).save_pretrained(folder.path / "model")
    if fault == "a value beyond fp16":
        with pytest.raises(RunError, match=r"lm_head\.weight holds values that float16 cannot hold"):
            export(cfg, folder, out=tmp_path / "out", dtype="fp16")
        return
    weights = load_file(folder.path / "model" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder.path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MachineError, match=r"lacks 1 weights, model\.norm\.weight for one"):
        export(cfg, folder, out=tmp_path / "out")


def test_base_that_is_stored_quantised_is_refused(inputs: Inputs, tmp_path: Path):
    base = Path(shutil.copytree(inputs.model, tmp_path / "base"))
    cfg, folder = finished(tmp_path, Inputs(base, inputs.train, inputs.held_out))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(MachineError, match="stored quantised"):
        merge(cfg, folder, out=tmp_path / "merged")


def test_what_cannot_be_merged_is_refused_with_what_to_do(inputs: Inputs, tmp_path: Path):
    base = Path(shutil.copytree(inputs.model, tmp_path / "base"))
    without_base = finished(tmp_path / "gone", Inputs(base, inputs.train, inputs.held_out))
    shutil.rmtree(base)
    with pytest.raises(MachineError, match="the base cannot be loaded") as gone:
        merge(*without_base, out=tmp_path / "merged")
    assert str(base) in gone.value.where
    cfg, folder = new_run(tmp_path / "full", inputs, tuning__mode="full")
    with pytest.raises(ConfigError, match="no result yet") as caught:
        merge(cfg, folder, out=tmp_path / "merged")
    assert "make resume" in caught.value.fix
    (folder.path / "model").mkdir()
    with pytest.raises(ConfigError, match="a whole model already") as caught:
        merge(cfg, folder, out=tmp_path / "merged")
    assert "make export" in caught.value.fix


def test_disk_that_is_too_small_is_refused_with_the_bytes_before_anything_is_written(
    simple: tuple[RunConfig, RunFolder], inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = SimpleNamespace(total=0, used=0, free=30_000_000)
    monkeypatch.setattr(merging.shutil, "disk_usage", lambda path: usage)
    weights = sum(value.numel() * 4 for value in load_file(inputs.model / "model.safetensors").values())
    with pytest.raises(MachineError, match=rf"\({weights + merging.SLACK_BYTES} bytes\) are needed"):
        merge(*simple, out=tmp_path / "merged", dtype="fp32")
    assert list(tmp_path.iterdir()) == []
