"""The digest by which ranks compare what they loaded: it tells weights apart and takes next to no memory."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Inputs, new_run, train_in
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sftplay.config.load import load_config
from sftplay.launch.run_folder import RunFolder
from sftplay.train import preflight
from sftplay.train.preflight import CHUNK_NUMBERS, Preflight, checksum


class LargestCopy(TorchDispatchMode):
    """Notes the largest result of any operation that is no view of what there was, in bytes."""

    found_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            for each in tree_leaves(result):
                self.found_bytes = max(self.found_bytes, each.nbytes if isinstance(each, torch.Tensor) else 0)
        return result


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Two chunks and 5 numbers in one weight, and a small frozen one."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(2 * CHUNK_NUMBERS + 5).bfloat16())
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    return torch.nn.ParameterDict({"weight": weight, "frozen": frozen})


def test_equal_weights_have_one_digest(model: torch.nn.Module):
    assert checksum(model) == checksum(copy.deepcopy(model))


@pytest.mark.parametrize("place", [0, CHUNK_NUMBERS, 2 * CHUNK_NUMBERS + 4], ids=["first", "second chunk", "last"])
def test_one_other_number_anywhere_is_another_digest(model: torch.nn.Module, place: int):
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other["weight"][place] += 1
    assert checksum(other) != checksum(model)


def test_a_number_that_moved_into_another_chunk_is_another_digest(model: torch.nn.Module):
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other["weight"].copy_(other["weight"].roll(CHUNK_NUMBERS))
    assert checksum(other) != checksum(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_the_order_in_which_a_device_adds_has_no_influence(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(1)
    numbers = torch.randn(100_003) * torch.logspace(-15, 15, 100_003)[torch.randperm(100_003)]
    held = torch.nn.ParameterDict({"weight": torch.nn.Parameter(numbers.to(dtype))})
    here, real = checksum(held), torch.Tensor.sum

    def elsewhere(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """As another GPU may add: the odd places, then the even ones."""
        return real(self[1::2], *given, **named) + real(self[::2], *given, **named)

    monkeypatch.setattr(torch.Tensor, "sum", elsewhere)
    assert checksum(held) == here
    with torch.no_grad():
        held["weight"].view(torch.uint8)[7] ^= 1
    assert checksum(held) != here


def test_the_digest_is_of_sums_of_the_bytes_as_whole_numbers():
    """1.0, -2.0 and 0.5 in fp32 are 0x3f800000, 0xc0000000 and 0x3f000000 (IEEE 754), the second one negative."""
    held = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))})
    total = 0x3F800000 + (0xC0000000 - 2**32) + 0x3F000000
    assert checksum(held) == hashlib.sha256(total.to_bytes(8, "little", signed=True)).hexdigest()


def test_no_copy_is_made_that_is_larger_than_one_chunk_in_fp64(model: torch.nn.Module):
    with LargestCopy() as largest:
        checksum(model)
    assert 0 < largest.found_bytes <= CHUNK_NUMBERS * 8


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_are_summed_only_where_another_rank_has_some(
    world_size: int, model: torch.nn.Module, write_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    checked = Preflight(load_config(str(write_config())), RunFolder(tmp_path), rows="", base="")
    checked.attach(SimpleNamespace(model=model))
    assert checked.parameters == ("" if world_size == 1 else checksum(model))


def test_a_run_notes_the_weights_it_loaded(tmp_path: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch):
    attached: list[Any] = []
    real = preflight.Preflight.attach

    def attach(self: Preflight, trainer: Any) -> None:
        attached.append(trainer)
        real(self, trainer)

    monkeypatch.setattr(preflight.Preflight, "attach", attach)
    run = train_in(*new_run(tmp_path, inputs, train__max_steps=1))
    assert attached == [run.trainer]
