"""The layers of the puzzle model: attention over all cells, SwiGLU, norms without weights, rotary positions.

Weights are fp32 and are cast to the type of their input in each call. No layer has a bias.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from sftplay.tasks.hrm.network.linear import Linear

EPSILON = 1e-5
MULTIPLE = 256
SMALL_WIDTH, SMALL_MULTIPLE = 512, 32
"""Below this width the feed-forward layers are rounded up to a multiple of 32, else to one of 256."""


def rms_norm(x: Tensor) -> Tensor:
    """x over its root mean square, computed in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return functional.rms_norm(wide, x.shape[-1:], eps=EPSILON).to(x.dtype)


def inner_width(hidden: int, expansion: float) -> int:
    """Width within SwiGLU: two thirds of `expansion` times `hidden`, rounded up."""
    multiple = MULTIPLE if hidden >= SMALL_WIDTH else SMALL_MULTIPLE
    return math.ceil(round(expansion * hidden * 2 / 3) / multiple) * multiple


class Rotation(nn.Module):
    """Cosines and sines of the rotary positions 0 to `length` - 1 (rotate-half)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, length: int, *, theta: float) -> None:
        super().__init__()
        rates = theta ** -(torch.arange(0, head_width, 2).float() / head_width)
        angles = torch.outer(torch.arange(length).float(), rates).unsqueeze(1)
        self.register_buffer("cos", angles.cos().repeat(1, 1, 2), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), dim=-1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [batch, length, heads, head_width], rotated."""
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((second, first), dim=-1)
        return (x * self.cos.to(x.dtype)).addcmul_(swapped, self.sin.to(x.dtype))


class Attention(nn.Module):
    """Positions look at every position: all of them, or only the `first` ones."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Linear(hidden, 3 * hidden)
        self.out = Linear(hidden, hidden)

    def forward(self, x: Tensor, rotation: Rotation | None, *, first: int | None = None) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.heads, hidden // self.heads)
        looking, v = heads.split((2 * self.heads, self.heads), dim=2)
        if rotation is not None:
            looking = rotation(looking)
        q, k, v = (each.transpose(1, 2) for each in (*looking.chunk(2, dim=2), v))
        mixed = functional.scaled_dot_product_attention(q[:, :, :first], k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, -1, hidden))


class SwiGlu(nn.Module):
    """The feed-forward layer."""

    def __init__(self, hidden: int, expansion: float) -> None:
        super().__init__()
        inner = inner_width(hidden, expansion)
        self.gate_up = Linear(hidden, 2 * inner)
        self.down = Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward layer, each followed by a norm of the sum (post-norm)."""

    def __init__(self, hidden: int, *, heads: int, expansion: float) -> None:
        super().__init__()
        self.attention = Attention(hidden, heads)
        self.feed_forward = SwiGlu(hidden, expansion)

    def forward(self, x: Tensor, rotation: Rotation | None, *, first: int | None = None) -> Tensor:
        x = rms_norm(x[:, :first] + self.attention(x, rotation, first=first))
        return rms_norm(x + self.feed_forward(x))


class Reasoner(nn.Module):
    """A recurrent module: what is injected is added to its state, which then goes through its blocks."""

    def __init__(self, n_layers: int, hidden: int, *, heads: int, expansion: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, heads=heads, expansion=expansion) for _ in range(n_layers))

    def forward(
        self, state: Tensor, injected: Tensor, *, rotation: Rotation | None, first: int | None = None
    ) -> Tensor:
        """The next state, of its `first` positions alone where that is given."""
        state = state + injected
        *blocks, last = self.blocks
        for block in blocks:
            state = block(state, rotation)
        return last(state, rotation, first=first)
