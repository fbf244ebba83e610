"""The built-in model: an ordinary model folder, made once, from the shipped text alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sftplay.errors import ConfigError, MachineError
from sftplay.model import builtin


def test_the_base_is_a_small_fp32_llama_that_plain_transformers_loads(builtin_tiny):
    model = AutoModelForCausalLM.from_pretrained(builtin_tiny)
    tokenizer = AutoTokenizer.from_pretrained(builtin_tiny)
    assert isinstance(model, LlamaForCausalLM)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert 0.5e6 < model.num_parameters() < 2e6
    assert (builtin_tiny / "model.safetensors").is_file()
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError) as refused:
        builtin.ensure_builtin("tyni", tmp_path, say=print)
    assert refused.value.where == "model.name"
    assert "tiny" in refused.value.nearest
    assert "use builtin:" in refused.value.fix
    with pytest.raises(ConfigError) as refused:
        builtin.ensure_builtin("xyz", tmp_path, say=print)
    assert refused.value.nearest == ["tiny", "copier", "digits", "steps"]


@pytest.fixture
def tiny_copy(tmp_path):
    """data/base with its shipped model, to be damaged."""
    return Path(shutil.copytree(builtin.TEXT_DIR, tmp_path / "base"))


def ensure_shipped(cache_dir: Path, text_dir: Path = builtin.TEXT_DIR) -> tuple[Path, list[str]]:
    said: list[str] = []
    return builtin.ensure_builtin("tiny", cache_dir, say=said.append, text_dir=text_dir), said


def test_nothing_is_trained_for_the_shipped_base(tmp_path):
    folder, said = ensure_shipped(tmp_path)
    assert said == []
    shipped = builtin.TEXT_DIR / "tiny" / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == shipped.read_bytes()
    assert shipped.stat().st_size <= 5.5e6


@pytest.fixture(scope="module")
def training() -> ModuleType:
    """data/base/training.py."""
    spec = importlib.util.spec_from_file_location("base_training", builtin.TEXT_DIR / "training.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["base_training"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_base_was_made_of_todays_texts_and_recipe(training):
    made, recipe = json.loads((builtin.TEXT_DIR / "tiny" / "made.json").read_text()), training.Recipe()
    assert made["fingerprint"] == training.fingerprint(recipe, builtin.TEXT_DIR)
    assert made["recipe"] == dataclasses.asdict(recipe)


def test_the_same_recipe_and_texts_give_the_same_model(training, tmp_path):
    quick = training.Recipe(vocab_size=400, hidden_size=16, intermediate_size=32, layers=1, heads=1, steps=2, rows=2)
    files = [tmp_path / name for name in ("alice.txt", "practice.txt")]
    for path in files:
        path.write_text("".join((builtin.TEXT_DIR / path.name).read_text().splitlines(keepends=True)[:400]))
    for name in ("one", "other"):
        training.make_base(tmp_path / name, recipe=quick, files=files, say=print)
    weights = [AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("one", "other")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (32, 96)])
def test_muon_in_fp32_steps_as_torch_s_does_up_to_the_rounding_of_bf16(shape, training):
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), torch.randn(4, *shape)
    ours, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
    pairs = [
        (ours, training.Muon([ours], lr=0.1)),
        (reference, torch.optim.Muon([reference], lr=0.1, weight_decay=0.0)),
    ]
    for gradient in gradients:
        for weight, optimizer in pairs:
            weight.grad = gradient.clone()
            optimizer.step()
    moved = (reference - start).norm()
    assert (ours - reference).norm() < 0.02 * moved


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_file_of_the_shipped_base_is_named_and_nothing_is_made(tiny_copy, tmp_path, name):
    path = tiny_copy / "tiny" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(MachineError, match="sha256") as refused:
        ensure_shipped(tmp_path / "cache", tiny_copy)
    assert refused.value.where == str(path)
    assert "git checkout" in refused.value.fix
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_damaged_copy_in_the_cache_is_named(tmp_path):
    folder, _ = ensure_shipped(tmp_path)
    with (folder / "model.safetensors").open("r+b") as handle:
        handle.truncate(1000)
    with pytest.raises(MachineError) as refused:
        ensure_shipped(tmp_path)
    assert refused.value.where == str(folder / "model.safetensors")
    assert str(folder) in refused.value.fix
