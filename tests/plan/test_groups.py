"""Groups of completions: every plan passes TRL's own checks, and what is refused would have failed there."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOConfig
from trl import import_utils as trl_imports

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.probe import Gpu, Machine
from sftplay.model.recomputation import recomputation_arguments
from sftplay.plan.find_shape import find_shape
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.tasks.grpo.task import grpo_arguments

GIB = 2**30
SHAPE = find_shape("Qwen/Qwen2.5-0.5B")


def config(**changes: Any) -> RunConfig:
    """A config that learns from a reward; `train__batch_size=2` changes a key."""
    content = {
        "task_mode": "grpo",
        "model": {"name": "Qwen/Qwen2.5-0.5B", "max_seq_len": 768},
        "rewards": [{"name": "answer", "use": "exact_match"}],
        "grpo": {"max_completion_length": 512, "max_prompt_length": 256},
    }
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return RunConfig.model_validate(content).with_values(values, "test")


def machine(gib: float, count: int, capability: tuple[int, int] = (8, 0)) -> Machine:
    each = int(gib * GIB)
    gpus = tuple(Gpu(n, f"A card of {gib} GiB", each, each, capability) for n in range(count))
    return Machine(gpus, "", 64 * GIB, 8, "3.11.0", "Linux", {})


def sized(cfg: RunConfig, *, processes: int = 1, gib: float = 80) -> SizedRun:
    return size_run(cfg, machine(gib, processes), world_size=processes, shape=SHAPE)


def trls_own(arguments: dict[str, Any], processes: int) -> GRPOConfig:
    """TRL's config as one of so many processes makes it."""
    usual = {"use_cpu": True, "bf16": False, "report_to": "none", **recomputation_arguments(recomputes=False)}
    with patch.object(GRPOConfig, "world_size", PropertyMock(return_value=processes)):
        return GRPOConfig("unused", **usual, **arguments)


def trl_takes(cfg: RunConfig, processes: int) -> bool:
    """Whether TRL takes any micro-batch and accumulation that make exactly the effective batch of `cfg`."""
    train = cfg.train
    for rows, accum in itertools.product(range(1, train.effective_batch_size + 1), repeat=2):
        given = train.batch_size in ("auto", rows) and train.grad_accum in ("auto", accum)
        if given and rows * accum * processes == train.effective_batch_size:
            exact = cfg.with_values({"train.batch_size": rows, "train.grad_accum": accum}, "test")
            try:
                trls_own(grpo_arguments(exact), processes)
            except ValueError:
                continue
            return True
    return False


@settings(deadline=None)
@given(
    effective=st.integers(1, 48),
    generations=st.integers(2, 9),
    steps=st.integers(1, 3),
    iterations=st.integers(1, 2),
    processes=st.integers(1, 4),
    gib=st.sampled_from([3.0, 4.0, 6.0, 16.0, 80.0]),
    rows=st.sampled_from(["auto", "auto", 1, 2, 3, 4]),
    accum=st.sampled_from(["auto", "auto", 1, 2, 3]),
)
def test_every_plan_passes_trls_own_checks_and_every_refused_one_fails_there(
    effective, generations, steps, iterations, processes, gib, rows, accum
):
    cfg = config(
        train__effective_batch_size=effective, train__batch_size=rows, train__grad_accum=accum,
        grpo__num_generations=generations, grpo__steps_per_generation=steps, grpo__num_iterations=iterations,
    )  # fmt: skip
    try:
        run = sized(cfg, processes=processes, gib=gib)
    except ConfigError:
        assert not trl_takes(cfg, processes)
        return
    train, plan = run.cfg.train, run.as_plan()
    theirs = trls_own(grpo_arguments(run.cfg), processes)
    assert theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps * processes == effective
    assert (rows, accum) in itertools.product(("auto", train.batch_size), ("auto", train.grad_accum))
    for name in ("num_generations", "generation_batch_size", "steps_per_generation"):
        assert plan[name] == getattr(theirs, name)
    share = theirs.generation_batch_size // processes
    assert share == effective * steps // processes
    assert 1 <= plan["generation_rows"] <= share
    if plan["peak_phase"] == "drawing" and plan["verdict"] == "does_not_fit":
        assert plan["generation_rows"] == 1


