"""`parity` says from names alone that vLLM would leave an adapter out, and holds the renamed one against the run."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import Finished, Inputs, train
from safetensors.torch import load_file
from test_parity import ADAPTER, ask, change_json, change_weights, set_other_values, set_zeros
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from sftplay.export.adapter_names import FOR_ENGINES
from sftplay.export.export import export
from sftplay.parity import by_transformers, by_vllm
from sftplay.parity.engine import EngineReply, Question

pytestmark = pytest.mark.filterwarnings("ignore:.*(missing adapter keys|tie_word_embeddings)")

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 416, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
    "max_position_embeddings": 512, "layer_types": ["full_attention"] * 2,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
IMAGES = {"image_token_id": 410, "video_token_id": 411, "vision_start_token_id": 412, "vision_end_token_id": 413}


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory, verbs_environment: None) -> Finished:
    """An exported LoRA run that trained the text class of a model whose config.json names the image-text class."""
    home = tmp_path_factory.mktemp("parity-mounts")
    base = Path(shutil.copytree(inputs.model, home / "base"))
    config = CONFIG_MAPPING["qwen3_5"](text_config=TEXT, vision_config=VISION, **IMAGES)
    AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    done = train(home, Inputs(base, inputs.train, inputs.held_out), train__learning_rate=0.05)
    export(done.cfg, done.folder, out=done.folder.path / "export")
    return done


@pytest.fixture
def renamed(run: Finished, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.folder.path / "export" / FOR_ENGINES, tmp_path / "renamed"))


@pytest.fixture
def starts(run: Finished, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The adapters that vLLM was started with; in its place PEFT answers, with the run's own adapter."""
    seen: list[Path] = []

    def answer(folder: Path, questions: Sequence[Question], *, adapter: Path, **others: Any) -> EngineReply:
        seen.append(adapter)
        own, tokens = run.folder.path / "adapter", others["max_new_tokens"]
        return by_transformers.answer_all(own, questions, max_new_tokens=tokens, end_ids=[2])

    monkeypatch.setattr(by_vllm, "answer_all", answer)
    monkeypatch.setattr("sftplay.commands.export.find_vllm_python", lambda: Path("python"))
    return seen


def test_an_adapter_that_vllm_would_leave_out_is_refused_without_a_server(run: Finished, starts: list[Path]):
    code, found = ask(run, "--engine", "vllm", "--against", "adapter")
    count = "the adapter's keys match 0 of 14 modules of Qwen3_5ForConditionalGeneration in vLLM"
    assert (code, starts) == (5, [])
    assert found["cause"].startswith(count)
    assert f"serve {FOR_ENGINES}/ of `make export`" in found["cause"]
    assert "another adapter" not in found["cause"]


def test_the_adapter_under_vllms_names_is_the_runs(run: Finished, starts: list[Path], renamed: Path):
    code, found = ask(run, "--engine", "vllm", "--served", str(renamed))
    assert (code, found["cause"], starts) == (0, None, [renamed])


def lose_tensor(folder: Path, run: Finished) -> None:
    change_weights(folder, lambda weights: weights.pop(next(name for name in weights if "lora_A" in name)), ADAPTER)


@pytest.mark.parametrize(
    ("plant", "cause"),
    [
        (set_other_values, "it is another adapter than the run's"),
        (set_zeros, "the adapter is all zeros"),
        (lose_tensor, "keys match 13 of 14 modules"),
    ],
)
def test_faults_of_the_adapter_under_vllms_names_are_named(
    plant: Any, cause: str, run: Finished, starts: list[Path], renamed: Path
):
    plant(renamed, run)
    code, found = ask(run, "--engine", "vllm", "--served", str(renamed))
    assert code == 5
    assert cause in found["cause"]


def test_peft_mounts_nothing_of_the_adapter_under_vllms_names(run: Finished, renamed: Path):
    assert not set(load_file(renamed / ADAPTER)) & set(load_file(run.folder.path / "adapter" / ADAPTER))
    change_json(renamed / "adapter_config.json", base_model_name_or_path=run.cfg.model.name)
    code, found = ask(run, "--served", str(renamed))
    assert code == 5
    assert "keys match 0 of 14 modules" in found["cause"]
