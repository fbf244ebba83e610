"""`comm-check`: real ranks that exchange, ranks that do not, and the arithmetic of its table by hand."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import HANG_S

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.errors import RunError
from sftplay.launch.command import Launch, Scale
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.communication import Exchange, exchange_s, nominal_link, turning_bytes
from sftplay.runs import comm_check
from sftplay.train import comm_check as rank

CPU = Machine((), "none in this test", 2**34, 2, "3.11", "Linux", {})
TWO = Scale(nproc=2)
FOURTH = Scale(nproc=1, nnodes=4, node_rank=3)
FOUND = {"latencies_s": [1e-3] * 8, "plain_s": 0.030, "fp16_s": 0.020, "backend": "gloo", "device": "cpu"}


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where node 0 keeps what its ranks said."""
    monkeypatch.setattr(comm_check, "KEPT", tmp_path / "kept")
    return tmp_path / "kept" / "comm-check-node0.log"


@pytest.mark.contract
@pytest.mark.slow
def test_two_real_ranks_exchange_and_the_table_adds_up(sftplay: Callable[..., Any], write_config: Callable[..., Path]):
    done = sftplay("comm-check", "--nproc", 2, "--json", "--config", write_config(tuning__mode="full"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["world_size"], report["backend"], report["device"]) == (2, "gloo", "cpu")
    assert [each["size_bytes"] for each in report["sizes"]] == [4096 * 4**n for n in range(8)]
    for each in report["sizes"]:
        assert each["algorithm_bytes_per_s"] == pytest.approx(each["size_bytes"] / each["latency_s"])
        assert each["bus_bytes_per_s"] == pytest.approx(each["algorithm_bytes_per_s"])  # 2 (2 - 1) / 2
    assert report["nominal_bytes_per_s"] is None
    # The tiny Llama: 400 x 32 twice, 2 x (2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64), 5 norms of 32; fp32.
    assert report["gradients"]["bytes"] == 4 * (2 * 400 * 32 + 2 * (2 * 1024 + 2 * 512 + 3 * 2048) + 5 * 32)
    assert report["gradients"]["exchange_s"] > 0


@pytest.mark.slow
def test_a_node_that_does_not_come_ends_the_check_in_time_with_a_reason(tmp_path: Path):
    scale = Scale(nproc=1, nnodes=2, master_port=29591)
    began = time.monotonic()
    with pytest.raises(RunError, match="rank 0 did not come") as caught:
        comm_check.run_check(
            comm_check.build_check(tmp_path, scale, machine=CPU, limit_s=6.0), tmp_path, scale=scale, limit_s=6.0
        )
    assert time.monotonic() - began < 60
    assert "MASTER_ADDR" in caught.value.fix


def fake(code: str) -> Launch:
    return Launch((sys.executable, "-c", code), {})


def test_ranks_that_hang_are_ended_and_named(tmp_path: Path):
    rank.write_note(tmp_path / "rank0.json", state="started")
    with pytest.raises(RunError) as caught:
        comm_check.run_check(fake("import time; time.sleep(600)"), tmp_path, scale=TWO, limit_s=0.5)
    assert "within 0.5 s" in caught.value.what
    assert "rank 0 started and met no one; rank 1 did not come" in caught.value.what
    assert caught.value.exit_code == 5


def test_a_rank_that_has_gone_is_told_with_the_launchers_last_word(tmp_path: Path):
    rank.write_note(tmp_path / "rank0.json", state="failed", error="connection closed by peer")
    with pytest.raises(RunError) as caught:
        comm_check.run_check(fake("import sys; sys.exit('no room')"), tmp_path, scale=TWO, limit_s=HANG_S)
    assert "ended with code 1: rank 0 failed (connection closed by peer); rank 1 did not come (no room)" in str(
        caught.value
    )


def test_what_the_ranks_of_a_failed_check_said_is_kept_and_named(tmp_path: Path, kept: Path):
    (tmp_path / "check").mkdir()
    for message in ("NCCL INFO NET/IB : no device", "NCCL INFO NET/Socket : Using eth0"):
        with pytest.raises(RunError) as caught:
            comm_check.run_check(
                fake(f"print({message!r}); raise SystemExit(5)"), tmp_path / "check", scale=TWO, limit_s=HANG_S
            )
        assert kept.read_text() == f"{message}\n"
        assert f"the output is in {kept}" in caught.value.what
    with pytest.raises(RunError, match="output is in"):
        comm_check.run_check(
            fake("print('of node 3', end=''); raise SystemExit(5)"), tmp_path / "check", scale=FOURTH, limit_s=HANG_S
        )
    assert (kept.parent / "comm-check-node3.log").read_text() == "of node 3"


def test_where_nothing_was_said_or_can_be_kept_no_log_is_named(tmp_path: Path, kept: Path):
    (tmp_path / "check").mkdir()
    with pytest.raises(RunError) as silent:
        comm_check.run_check(fake("raise SystemExit(5)"), tmp_path / "check", scale=TWO, limit_s=HANG_S)
    kept.parent.touch()  # a file in the folder's place
    with pytest.raises(RunError) as lost:
        comm_check.run_check(
            fake("print('in vain'); raise SystemExit(5)"), tmp_path / "check", scale=TWO, limit_s=HANG_S
        )
    for caught in (silent, lost):
        assert "ended with code 5" in caught.value.what
        assert str(kept) not in str(caught.value)


def test_a_check_that_succeeds_keeps_nothing(tmp_path: Path, kept: Path):
    for n in (0, 1):
        rank.write_note(tmp_path / f"rank{n}.json", state="done")
    comm_check.run_check(fake("print('fine')"), tmp_path, scale=TWO, limit_s=HANG_S)
    assert not kept.parent.exists()


def test_a_wrong_sum_is_the_reason_even_where_other_ranks_failed_too(tmp_path: Path):
    rank.write_note(tmp_path / "rank0.json", state="failed", error="connection closed by peer")
    rank.write_note(
        tmp_path / "rank1.json", state="failed", error="holds a wrong sum after an all-reduce of 4096 bytes"
    )
    with pytest.raises(RunError, match=r"comm-check: rank 1 holds a wrong sum") as caught:
        comm_check.run_check(fake("raise SystemExit(5)"), tmp_path, scale=TWO, limit_s=HANG_S)
    assert "cannot be trusted" in caught.value.fix


def three_ranks(buffer: torch.Tensor, *, lost: int | None = None) -> None:
    """What an all-reduce of ranks 0, 1 and 2 leaves on rank 0: its marks, twice and three times them."""
    buffer.mul_(1 + 2 + 3)
    if lost is not None:
        buffer[lost] -= 1


def test_only_the_exact_sum_over_the_ranks_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    cpu = torch.device("cpu")
    rank.check_sum(4096, cpu, reduce=three_ranks)
    with pytest.raises(RunError, match="4096 bytes: 1 of 1024 numbers"):
        rank.check_sum(4096, cpu, reduce=lambda buffer: three_ranks(buffer, lost=700))
    with pytest.raises(RunError, match="wrong sum"):
        rank.check_sum(4096, cpu, reduce=lambda buffer: None)
    with pytest.raises(RunError, match="wrong sum"):
        rank.check_sum(4096, cpu, reduce=lambda buffer: buffer.copy_(buffer.roll(1) * 6))


def test_every_size_and_a_whole_bucket_are_exchanged_in_fp32_and_the_bucket_in_fp16_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "SIZES_BYTES", (4096, 16384))
    exchanged: set[tuple[torch.dtype, int]] = set()
    rank.sweep(torch.device("cpu"), lambda buffer: exchanged.add((buffer.dtype, buffer.nbytes)))
    bucket = 25 * 2**20  # torch's DistributedDataParallel, bucket_cap_mb
    fp32, fp16 = torch.float32, torch.float16
    assert exchanged == {(fp32, 4096), (fp32, 16384), (fp32, bucket), (fp16, bucket // 2)}


def test_bandwidth_is_what_a_ring_of_the_ranks_carries():
    # 64 MB in 0.1 s: 640 MB/s go in; a ring of 4 sends each byte 2 x 3 / 4 = 1.5 times, one of 2 once.
    each = Exchange(64_000_000, 0.1)
    assert each.algorithm_bytes_per_s() == pytest.approx(640e6)
    assert each.bus_bytes_per_s(4) == pytest.approx(960e6)
    assert each.bus_bytes_per_s(2) == pytest.approx(640e6)


SWEEP = [Exchange(1000, 0.001), Exchange(3000, 0.002), Exchange(10_000, 0.010)]


def test_gradients_take_their_buckets_one_after_the_other():
    # 2000 bytes lie half way between 1 ms and 2 ms; 7000 bytes are three of them and 1000 more.
    assert exchange_s(SWEEP, 2000, bucket_bytes=2000) == pytest.approx(0.0015)
    assert exchange_s(SWEEP, 7000, bucket_bytes=2000) == pytest.approx(3 * 0.0015 + 0.001)
    assert exchange_s(SWEEP, 10, bucket_bytes=2000) == pytest.approx(0.001)  # never faster than the smallest
    assert exchange_s(SWEEP, 20_000, bucket_bytes=20_000) == pytest.approx(0.020)  # beyond the largest: at its speed


def test_latency_rules_below_the_size_that_takes_as_long_to_send_as_to_start():
    assert turning_bytes(SWEEP) == 1500  # 1 ms at 3000 bytes in 2 ms, the best speed


def gpus(count: int, capability: tuple[int, int], word: str) -> Machine:
    cards = tuple(Gpu(n, "card", 2**36, 2**36, capability) for n in range(count))
    return replace(
        CPU, gpus=cards, links=tuple(tuple("X" if a == b else word for b in range(count)) for a in range(count))
    )


def test_a_links_nominal_speed_is_the_makers_each_way():
    # NVIDIA's figures both ways: V100 300 GB/s over 6 links, H100 900 over 18, B200 1800 over 18.
    for capability, links, both_ways in (((7, 0), 6, 300e9), ((9, 0), 18, 900e9), ((10, 0), 18, 1800e9)):
        assert nominal_link(gpus(2, capability, f"NV{links}"), 2, nnodes=1)[0] == pytest.approx(both_ways / 2)


@pytest.mark.parametrize(
    ("machine", "nnodes", "message"),
    [
        (CPU, 1, "loopback"),
        (gpus(2, (9, 0), "NV18"), 2, "network between the nodes"),
        (gpus(2, (8, 9), "SYS"), 1, "SYS: its nominal speed is not known"),
        (gpus(2, (8, 6), "NV4"), 1, "NV4: its nominal speed is not known"),
        (replace(gpus(2, (9, 0), "NV18"), links=()), 1, "the driver does not say"),
    ],
)
def test_a_link_without_a_known_speed_is_said_to_have_none(machine: Machine, nnodes: int, message: str):
    nominal, text = nominal_link(machine, 2, nnodes=nnodes)
    assert nominal is None
    assert message in text


def test_the_time_of_the_fp16_hook_stands_beside_that_of_plain_gradients():
    figures = FOUND | {"plain_s": 0.030, "fp16_s": 0.020}
    report = comm_check.describe_exchanges(figures, TWO, nominal_bytes_per_s=None, link="loopback")
    hook, verdict = comm_check.as_lines(report)[-2:]
    assert "take 20.0 ms with it, conversion included, and 30.0 ms without" in hook
    assert report["verdict"] == [verdict]
    assert verdict.startswith("verdict: every sum is right; the link carries ")


def test_the_table_stands_beside_what_the_link_should_do():
    report = comm_check.describe_exchanges(
        FOUND, TWO, nominal_bytes_per_s=1e9, link="NVLink", gradients=(2 * 2**20, 2**20)
    )
    lines = comm_check.as_lines(report)
    assert lines[0] == "2 ranks over gloo on cpu; link: NVLink"
    # 1 MiB in 1 ms is 1.049 GB/s, 105 % of a link of 1 GB/s.
    (row,) = (line for line in lines if line.strip().startswith("1.0 MiB"))
    assert row.split() == ["1.0", "MiB", "1.000", "ms", "1.049", "GB/s", "1.049", "GB/s", "105%"]
    assert report["gradients"] == {"bytes": 2 * 2**20, "bucket_bytes": 2**20, "exchange_s": pytest.approx(0.002)}


def test_a_dry_run_prints_the_command_of_two_ranks_and_starts_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["comm-check", "--nproc", "2", "--dry-run", "--json"]) == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    assert argv[argv.index("--nproc-per-node") + 1] == "2"
    assert argv[argv.index("-m", 3) + 1 :][-2:] == ["FOLDER", "180"]
    assert "sftplay.train.comm_check" in argv
    assert "sftplay.tasks.worker" not in argv


@pytest.mark.contract
def test_a_config_names_the_ways_that_are_checked(
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    words = ["comm-check", "--config", str(write_config()), "--nproc", "2", "--dry-run", "--json"]
    assert main([*words, "cluster.nccl.socket_ifname=lo"]) == 0
    assert json.loads(capsys.readouterr().out)["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert main([*words, "cluster.nccl.socket_ifname=no-such-0"]) == 2
    assert "no network interface 'no-such-0'" in json.loads(capsys.readouterr().out)["error"]["what"]


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["started", "dry"])
def test_values_without_a_config_to_set_them_in_are_refused(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sftplay.commands.gpu_check.run_check", lambda *_, **__: pytest.fail("ranks were started"))
    assert main(["comm-check", "--nproc", "2", "--json", "cluster.nccl.socket_ifname=nope", *more]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["where"] == "command line"
    assert "'cluster.nccl.socket_ifname=nope'" in error["what"]
    assert "CONFIG=" in error["fix"]


@pytest.mark.contract
def test_one_process_has_nobody_to_exchange_with(capsys: pytest.CaptureFixture[str]):
    assert main(["comm-check", "--nproc", "1"]) == 3
    assert "nobody to exchange with" in capsys.readouterr().err


def test_the_gradients_of_a_step_go_in_buckets_of_the_configs_size(tiny_llama: Path, write_config: Callable[..., Path]):
    # The tiny Llama: 400 x 32 twice, 2 x (2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64), 5 norms of 32; fp32.
    size = 4 * (2 * 400 * 32 + 2 * (2 * 1024 + 2 * 512 + 3 * 2048) + 5 * 32)
    for given, bucket in ((None, 25), (5, 5)):  # in MiB; torch's own default is 25
        cfg = load_config(write_config(tuning__mode="full", cluster__comm__bucket_cap_mb=given))
        assert comm_check.gradient_bytes(cfg, CPU, scale=TWO) == (size, bucket * 2**20)


@pytest.mark.parametrize(("use_cpu", "device"), [("", "cuda:1"), ("true", "cpu")])
def test_each_rank_measures_on_its_own_gpu_unless_accelerate_keeps_it_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, use_cpu: str, device: str
):
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu)
    assert str(rank.take_device()) == device
    assert taken == ([1] if device == "cuda:1" else [])
