"""The kit passes its settings to unsloth, and refuses a model when unsloth did something else."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Inputs, sized, written_config
from processes import HANG_S
from safetensors.torch import load_file, save_file
from unsloth_stand_in import FastLanguageModel, as_module

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.model.load import load_start, start_adapter
from sftplay.model.recomputation import recomputation
from sftplay.model.unsloth_model import check_arguments

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tiny_llama: Path, chat_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sftplay.machine.probe.find_unsloth_problem", lambda **_: "")

    def write(folder: Path = tiny_llama, **changes: Any) -> RunConfig:
        inputs = Inputs(folder, chat_rows, chat_rows)
        return sized(written_config(tmp_path, inputs, tuning__backend="unsloth", **changes))

    return write


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens the base of a config with a stand-in for unsloth: (model, stand-in)."""

    def open_it(cfg: RunConfig, stand_in: FastLanguageModel | None = None) -> tuple[Any, FastLanguageModel]:
        stand_in = stand_in or FastLanguageModel()
        monkeypatch.setitem(sys.modules, "unsloth", as_module(stand_in))
        return load_start(cfg), stand_in

    return open_it


def test_unsloth_is_told_what_the_config_says_and_to_open_no_other_model(config: Any, opened: Any, tiny_llama: Path):
    cfg = config(model__max_seq_len=96, train__gradient_checkpointing=True, seed=7)
    _, stand_in = opened(cfg)
    given = stand_in.opened
    assert given["model_name"] == str(tiny_llama)
    assert given["use_exact_model_name"] is True
    assert (given["max_seq_length"], given["dtype"], given["random_state"]) == (96, torch.float32, 7)
    assert (given["load_in_4bit"], given["trust_remote_code"], given["use_safetensors"]) == (False, False, True)
    assert given["use_gradient_checkpointing"] == "unsloth"
    _, stand_in = opened(config())
    assert stand_in.opened["use_gradient_checkpointing"] is False


def test_adapter_has_the_configs_shape_on_every_linear_layer_but_the_head_and_fp32_weights(config: Any, opened: Any):
    lora = {"tuning__lora": {"r": 3, "alpha": 12.0, "dropout": 0.25, "rslora": True, "modules_to_save": ["lm_head"]}}
    cfg = config(train__precision="bf16", seed=9, **lora)
    model, stand_in = opened(cfg)
    adapted = start_adapter(model, cfg)
    given = stand_in.adapted
    assert given["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (given["r"], given["lora_alpha"], given["lora_dropout"], given["random_state"]) == (3, 12.0, 0.25, 9)
    assert (given["use_rslora"], given["use_dora"], given["modules_to_save"]) == (True, False, ["lm_head"])
    trainable = {p.dtype for p in adapted.parameters() if p.requires_grad}
    frozen = {p.dtype for p in adapted.parameters() if not p.requires_grad}
    assert (trainable, frozen) == ({torch.float32}, {torch.bfloat16})


def test_adapter_on_other_layers_than_meant_is_refused(config: Any, opened: Any):
    cfg = config()
    model, _ = opened(cfg, FastLanguageModel(adapts=["q_proj"]))
    # Two blocks of seven linear layers; the stand-in takes one of the seven.
    with pytest.raises(ConfigError, match="unsloth would adapt 2 layers where 14 are meant"):
        start_adapter(model, cfg)


def test_base_that_is_not_held_in_4_bits_is_refused_though_unsloth_went_on(config: Any, opened: Any):
    model, _ = opened(config(tuning__mode="qlora"))
    assert any(p.dtype == torch.uint8 for p in model.parameters())
    with pytest.raises(MachineError, match="unsloth could not hold this model in 4 bits") as caught:
        opened(config(tuning__mode="qlora"), FastLanguageModel(ignores_4_bits=True))
    assert "tuning.mode: lora" in caught.value.fix


def test_missing_weights_are_refused_though_unsloth_says_nothing(
    config: Any, opened: Any, tiny_llama: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "lacking"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MachineError, match=r"cannot be loaded .*layers\.1\.mlp\.up_proj\.weight"):
        opened(config(folder))


@pytest.mark.parametrize(
    ("key", "given", "taken", "ours"),
    [
        ("bf16", True, False, "train.precision"),
        ("optim", "adamw_8bit", "adamw_torch_fused", "train.optim"),
        (recomputation(), False, True, "train.gradient_checkpointing"),
    ],
)
def test_argument_that_unsloth_changed_on_the_way_is_named(key: str, given: Any, taken: Any, ours: str):
    class Taken:
        bf16, fp16, optim, dataloader_pin_memory = False, False, "adamw_torch_fused", False

    setattr(Taken, recomputation(), True)
    check_arguments({key: taken, recomputation(): True}, Taken())
    with pytest.raises(ConfigError, match=f"unsloth turns {key} from {given} into {taken} on this machine") as caught:
        check_arguments({key: given}, Taken())
    assert caught.value.where == ours


IMPORT = """
import sys, importlib
sys.path.insert(0, sys.argv[1])
from sftplay.errors import MachineError
from sftplay.model.libraries import import_unsloth
try:
    print(import_unsloth().SEEN)
except MachineError as error:
    print(error)
"""


def imported(folder: Path, text: str) -> str:
    (folder / "unsloth").mkdir()
    (folder / "unsloth" / "__init__.py").write_text(text)
    argv = [sys.executable, "-c", IMPORT, str(folder)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stderr == ""
    return done.stdout


def test_unsloth_is_imported_before_what_it_changes_without_counting_users(tmp_path: Path):
    text = (
        "import json, os, sys\n"
        "early = sorted({'torch', 'transformers', 'trl', 'peft'} & set(sys.modules))\n"
        "SEEN = json.dumps([early, os.environ['UNSLOTH_DISABLE_STATISTICS'], os.environ['UNSLOTH_COMPILE_LOCATION']])\n"
    )
    assert json.loads(imported(tmp_path, text)) == [[], "1", str(ROOT / ".cache" / "unsloth")]
