"""A model of images or sound trains where transformers opens its text part, and is refused before anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sftplay.cli import main
from sftplay.errors import ConfigError
from sftplay.plan.config_json import NESTED, WITH_TEXT, refuse_unopened

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "vocab_size": 160}  # fmt: skip


def test_the_types_are_those_that_transformers_opens():
    nests = {kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if {*CONFIG_MAPPING[kind].sub_configs} & {*NESTED}}
    assert nests == WITH_TEXT


@pytest.mark.parametrize("kind", ["mistral3", "qwen3_vl", "qwen3_vl_moe", "glm4v", "voxtral", "llava", "internvl"])
def test_a_type_without_such_a_class_is_refused_by_its_name(kind: str):
    with pytest.raises(ConfigError, match=f"'{kind}' is for images or sound too") as caught:
        refuse_unopened(json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False)), where="x")
    assert "name a model of text alone" in caught.value.fix


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4", "llama4", "qwen3_5", "qwen3_5_moe", "mpt"])
def test_other_models_pass(kind: str):
    refuse_unopened(CONFIG_MAPPING[kind]().to_dict(), where="x")
    refuse_unopened({"model_type": "own", "text_config": LLAMA, "auto_map": {"AutoModelForCausalLM": "a.B"}}, where="x")


@pytest.mark.contract
@pytest.mark.parametrize("verb", ["validate", "plan", "train"])
def test_every_verb_says_so_of_a_folder(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen").mkdir()
    config = {"model_type": "mistral3", "text_config": LLAMA, "vision_config": {"model_type": "pixtral"}}
    (tmp_path / "seen/config.json").write_text(json.dumps(config))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "run.yaml").write_text("model: {name: ./seen}\ndata: {train_path: rows.jsonl}\n")
    assert main([verb, "--config", "run.yaml", "--json"]) == 2
    out = capsys.readouterr().out
    error = json.loads(out[out.index("{") :])["error"]
    assert error["where"].endswith("model.name")
    assert "'mistral3'" in error["what"]
