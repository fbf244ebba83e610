"""Counts the bytes of tensors that live at the same time while code runs, and says where they come from.

It sees what an operator hands out, real tensors and fake ones alike, not what a kernel takes and gives back inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Block:
    """One storage: its size and the tensor it was made for."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    created_by: str
    """Operator, then the module whose forward was running; `outside` where none was, as in most of a backward pass."""

    phase: str


@dataclass(frozen=True)
class _Event:
    """A block came (bytes above 0) or went (below), or a phase began (0)."""

    block: int
    bytes: int
    phase: str


class LiveBytes(TorchDispatchMode):
    """While in force, follows every storage from the operator that makes it until nothing refers to it any more.

    A storage counts once however many views it has. `phase` may be set to any word; peaks are kept by it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.phase = "load"
        self.peaks_bytes: dict[str, int] = {}
        self._blocks: list[Block] = []
        self._living: dict[int, int] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}
        self._events: list[_Event] = []
        self._modules: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._follow(leaf, str(func))
        return made

    def enter_phase(self, name: str) -> None:
        """From now on peaks belong to `name`; what lives already counts in it."""
        self.phase = name
        self._events.append(_Event(-1, 0, name))
        self.peaks_bytes[name] = max(self.peaks_bytes.get(name, 0), self.live_bytes)

    def forget_peaks(self) -> None:
        """Keep what lives, forget how much lived before."""
        self.peaks_bytes = {}
        self._events = [_Event(i, self._blocks[i].bytes, "") for i in self._living.values()]

    def name_modules(self, model: nn.Module) -> None:
        """Note from now on which module of `model` is running when a storage is made."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._modules.append(name))
            # A checkpoint ends its second forward with an exception, in the middle of a layer.
            module.register_forward_hook(self._leave_module, always_call=True)

    def _leave_module(self, *_: Any) -> None:
        self._modules.pop()

    def at_peaks(self) -> dict[str, list[Block]]:
        """What lived when the most bytes lived in each phase since `forget_peaks`, biggest first."""
        totals = list(accumulate(event.bytes for event in self._events))
        tops: dict[str, int] = {}
        for i, event in enumerate(self._events):
            if event.phase not in tops or totals[i] > totals[tops[event.phase]]:
                tops[event.phase] = i
        return {name: self._sorted(self._alive_after(i)) for name, i in tops.items()}

    def _alive_after(self, last: int) -> set[int]:
        alive: set[int] = set()
        for event in self._events[: last + 1]:
            (alive.add if event.bytes > 0 else alive.discard)(event.block)
        return alive

    def alive(self) -> list[Block]:
        """What lives now, biggest first."""
        return self._sorted(self._living.values())

    def _sorted(self, indices: Iterable[int]) -> list[Block]:
        return sorted((self._blocks[index] for index in indices), key=lambda block: -block.bytes)

    def _follow(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._living or storage.nbytes() == 0:
            return
        module = self._modules[-1] if self._modules else "outside"
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self._blocks.append(Block(storage.nbytes(), shape, dtype, f"{operator} {module}", self.phase))
        index = len(self._blocks) - 1
        self._living[key] = index
        self._watchers[key] = weakref.ref(storage, lambda _: self._release(key))
        self._events.append(_Event(index, storage.nbytes(), self.phase))
        self.live_bytes += storage.nbytes()
        self.peaks_bytes[self.phase] = max(self.peaks_bytes.get(self.phase, 0), self.live_bytes)

    def _release(self, key: int) -> None:
        index = self._living.pop(key)
        del self._watchers[key]
        self._events.append(_Event(index, -self._blocks[index].bytes, self.phase))
        self.live_bytes -= self._blocks[index].bytes
