"""What engines mount is what the tables say: held against vLLM's own classes, and PEFT's own report."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from processes import HANG_S
from project import ROOT
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from sftplay.export.adapter_names import find_mounted, rename_for_vllm, served_names
from sftplay.places import find_vllm_python

sys.path.insert(0, str(ROOT / "docs"))
import engines

VLLM = find_vllm_python()
needs_vllm = pytest.mark.skipif(VLLM is None, reason="needs .venv-vllm: make install-vllm")


def table_of(name: str) -> dict[str, Any]:
    """A class's row of the table, in the child's form."""
    row = served_names()["vllm"]["classes"][name]
    modules = [f"{row['layer']}.*.{module}" for module in row["in_layer"]] + row.get("outside", [])
    return {"renames": row.get("renames", []), "modules": sorted(modules)}


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    return {family: engines.make_config(family) for family in engines.FAMILIES | engines.MERGED_ALONE}


@pytest.fixture(scope="module")
def merged(configs: dict[str, Any]) -> dict[str, Any]:
    """Config and shapes of what save_pretrained writes, for a model that was made anew and for one that was loaded."""
    saved = {}
    for family in engines.FAMILIES:
        model = engines.make_model(configs[family])
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        tied = set(model.all_tied_weights_keys)  # which save_pretrained leaves out
        weights = {name: weight for name, weight in model.state_dict().items() if name not in tied}
        ways = {"new": revert_weight_conversion(model, dict(weights))}
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
        ways["loaded"] = revert_weight_conversion(model, weights)
        for way, weights in ways.items():
            if way == "new" and family != "qwen3_5":
                continue  # nobody has a base that was never loaded
            saved[f"{family}, {way}"] = [config, {name: list(weight.shape) for name, weight in weights.items()}]
    return saved


@pytest.fixture(scope="module")
def vllm_says(configs: dict[str, Any], merged: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's environment answers to both, in one child: its import takes most of the time."""
    questions = {family: config.to_dict() for family, config in configs.items()} | merged
    text = json.dumps(questions, default=str)
    done = subprocess.run(
        [str(VLLM), str(ROOT / "tests/vllm_names.py")], input=text, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_vllm
def test_the_table_is_what_vllms_own_classes_say(configs: dict[str, Any], vllm_says: dict[str, Any]):
    for family, config in configs.items():
        assert vllm_says[family] == table_of(config.architectures[0]), family
    classes = {config.architectures[0] for config in configs.values()}
    assert set(served_names()["vllm"]["classes"]) == classes  # no row that nothing holds


@pytest.mark.slow
@needs_vllm
def test_vllm_loads_every_weight_of_a_merged_model_under_the_names_it_is_saved_with(
    merged: dict[str, Any], vllm_says: dict[str, Any]
):
    assert any(name.startswith("model.language_model.") for name in merged["qwen3_5, loaded"][1])
    refused = {name for name in merged if vllm_says[name].get("unloaded") != []}
    rows = served_names()["vllm"]["classes"]
    assert refused == {name for name, (config, _) in merged.items() if "merged" in rows[config["architectures"][0]]}
    assert "size of tensor" in vllm_says["qwen3_vl_moe, loaded"]["error"]  # an error, not a silent no-op


@pytest.mark.slow
def test_the_page_is_the_one_that_the_classes_give():
    assert engines.PAGE.read_text(encoding="utf-8") == engines.page(), "run `make engines`"
    assert len(engines.PAGE.read_text(encoding="utf-8").splitlines()) <= 70


def qwen3_5() -> tuple[dict[str, Any], list[str]]:
    config = engines.make_config("qwen3_5")
    return config.to_dict(), engines.adapter_keys(engines.make_model(config))


def test_an_adapter_of_the_text_class_mounts_nothing_until_it_is_renamed():
    config, keys = qwen3_5()
    found = find_mounted(config, keys, "vllm")
    assert (found.matched, found.total) == (0, len(keys) // 2)
    assert found.first_unmatched == "model.layers.0.linear_attn.out_proj"
    assert "Qwen3_5ForConditionalGeneration" in found.fix
    renamed = rename_for_vllm(config, keys)
    assert renamed is not None
    names = [name for new in renamed.values() for name in new]
    assert len(set(names)) == len(keys)
    assert find_mounted(config, names, "vllm").mounts_all
    assert find_mounted(config, keys, "peft").mounts_all
    assert find_mounted(config, names, "peft").matched == 0


@pytest.mark.parametrize("changed", [r"\1x.", r"\1layers.", r"mode.\1"])
def test_one_letter_of_a_prefix_is_enough_to_mount_nothing(changed: str):
    config = engines.make_config("qwen3").to_dict()
    keys = [f"base_model.model.model.layers.{n}.mlp.up_proj.lora_{side}.weight" for n in range(2) for side in "AB"]
    assert find_mounted(config, keys, "vllm") == find_mounted(config, iter(keys), "vllm")
    assert find_mounted(config, keys, "vllm").mounts_all
    wrong = [re.sub(r"(model\.)(?=layers)", changed, key) for key in keys]
    for engine in ("vllm", "peft"):
        assert find_mounted(config, wrong, engine).matched == 0


def test_one_module_of_many_that_lands_nowhere_is_named():
    config = engines.make_config("llama").to_dict()
    keys = engines.adapter_keys(engines.make_model(engines.make_config("llama")))
    lost = [key.replace("layers.1.mlp.up_proj", "layers.1.mlp.upp_proj") for key in keys]
    for engine in ("peft", "vllm"):
        found = find_mounted(config, lost, engine)
        assert (found.matched, found.total, found.first_unmatched) == (13, 14, "model.layers.1.mlp.upp_proj")
    assert "upp_proj" in found.fix


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
        "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector",
    ],
)
def test_what_is_no_low_rank_pair_is_said(key: str):
    config = engines.make_config("llama").to_dict()
    keys = [f"base_model.model.model.layers.0.mlp.down_proj.lora_{side}.weight" for side in "AB"]
    for engine in ("vllm", "sglang"):
        found = find_mounted(config, [*keys, key], engine)
        assert not found.mounts_all
        assert "low-rank pairs only" in found.fix
        assert "merged" in found.fix


