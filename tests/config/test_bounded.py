"""What is read for a config has an end: files that have none, or too many of them, are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from processes import ends_soon

from sftplay.config.layers import MAX_BYTES
from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.launch.deepspeed_json import read_deepspeed

CPU_S = 30
"""No refusal here takes the processor so long. What it refuses would take for ever; a busy machine counts nothing."""

BASE = "model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n"


@pytest.fixture(autouse=True)
def in_time():
    with ends_soon(CPU_S):
        yield


@pytest.mark.parametrize("path", ["/dev/zero", "pipe"])
def test_a_file_without_an_end_is_refused_as_config_include_and_deepspeed_file(write, path):
    if path == "pipe":
        os.mkfifo(path)
    name = write(f"include: {path}\n{BASE}", "top.yaml")
    reads = {lambda: load_config(path): path, lambda: load_config(name): "top.yaml:1 include",
             lambda: read_deepspeed(Path(path)): path}  # fmt: skip
    for read, where in reads.items():
        with pytest.raises(ConfigError, match="is a device, a pipe or a socket") as refusal:
            read()
        assert refusal.value.where == where


def test_a_huge_file_is_refused_by_its_size(write):
    name = write(f"{BASE}# {'x' * MAX_BYTES}\n")
    with pytest.raises(ConfigError, match=r"a config has at most 1,000,000"):
        load_config(name)


@pytest.mark.contract
def test_files_that_include_each_other_in_ever_more_ways_are_counted(write):
    for n in range(24):
        write(f"include: [f{n + 1}.yaml, f{n + 1}.yaml]\n" if n < 23 else "seed: 1\n", f"f{n}.yaml")
    with pytest.raises(ConfigError, match="includes more than 100 files") as refusal:
        load_config(write(f"include: f0.yaml\n{BASE}"))
    assert refusal.value.where == "run.yaml include"


@pytest.mark.contract
def test_a_link_that_leads_to_itself_is_refused(write):
    name = write(f"include: link.yaml\n{BASE}")
    Path("link.yaml").symlink_to("link.yaml")
    with pytest.raises(ConfigError, match="Too many levels"):
        load_config(name)
    with pytest.raises(ConfigError, match="cannot be read: Too many levels"):
        load_config("link.yaml")


@pytest.mark.contract
def test_many_files_that_each_include_one_are_read(write):
    for n in range(60):
        write(f"include: f{n + 1}.yaml\n" if n < 59 else "seed: 7\n", f"f{n}.yaml")
    assert load_config(write(f"include: f0.yaml\n{BASE}")).seed == 7


@pytest.mark.contract
@pytest.mark.parametrize("path", [r'"a\0b"', r'"\ud800"', '""', "x" * 300, "a/" * 2500])
def test_an_include_that_no_path_can_be_is_refused(write, path):
    with pytest.raises(ConfigError, match="is no path and no list of paths"):
        load_config(write(f"include: {path}\n{BASE}"))


@pytest.mark.contract
@pytest.mark.parametrize("path", ["run.yaml/inner.yaml", "..", "/dev/null"])
def test_an_include_that_cannot_be_read_is_named_with_its_line(write, path):
    with pytest.raises(ConfigError) as refusal:
        load_config(write(f"seed: 1\ninclude: {path}\n{BASE}"))
    assert refusal.value.where == "run.yaml:2 include"
    assert len(str(refusal.value)) < 2000