def test_a_batch_of_broken_groups_names_the_nearest_batches_and_groups_for_the_processes_there_are():
    with pytest.raises(ConfigError) as caught:
        sized(config(train__effective_batch_size=20))
    assert caught.value.what == (
        "20 completions a step do not make whole groups of grpo.num_generations 8 over 1 process(es)"
    )
    assert caught.value.fix == "set train.effective_batch_size to 16 or 24, or grpo.num_generations to 5 or 10"
    with pytest.raises(ConfigError) as caught:
        sized(config(train__effective_batch_size=20), processes=3)
    assert caught.value.fix == "set train.effective_batch_size to 24"


def test_where_memory_is_short_completions_are_drawn_in_equal_parts_and_learned_in_smaller_micro_batches():
    cfg = config(train__effective_batch_size=512, grpo__steps_per_generation=2)
    much, little = sized(cfg, gib=80).as_plan(), sized(cfg, gib=6).as_plan()
    assert much["generation_rows"] == 1024
    assert little["verdict"] == "fits"
    parts = -(-1024 // little["generation_rows"])
    assert parts > 1
    assert parts * little["generation_rows"] - 1024 < parts
    assert little["batch_size"] < much["batch_size"]
    assert little["batch_size"] * little["grad_accum"] == 512
    assert sized(config(grpo__generation_rows=3)).as_plan()["generation_rows"] == 3


PYTHON = "sftplay.tasks.grpo.plan.find_python"


def test_vllm_is_refused_with_its_install_line_where_it_is_missing(monkeypatch):
    bare = Machine((), "none", 64 * GIB, 8, "3.11.0", "Linux", {})
    monkeypatch.setattr(PYTHON, lambda: None)
    for kind in ("vllm_colocate", "vllm_server"):
        with pytest.raises(MachineError, match="vLLM is not installed") as caught:
            sized(config(grpo__generation=kind))
        assert caught.value.fix.startswith("make install-vllm, or")
        with pytest.raises(MachineError, match="vLLM is not installed"):
            size_run(config(grpo__generation=kind), bare)
    monkeypatch.setattr(PYTHON, lambda: Path("python"))
    run = sized(config(grpo__generation="vllm_colocate"), processes=2)
    assert run.forecast is not None
    assert run.as_plan()["phases"]["drawing"] > 0.3 * 80 * GIB
    with pytest.raises(ConfigError, match="3 does not divide 2"):
        sized(config(grpo__generation="vllm_colocate", grpo__vllm__tensor_parallel=3), processes=2)
    with pytest.raises(MachineError, match="vLLM needs") as small:
        sized(config(grpo__generation="vllm_colocate", grpo__vllm__memory_share=0.05), gib=16)
    assert "write 0.0" in small.value.fix
    with pytest.raises(MachineError, match="in one process, and there are 2"):
        size_run(config(grpo__generation="vllm_colocate"), bare, world_size=2)
    for kind in ("vllm_colocate", "vllm_server"):
        assert size_run(config(grpo__generation=kind), bare).cfg.grpo.generation == kind


@pytest.mark.parametrize(
    ("release", "is_taken"), [("0.21.3", False), ("0.22.0", True), ("0.31.0+cu130", True), ("0.33.1", False)]
)
def test_a_vllm_that_trl_does_not_take_is_refused_by_name(monkeypatch, release, is_taken):
    """The bounds are those of `is_vllm_available` in trl 1.16, which only warns."""
    monkeypatch.setattr(PYTHON, lambda: Path("python"))
    monkeypatch.setattr("sftplay.machine.releases.version", lambda name: release)
    monkeypatch.setattr(trl_imports, "_is_package_available", lambda *_, **__: (True, release))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trl_imports.is_vllm_available()
    assert any("supports vLLM versions" in str(each.message) for each in said) != is_taken
    cfg = config(grpo__generation="vllm_colocate")
    if is_taken:
        sized(cfg)
        return
    with pytest.raises(MachineError, match=f"trl takes vllm 0.22.0 to 0.31.0, and {release} is installed") as refused:
        sized(cfg)
    assert refused.value.fix.startswith("make install-vllm")


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "zero3"])
def test_what_needs_whole_weights_is_refused_before_a_model_in_parts_is_loaded(monkeypatch, strategy):
    monkeypatch.setattr(PYTHON, lambda: Path("python"))
    served = config(grpo__generation="vllm_server", cluster__strategy=strategy)
    with pytest.raises(ConfigError, match="cannot be sent an adapter whose base is in parts") as caught:
        sized(served, processes=2)
    assert caught.value.fix == "write cluster.strategy: ddp, or grpo.generation: transformers"
    with pytest.raises(ConfigError, match="must sample equally many") as caught:
        sized(config(grpo__skip_zero_variance=True, cluster__strategy=strategy), processes=2)
    assert caught.value.where.endswith("grpo.skip_zero_variance")
    for changes in ({"cluster.strategy": "zero2"}, {"tuning.mode": "full"}):
        assert sized(served.with_values(changes, "test"), processes=2).world_size == 2
    assert sized(served).world_size == 1


