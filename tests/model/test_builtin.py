"""The built-in model: an ordinary model folder, made once, from the shipped text alone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sftplay.errors import ConfigError, MachineError
from sftplay.model import base_training, builtin

QUICK = builtin.Recipe(vocab_size=400, hidden_size=16, intermediate_size=32, layers=1, heads=1, steps=2, rows=2)
CHAT = [
    {"role": "system", "content": "Answer with one word."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Tudix."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "Gechie."},
]


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first 400 lines of each shipped text."""
    folder = tmp_path_factory.mktemp("text")
    for path in builtin.text_files(builtin.TEXT_DIR):
        (folder / path.name).write_text("".join(path.read_text().splitlines(keepends=True)[:400]))
    return folder


@pytest.fixture(scope="module")
def quick_folder(tmp_path_factory: pytest.TempPathFactory, text_dir: Path) -> Path:
    """A model of the same make in a moment: a tokenizer of little text, the template, two steps of base training."""
    return ensure_quick(tmp_path_factory.mktemp("quick"), text_dir)


def ensure_quick(cache_dir: Path, text_dir: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    return builtin.ensure_builtin("tiny", cache_dir, say=say, recipe=QUICK, text_dir=text_dir)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


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


def test_the_chat_template_marks_what_the_assistant_says(builtin_tiny):
    tokenizer = AutoTokenizer.from_pretrained(builtin_tiny)
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    said = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == "Tudix.<|im_end|>Gechie.<|im_end|>"


def test_an_unknown_role_is_refused(quick_folder):
    tokenizer = AutoTokenizer.from_pretrained(quick_folder)
    with pytest.raises(Exception, match="unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "hum"}], tokenize=False)


def test_a_second_call_makes_nothing_and_gives_the_same_folder(builtin_tiny, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(base_training, "make_base", lambda *_, **__: pytest.fail("it is made again"))
    assert builtin.ensure_builtin("tiny", builtin_tiny.parent, say=said.append) == builtin_tiny
    assert said == []


def test_the_same_recipe_gives_the_same_weights(quick_folder, text_dir, tmp_path):
    torch.manual_seed(99)  # the caller's own random state must not matter
    before = torch.get_rng_state()
    again = ensure_quick(tmp_path, text_dir)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.name == quick_folder.name
    first, second = read_weights(quick_folder), read_weights(again)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_fingerprint_follows_the_text_and_the_recipe(tmp_path):
    shutil.copytree(builtin.TEXT_DIR, tmp_path / "text")
    before = builtin.fingerprint(QUICK, tmp_path / "text")
    assert before == builtin.fingerprint(QUICK, builtin.TEXT_DIR)
    assert before != builtin.fingerprint(dataclasses.replace(QUICK, seed=8), tmp_path / "text")
    practice = tmp_path / "text" / "practice.txt"
    practice.write_bytes(practice.read_bytes() + b"one more line\n")
    assert before != builtin.fingerprint(QUICK, tmp_path / "text")


def test_a_broken_off_build_is_made_anew_and_leaves_no_debris(quick_folder, text_dir, tmp_path):
    debris = tmp_path / f".{quick_folder.name}.part"
    debris.mkdir()
    (debris / "model.safetensors").write_bytes(b"half of it")
    made = ensure_quick(tmp_path, text_dir)
    assert made.is_dir()
    assert not debris.exists()
    assert AutoModelForCausalLM.from_pretrained(made).num_parameters() > 0


def test_two_processes_that_build_at_once_share_one_folder(text_dir, tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sftplay.model.builtin", "transformers.models.llama.modeling_llama"])
    with context.Pool(2) as pool:
        folders = set(pool.starmap(ensure_quick, 2 * [(tmp_path, text_dir)], chunksize=1))
    assert len(folders) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folders.pop().name]


def test_an_unknown_name_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ConfigError) as refused:
        builtin.ensure_builtin("tyni", tmp_path, say=print)
    assert refused.value.where == "model.name"
    assert "tiny" in refused.value.nearest
    assert "use builtin:" in refused.value.fix


@pytest.fixture
def tiny_copy(tmp_path):
    """data/base with its shipped model, to be damaged."""
    return Path(shutil.copytree(builtin.TEXT_DIR, tmp_path / "base"))


def ensure_shipped(cache_dir: Path, text_dir: Path = builtin.TEXT_DIR) -> tuple[Path, list[str]]:
    said: list[str] = []
    return builtin.ensure_builtin("tiny", cache_dir, say=said.append, text_dir=text_dir), said


def test_nothing_is_trained_for_the_shipped_base(tmp_path, monkeypatch):
    monkeypatch.setattr(base_training, "make_base", lambda *_, **__: pytest.fail("the base is trained"))
    folder, said = ensure_shipped(tmp_path)
    assert said == []
    shipped = builtin.TEXT_DIR / "tiny" / "model.safetensors"
    assert (folder / "model.safetensors").read_bytes() == shipped.read_bytes()
    assert shipped.stat().st_size <= 5.5e6


def test_the_shipped_base_was_made_of_todays_texts_and_recipe():
    made = json.loads((builtin.TEXT_DIR / "tiny" / "made.json").read_text())
    assert made["fingerprint"] == builtin.fingerprint(builtin.RECIPES["tiny"])
    assert made["recipe"] == dataclasses.asdict(builtin.RECIPES["tiny"])
    for name, digest in made["sha256"].items():
        assert hashlib.sha256((builtin.TEXT_DIR / "tiny" / name).read_bytes()).hexdigest() == digest


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


def test_a_cache_of_a_base_trained_on_another_machine_is_not_taken_for_the_shipped_one(tmp_path):
    trained = tmp_path / f"tiny-{builtin.fingerprint(builtin.RECIPES['tiny'])}"
    trained.mkdir()
    assert ensure_shipped(tmp_path)[0] != trained
