"""`comm-check`: real ranks that exchange, ranks that do not, and the arithmetic of its table by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import HANG_S

from sftplay.cli import main
from sftplay.errors import RunError
from sftplay.launch.command import Launch, Scale
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.communication import SIZES_BYTES, Exchange, exchange_s, nominal_link, turning_bytes
from sftplay.runs import comm_check
from sftplay.train import comm_check as rank

CPU = Machine((), "none in this test", 2**34, 2, "3.11", "Linux", {})
TWO = Scale(nproc=2)


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


def run_check(folder: Path, launch: Launch | str, *, scale: Scale = TWO, limit_s: float = HANG_S) -> dict[str, Any]:
    """The check of a launch, or of a program that takes its place."""
    if isinstance(launch, str):
        launch = Launch((sys.executable, "-c", launch), {})
    return comm_check.run_check(launch, folder, scale=scale, limit_s=limit_s)


CLOSED = {"state": "failed", "error": "connection closed by peer"}
WRONG = {"state": "failed", "error": "holds a wrong sum after an all-reduce of 4096 bytes"}


@pytest.mark.parametrize(
    ("notes", "program", "limit_s", "says"),
    [
        pytest.param(
            [{"state": "started"}], "import time; time.sleep(600)", 0.5,
            "within 0.5 s: rank 0 started and met no one; rank 1 did not come", id="ranks that hang are ended",
        ),
        pytest.param(
            [CLOSED], "import sys; sys.exit('no room')", HANG_S,
            "ended with code 1: rank 0 failed (connection closed by peer); rank 1 did not come (no room)",
            id="a rank that died is named with the launcher's last line",
        ),
        pytest.param(
            [{"state": "met"}], "pass", HANG_S,
            "ended with code 0: rank 0 met the others and did not finish; rank 1 did not come",
            id="a launcher that ends well without the ranks is no success",
        ),
        pytest.param(
            [CLOSED, WRONG], "raise SystemExit(5)", HANG_S, "comm-check: rank 1 holds a wrong sum",
            id="a wrong sum is the reason where other ranks failed too",
        ),
    ],
)  # fmt: skip
def test_a_check_that_fails_says_what_became_of_each_rank(
    notes: list[dict[str, str]], program: str, limit_s: float, says: str, tmp_path: Path
):
    for n, note in enumerate(notes):
        (tmp_path / f"rank{n}.json").write_text(json.dumps(note))
    with pytest.raises(RunError) as caught:
        run_check(tmp_path, program, limit_s=limit_s)
    assert says in str(caught.value)
    assert caught.value.exit_code == 5
    assert ("cannot be trusted" in caught.value.fix) == ("wrong sum" in says)


def test_only_the_exact_sum_over_the_ranks_passes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    cpu = torch.device("cpu")
    # Rank 0's numbers, twice and three times them.
    rank.check_sum(4096, cpu, reduce=lambda buffer: buffer.mul_(1 + 2 + 3))
    for wrong, message in (
        (lambda buffer: buffer.mul_(6)[700:701].sub_(1), "4096 bytes: 1 of 1024 numbers"),
        (lambda buffer: None, "wrong sum"),
        (lambda buffer: buffer.copy_(buffer.roll(1) * 6), "wrong sum"),
    ):
        with pytest.raises(RunError, match=message):
            rank.check_sum(4096, cpu, reduce=wrong)


SWEEP = [Exchange(1000, 0.001), Exchange(3000, 0.002), Exchange(10_000, 0.010)]


def test_the_arithmetic_of_an_exchange():
    # 64 MB in 0.1 s: 640 MB/s go in; a ring of 4 sends each byte 2 x 3 / 4 = 1.5 times, one of 2 once.
    each = Exchange(64_000_000, 0.1)
    speeds = [each.algorithm_bytes_per_s(), each.bus_bytes_per_s(4), each.bus_bytes_per_s(2)]
    assert speeds == pytest.approx([640e6, 960e6, 640e6])
    for total, bucket, seconds in (
        (2000, 2000, 0.0015),  # half way between 1 ms and 2 ms
        (7000, 2000, 3 * 0.0015 + 0.001),  # three buckets and 1000 more, one after the other
        (10, 2000, 0.001),  # never faster than the smallest
        (20_000, 20_000, 0.020),  # beyond the largest: at its speed
    ):
        assert exchange_s(SWEEP, total, bucket_bytes=bucket) == pytest.approx(seconds)
    assert turning_bytes(SWEEP) == 1500  # 1 ms at 3000 bytes in 2 ms, the best speed: latency rules below that


def test_a_report_has_each_size_and_the_exchange_of_all_gradients():
    seconds = [size / 1e9 for size in SIZES_BYTES]
    measured = {"latencies_s": seconds, "backend": "gloo", "device": "cpu", "plain_s": 0.2, "fp16_s": 0.1}
    report = comm_check.describe_exchanges(
        measured, Scale(2), nominal_bytes_per_s=None, link="loopback", gradients=(2**27, 2**25)
    )
    assert [each["size_bytes"] for each in report["sizes"]] == list(SIZES_BYTES)
    assert [each["bus_bytes_per_s"] for each in report["sizes"]] == pytest.approx([1e9] * len(SIZES_BYTES))
    assert report["gradients"]["exchange_s"] == pytest.approx(2**27 / 1e9)
    assert "the link carries 1.000 GB/s" in report["verdict"][0]


def gpus(count: int, capability: tuple[int, int], word: str) -> Machine:
    cards = tuple(Gpu(n, "card", 2**36, 2**36, capability) for n in range(count))
    return replace(
        CPU, gpus=cards, links=tuple(tuple("X" if a == b else word for b in range(count)) for a in range(count))
    )


@pytest.mark.parametrize(
    ("machine", "nnodes", "nominal", "message"),
    [
        # NVIDIA's figures both ways: V100 300 GB/s over 6 links, H100 900 over 18, B200 1800 over 18.
        (gpus(2, (7, 0), "NV6"), 1, 150e9, ""),
        (gpus(2, (9, 0), "NV18"), 1, 450e9, ""),
        (gpus(2, (10, 0), "NV18"), 1, 900e9, ""),
        (CPU, 1, None, "loopback"),
        (gpus(2, (9, 0), "NV18"), 2, None, "network between the nodes"),
        (gpus(2, (8, 9), "SYS"), 1, None, "SYS: its nominal speed is not known"),
        (gpus(2, (8, 6), "NV4"), 1, None, "NV4: its nominal speed is not known"),
        (replace(gpus(2, (9, 0), "NV18"), links=()), 1, None, "the driver does not say"),
    ],
)
def test_a_links_nominal_speed_is_the_makers_each_way_or_said_to_be_unknown(
    machine: Machine, nnodes: int, nominal: float | None, message: str
):
    found, text = nominal_link(machine, 2, nnodes=nnodes)
    assert found == pytest.approx(nominal)
    assert message in text


@pytest.mark.contract
def test_a_config_names_the_ways_that_are_checked(
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    words = ["comm-check", "--config", str(write_config()), "--nproc", "2", "--dry-run", "--json"]
    assert main([*words, "cluster.nccl.socket_ifname=lo"]) == 0
    assert json.loads(capsys.readouterr().out)["env"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert main([*words, "cluster.nccl.socket_ifname=no-such-0"]) == 2
    assert "no network interface 'no-such-0'" in json.loads(capsys.readouterr().out)["error"]["what"]


@pytest.mark.contract
def test_one_process_has_nobody_to_exchange_with(capsys: pytest.CaptureFixture[str]):
    assert main(["comm-check", "--nproc", "1"]) == 3
    assert "nobody to exchange with" in capsys.readouterr().err
