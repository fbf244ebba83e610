"""The recurrent network of HRM and TRM, its sparse puzzle embeddings, and its files."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from sftplay.atomic import whole_folder
from sftplay.errors import DataError
from sftplay.tasks.hrm.section import HrmConfig

PIECE_BYTES = 2**26
"""Rows that all ranks together send at a time where the whole table is collected."""


class TableShare(NamedTuple):
    """The part of a rank; by default all rows. Rank r holds every n-th row from r on, at the place id // n."""

    rank: int = 0
    world: int = 1

    def room(self, identifiers: int) -> int:
        """Count the rows that a rank has room for, equally many on all; the last one of some ranks stays empty."""
        return -(-identifiers // self.world)

    def holds(self, ids: Tensor) -> Tensor:
        """Return bool, as long as `ids`: whose rows are here."""
        return ids % self.world == self.rank

    def fetch(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Fetch the rows of `ids`, each from the rank that holds it; `rows` are this rank's.

        All ranks call it, with equally many ids each.
        """
        answers = [rows[asked[self.holds(asked)] // self.world] for asked in gather_tensors(ids)]
        owners = ids % self.world
        received = rows.new_empty(len(ids), rows.shape[1])
        torch.distributed.all_to_all_single(
            received,
            torch.cat(answers),
            output_split_sizes=owners.bincount(minlength=self.world).tolist(),
            input_split_sizes=[len(answer) for answer in answers],
        )
        found = torch.empty_like(received)
        found[owners.argsort(stable=True)] = received  # each rank answers in the order of the question
        return found

    def collect(self, rows: Tensor, identifiers: int) -> Tensor:
        """Collect all rows on rank 0, in its host memory; none on other ranks. All ranks call it, with their rows."""
        whole = torch.empty(self.room(identifiers) * self.world if self.rank == 0 else 0, rows.shape[1])
        at_once = max(1, PIECE_BYTES // (rows.shape[1] * rows.element_size() * self.world))
        for start in range(0, len(rows), at_once):
            piece = rows[start : start + at_once].contiguous()
            parts = [torch.empty_like(piece) for _ in range(self.world)] if self.rank == 0 else None
            torch.distributed.gather(piece, parts, dst=0)
            if parts is not None:
                whole[start * self.world :][: len(piece) * self.world] = torch.stack(parts, dim=1).flatten(0, 1).cpu()
        return whole[:identifiers]


def gather_tensors(tensor: Tensor) -> list[Tensor]:
    """Gather each rank's tensor, in rank order. All ranks call it with the same shape."""
    parts = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, tensor.contiguous())
    return parts


ALL_ROWS = TableShare()


class Touched(NamedTuple):
    """Rows that a step has looked up, with duplicates: int64 [rows], and fp32 [rows, dim]."""

    ids: Tensor
    gradients: Tensor


class PuzzleTable(nn.Module):
    """The rows, a persistent buffer that begins with zeros: all of them, or those of this rank's share."""

    rows: Tensor

    def __init__(self, identifiers: int, dim: int, *, share: TableShare = ALL_ROWS) -> None:
        super().__init__()
        self.identifiers, self.share = identifiers, share
        self.register_buffer("rows", torch.zeros(share.room(identifiers), dim))
        self._looked_up: list[tuple[Tensor, Tensor]] = []
        self._collected: Tensor | None = None

    @property
    def is_shared_out(self) -> bool:
        """Whether other ranks hold some of the rows."""
        return self.share.world > 1

    def forward(self, ids: Tensor) -> Tensor:
        """Look up the rows of `ids`. Where gradients are on, it is a copy that gets a gradient, until `take` is called.

        Where the table is shared out, all ranks call it, with equally many ids each.
        """
        found = self.share.fetch(ids, self.rows) if self.is_shared_out else self.rows[ids]
        if torch.is_grad_enabled():
            self._looked_up.append((ids, found.requires_grad_()))
        return found

    def take(self) -> Touched:
        """Return what was looked up since the last call, with its gradients; rows without one count as zero."""
        taken, self._looked_up = self._looked_up, []
        if not taken:
            return Touched(self.rows.new_zeros(0, dtype=torch.int64), self.rows.new_zeros(0, self.rows.shape[1]))
        gradients = [torch.zeros_like(copied) if copied.grad is None else copied.grad for _, copied in taken]
        return Touched(torch.cat([ids for ids, _ in taken]).long(), torch.cat(gradients))

    def update(self, touched: Touched, *, rate: float, weight_decay: float) -> int:
        """Move the touched rows by `rate` against the sign of the summed gradient; return the number of different rows.

        All ranks call it, with equally many rows each. Decay is decoupled and reaches touched rows alone.
        """
        if torch.distributed.is_initialized():
            touched = Touched(*(torch.cat(gather_tensors(part)) for part in touched))
        different, place = touched.ids.unique(return_inverse=True)
        total = touched.gradients.new_zeros(len(different), self.rows.shape[1]).index_add_(0, place, touched.gradients)
        held = self.share.holds(different)
        rows, total = different[held] // self.share.world, total[held]
        self.rows[rows] = self.rows[rows] * (1 - rate * weight_decay) - rate * total.sign()
        return len(different)

    def copy_from_main(self) -> None:
        """Make the table of every rank that of rank 0; nothing where each row has one holder."""
        if torch.distributed.is_initialized() and not self.is_shared_out:
            torch.distributed.broadcast(self.rows, src=0)

    def norm(self) -> Tensor:
        """Compute the norm of all rows. All ranks call it."""
        norm = self.rows.norm()
        return torch.stack(gather_tensors(norm)).norm() if self.is_shared_out else norm

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Within it `state_dict` has all rows on rank 0. All ranks enter it."""
        if self.is_shared_out:
            self._collected = self.share.collect(self.rows, self.identifiers)
        try:
            yield
        finally:
            self._collected = None

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_shared_out:
            assert self._collected is not None, "a share of the table would be taken for all of it"
            destination[f"{prefix}rows"] = self._collected

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        whole, share = state_dict.get(f"{prefix}rows"), self.share
        if self.is_shared_out and whole is not None:
            rows = whole[share.rank :: share.world]
            padded = torch.nn.functional.pad(rows, (0, 0, 0, share.room(len(whole)) - len(rows)))
            state_dict = {**state_dict, f"{prefix}rows": padded}
        super()._load_from_state_dict(state_dict, prefix, *rest)


def truncated_normal_(weight: Tensor, std: float) -> Tensor:
    """Fill `weight` from a normal distribution that is cut at two sigma, and whose standard deviation is `std`.

    A standard one that is cut so has the standard deviation sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)), which torch's
    trunc_normal_ does not correct for.
    """
    sigma = std / 0.8796256610342398
    with torch.no_grad():
        return nn.init.trunc_normal_(weight, std=sigma, a=-2 * sigma, b=2 * sigma)


class Linear(nn.Module):
    """A linear layer without a bias."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(truncated_normal_(torch.empty(n_out, n_in), n_in**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        if not multiplies_by_one_dnn(x):
            return functional.linear(x, weight)
        multiply = OneDnnProduct.apply if torch.is_grad_enabled() else one_dnn_product
        return multiply(x, weight)


