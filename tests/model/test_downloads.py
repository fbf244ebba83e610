"""The hub: a model is fetched with what is needed and no more, and a hub that does not answer is said quickly."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import snapshot_download
from processes import HANG_S
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sftplay.config.load import load_config
from sftplay.config.run import ModelConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.releases import hub_client
from sftplay.model import hub
from sftplay.model.hub import check_reachable
from sftplay.model.start_point import resolve_names
from sftplay.model.tokenizer import load_tokenizer
from sftplay.reward.model_reward import open_score_model
from sftplay.tasks.preference.spec import find_reference_model
from sftplay.train.train_run import write_manifest

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "c0ffee" + "0" * 34
NOT_NEEDED = ("pytorch_model.bin", "consolidated.safetensors", "modeling_own.py", "picture.png")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client asks for: a listing, and files with their tags."""

    folder: Path
    asked: list[tuple[str, str]]
    commit = COMMIT

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append((self.command, self.path))
        if self.path.startswith("/api/models/org/tiny/tree/"):
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.path.startswith("/api/models/org/tiny"):
            files = [{"rfilename": p.name, "size": p.stat().st_size} for p in sorted(self.folder.iterdir())]
            self._answer(200, json.dumps({"id": "org/tiny", "sha": self.commit, "siblings": files}).encode())
            return
        path = self.folder / self.path.rsplit("/", 1)[-1]
        if not self.path.startswith("/org/tiny/resolve/"):
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        asked = self.path.split("/")[4]
        commit = {"X-Repo-Commit": asked if asked.endswith("0" * 34) else self.commit}
        if not path.is_file():
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound", **commit})
        else:
            tag = hashlib.sha1(path.read_bytes()).hexdigest()
            self._answer(200, path.read_bytes(), {"ETag": f'"{tag}"', **commit})

    def _answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def served(tiny_llama: Path, tmp_path: Path) -> Iterator[tuple[str, type[Hub]]]:
    """A hub on this machine that has one model, org/tiny."""
    folder = tmp_path / "on the hub"
    folder.mkdir()
    for path in tiny_llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in NOT_NEEDED:
        (folder / name).write_bytes(b"not needed")
    handler = type("OneModel", (Hub,), {"folder": folder, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def hub_environment(address: str, home: Path) -> dict[str, str]:
    waits = {"HF_HUB_ETAG_TIMEOUT": str(int(HANG_S)), "HF_HUB_DOWNLOAD_TIMEOUT": str(int(HANG_S))}
    return {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", **waits}


def test_a_run_notes_the_commit_of_its_base_but_not_that_of_an_adapter_it_begins_with(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sftplay.train.train_run.find_commit", lambda name, revision: COMMIT)
    cfg, folder = load_config(write_config()), RunFolder(tmp_path)
    rows: Any = SimpleNamespace(recipe={}, report={"sources": [], "files": []})
    for adapter, expected in ((None, COMMIT), ("first", None)):
        begun = cfg.with_values({"model.adapter": adapter}, "test")
        setup: Any = SimpleNamespace(cfg=begun, folder=folder, order_hash="", steps=1)
        write_manifest(setup, rows, parameters={}, task={})
        assert folder.read_json("manifest.json")["base_commit"] == expected


def test_a_run_that_another_names_brings_the_commit_that_it_was_trained_on(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "outputs" / "first"
    (run / "adapter").mkdir(parents=True)
    (run / "config.resolved.yaml").write_text("model: {name: org/tiny}\n")
    (run / "manifest.json").write_text(json.dumps({"base_commit": COMMIT}))
    lora = {"base_model_name_or_path": "org/tiny", "peft_type": "LORA", "r": 4, "lora_alpha": 8, "revision": None}
    (run / "adapter" / "adapter_config.json").write_text(json.dumps(lora))
    (run / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    lora_keys = {"tuning__lora__r": 4, "tuning__lora__alpha": 8}
    for changes in ({"model__name": "first"}, {"model__name": "org/tiny", "model__adapter": "first"}):
        cfg = resolve_names(load_config(write_config(**changes, **lora_keys)))
        assert (cfg.model.name, cfg.model.revision) == ("org/tiny", COMMIT)
        assert cfg.model.adapter == str(run / "adapter")
        assert resolve_names(cfg).model == cfg.model
    with pytest.raises(ConfigError, match=f"belongs to revision {COMMIT} of org/tiny, not to v2"):
        resolve_names(cfg.with_values({"model.revision": "v2"}, "test"))
    pairs = load_config(write_config(task_mode="dpo", preference__reference="first"))
    assert find_reference_model(pairs).revision == COMMIT

    opened = []
    monkeypatch.setattr(
        AutoModelForSequenceClassification, "from_pretrained",
        lambda name, **options: opened.append((name, options["revision"])) or 1 / 0,
    )  # fmt: skip
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_: Mock())
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        open_score_model(run / "adapter")
    assert opened == [("org/tiny", COMMIT)]


@pytest.mark.slow
def test_a_run_goes_on_with_and_is_merged_into_the_commit_that_it_was_trained_on(
    served: tuple[str, type[Hub]], write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]],
    tmp_path: Path,
):  # fmt: skip
    address, handler = served
    env = hub_environment(address, tmp_path / "hf")
    config = write_config(model__name="org/tiny", train__max_steps=2, train__save_steps=1)
    done = sftplay("train", "--config", config, env=env)
    assert done.returncode == 0, done.stderr
    weights = handler.folder / "model.safetensors"
    trained_on = load_file(weights)
    save_file({name: 2 * value for name, value in trained_on.items()}, weights, metadata={"format": "pt"})
    handler.commit = "decade" + "0" * 34
    done = sftplay("merge", "--config", config, "--out", tmp_path / "merged", env=env)
    assert done.returncode == 0, done.stderr
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(bool((merged[name] == trained_on[name]).all()) for name in ("lm_head.weight", "model.norm.weight"))
    run = next((tmp_path / "outputs").glob("*/manifest.json")).parent.resolve()  # not the link `latest`
    next_config = write_config("next.yaml", model__name=str(run), run_name="next", train__max_steps=1)
    done = sftplay("train", "--config", next_config, env=env)
    assert done.returncode == 0, done.stderr
    done = sftplay("merge", "--config", next_config, "--run", "next", "--out", tmp_path / "next", env=env)
    assert done.returncode == 0, done.stderr
    merged = load_file(tmp_path / "next" / "model.safetensors")
    assert all(bool((merged[name] == trained_on[name]).all()) for name in ("lm_head.weight", "model.norm.weight"))
    result = run / "adapter" / "adapter_model.safetensors"
    trained = load_file(result)
    for lost in (result.parent, run / "checkpoints" / "checkpoint-2"):
        shutil.rmtree(lost)
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(status | {"state": "stopped"}))
    done = sftplay("resume", "--config", config, env=env)
    assert done.returncode == 0, done.stderr
    assert all(bool((value == trained[name]).all()) for name, value in load_file(result).items())


@pytest.mark.contract
def test_download_fetches_what_is_needed_to_where_libraries_find_it_offline(
    served: tuple[str, type[Hub]], sftplay: Callable[..., CompletedProcess[str]], tiny_llama: Path, tmp_path: Path
):
    address, handler = served
    env = hub_environment(address, tmp_path / "hf")
    done = sftplay("download-model", "--model", "org/tiny", "--json", env=env)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["revision"]) == ("org/tiny", COMMIT)
    kept = sorted(path.name for path in tiny_llama.iterdir())
    assert report["files"] == kept
    assert report["bytes"] == sum(path.stat().st_size for path in tiny_llama.iterdir())
    assert sorted(path.name for path in Path(report["folder"]).iterdir()) == kept
    assert all((Path(report["folder"]) / name).read_bytes() == (tiny_llama / name).read_bytes() for name in kept)
    assert not any(name in path for _, path in handler.asked for name in NOT_NEEDED)
    found = snapshot_download("org/tiny", cache_dir=tmp_path / "hf" / "hub", local_files_only=True)
    assert Path(found).samefile(report["folder"])


@pytest.mark.contract
def test_download_of_pickled_weights_is_refused(
    served: tuple[str, type[Hub]], sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    address, handler = served
    (handler.folder / "model.safetensors").unlink()
    done = sftplay("download-model", "--model", "org/tiny", env=hub_environment(address, tmp_path / "hf"))
    assert done.returncode == 3
    assert "no weights in safetensors, only pickles (pytorch_model.bin)" in done.stderr
    assert not any("pytorch_model.bin" in path for _, path in handler.asked)


COUNTS = """
import os, sys
def listen(event, args):
    if event == "socket.connect" and args[1][:1] == ("127.0.0.1",):
        with open(os.environ["CONNECTS"], "a") as stream:
            stream.write("once ")
sys.addaudithook(listen)
"""
"""The text of a sitecustomize.py that notes each attempt to connect to this machine."""


@pytest.mark.contract
def test_hub_that_refuses_connections_is_said_at_once_with_how_to_use_a_folder(
    sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    (tmp_path / "sitecustomize.py").write_text(COUNTS)
    with socket.socket() as closed:  # bound and not listening
        closed.bind(("127.0.0.1", 0))
        env = hub_environment(f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path)
        env |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "CONNECTS": str(tmp_path / "connects")}
        done = sftplay("download-model", "--model", "org/tiny", env=env)
    assert (tmp_path / "connects").read_text() == "once "
    assert done.returncode == 3
    assert "the hub cannot be reached (" in done.stderr
    assert "point model.name to the folder" in done.stderr


def test_model_in_the_cache_is_opened_when_the_hub_does_not_answer(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise hub_client().ConnectTimeout("timed out")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", refuse)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: str(tiny_llama / "config.json"))
    assert check_reachable("org/cached", None, where="here") is False
    report: list[Any] = []
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda *_, **options: report.append(options) or 1 / 0
    )
    with pytest.raises(MachineError, match="ZeroDivisionError"):
        load_tokenizer(ModelConfig(name="org/cached"))
    assert report[0]["local_files_only"] is True


def test_model_that_the_hub_does_not_have_is_refused(served: tuple[str, type[Hub]], monkeypatch: pytest.MonkeyPatch):
    address, _ = served
    monkeypatch.setattr(hub, "CONNECT_S", HANG_S)
    hub_url = f"{address}/org/other/resolve/main/config.json"
    monkeypatch.setattr("huggingface_hub.hf_hub_url", lambda *_, **__: hub_url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(MachineError, match="the hub has no such model") as caught:
        check_reachable("org/other", None, where="here")
    assert "HF_TOKEN" in caught.value.fix


FETCH = "from sftplay.model.hub import fetch_weights; fetch_weights('org/tiny', None)"


@pytest.mark.contract
@pytest.mark.parametrize("parts", [1, 2])
def test_weights_are_fetched_once_however_they_are_cut_and_nothing_else(
    served: tuple[str, type[Hub]], tmp_path: Path, parts: int
):
    address, handler = served
    weights = [handler.folder / "model.safetensors"]
    if parts == 2:
        names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        weights = [weights[0].rename(handler.folder / names[0]), handler.folder / names[1]]
        weights[1].write_bytes(b"the rest")
        index = {"metadata": {}, "weight_map": {"a": names[1], "b": names[0], "c": names[0]}}
        (handler.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    env = {**os.environ, **hub_environment(address, tmp_path / "hf")}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", FETCH], env=env, cwd=ROOT, check=True, timeout=HANG_S)
    read = [path.rsplit("/", 1)[-1] for command, path in handler.asked if command == "GET" and "/resolve/" in path]
    wanted = [path.name for path in weights] + ["model.safetensors.index.json"] * (parts == 2)
    assert sorted(read) == sorted(wanted)
    kept = list((tmp_path / "hf" / "hub").glob("*/snapshots/*/*.safetensors"))
    assert {path.name: path.read_bytes() for path in kept} == {path.name: path.read_bytes() for path in weights}
