"""Solver, guide and reference in shards on two processes: the course of two processes that have them whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from run_outputs import Outputs
from safetensors.torch import load_file
from score_run import score_options
from small_run import Inputs, write_small_run
from transformers import AutoModelForCausalLM
from untimed_metrics import lines_of

from sftplay.tasks.score.role_models import RoleModels, gather_tensor, load_full_weights
from sftplay.tasks.score.spec import Layout
from sftplay.tasks.score.trainer import load_weights, save_weights

pytestmark = pytest.mark.slow

Verb = Callable[..., CompletedProcess[str]]

OPTIONS = {
    "tuning__mode": "full", "train__batch_size": 4, "train__learning_rate": 1e-3, "train__gradient_checkpointing": True,
    "train__save_steps": 1, "train__save_total_limit": 9, "score__advantage": "critic", "train__eval_steps": 2,
    "score__max_new_tokens": 5, "score__max_hint_tokens": 4, "eval__after": True,
    "score__steps_per_generation": 2,
}  # fmt: skip


NEAR = {"abs": 1e-5, "rel": 1e-5}


@pytest.fixture(scope="module")
def home(warm_inputs: Inputs, sftplay: Verb, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both runs are."""
    home = tmp_path_factory.mktemp("runs")
    for placement in ("shared", "sharded"):
        options = score_options(**OPTIONS, run_name=placement, score__placement=placement)
        config = write_small_run(home, warm_inputs, f"{placement}.yaml", **options)
        done = sftplay("train", "--config", config, "--nproc", 2)
        assert done.returncode == 0, done.stdout + done.stderr
    return home


def weights(run: Path) -> dict[str, torch.Tensor]:
    models = (run / "model", run / "model" / "guide")
    return {f"{at.name}/{name}": t for at in models for name, t in load_file(at / "model.safetensors").items()}


def episodes(samples: Path) -> list[list[Any]]:
    lines = map(json.loads, samples.read_text().splitlines())
    return [[line[name] for name in ("row", "first", "hint", "second", "correct")] for line in lines]


def assert_close(run: Path, other: Path) -> None:
    """Figures and weights are equal but for the order in which gradients are added up."""
    for mine, its in zip(lines_of(run), lines_of(other), strict=True):
        assert mine.keys() == its.keys()
        for name, value in mine.items():
            its_value = its[name]
            assert value == (pytest.approx(its_value, **NEAR) if isinstance(value, float) else its_value), name
    assert_close_weights(run, other)


def assert_close_weights(run: Path, other: Path) -> None:
    mine, its = weights(run), weights(other)
    assert mine.keys() == its.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, its[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.contract
def test_models_in_shards_learn_what_whole_ones_learn(home: Path, warm_inputs: Inputs):
    shared, sharded = home / "outputs" / "shared", home / "outputs" / "sharded"
    ranks = json.loads((sharded / "status.json").read_text())["ranks"]
    assert [rank["model_class"] for rank in ranks] == ["FSDPModels"] * 2
    assert_close(sharded, shared)
    for step in (1, 3):
        found, expected = (episodes(run / "samples" / f"step-{step}.jsonl") for run in (sharded, shared))
        assert found == expected
    began = AutoModelForCausalLM.from_pretrained(warm_inputs.model).state_dict()
    assert any(not torch.equal(t, began[name.partition("/")[2]]) for name, t in weights(sharded).items())


@pytest.mark.contract
def test_the_result_opens_in_plain_transformers(home: Path):
    result = home / "outputs" / "sharded" / "model"
    for path in (result, result / "guide"):
        model = AutoModelForCausalLM.from_pretrained(path)
        assert json.loads((path / "config.json").read_text())["architectures"] == [type(model).__name__]
        saved = load_file(path / "model.safetensors")
        assert saved.keys() == {name for name, _ in model.named_parameters()}
        assert all(torch.equal(tensor, saved[name]) for name, tensor in model.named_parameters())
    after, last = (json.loads((result.parent / "eval" / f"{name}.json").read_text()) for name in ("after", "step-4"))
    assert after["acc_t2"] == pytest.approx(last["acc_t2"])


@pytest.mark.contract
@pytest.mark.parametrize(("placement", "processes"), [("sharded", 2), ("roles", 1)])
def test_a_run_in_shards_goes_on_in_shards_and_in_another_placement(
    placement: str, processes: int, home: Path, sftplay: Verb
):
    runs = Outputs(home)
    name, whole = f"on-{placement}", runs.folder("sharded").path
    shutil.copytree(whole, runs.folder(name).path)
    runs.cut_off(name, 3)  # within the second rollout batch
    changes = [f"run_name={name}", f"score.placement={placement}"]
    words = ["--config", home / "sharded.yaml", "--nproc", processes, *changes]
    done = sftplay("resume", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["attempt"] for line in runs.metrics(name)] == [1, 1, 1, 2]
    assert_close_weights(runs.folder(name).path, whole)
    if placement == "sharded":
        assert lines_of(runs.folder(name).path) == lines_of(whole)
        for tensor, its in zip(weights(runs.folder(name).path).values(), weights(whole).values(), strict=True):
            assert torch.equal(tensor, its)


def test_models_in_shards_take_the_whole_weights_of_a_checkpoint(warm_inputs: Inputs, tmp_path: Path):
    def build_role_models(placement: Any) -> RoleModels:
        model = AutoModelForCausalLM.from_pretrained(warm_inputs.model)
        return RoleModels(model, has_guide=True, guide_learns=True, has_value=True, layout=Layout(placement=placement))

    whole = build_role_models("roles")
    for model in (*whole.models.values(), whole.value_head):
        for parameter in model.parameters():
            parameter.data.normal_()
    save_weights(whole, tmp_path)
    whole.model.save_pretrained(tmp_path)

    def loaded() -> list[tuple[str, list[torch.Tensor]]]:
        sharded = build_role_models("sharded")
        sharded.shard("no")
        load_weights(sharded, tmp_path)
        load_full_weights(sharded.model, tmp_path)
        return [
            (part, [gather_tensor(weight.detach()) for weight in weights])
            for part, weights in sharded.trainable.items()
        ]

    for rank in on_ranks(2, loaded, tmp_path / "ranks"):
        for part, weights in rank:
            assert all(torch.equal(*pair) for pair in zip(weights, whole.trainable[part], strict=True)), part
