"""Keys of `cluster.comm`: what is refused, by the file or by the machine, and what has no effect."""

import pytest

from sftplay.config.load import check_rules, load_config, notes
from sftplay.config.resolved import dump_resolved
from sftplay.errors import MachineError
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.sizing import size_run

L4 = Gpu(0, "NVIDIA L4", 24 * 2**30, 23 * 2**30, (8, 9))


def machine(n_gpus: int) -> Machine:
    return Machine((L4,) * n_gpus, "" if n_gpus else "none in this test", 2**34, 2, "3.11", "Linux", {})


@pytest.mark.parametrize("word", ["powersgd_batched", "PowerSGD-Batched"])
def test_batched_powersgd_is_refused_with_the_reason_upstream(refusals, word):
    (problem,) = refusals(f"cluster: {{comm: {{hook: {word}}}}}\n")
    assert problem.where == "run.yaml:1 cluster.comm.hook"
    assert "batched_powerSGD_hook hands its orthogonalisation a matrix" in problem.what
    assert problem.fix == "write powersgd"


def test_bf16_between_processes_without_a_gpu_is_refused_before_the_launch(load):
    cfg = load("cluster: {comm: {hook: bf16}}\n")
    with pytest.raises(MachineError, match="NCCL only") as caught:
        size_run(cfg, machine(0), world_size=2)
    assert caught.value.where == "run.yaml:1 cluster.comm.hook"
    assert caught.value.nearest == ["fp16", "none"]
    assert size_run(cfg, machine(2), world_size=2).cfg.cluster.comm.hook == "bf16"
    assert size_run(cfg, machine(0), world_size=1).cfg.cluster.comm.hook == "bf16"


def test_a_static_graph_is_refused_where_a_step_may_have_several_micro_batches(refusals, load):
    accum, recovery = refusals("train: {grad_accum: 2}\ncluster: {comm: {static_graph: true}}\n")
    assert (accum.where, accum.fix) == (
        "run.yaml:2 cluster.comm.static_graph",
        "write train.grad_accum: 1, or remove it",
    )
    assert recovery.fix == "write train.oom_recovery: false, or remove it"
    assert len(refusals("train: {oom_recovery: false}\ncluster: {comm: {static_graph: true}}\n")) == 1
    text = "train: {grad_accum: 1, oom_recovery: false}\ncluster: {comm: {static_graph: true}}\n"
    assert check_rules(load(text)) == []


def test_traffic_of_a_single_process_is_noted_as_without_effect(load):
    text = "train: {effective_batch_size: 8}\ncluster:\n  comm:\n    hook: fp16\n    bucket_cap_mb: 5\n"
    cfg = load(text)
    assert notes(cfg) == []  # nobody knows yet how many there are
    alone = size_run(cfg, machine(0), world_size=1).cfg
    assert notes(alone) == [
        "run.yaml:4 cluster.comm.hook has no effect: a single process exchanges no gradients",
        "run.yaml:5 cluster.comm.bucket_cap_mb has no effect: a single process exchanges no gradients",
    ]
    assert notes(size_run(cfg, machine(0), world_size=2).cfg) == []


@pytest.mark.contract
def test_a_resolved_config_keeps_its_traffic(load, write):
    cfg = load("cluster: {comm: {hook: powersgd, bucket_cap_mb: 7}}\n")
    assert load_config(write(dump_resolved(cfg), "resolved.yaml")).cluster == cfg.cluster
