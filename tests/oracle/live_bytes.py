"""Counts the bytes of tensors that live at the same time while code runs.

It sees what an operator hands out, real tensors and fake ones alike, not what a kernel takes and gives back inside.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Block:
    """One storage: its size and the shape of the tensor it was made for."""

    bytes: int
    shape: tuple[int, ...]


class LiveBytes(TorchDispatchMode):
    """While in force, follows every storage from the operator that makes it until nothing refers to it any more.

    A storage counts once however many views it has. `phase` may be set to any word; peaks are kept by it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.phase = "load"
        self.peaks_bytes: dict[str, int] = {}
        self._living: dict[int, Block] = {}
        self._watchers: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        return made

    def enter_phase(self, name: str) -> None:
        """From now on peaks belong to `name`; what lives already counts in it."""
        self.phase = name
        self.peaks_bytes[name] = max(self.peaks_bytes.get(name, 0), self.live_bytes)

    def forget_peaks(self) -> None:
        """Keep what lives, forget how much lived before."""
        self.peaks_bytes = {}

    def alive(self) -> list[Block]:
        """What lives now."""
        return list(self._living.values())

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._living or storage.nbytes() == 0:
            return
        self._living[key] = Block(storage.nbytes(), tuple(tensor.shape))
        self._watchers[key] = weakref.ref(storage, lambda _: self._release(key))
        self.live_bytes += storage.nbytes()
        self.peaks_bytes[self.phase] = max(self.peaks_bytes.get(self.phase, 0), self.live_bytes)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._living.pop(key).bytes
        del self._watchers[key]
