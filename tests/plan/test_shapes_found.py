"""Where a shape is looked for, in which order, and what the shipped table says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sftplay.errors import ConfigError
from sftplay.plan.find_shape import find_shape, read_table
from sftplay.plan.near_names import nearest_models

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch) -> Path:
    """A hub cache with nothing in it, and a current folder without models."""
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def put_in_cache(hub: Path, name: str, *, commit: str = "abc123", ref: str = "main", **changes: object) -> None:
    repository = hub / f"models--{name.replace('/', '--')}"
    put(repository / "snapshots" / commit, **changes)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)


def test_a_folder_goes_before_the_cache_of_the_hub_and_that_before_the_table(tmp_path, empty_cache):
    put_in_cache(empty_cache, "Qwen/Qwen2.5-7B", num_hidden_layers=5)
    assert find_shape("Qwen/Qwen2.5-7B").layers == 5
    put(tmp_path / "Qwen" / "Qwen2.5-7B", num_hidden_layers=3)
    found = find_shape("Qwen/Qwen2.5-7B")
    assert (found.layers, found.name) == (3, "Qwen/Qwen2.5-7B")


def test_a_revision_is_looked_up_by_its_name_and_by_its_commit(empty_cache):
    put_in_cache(empty_cache, "me/mine")
    put_in_cache(empty_cache, "me/mine", commit="def456", ref="v2", num_hidden_layers=7)
    assert find_shape("me/mine").layers == 2
    assert find_shape("me/mine", "v2").layers == 7
    assert find_shape("me/mine", "def456").layers == 7
    assert find_shape("me/mine", "v3") is None


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HOME", "hub"), ("HUGGINGFACE_HUB_CACHE", ""), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_the_cache_lies_where_huggingface_hub_puts_it(variable, below, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert Path(asked) == tmp_path / "elsewhere" / below
    put_in_cache(Path(asked), "me/mine")
    assert find_shape("me/mine").layers == 2


def test_the_last_part_is_enough_when_all_models_of_that_name_are_alike():
    both = [name for name in sorted(read_table()) if name.endswith("/Qwen2.5-7B-Instruct")]
    assert len(both) == 2
    assert find_shape("Qwen2.5-7B-Instruct").max_positions == 32768


def test_a_name_that_no_place_knows_gives_none():
    assert find_shape("nobody/nothing") is None
    assert find_shape("x" * 5000) is None
    assert find_shape("a\0b") is None


def test_a_slip_is_told_the_nearest_names():
    assert nearest_models("Qwen/Qwen2.5-7B-Instrct")[0] == "Qwen/Qwen2.5-7B-Instruct"
    assert nearest_models("google/gemma-3-27b") == ["google/gemma-3-27b-it", "google/gemma-3-27b-pt"]
    assert nearest_models("qwen2.5-7b-instruct")[0].endswith("/Qwen2.5-7B-Instruct")
    assert nearest_models("builtin:tyni", ["builtin:tiny"])[0] == "builtin:tiny"
    assert nearest_models("zzzzzzzzzzzzzzzzzzzzzzz") == []


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\ud800", "[" * 100_000, '{"a": ' + "9" * 6000 + "}"])
def test_a_file_that_is_no_mapping_in_json_is_refused_with_its_path(tmp_path, text):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        find_shape(str(tmp_path / "odd"))
    assert str(tmp_path / "odd" / "config.json") in caught.value.where
