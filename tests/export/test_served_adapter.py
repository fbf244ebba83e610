"""A real vLLM answers with the exported adapter as PEFT does, and with the names of training as the base."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from processes import HANG_S
from project import ROOT
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from sftplay.config.run import LoraConfig
from sftplay.errors import ConfigError
from sftplay.export.adapter_names import FOR_ENGINES, export_adapter, find_mounted, mountable_by_vllm
from sftplay.model.adapter import add_adapter
from sftplay.places import find_vllm_python

PROMPT, NEW_TOKENS = list(range(3, 23)), 8  # as tests/vllm_answers.py has them
TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 128, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
IMAGES = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}


def make_base(family: str) -> Any:
    """A random model of the class that the hub's config.json names."""
    if family == "qwen3_5":  # no layer of linear attention: vLLM computes those in bf16 only on a CPU
        text = TEXT | {"layer_types": ["full_attention"] * 2}
        config = CONFIG_MAPPING[family](text_config=text, vision_config=VISION, **IMAGES)
        return AutoModelForImageTextToText.from_config(config)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**TEXT))


def greedy(model: Any) -> tuple[list[int], list[float]]:
    ids, logprobs = list(PROMPT), []
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(PROMPT) :], logprobs


@pytest.fixture
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any]:
    """A folder with base, trained, adapter and perhaps adapter-vllm; and the model with the adapter."""
    torch.manual_seed(0)
    base = make_base(request.param)
    for parameter in base.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    base.save_pretrained(tmp_path / "base")
    adapted = add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=4))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.15)
    adapted.save_pretrained(tmp_path / "trained")
    config = json.loads((tmp_path / "base/config.json").read_text())
    settings = json.loads((tmp_path / "trained/adapter_config.json").read_text())
    export_adapter(tmp_path / "trained", tmp_path, config=config, settings=settings)
    return tmp_path, adapted.eval()


@pytest.mark.slow
@pytest.mark.skipif(find_vllm_python() is None, reason="needs .venv-vllm: make install-vllm")
@pytest.mark.parametrize("exported", ["qwen3_5", pytest.param("glm4", marks=pytest.mark.long)], indirect=True)
def test_vllm_answers_as_the_trained_model_by_the_exported_names_only(exported: tuple[Path, Any]):
    folder, adapted = exported
    is_image_text = (folder / "base/config.json").read_text().count("vision_config") > 0
    folders = [str(folder / name) for name in ("base", *(["adapter"] if is_image_text else []), FOR_ENGINES)]
    done = subprocess.run(
        [str(find_vllm_python()), str(ROOT / "tests/vllm_answers.py"), *folders],
        capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout)
    with adapted.disable_adapter():
        check(answers[folders[0]], greedy(adapted))
    check(answers[folders[-1]], greedy(adapted))
    assert answers[folders[-1]][0] != answers[folders[0]][0]
    if is_image_text:  # the control, and the reason for all of this: no error, and the base's answers
        assert answers[folders[1]] == answers[folders[0]]


def check(said: list[Any], expected: tuple[list[int], list[float]]) -> None:
    assert said[0] == expected[0]
    assert said[1] == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.parametrize("exported", ["qwen3_5"], indirect=True)
def test_peft_loads_each_folder_on_its_own_class(exported: tuple[Path, Any]):
    folder, adapted = exported
    expected = greedy(adapted)
    for opens, name in ((AutoModelForCausalLM, "adapter"), (AutoModelForImageTextToText, FOR_ENGINES)):
        loaded = PeftModel.from_pretrained(opens.from_pretrained(folder / "base"), folder / name).eval()
        check(list(greedy(loaded)), expected)


@pytest.mark.parametrize("exported", ["glm4"], indirect=True)
def test_halves_of_a_joined_layer_add_up_to_what_was_trained(exported: tuple[Path, Any]):
    folder, _ = exported
    trained, halved = (load_file(folder / name / "adapter_model.safetensors") for name in ("trained", FOR_ENGINES))
    layer = "base_model.model.model.layers.1.mlp"
    whole = trained[f"{layer}.gate_up_proj.lora_B.weight"] @ trained[f"{layer}.gate_up_proj.lora_A.weight"]
    parts = [
        halved[f"{layer}.{p}.lora_B.weight"] @ halved[f"{layer}.{p}.lora_A.weight"] for p in ("gate_proj", "up_proj")
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("exported", ["qwen3"], indirect=True)
def test_an_adapter_that_fits_as_it_is_is_written_once(exported: tuple[Path, Any]):
    folder, _ = exported
    assert not (folder / FOR_ENGINES).exists()
    names = ("trained", "adapter")
    first, second = ((folder / name / "adapter_model.safetensors").read_bytes() for name in names)
    assert first == second


@pytest.mark.parametrize("in_full", [[], ["lm_head"]], ids=["pairs alone", "and a head in full"])
@pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers)")
def test_a_pattern_becomes_full_names_that_sglang_takes_and_peft_keeps_out_of_the_tower(
    in_full: list[str], tmp_path: Path
):
    vision = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    base = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gemma3"](text_config=TEXT, vision_config=vision))
    base.save_pretrained(tmp_path / "base")
    adapted = add_adapter(base, LoraConfig(r=4, modules_to_save=in_full))
    adapted.save_pretrained(tmp_path / "trained")
    config = json.loads((tmp_path / "base/config.json").read_text())
    settings = json.loads((tmp_path / "trained/adapter_config.json").read_text())
    assert isinstance(settings["target_modules"], str)
    export_adapter(tmp_path / "trained", tmp_path, config=config, settings=settings)
    listed = json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"]
    assert len(listed) == 2 * 7
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    adapted_names = [{n for n, m in model.named_modules() if hasattr(m, "lora_A")} for model in (adapted, again)]
    assert adapted_names[0] == adapted_names[1]
    assert find_mounted(config, [f"base_model.model.{name}.lora_A.weight" for name in listed], "sglang").mounts_all


@pytest.mark.parametrize("exported", ["qwen3_5", "glm4", "qwen3"], indirect=True)
def test_what_is_served_is_what_is_exported_for_vllm(exported: tuple[Path, Any]):
    folder, _ = exported
    config = json.loads((folder / "base/config.json").read_text())
    served = mountable_by_vllm(folder / "trained", config, target=folder / "served")
    name = FOR_ENGINES if (folder / FOR_ENGINES).is_dir() else "trained"
    assert (served == folder / "trained") == (name == "trained")
    weights = [load_file(place / "adapter_model.safetensors") for place in (served, folder / name)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
    settings = json.loads((served / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)


@pytest.mark.parametrize("exported", ["qwen3"], indirect=True)
def test_an_adapter_that_is_mounted_in_part_is_not_served(exported: tuple[Path, Any]):
    folder, _ = exported
    weights = load_file(folder / "trained/adapter_model.safetensors")
    place, other = "layers.1.self_attn.q_proj", "layers.1.self_attn.query"
    odd = {key.replace(place, other): value for key, value in weights.items()}
    save_file(odd, folder / "trained/adapter_model.safetensors")
    config = json.loads((folder / "base/config.json").read_text())
    with pytest.raises(ConfigError, match=rf"mounts 13 of 14 modules of this adapter, first not .*{other}"):
        mountable_by_vllm(folder / "trained", config, target=folder / "served")
