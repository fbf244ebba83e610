"""What a node tells the others of itself: files it reads, its kit, its GPUs, and an address that they cannot reach."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sftplay.config.load import load_config
from sftplay.machine.gpu import Gpu
from sftplay.machine.probe import probe
from sftplay.runs import nodes
from sftplay.runs.nodes import describe_files, describe_gpus, describe_network, kit_version


def config(tmp_path: Path, **values: Any) -> Any:
    rows = tmp_path / "rows.jsonl"
    if not rows.exists():
        rows.write_text('{"text": "a"}\n')
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"name": str(model)}, "data": {"train_path": str(rows)}, **values}))
    return load_config(str(path))


def test_every_file_that_a_run_reads_has_a_digest_that_follows_its_content(tmp_path: Path):
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    data = {"train_path": str(tmp_path / "rows.jsonl"), "val_path": str(tmp_path / "held.jsonl")}
    (tmp_path / "held.jsonl").write_text('{"text": "b"}\n')
    before = describe_files(config(tmp_path, data={**data, "template": str(template)}))
    assert set(before) == {"data.train_path", "data.val_path", "data.template", "model.name (config.json)"}
    for path, key in ((tmp_path / "rows.jsonl", "data.train_path"), (template, "data.template")):
        path.write_text(path.read_text() + " ")
        after = describe_files(config(tmp_path, data={**data, "template": str(template)}))
        assert {name for name in after if after[name] != before[name]} == {key}
        before = after


def test_a_name_on_a_hub_has_no_files_here(tmp_path: Path):
    assert describe_files(config(tmp_path, model={"name": "org/name"}, data={"train_path": "org/rows"})) == {}


def test_another_line_in_the_kit_makes_it_another_kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for folder in ("a", "b"):
        (tmp_path / folder / "sftplay" / "verbs").mkdir(parents=True)
        (tmp_path / folder / "sftplay" / "verbs" / "nodes.py").write_text("")

    def version_of(folder: str) -> str:
        monkeypatch.setattr(nodes, "ROOT", tmp_path / folder)
        return kit_version()

    assert version_of("a") == version_of("b")
    (tmp_path / "b" / "sftplay" / "verbs" / "nodes.py").write_text("x = 1\n")
    assert version_of("a") != version_of("b")
    (tmp_path / "a" / "sftplay" / "nodes.py").write_text("x = 1\n")  # the same line in another file
    assert version_of("a") != version_of("b")


def test_gpus_are_described_one_by_one():
    gpu = Gpu(index=0, name="Tesla V100", total_bytes=16 * 2**30, free_bytes=15 * 2**30, capability=(7, 0))
    assert describe_gpus(replace(probe(), gpus=(gpu, gpu))) == "Tesla V100 16.00 GiB, Tesla V100 16.00 GiB"
    assert describe_gpus(replace(probe(), gpus=())) == "none"


NO_GPU = replace(probe(), gpus=())
NAMED = {"config": {"cluster.nccl.socket_ifname": "eth0"}}


@pytest.mark.parametrize(
    ("address", "named", "report", "is_trouble"),
    [
        ("10.0.0.8", "127.0.1.1", {}, True),
        ("10.0.0.8", None, {}, True),
        ("10.0.0.8", "10.0.0.8", {}, False),
        ("10.0.0.8", "127.0.1.1", NAMED, False),
        ("127.0.0.1", "127.0.1.1", {}, False),
    ],
)
def test_host_whose_name_leads_to_itself_only_is_told_to_name_its_interface(
    monkeypatch: pytest.MonkeyPatch, address: str, named: str | None, report: dict[str, Any], is_trouble: bool
):
    def look_up(_name: str) -> str:
        if named is None:
            raise socket.gaierror("not known")
        return named

    monkeypatch.setattr(socket, "gethostbyname", look_up)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def ask() -> Any:
        return describe_network(SimpleNamespace(own_address=lambda: address), NO_GPU, report=report)

    assert ("error" in ask()) is is_trouble
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert ask() == {}
