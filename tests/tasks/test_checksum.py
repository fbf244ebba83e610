"""The digest by which ranks compare what they loaded: it tells weights apart and takes next to no memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sftplay.train.preflight import CHUNK_NUMBERS, checksum


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


@pytest.mark.parametrize("place", [0, CHUNK_NUMBERS, 2 * CHUNK_NUMBERS + 4], ids=["first", "second chunk", "last"])
def test_one_other_number_anywhere_is_another_digest(model: torch.nn.Module, place: int):
    other: Any = copy.deepcopy(model)
    with torch.no_grad():
        other["weight"][place] += 1
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


def test_no_copy_is_made_that_is_larger_than_one_chunk_in_fp64(model: torch.nn.Module):
    with LargestCopy() as largest:
        checksum(model)
    assert 0 < largest.found_bytes <= CHUNK_NUMBERS * 8
