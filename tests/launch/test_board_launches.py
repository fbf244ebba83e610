"""The four make targets for several processes, with two ranks each; how their TensorBoard works and stops."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import HANG_S, is_alive, wait_until

from sftplay.launch.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3

pytestmark = pytest.mark.slow

PLAIN = ("MULTI_CPU", "DistributedDataParallel")
SPLIT = ("DEEPSPEED", "DeepSpeedEngine")
TARGETS = {
    "train-distributed": PLAIN,
    "train-distributed-tb": PLAIN,
    "train-deepspeed": SPLIT,
    "train-deepspeed-tb": SPLIT,
}
"""Target -> accelerate's name of its distribution, and the class that wraps the model."""

SHOWN = [target for target in TARGETS if target.endswith("-tb")]

STRANGER = """
import http.server, sys
for port in (6006, 0):
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), http.server.SimpleHTTPRequestHandler)
        break
    except OSError:  # another program already listens there, which serves the test too
        continue
print(server.server_port, flush=True)
server.serve_forever()
"""
"""A server on TensorBoard's usual port that is no TensorBoard."""


@dataclass
class Checkout:
    """A folder in which make runs as in a checkout. It has its own .cache and two servers that are not ours."""

    root: Path
    python: Path
    strangers: list[subprocess.Popen[str]]

    def make(self, target: str, *settings: str) -> subprocess.CompletedProcess[str]:
        ready = [f"READY={self.root / 'stamp'}", f"PY={self.python}"]
        # DeepSpeed would compile its operators with this compiler.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CXX": "false"}
        for name in ("MAKELEVEL", "MAKEFLAGS"):
            env.pop(name, None)
        argv = ["make", "--no-print-directory", *ready, target, *settings]
        return subprocess.run(
            argv,
            cwd=self.root,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def train(self, target: str) -> subprocess.CompletedProcess[str]:
        words = [
            f"run_name={target}", f"output_dir={self.root / 'outputs'}", f"train.max_steps={STEPS}", "logging.steps=1",
            "train.save_steps=100", "train.eval_steps=100", "eval.limit=4", "eval.max_new_tokens=4",
        ]  # fmt: skip
        return self.make(target, "CONFIG=configs/run_demo.yaml", "NPROC=2", f"ARGS={' '.join(words)}")

    def folder(self, target: str) -> RunFolder:
        return RunFolder(self.root / "outputs" / target)

    @property
    def record(self) -> dict[str, Any]:
        path = self.root / ".cache" / "tensorboard.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def ask(self, page: str, **words: str) -> Any:
        """The answer of our TensorBoard's HTTP interface."""
        query = urllib.parse.urlencode(words)
        with urllib.request.urlopen(
            f"{self.record['url']}/data/plugin/scalars/{page}?{query}", timeout=HANG_S
        ) as reply:
            return json.load(reply)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, builtin_tiny: Path, forked_python: Path) -> Iterator[Checkout]:
    root = tmp_path_factory.mktemp("checkout")
    for name in ("Makefile", "requirements.lock", "sftplay", "configs", "data"):
        (root / name).symlink_to(ROOT / name)
    (root / ".cache").mkdir()
    (root / ".cache" / "builtin").symlink_to(builtin_tiny.parent)
    (root / "stamp").write_text(str(root))
    # Both command lines contain TensorBoard's name, like ours. The name alone must not decide.
    strangers = [
        subprocess.Popen(
            [sys.executable, "-c", STRANGER, "tensorboard.main"], cwd=root / "data", stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for stranger in strangers:
        stranger.stdout.readline()
    place = Checkout(root, forked_python, strangers)
    yield place
    for stranger in strangers:
        stranger.kill()
        stranger.communicate()
    with suppress(KeyError, ProcessLookupError):
        os.kill(place.record["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def launched(checkout: Checkout) -> dict[str, subprocess.CompletedProcess[str]]:
    """Target -> its finished process; the targets run one after the other."""
    return {target: checkout.train(target) for target in TARGETS}


@pytest.mark.contract
@pytest.mark.parametrize("target", TARGETS)
def test_two_processes_train_as_the_target_says(
    checkout: Checkout, launched: dict[str, subprocess.CompletedProcess[str]], target: str
):
    done, status = launched[target], checkout.folder(target).read_json("status.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (status["state"], status["step"], status["exit_code"]) == ("done", STEPS, 0)
    found = [(rank["distributed_type"], rank["model_class"], rank["world_size"]) for rank in status["ranks"]]
    assert found == [(*TARGETS[target], 2)] * 2
    assert ("[tensorboard]" in done.stdout) == (target in SHOWN)


@pytest.mark.contract
@pytest.mark.parametrize("target", SHOWN)
def test_tensorboard_shows_what_each_rank_measured(checkout: Checkout, launched: dict[str, Any], target: str):
    run, tags = f"{target}/tb", {f"train/rank{rank}/loss" for rank in (0, 1)}
    wait_until(lambda: tags <= checkout.ask("tags").get(run, {}).keys())
    # TensorBoard shows a tag before it has read all of its steps.
    wait_until(lambda: all(len(checkout.ask("scalars", run=run, tag=tag)) == 3 for tag in tags))
    lines = [json.loads(line) for line in checkout.folder(target).metrics.read_text().splitlines()]
    for rank in (0, 1):
        shown = checkout.ask("scalars", run=run, tag=f"train/rank{rank}/loss")
        assert [step for _, step, _ in shown] == [1, 2, 3]
        assert [value for *_, value in shown] == pytest.approx([line["ranks"][rank]["loss"] for line in lines])
    assert lines[0]["ranks"][0]["loss"] != lines[0]["ranks"][1]["loss"]


@pytest.mark.contract
def test_it_answers_on_this_machines_own_address_only(checkout: Checkout, launched: dict[str, Any]):
    port = int(checkout.record["url"].removeprefix("http://127.0.0.1:"))
    cards = [
        address.address
        for card in psutil.net_if_addrs().values()
        for address in card
        if address.family == socket.AF_INET
    ]
    others = {"127.0.0.2", *cards} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as elsewhere:
            elsewhere.settimeout(5)
            assert elsewhere.connect_ex((address, port)) != 0, address


@pytest.mark.contract
def test_stopping_it_ends_ours_and_no_other_server(checkout: Checkout, launched: dict[str, Any]):
    record = checkout.record
    family = [record["pid"], *(child.pid for child in psutil.Process(record["pid"]).children(recursive=True))]
    done = checkout.make("tb-stop")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"stopped (process {record['pid']})" in done.stdout
    wait_until(lambda: not any(is_alive(pid) for pid in family))
    assert checkout.record == {}
    assert [stranger.poll() for stranger in checkout.strangers] == [None, None]
