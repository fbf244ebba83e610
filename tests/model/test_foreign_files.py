"""A model, tokenizer or adapter with wrong files is refused with a remedy, whatever error a library raises."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sftplay.config.load import load_config
from sftplay.errors import SftplayError
from sftplay.model.load import load_base
from sftplay.model.tokenizer import load_tokenizer
from sftplay.runs.inputs import check_inputs

RAW = [b"", b"[]", b"\xff\xfe", b"[" * 100_000]

CONFIG: list[dict[str, Any]] = [
    {"dtype": "float99"}, {"dtype": []}, {"rope_parameters": {"rope_type": "warp"}}, {"rope_parameters": 5},
    {"hidden_act": "warp"}, {"hidden_act": 5}, {"model_type": "nope"},
    {"vocab_size": 10}, {"hidden_size": 33}, {"quantization_config": 5}, {"auto_map": 5}, {"eos_token_id": "x"},
    {"pad_token_id": 10**9}, {"id2label": 5}, {"num_labels": "x"}, {"layer_types": 5},
]  # fmt: skip


TOKENIZER: list[dict[str, Any]] = [
    {"tokenizer_class": 5}, {"added_tokens_decoder": 5}, {"added_tokens_decoder": {"x": 5}}, {"eos_token": 5},
    {"padding_side": "up"}, {"extra_special_tokens": 5}, {"bos_token": [1]},
]  # fmt: skip

ADAPTER: list[dict[str, Any]] = [
    {"lora_alpha": "x"}, {"lora_alpha": None}, {"r": "x"}, {"r": True}, {"target_modules": 5},
    {"target_modules": ["nope"]}, {"peft_type": 5}, {"modules_to_save": 5}, {"modules_to_save": [5, "a"]},
    {"base_model_name_or_path": 5}, {"task_type": "NOPE"}, {"bias": "nope"}, {"init_lora_weights": "nope"},
]  # fmt: skip


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    get_peft_model(model, LoraConfig(r=32, lora_alpha=64, target_modules=layers)).save_pretrained(folder)
    return folder


@pytest.fixture
def refused(tmp_path: Path, tiny_llama: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The refusal of a model `m` and, where asked for, an adapter `a` after a change to their files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(tiny_llama, "m")
    shutil.copytree(adapter, "a")
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    change(Path("a/adapter_config.json"), {"base_model_name_or_path": "./m"})
    text = "model: {name: ./m, attn: eager}\ndata: {train_path: rows.jsonl}\ntrain: {precision: fp32}\n"
    Path("run.yaml").write_text(text)

    def load(*overrides: str) -> str:
        with pytest.raises(SftplayError) as refusal:
            opened(*overrides)
        assert refusal.value.exit_code in (2, 3, 4)
        assert refusal.value.fix
        assert refusal.value.where
        return str(refusal.value)

    return load


def opened(*overrides: str) -> Any:
    cfg = check_inputs(load_config("run.yaml", overrides))
    load_tokenizer(cfg.model)
    return load_base(cfg)


def change(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("values", CONFIG, ids=json.dumps)
def test_a_config_json_that_lies_is_refused(refused: Callable[..., str], values: dict[str, Any]):
    change(Path("m/config.json"), values)
    said = refused()
    if isinstance(next(iter(values.values())), str):
        assert str(next(iter(values.values()))) in said


@pytest.mark.parametrize("values", [{"hidden_act": "warp"}, {"rope_parameters": {"rope_type": "warp"}}], ids=json.dumps)
def test_a_word_that_the_library_does_not_know_is_named_with_its_key(refused: Callable[..., str], values: Any):
    change(Path("m/config.json"), values)
    key = "rope_type" if "rope_parameters" in values else "hidden_act"
    assert f"{key} is 'warp' in its config.json" in refused()


@pytest.mark.parametrize("values", TOKENIZER, ids=json.dumps)
def test_a_tokenizer_config_that_lies_is_refused(refused: Callable[..., str], values: dict[str, Any]):
    change(Path("m/tokenizer_config.json"), values)
    assert "no tokenizer could be opened" in refused()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("raw", RAW, ids=repr)
def test_a_file_of_the_model_that_is_none_is_refused(refused: Callable[..., str], name: str, raw: bytes):
    Path("m", name).write_bytes(raw)
    refused()


@pytest.mark.parametrize("values", ADAPTER, ids=json.dumps)
def test_an_adapter_that_lies_is_refused(refused: Callable[..., str], values: dict[str, Any]):
    change(Path("a/adapter_config.json"), values)
    assert "a" in refused("model.adapter=./a")


@pytest.mark.parametrize("raw", RAW, ids=repr)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_of_the_adapter_that_is_none_is_refused(refused: Callable[..., str], name: str, raw: bytes):
    Path("a", name).write_bytes(raw)
    refused("model.adapter=./a")


@pytest.mark.parametrize("name", ["m/model.safetensors", "a/adapter_model.safetensors"])
def test_weights_that_were_cut_off_are_no_full_disk(refused: Callable[..., str], name: str):
    Path(name).write_bytes(Path(name).read_bytes()[:-100])
    said = refused("model.adapter=./a")
    assert "copy the" in said
    assert "room" not in said


def test_what_does_not_lie_is_opened(refused: Callable[..., str]):
    assert opened("model.adapter=./a").peft_config["default"].r == 32