def test_a_class_in_no_table_is_never_taken_for_mounted():
    config = engines.make_config("llama").to_dict() | {"architectures": ["BrandNewForCausalLM"]}
    for engine in ("vllm", "sglang"):
        found = find_mounted(config, ["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"], engine)
        assert not found.is_known
        assert not found.mounts_all
        assert "BrandNewForCausalLM" in found.fix


def test_sglang_drops_a_k_without_its_q_and_v():
    # lora.py, normalize_qkv_proj: joined by the name of q; k_proj alone stays, and matches no target (mem_pool.py)
    config = engines.make_config("qwen3").to_dict()
    keys = [f"base_model.model.model.layers.0.self_attn.{part}_proj.lora_A.weight" for part in "qkv"]
    assert find_mounted(config, keys, "sglang").mounts_all
    assert find_mounted(config, keys[1:2], "sglang").matched == 0
    assert find_mounted(config, keys[1:2], "vllm").mounts_all


def test_an_empty_adapter_mounts_nothing():
    assert not find_mounted(engines.make_config("qwen3").to_dict(), [], "vllm").mounts_all


@pytest.mark.parametrize("family", ["qwen3_5", "gemma3", "llama", "glm4"])
def test_peft_reports_no_key_too_many_where_all_are_said_to_mount(family: str):
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    from sftplay.config.run import LoraConfig
    from sftplay.model.adapter import add_adapter

    config = engines.make_config(family)
    adapted = add_adapter(engines.make_model(config), LoraConfig())
    weights: dict[str, torch.Tensor] = get_peft_model_state_dict(adapted)
    ways = {name: {name(key): weight for key, weight in weights.items()} for name in (str, misname)}
    for renamed in ways.values():
        unexpected = set_peft_model_state_dict(adapted, renamed).unexpected_keys
        found = find_mounted(config.to_dict(), list(renamed), "peft")
        assert found.total - found.matched == len(unexpected) // 2


def misname(key: str) -> str:
    return key.replace("layers.1.", "layers.1.text.")
