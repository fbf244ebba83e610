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
from sftplay.errors import DataError
from sftplay.launch.nodes import check_nodes_match, find_differences
from sftplay.machine.probe import probe
from sftplay.runs.nodes import describe_files, describe_network


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


def test_of_more_than_two_nodes_the_one_that_is_alone_differs_and_an_error_is_told_with_its_place_and_remedy():
    same = {"host": "h", "versions": {"torch": "2.13.0"}}
    other = {"host": "b", "versions": {"torch": "2.12.0"}}
    assert find_differences([other, same, same]) == [(0, "machine", "torch is 2.12.0, on nodes 1, 2 it is 2.13.0")]
    failed = {"host": "b", "error": DataError("no such file", where="x.yaml:3", fix="write it").as_json()}
    with pytest.raises(DataError) as error:
        check_nodes_match([same, failed])
    assert (error.value.what, error.value.fix) == ("node 1 (b): x.yaml:3: no such file", "write it")