def multiplies_by_one_dnn(x: Tensor) -> bool:
    """Whether `x` is multiplied by oneDNN: in fp32, on a CPU of AMD with AVX-512, where nothing is compiled."""
    return (
        x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and has_amd_cpu()
    )


@cache
def has_amd_cpu() -> bool:
    """Whether the CPU is one of AMD's. Where the system does not say so, it counts as another."""
    with suppress(OSError):
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return False


class OneDnnProduct(torch.autograd.Function):
    """x [..., n_in] times the transposed weight [n_out, n_in], in fp32."""

    @staticmethod
    def forward(ctx: Any, *factors: Tensor) -> Tensor:
        # With a setup_context torch would look up the signature in each call, for a tenth of a small model's step.
        ctx.save_for_backward(*factors)
        return one_dnn_product(*factors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, weight), (needs_x, needs_weight) = ctx.saved_tensors, ctx.needs_input_grad
        gradient = gradient.contiguous()
        x_gradient = one_dnn_product(gradient, weight.t()) if needs_x else None
        rows, x_rows = gradient.flatten(0, -2).t(), x.flatten(0, -2).t()
        return x_gradient, one_dnn_product(rows, x_rows) if needs_weight else None


def one_dnn_product(x: Tensor, weight: Tensor) -> Tensor:
    """As functional.linear; torch's compiler calls oneDNN by this operator (torch/_inductor/mkldnn_ir.py)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square, computed in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return functional.rms_norm(wide, x.shape[-1:], eps=1e-5).to(x.dtype)


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

    def __init__(self, hrm: HrmConfig) -> None:
        super().__init__()
        self.heads = hrm.num_heads
        self.qkv = Linear(hrm.hidden_size, 3 * hrm.hidden_size)
        self.out = Linear(hrm.hidden_size, hrm.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation | None, *, first: int | None = None) -> Tensor:
        batch, length, hidden = x.shape
        heads = self.qkv(x).view(batch, length, 3 * self.heads, hidden // self.heads)
        looking, v = heads.split((2 * self.heads, self.heads), dim=2)
        if rotation is not None:
            looking = rotation(looking)
        q, k, v = (part.transpose(1, 2) for part in (*looking.chunk(2, dim=2), v))
        mixed = functional.scaled_dot_product_attention(q[:, :, :first], k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, -1, hidden))


class SwiGlu(nn.Module):
    """The feed-forward layer."""

    def __init__(self, hrm: HrmConfig) -> None:
        super().__init__()
        self.gate_up = Linear(hrm.hidden_size, 2 * hrm.inner_size)
        self.down = Linear(hrm.inner_size, hrm.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward layer, each followed by a norm of the sum (post-norm)."""

    def __init__(self, hrm: HrmConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(hrm), SwiGlu(hrm)

    def forward(self, x: Tensor, rotation: Rotation | None, *, first: int | None = None) -> Tensor:
        x = rms_norm(x[:, :first] + self.attention(x, rotation, first=first))
        return rms_norm(x + self.feed_forward(x))


class Reasoner(nn.Module):
    """A recurrent module: what is injected is added to its state, which then goes through its blocks."""

    def __init__(self, hrm: HrmConfig, n_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hrm) for _ in range(n_layers))

    def forward(
        self, state: Tensor, injected: Tensor, *, rotation: Rotation | None, first: int | None = None
    ) -> Tensor:
        """Return the next state, of its `first` positions alone where that is given."""
        state = state + injected
        *blocks, last = self.blocks
        for block in blocks:
            state = block(state, rotation)
        return last(state, rotation, first=first)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What the data decides of the model; `identifiers` counts those of puzzles, the blank one among them."""

    vocab_size: int
    cells: int
    identifiers: int


class State(NamedTuple):
    """The state that a segment hands to the next one; both [batch, positions, hidden]."""

    high: Tensor
    low: Tensor


class SegmentOutput(NamedTuple):
    """The model's answer after a segment: logits [batch, cells, vocabulary], and fp32 [batch] before the sigmoid.

    `q_halt` says how likely the answer is right, `q_continue` what going on is worth.
    """

    logits: Tensor
    q_halt: Tensor
    q_continue: Tensor


class PuzzleModel(nn.Module):
    """Both modules, the embeddings and the heads."""

    start_high: Tensor
    start_low: Tensor

    def __init__(
        self, hrm: HrmConfig, grid: Grid, *, dtype: torch.dtype = torch.float32, share: TableShare = ALL_ROWS
    ) -> None:
        """`dtype` is the type it computes in; its weights are fp32. `share` says which puzzle embeddings it holds."""
        super().__init__()
        self.hrm, self.grid, self.dtype = hrm, grid, dtype
        width, self.prefix = hrm.hidden_size, hrm.prefix_len
        positions = self.prefix + grid.cells
        self.tokens = nn.Parameter(truncated_normal_(torch.empty(grid.vocab_size, width), width**-0.5))
        self.places: nn.Parameter | None = None
        self.rotation: Rotation | None = None
        if hrm.positions == "learned":
            self.places = nn.Parameter(truncated_normal_(torch.empty(positions, width), width**-0.5))
        else:
            self.rotation = Rotation(width // hrm.num_heads, positions, theta=hrm.rope_theta)
        emb_dim = hrm.embedding_size
        self.puzzles = PuzzleTable(grid.identifiers, emb_dim, share=share) if emb_dim else None
        self.low = Reasoner(hrm, hrm.l_layers)
        self.own_high = None if hrm.arch == "single" else Reasoner(hrm, hrm.h_layers)
        self.head = Linear(width, grid.vocab_size)
        self.q_head = nn.Linear(width, 2)
        with torch.no_grad():
            self.q_head.weight.zero_()
            # Halting and going on look worthless at first.
            self.q_head.bias.fill_(-5.0)
        self.register_buffer("start_high", truncated_normal_(torch.empty(width), 1.0))
        self.register_buffer("start_low", truncated_normal_(torch.empty(width), 1.0))

    @property
    def high(self) -> Reasoner:
        """The slow module, which may be the fast one."""
        return self.low if self.own_high is None else self.own_high

    def start(self, batch: int) -> State:
        """Return the state before the first segment."""
        shape = (batch, self.prefix + self.grid.cells, self.hrm.hidden_size)
        return State(*(start.to(self.dtype).expand(shape) for start in (self.start_high, self.start_low)))

    def embed(self, inputs: Tensor, puzzle_rows: Tensor | None) -> Tensor:
        """Compute the input of each call of the fast module, [batch, positions, hidden].

        `inputs` are int [batch, cells]; `puzzle_rows` the embeddings of the puzzles [batch, puzzle_emb_dim].
        """
        width = self.hrm.hidden_size
        # Its gradient is a sum in one order; that of `tokens[inputs]` depends on how threads take turns.
        embedded = nn.functional.embedding(inputs, self.tokens).to(self.dtype)
        if self.prefix and puzzle_rows is not None:
            padding = self.prefix * width - puzzle_rows.shape[-1]
            rows = nn.functional.pad(puzzle_rows.to(self.dtype), (0, padding))
            embedded = torch.cat((rows.view(-1, self.prefix, width), embedded), dim=1)
        if self.places is not None:
            embedded = math.sqrt(0.5) * (embedded + self.places.to(self.dtype))
        return math.sqrt(width) * embedded

    def forward(
        self, state: State, inputs: Tensor, *, puzzle_rows: Tensor | None, judges_alone: bool = False
    ) -> tuple[State, SegmentOutput]:
        """Run one segment; return the state after it, detached, and the answer.

        Gradients reach the last calls alone, as `hrm.grad` says; `state` gets none. With `judges_alone` the answer has
        no cells, and the high state only its first position, from which the Q values are read.
        """
        hrm, embedded = self.hrm, self.embed(inputs, puzzle_rows)
        high, low = state.high.detach(), state.low.detach()
        for slow in range(hrm.h_cycles):
            is_last_cycle = slow == hrm.h_cycles - 1
            for fast in range(hrm.l_cycles):
                learns = is_last_cycle and (hrm.grad == "full_last_cycle" or fast == hrm.l_cycles - 1)
                with nullcontext() if learns else torch.no_grad():
                    low = self.low(low, high + embedded, rotation=self.rotation)
            with nullcontext() if is_last_cycle else torch.no_grad():
                first = 1 if judges_alone and is_last_cycle else None
                high = self.high(high, low, rotation=self.rotation, first=first)
        q = self.q_head(high[:, 0].to(self.q_head.weight.dtype))
        logits = self.head(high[:, :0] if judges_alone else high[:, self.prefix :])
        return State(high.detach(), low.detach()), SegmentOutput(logits, q[:, 0], q[:, 1])


WEIGHTS, MODEL_CONFIG = "model.safetensors", "config.json"

PUBLISHED_NAMES = (
    ("_orig_mod.", ""),  # torch.compile's
    ("model.inner.", ""),
    ("embed_tokens.embedding_weight", "tokens"),
    ("embed_pos.embedding_weight", "places"),
    ("puzzle_emb.weights", "puzzles.rows"),
    ("lm_head.", "head."),
    ("H_init", "start_high"),
    ("L_init", "start_low"),
    ("H_level.layers.", "own_high.blocks."),
    ("L_level.layers.", "low.blocks."),
    ("self_attn.qkv_proj.", "attention.qkv."),
    ("self_attn.o_proj.", "attention.out."),
    ("mlp.gate_up_proj.", "feed_forward.gate_up."),
    ("mlp.down_proj.", "feed_forward.down."),
)
"""Parts of the weights' names in HRM's code (github.com/sapientinc/HRM, commit 42410da, models/hrm/hrm_act_v1.py) and
ours. TRM's code has the same, without the slow module. Queries, keys and values, gate and up lie in the same order."""


