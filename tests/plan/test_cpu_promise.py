"""On a CPU the plan's bytes are those of the process, and a run that is planned into a memory limit stays in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from benchmarks.cpu_memory import CASES, Case, Measured, measure, write_case
from sftplay.cli import main
from sftplay.commands import train
from sftplay.machine.gpu import ram_limit_bytes
from sftplay.machine.probe import probe
from sftplay.plan.forecast import CPU_PROCESS_BYTES
from sftplay.runs import inputs, start

MIB = 2**20
NEAR = 0.15

LIMIT_BYTES = 1500 * MIB
"""Room for the process, the model (65 MiB) and the loss of two rows (4 copies of 128 MiB), not for eight (2 GiB)."""

CROWDED = Case(
    {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 131_072,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    {
        "tuning.mode": "lora", "model.max_seq_len": 128, "train.effective_batch_size": 8, "train.batch_size": "auto",
        "train.loss_head": "standard",
    },
)  # fmt: skip
"""Eight rows of 128 tokens are within the tokens a CPU takes at once, so only memory can ask for fewer."""


@dataclass(frozen=True)
class Group:
    """A memory cgroup; `enter` puts the calling process in."""

    folder: Path
    limit_file: str
    kills_file: str

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """Processes of the group that the kernel has killed for want of memory."""
        words = dict(line.split() for line in (self.folder / self.kills_file).read_text().splitlines())
        return int(words["oom_kill"])


def _homes() -> Iterator[tuple[Path, str, str]]:
    """This process's own memory groups, version 1 and 2: folder, file of the limit, file that counts kills."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes", "memory.oom_control"
        elif not controllers:
            yield Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max", "memory.events"


@contextmanager
def limited(limit_bytes: int) -> Iterator[Group]:
    """A group below this process's own, without swap; the test is skipped where none can be made."""
    reasons = []
    for home, limit_file, kills_file in _homes():
        group = Group(home / f"sftplay-test-{os.getpid()}", limit_file, kills_file)
        try:
            group.folder.mkdir()
            (group.folder / limit_file).write_text(str(limit_bytes))
        except OSError as error:
            reasons.append(str(error))
            with suppress(OSError):
                group.folder.rmdir()
            continue
        for name, value in (("memory.swappiness", "0"), ("memory.swap.max", "0")):
            with suppress(OSError):
                (group.folder / name).write_text(value)
        try:
            yield group
        finally:
            group.folder.rmdir()
        return
    pytest.skip(f"needs root and a memory cgroup to make one below: {'; '.join(reasons) or 'none is mounted'}")


def trained_within(group: Group, home: Path, *overrides: str) -> Measured:
    return measure(write_case(home, CROWDED), *overrides, before=group.enter)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "process"])
def test_planned_peak_is_near_the_measured_resident_set(name: str, tmp_path: Path):
    seen = measure(write_case(tmp_path, CASES[name]))
    assert seen.code == 0, seen.said
    assert seen.peak_rss_bytes > 1.5 * CPU_PROCESS_BYTES, "the process alone decides, which says nothing of the model"
    assert seen.planned_bytes == pytest.approx(seen.peak_rss_bytes, rel=NEAR)


@pytest.mark.slow
def test_a_run_that_would_exceed_the_limit_is_sized_down_and_finishes(tmp_path: Path):
    with limited(LIMIT_BYTES) as group:
        seen = trained_within(group, tmp_path)
        assert (seen.code, group.kills()) == (0, 0), seen.said
    plan = seen.plan
    assert plan["device"]["total_bytes"] == LIMIT_BYTES
    assert plan["verdict"] == "fits"
    assert 1 <= plan["batch_size"] < 8
    assert plan["batch_size"] * plan["grad_accum"] == plan["effective_batch_size"] == 8
    reason = next(each["reason"] for each in plan["decisions"] if each["key"] == "train.batch_size")
    assert reason.startswith("largest divisor of 8 that fits")


@pytest.mark.slow
def test_the_same_run_with_its_batch_forced_is_killed(tmp_path: Path):
    with limited(LIMIT_BYTES) as group:
        seen = trained_within(group, tmp_path, "train.batch_size=8")
        assert group.kills() >= 1, seen.said
    assert seen.code == 5
    assert seen.plan["verdict"] == "does_not_fit"
    assert "memory may have run out" in seen.said
    assert json.loads((tmp_path / "outputs" / "run" / "status.json").read_text())["state"] == "failed"


def test_a_process_inside_a_group_sees_the_groups_limit():
    with limited(64 * MIB) as group:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                group.enter()
                os.write(writer, str(ram_limit_bytes()).encode())
            finally:  # no test goes on in the child
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writer)
        with os.fdopen(reader) as told:
            assert int(told.read()) == 64 * MIB


def test_a_run_of_which_not_even_one_row_fits_is_refused_with_what_would_fit(
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # 135 M weights that train take 4 x 4 bytes each, 2.0 GiB, beside the process's 0.5; an adapter's base a fourth.
    small = replace(probe(), gpus=(), ram_bytes=2560 * MIB, ram_free_bytes=None)
    monkeypatch.setattr(train, "probe", lambda: small)
    monkeypatch.setattr(start, "follow", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setattr(inputs, "ask_hub", lambda *_, **__: True)  # no test reaches a hub
    path = write_config(tuning__mode="full", model__name="HuggingFaceTB/SmolLM2-135M", model__max_seq_len=1024)
    words = ["train", "--config", str(path), "train.gradient_checkpointing=true"]
    assert main(words) == 3
    told = capsys.readouterr().err
    assert "does not fit: even one row at a time takes" in told
    assert "tuning.mode=lora (" in told
    assert "train.batch_size=1 tries it anyway" in told
    assert not (path.parent / "outputs" / "run" / "plan.json").exists()
    assert main([*words, "tuning.mode=lora", "--dry-run"]) == 0
