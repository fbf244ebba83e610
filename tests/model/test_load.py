"""Models are opened exactly as asked, or refused with a remedy; names of layers are checked against the model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Inputs, sized, written_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sftplay.config.run import LoraConfig, ModelConfig
from sftplay.errors import ConfigError, DataError, MachineError
from sftplay.model.adapter import (
    add_adapter,
    attach_adapter,
    describe_parameters,
    every_linear_of_text,
    freeze_outside_text,
)
from sftplay.model.load import load_base
from sftplay.model.source import check_source
from sftplay.model.tokenizer import load_tokenizer


@pytest.fixture
def open_base(tiny_llama: Path, chat_rows: Path, held_out_rows: Path, tmp_path: Path) -> Any:
    def open_it(folder: Path = tiny_llama, **changes: Any) -> Any:
        return load_base(sized(written_config(tmp_path, Inputs(folder, chat_rows, held_out_rows), **changes)))

    return open_it


@pytest.fixture
def broken(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "broken"))


@pytest.mark.parametrize(
    ("mode", "precision", "dtype"),
    [
        ("full", "fp32", torch.float32),
        ("full", "bf16", torch.float32),
        ("lora", "fp32", torch.float32),
        ("lora", "bf16", torch.bfloat16),
    ],
)
def test_weights_that_train_are_fp32_and_a_frozen_base_has_the_runs_precision(
    mode: str, precision: str, dtype: torch.dtype, open_base: Any
):
    model = open_base(tuning__mode=mode, train__precision=precision)
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", True), ("nf4", False)])
def test_4_bit_base_is_held_as_asked(kind: str, double: bool, open_base: Any, tiny_llama: Path):
    model = open_base(tuning__mode="qlora", tuning__quant_type=kind, tuning__double_quant=double)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.uint8
    assert weight.quant_state.quant_type == kind
    assert weight.quant_state.nested == double
    # Two codes of 4 bits a byte: 64 x 32 weights are 1024 bytes.
    assert weight.numel() == 64 * 32 // 2
    full = AutoModelForCausalLM.from_pretrained(tiny_llama)
    described = describe_parameters(model)
    assert described["four_bit_layers"] == 14
    assert described["parameters"] == sum(p.numel() for p in full.parameters())


def test_evaluation_mode_leaves_4_bit_weights_as_they_were(open_base: Any):
    model = open_base(tuning__mode="qlora")
    packed = {name: p for name, p in model.named_parameters() if p.dtype == torch.uint8}
    before = {name: p.detach().clone() for name, p in packed.items()}
    scales = {name: p.quant_state.absmax.clone() for name, p in packed.items()}
    ids = torch.arange(20)[None]
    with torch.no_grad():
        training = model.train()(input_ids=ids).logits
        evaluation = model.eval()(input_ids=ids).logits
    assert torch.equal(training, evaluation)
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(torch.equal(after[name].quant_state.absmax, value) for name, value in scales.items())


def drop_a_layer(folder: Path) -> None:
    path = folder / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if "layers.1.mlp.up_proj" not in name}
    save_file(kept, path, metadata={"format": "pt"})


def widen_the_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 96}))


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        drop_a_layer,
        widen_the_config,
    ],
    ids=["no weights", "a layer is missing", "other shapes"],
)
def test_model_that_cannot_be_loaded_whole_is_refused(harm: Any, broken: Path, open_base: Any):
    harm(broken)
    with pytest.raises(MachineError, match="the model cannot be loaded") as caught:
        open_base(broken)
    assert str(broken) in caught.value.where
    assert "\n" not in caught.value.what
    assert caught.value.fix


def edit_tokenizer(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def test_tokenizer_is_padded_on_the_right_and_borrows_the_end_token_for_padding(broken: Path):
    assert load_tokenizer(ModelConfig(name=str(broken))).pad_token == "<pad>"
    edit_tokenizer(broken, pad_token=None, padding_side="left")
    tokenizer = load_tokenizer(ModelConfig(name=str(broken)))
    assert (tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "right")
    edit_tokenizer(broken, eos_token=None)
    with pytest.raises(DataError, match="no pad token and no end-of-text token"):
        load_tokenizer(ModelConfig(name=str(broken)))


def test_auto_means_every_linear_layer_but_the_head(open_base: Any):
    base = open_base()
    linear = {name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    model = add_adapter(base, LoraConfig(r=2))
    adapted = {
        name.removeprefix("base_model.model.") for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    assert adapted == linear - {"lm_head"}


def test_a_class_that_lacks_what_is_asked_for_is_refused_with_the_key(tmp_path: Path, open_base: Any, tiny_llama: Path):
    for kind, fix in (("gptj", "write model.attn: eager"), ("ctrl", "write train.gradient_checkpointing: false")):
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 400}
        AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path / kind)
        for file in tiny_llama.glob("tokenizer*"):
            shutil.copy(file, tmp_path / kind)
        with pytest.raises((ConfigError, MachineError)) as refused:
            open_base(tmp_path / kind, model__attn="sdpa", train__gradient_checkpointing=True)
        assert refused.value.fix == fix


def test_a_decoder_is_found_where_the_class_calls_it_by_another_word(tmp_path: Path, open_base: Any, tiny_llama: Path):
    sizes = SIZES | {"vocab_size": 400, "intermediate_size_mlp": 48, "num_local_experts": 2}
    stored = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama4_text", **sizes))
    stored.save_pretrained(tmp_path / "llama4")
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "llama4")
    model = open_base(tmp_path / "llama4", tuning__mode="full")
    assert model.base_model is model.model
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(again.state_dict(), stored.state_dict(), rtol=0, atol=0)


def test_a_mixture_whose_config_asks_for_a_loss_of_its_router_answers_padded_prompts(
    tmp_path: Path, open_base: Any, tiny_llama: Path
):
    sizes = SIZES | {"vocab_size": 400, "num_experts": 4, "moe_intermediate_size": 16,
                     "num_experts_per_tok": 2, "output_router_logits": True}  # fmt: skip
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes)).save_pretrained(tmp_path / "moe")
    for file in tiny_llama.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "moe")
    model, mask = open_base(tmp_path / "moe"), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    ids = torch.arange(8).reshape(2, 4) + 10
    answers = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, eos_token_id=None)
    alone = model.generate(ids[1:], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert answers[1].tolist() == alone[0].tolist()
    assert model(ids, attention_mask=mask, labels=ids).aux_loss > 0


def test_auto_keeps_linears_of_a_library_whatever_they_compute_with(open_base: Any):
    """A quantised linear may not compute where it is asked: without its GPU, or in the type of its weights."""

    class QuantisedLinear(torch.nn.Linear):
        def forward(self, _states: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("needs its kernel")

    base = open_base()
    base.model.layers[0].self_attn.q_proj.__class__ = QuantisedLinear
    assert every_linear_of_text(base) == "all-linear"


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize(
    ("kind", "values", "names"),
    [
        ("llama4_text", {"intermediate_size_mlp": 48, "num_local_experts": 4},
         ATTENTION | {"gate_proj", "up_proj", "down_proj"}),
        ("phimoe", {"num_local_experts": 4}, ATTENTION),
        ("mamba2", {"num_heads": 8, "state_size": 8, "n_groups": 1, "expand": 2}, {"in_proj"}),
        ("modernbert-decoder", {"bos_token_id": 1, "global_rope_theta": 10000.0},
         (ATTENTION | {"Wo", "Wi", "dense"}) - {"o_proj"}),
        ("falcon", {"head_dim": None}, {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
    ],
    ids=["Llama 4", "Phi MoE", "Mamba 2", "decoder of ModernBERT", "Falcon"],
)  # fmt: skip
def test_auto_leaves_out_routers_and_what_peft_refuses(kind: str, values: dict[str, Any], names: set[str]):
    """The routers of Llama 4 and Phi MoE are linears that give more than one tensor."""
    given = {key: value for key, value in (SIZES | values).items() if value is not None}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given))
    assert freeze_outside_text(base) == 0
    model = add_adapter(base, LoraConfig(r=2))
    adapted = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert {name for name in adapted if "expert" not in name and name != "base_layer"} == names
    ids = torch.arange(12).reshape(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize(
    ("key", "name", "nearest"),
    [
        ("target_modules", "q_prj", "q_proj"),
        ("target_modules", "up_project", "up_proj"),
        ("modules_to_save", "lm_haed", "lm_head"),
        ("modules_to_save", "embed_token", "embed_tokens"),
    ],
)
def test_name_of_no_layer_is_refused_with_the_nearest(key: str, name: str, nearest: str, open_base: Any):
    with pytest.raises(ConfigError, match=f"no module of this model is called '{name}'") as caught:
        add_adapter(open_base(), LoraConfig(**{key: [name]}))
    assert caught.value.where.endswith(f"tuning.lora.{key}")
    assert caught.value.nearest[0] == nearest


def test_layer_that_cannot_have_a_pair_is_refused(open_base: Any):
    with pytest.raises(ConfigError, match=r"cannot adapt these modules .*LlamaRMSNorm"):
        add_adapter(open_base(), LoraConfig(target_modules=["input_layernorm"]))


def test_source_is_a_folder_with_a_config_a_builtin_or_a_hub_name(tiny_llama: Path, tmp_path: Path):
    for name in ("builtin:tiny", "org/model", "gpt2", str(tiny_llama)):
        check_source(name, "here")
    with pytest.raises(ConfigError, match="no model folder"):
        check_source(str(tmp_path / "nothing"), "here")
    with pytest.raises(ConfigError, match="no model folder"):
        check_source("./models/nothing", "here")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        check_source(str(tmp_path), "here")


@pytest.fixture(scope="module")
def seeing_gemma():
    """A tiny Gemma 3 with a vision tower, as google/gemma-3-27b-it has one."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    return lambda: Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision))