def save_model(model: PuzzleModel, target: Path) -> Path:
    """Save weights, puzzle embeddings and what the model is made of; the folder appears whole or not at all."""
    content = {"model_type": "hrm", "hrm": model.hrm.model_dump(mode="json"), "grid": vars(model.grid)}
    with whole_folder(target, replaces=True) as scratch:
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, scratch / WEIGHTS)
        (scratch / MODEL_CONFIG).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return target


def load_model(folder: Path, *, device: str = "cpu") -> PuzzleModel:
    """Load the model that `save_model` has saved, for measuring; raise DataError where the folder holds none."""
    path = folder / MODEL_CONFIG
    try:
        content = json.loads(path.read_bytes())
        model = PuzzleModel(HrmConfig.model_validate(content["hrm"]), Grid(**content["grid"]))
        model.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        fix = "name a finished run of task mode hrm"
        raise DataError(f"holds no model of puzzles ({reason})", where=str(path), fix=fix) from error
    return model.to(device).eval()


def load_published(model: PuzzleModel, path: Path) -> None:
    """Give `model` the weights of a checkpoint that HRM's or TRM's own code has saved.

    Raise DataError where the file is none, or its model has other sizes.
    """
    try:
        weights = {}
        for name, weight in torch.load(path, map_location="cpu", weights_only=True).items():
            for published, ours in PUBLISHED_NAMES:
                name = name.replace(published, ours)
            weights[name] = weight
        model.load_state_dict(weights)
    except (OSError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        what = f"holds no weights ({next(iter(str(error).splitlines()), type(error).__name__)})"
        raise DataError(what, where=str(path), fix="name a file step_N of HRM's or TRM's own code") from error
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        what = f"does not fit the model of this config: {' '.join(lines[1:3]) or lines[0]}"
        fix = "write the sizes of its all_config.yaml in the section hrm, and take the puzzles that it has learned"
        raise DataError(what, where=str(path), fix=fix) from error