V100_TABLE = [
    # model, cards, per card, prompt, completion -> accumulation; specification, section 8
    ("Qwen/Qwen2.5-1.5B-Instruct", 2, 4, 256, 384, 1),
    ("Qwen/Qwen2.5-3B-Instruct", 2, 2, 128, 256, 2),
    ("Qwen/Qwen2.5-3B-Instruct", 1, 1, 128, 256, 8),
    ("Qwen/Qwen2.5-1.5B-Instruct", 2, 1, 256, 384, 4),
]


@pytest.mark.parametrize(("name", "cards", "rows", "prompt", "completion", "accum"), V100_TABLE)
def test_the_batches_of_the_guides_table_fit_v100s_and_make_eight_completions_a_step(
    name, cards, rows, prompt, completion, accum
):
    cfg = config(
        model__name=name, model__max_seq_len=prompt + completion, train__effective_batch_size=8,
        train__batch_size=rows, grpo__max_prompt_length=prompt, grpo__max_completion_length=completion,
        tuning__lora__r=16, train__optim="adamw_8bit",
    )  # fmt: skip
    run = size_run(cfg, machine(16, cards, (7, 0)), world_size=cards, shape=find_shape(name))
    assert run.cfg.train.grad_accum == accum
    assert run.forecast is not None
    assert run.forecast.verdict == "fits"
    assert (run.cfg.train.precision, run.cfg.model.attn) == ("fp16", "sdpa")
    # Left to itself the plan takes no less.
    free = size_run(
        cfg.with_values({"train.batch_size": "auto"}, "test"), machine(16, cards, (7, 0)), world_size=cards,
        shape=find_shape(name),
    )  # fmt: skip
    assert free.cfg.train.batch_size == 8 // cards


def test_a_plan_shares_prompts_where_learning_is_faster_and_says_so():
    long, short = (
        {"grpo__max_prompt_length": prompt, "grpo__max_completion_length": completion, "model__max_seq_len": 1024}
        for prompt, completion in ((512, 128), (16, 512))
    )
    for changes, value, reason in (
        (long, "auto", "a prompt of 512 tokens for 8 completions of 128, once"),
        (short, False, "would take 1.2 times as long"),
        ({**long, "grpo__steps_per_generation": 8}, False, "for 1 completion of 128"),
        ({**long, "train__batch_size": 1}, False, "for 1 completion of 128"),
        ({**long, "model__attn": "eager"}, False, "eager attention"),
        ({**long, "cluster__strategy": "fsdp"}, False, "parts of the weights (fsdp)"),
    ):
        found = sized(config(**changes), processes=2 if "cluster__strategy" in changes else 1)
        decision = found.decisions["grpo.share_prompts"]
        assert (found.cfg.grpo.share_prompts, decision.value) == (value, value)
        assert reason in decision.reason


def test_a_micro_batch_of_shared_prompts_is_planned_with_less_memory_only_where_it_is_sure():
    changes = {"grpo__max_prompt_length": 512, "grpo__max_completion_length": 128, "train__batch_size": 8}
    auto, shared, unsure = (
        sized(config(**changes, **more)).forecast
        for more in ({}, {"grpo__share_prompts": True}, {"grpo__share_prompts": True, "grpo__loss_type": "bnpo"})
    )
    assert auto is not None
    assert shared is not None
    assert unsure is not None
    assert unsure.peak_bytes == auto.peak_bytes
    kept = [found.footprint.phases["head"]["activations"] for found in (auto, shared)]
    # 8 x (512 + 128) tokens are kept, or 512 + 8 x 128.
    assert kept[1] / kept[0] == pytest.approx(1536 / 5120, rel=0.02)
    assert sum(shared.footprint.phases["head"].values()) < sum(auto.footprint.phases["head"].values())