@pytest.mark.parametrize("targets", ["auto", ["q_proj", "out_proj"]])
def test_on_a_model_that_sees_only_the_text_part_trains_and_all_of_it_gets_gradients(seeing_gemma, targets):
    model = add_adapter(seeing_gemma(), LoraConfig(r=2, target_modules=targets))
    assert (freeze_outside_text(model) == 0) == (targets == "auto")
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trains
    assert all(p.grad is not None for p in trains.values())
    assert not any("vision" in name for name in trains)


def only_pickled(folder: Path) -> Path:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_weights_that_are_only_pickled_are_refused_with_the_remedy_unless_allowed(
    broken: Path, open_base: Any, tiny_llama: Path
):
    folder = only_pickled(broken)
    with pytest.raises(ConfigError, match=r"only as a pickle \(pytorch_model\.bin\)") as caught:
        check_source(str(folder), "here")
    assert "model.allow_pickle: true" in caught.value.fix
    with pytest.raises(MachineError, match="the model cannot be loaded"):
        open_base(folder)
    check_source(str(folder), "here", allow_pickle=True)
    opened, usual = open_base(folder, model__allow_pickle=True).state_dict(), open_base().state_dict()
    assert all(torch.equal(opened[name], usual[name]) for name in usual)


class Command:
    """A pickle that runs a command when it is opened."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_pickle_that_torch_refuses_is_told_without_torchs_advice_to_open_it_all_the_same(open_base: Any, broken: Path):
    folder = only_pickled(broken)
    torch.save({"lm_head.weight": Command()}, folder / "pytorch_model.bin")
    with pytest.raises(MachineError, match=r"holds more than numbers: opening it would run posix\.system") as caught:
        open_base(folder, model__allow_pickle=True)
    assert "weights_only" not in str(caught.value)
    assert "take a copy in safetensors from its maker" in caught.value.fix


def test_adapter_that_is_a_pickle_of_that_kind_is_refused_in_the_same_words(open_base: Any, tmp_path: Path):
    model = add_adapter(open_base(), LoraConfig(r=2))
    model.save_pretrained(tmp_path / "adapter", safe_serialization=True)
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({"x": Command()}, tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(MachineError, match=r"the adapter's pickle holds more than numbers: .* posix\.system"):
        attach_adapter(open_base(), tmp_path / "adapter")


def test_model_that_needs_its_own_code_is_refused_with_reason_and_key(broken: Path, open_base: Any):
    (broken / "modeling_own.py").write_text("raise SystemExit('foreign code has run')\n")
    path = broken / "config.json"
    custom = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | custom))
    with pytest.raises(ConfigError, match="runs only with Python code that ships with it") as caught:
        open_base(broken)
    assert str(broken) in caught.value.what
    assert caught.value.where == "model.trust_remote_code"


def test_adapter_as_model_name_is_refused_with_the_key_for_adapters(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter, not a model") as caught:
        check_source(str(tmp_path), "here")
    assert f"model.adapter: {tmp_path}" in caught.value.fix
