"""From `auto` to numbers: the effective batch is exact, what was given is kept, every choice has its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.config.load import load_config
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan import sizing
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import Hardware, Size, find_device, forecast
from sftplay.plan.more_families import WITHOUT_FLASH, WITHOUT_SDPA
from sftplay.plan.shape_from_config import shape_from_config
from sftplay.plan.sizing import build_setting, size_run, split_batch

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


def machine(*gpus):
    return Machine(gpus=gpus, gpu_reason="", ram_bytes=16 * GIB, cores=8, python="3.11.0", system="Linux", libraries={})


CPU = machine()
H200 = Gpu(0, "NVIDIA H200", 141 * GIB, 140 * GIB, (9, 0))
V100 = Gpu(1, "Tesla V100-SXM2-16GB", 16 * GIB, 15 * GIB, (7, 0))
BASE = load_config(ROOT / "configs/run_lora.yaml")


def config(**train):
    return BASE.with_values({f"train.{key}": value for key, value in train.items()}, "test")


EFFECTIVE, PROCESSES = st.integers(1, 256), st.integers(1, 16)


@pytest.mark.contract
@given(EFFECTIVE, PROCESSES)
def test_exactly_those_effective_batches_are_accepted_that_the_processes_divide(effective, processes):
    cfg = config(effective_batch_size=effective)
    if effective % processes == 0:
        batch, accum, _ = split_batch(cfg, processes, has_gpu=False)
        assert batch * accum * processes == effective
        return
    with pytest.raises(ConfigError) as caught:
        split_batch(cfg, processes, has_gpu=False)
    below, above = effective // processes * processes, (effective // processes + 1) * processes
    assert below < effective < above
    assert f"to {f'{below} or ' if below else ''}{above}," in caught.value.fix


@given(EFFECTIVE, st.integers(1, 4096), st.integers(1, 8192))
def test_a_micro_batch_is_the_largest_whose_rows_stay_within_the_tokens_and_never_less_than_a_row(effective, row, most):
    batch, accum, _ = split_batch(
        config(effective_batch_size=effective), 1, has_gpu=False, row_tokens=row, most_tokens=most
    )
    larger = [n for n in range(batch + 1, effective + 1) if effective % n == 0]
    assert batch * accum == effective
    assert batch == 1 or batch * row <= most
    assert all(n * row > most for n in larger)


@pytest.mark.contract
@given(EFFECTIVE, PROCESSES, st.integers(1, 64), st.sampled_from(["batch_size", "grad_accum"]))
def test_one_size_that_is_given_is_kept_or_refused_with_the_nearest_batches(effective, processes, size, key):
    cfg = config(effective_batch_size=effective, **{key: size})
    if effective % (size * processes) == 0:
        batch, accum, _ = split_batch(cfg, processes, has_gpu=False)
        assert (batch if key == "batch_size" else accum) == size
        assert batch * accum * processes == effective
        return
    with pytest.raises(ConfigError) as caught:
        split_batch(cfg, processes, has_gpu=False)
    step = size * processes
    below, above = effective // step * step, (effective // step + 1) * step
    assert f"to {f'{below} or ' if below else ''}{above}," in caught.value.fix


@pytest.mark.contract
@given(EFFECTIVE, PROCESSES, st.integers(1, 64), st.integers(1, 64))
def test_two_sizes_that_are_given_must_make_the_effective_batch(effective, processes, batch, accum):
    cfg = config(effective_batch_size=effective, batch_size=batch, grad_accum=accum)
    if batch * accum * processes == effective:
        assert split_batch(cfg, processes, has_gpu=False)[:2] == (batch, accum)
    else:
        with pytest.raises(ConfigError) as caught:
            split_batch(cfg, processes, has_gpu=False)
        assert f"to {batch * accum * processes}," in caught.value.fix


LEFT_AUTO = {"tuning.lora.target_modules", "data.format", "data.template", "data.encoding", "data.delimiter"}
LEFT_AUTO |= {"train.probe", "cluster.launcher", "sandbox.executor"}
"""Resolved later: from the loaded model, from the rows, from the tokenizer. None of them depends on the machine, but
for the probe and the launcher, which have done their part when the workers read the config."""


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("gpus", [(), (H200, H200), (V100,), (H200, V100)], ids=["cpu", "h200", "v100", "mixed"])
@pytest.mark.parametrize("name", ["run_lora", "run_full", "run_bnb", "run_demo"])
def test_no_value_that_the_machine_decides_is_left_on_auto(name, gpus):
    sized = size_run(load_config(ROOT / f"configs/{name}.yaml"), machine(*gpus))
    left = {
        key
        for key, value in leaves(sized.cfg.model_dump(exclude={"score", "hrm", "preference", "grpo"}))
        if value == "auto"
    }
    assert left <= LEFT_AUTO  # sections of tasks that these runs are not
    assert all(decision.reason for decision in sized.decisions.values())


@pytest.mark.contract
def test_a_value_that_was_given_is_never_changed():
    cfg = config(
        precision="fp32", learning_rate=3e-3, optim="sgd", packing=True, loss_head="chunked", batch_size=4,
        dataloader_pin_memory=True,
    ).with_values({"model.attn": "eager"}, "test")  # fmt: skip
    sized = size_run(cfg, machine(H200)).cfg
    given_values = {k: v for k, v in leaves(cfg.model_dump()) if v != "auto"}
    assert {k: dict(leaves(sized.model_dump()))[k] for k in given_values} == given_values


@pytest.mark.parametrize(
    ("gpus", "precision"),
    [((), "fp32"), ((H200,), "bf16"), ((V100,), "fp16"), ((H200, V100), "fp16")],
    ids=["cpu", "h200", "v100", "mixed"],
)
def test_precision_is_the_best_that_every_device_has(gpus, precision):
    assert size_run(config(), machine(*gpus)).cfg.train.precision == precision


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"train.precision": "fp16"}, "train.precision"),
        ({"model.attn": "flash_attention_2"}, "model.attn"),
        ({"train.loss_head": "liger"}, "train.loss_head"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_naming_the_key(values, key):
    with pytest.raises(MachineError) as caught:
        size_run(config().with_values(values, "run.yaml:3"), CPU)
    assert caught.value.where == f"run.yaml:3 {key}"
    assert "auto" in caught.value.fix


@pytest.mark.slow
def test_families_without_sdpa_or_flash_attention_are_those_of_transformers():
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {
        kind: [getattr(transformers, name) for name in ([names] if isinstance(names, str) else names)]
        for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    for known, attribute in ((WITHOUT_SDPA, "_supports_sdpa"), (WITHOUT_FLASH, "_supports_flash_attn")):
        assert known == {kind for kind, found in classes.items() if not all(getattr(one, attribute) for one in found)}


@pytest.mark.parametrize(
    ("kind", "with_flash", "without"),
    [("llama", "flash_attention_2", "sdpa"), ("bloom", "eager", "eager"), ("gptj", "flash_attention_2", "eager"),
     ("llama4_text", "sdpa", "sdpa")],
)  # fmt: skip
def test_a_model_is_given_to_an_attention_that_its_class_has(monkeypatch, kind, with_flash, without):
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    llama = shape_from_config({"model_type": "llama", "num_attention_heads": 4, **sizes}, name="x")
    shape = replace(llama, family=kind)
    cfg = config()
    free = cfg.with_values({"model.attn": "auto"}, "test")
    assert size_run(free, machine(H200), shape=shape).cfg.model.attn == without
    monkeypatch.setattr(sizing, "find_module", lambda name: object())
    assert size_run(free, machine(H200), shape=shape).cfg.model.attn == with_flash
    for attn in ("sdpa", "flash_attention_2"):
        if attn not in (with_flash, without):
            with pytest.raises(MachineError, match=f"{kind} has no {attn}") as caught:
                size_run(cfg.with_values({"model.attn": attn}, "test"), machine(H200), shape=shape)
            assert caught.value.fix == f"leave model.attn on auto ({with_flash} here)"


def test_a_model_that_caps_the_scores_of_its_attention_is_not_given_to_sdpa_which_does_not(monkeypatch):
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    capped = shape_from_config({"model_type": "gemma2", "num_attention_heads": 4, **sizes}, name="capped")
    cfg = config()
    free = cfg.with_values({"model.attn": "auto"}, "test")
    assert size_run(free, machine(H200), shape=capped).cfg.model.attn == "eager"
    with pytest.raises(MachineError, match="caps the scores of its attention, which sdpa does not do") as caught:
        size_run(cfg.with_values({"model.attn": "sdpa"}, "test"), CPU, shape=capped)
    assert caught.value.fix == "leave model.attn on auto (eager here)"
    monkeypatch.setattr(sizing, "find_module", lambda name: object())
    assert size_run(free, machine(H200), shape=capped).cfg.model.attn == "flash_attention_2"


def test_rows_are_packed_where_a_kernel_skips_the_gaps_and_nowhere_else(monkeypatch):
    assert size_run(config(packing="auto"), machine(H200)).cfg.train.packing is False
    monkeypatch.setattr(sizing, "find_module", lambda name: object())
    sized = size_run(config(packing="auto"), machine(H200)).cfg
    assert (sized.model.attn, sized.train.packing) == ("flash_attention_2", True)
    assert size_run(config(packing="auto"), machine(V100)).cfg.train.packing is False
    assert size_run(config(packing="auto", batching="tokens"), machine(H200)).cfg.train.packing is False


@pytest.mark.parametrize(("processes", "parts"), [(8, 4), (16, 8)])
def test_hsdp_holds_a_copy_of_the_model_on_each_node_and_two_on_a_single_one(processes: int, parts: int):
    """As `accelerate_settings` starts it."""
    cards = machine(*(replace(H200, index=n) for n in range(8)))
    shape = find_shape("Qwen/Qwen2.5-1.5B")

    def planned(strategy: str, count: int) -> object:
        cfg = config().with_values({"cluster.strategy": strategy, "tuning.mode": "full"}, "test")
        hardware = Hardware(find_device(cards, min(count, 8)), count)
        setting = build_setting(size_run(cfg, cards, shape=shape).cfg, shape, hardware=hardware, strategy="fsdp")
        return forecast(setting, Size(rows=1, seq=64)).footprint

    assert planned("hsdp", processes) == planned("fsdp", parts)
