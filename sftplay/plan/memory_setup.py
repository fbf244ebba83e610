"""Which code a training step runs, as far as that decides bytes: dtypes, loss head, kernels, optimizer.

The largest differences between two kits on the same model lie in the code that runs, not in hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from sftplay.config.run import FLASH_KERNELS, RunConfig
from sftplay.config.run import Optimizer as OptimizerName
from sftplay.plan.shape import Linear, ModelShape

OPENED = "model_opened_on"
"""Key of plan.json: `host` where each process opens the model it will split in the host's memory, else `device`."""

Head = Literal["standard", "chunked", "liger", "tiled", "actions", "score"]
Attention = Literal["flash", "efficient", "eager"]
Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "sgd"]

STATE_BYTES_8BIT = 2.03
"""Two 8-bit moments and their block maxima (blocks of 256 with an fp32 maximum each): 2 * (1 + 4/256)."""

NF4_CODE_BYTES = 0.5
NF4_BYTES = NF4_CODE_BYTES + 4 / 64
"""A 4-bit code, and an fp32 scale for each 64 of them (QLoRA, Dettmers 2023, section 3)."""

NF4_DOUBLE_BYTES = NF4_CODE_BYTES + 1 / 64 + 4 / (64 * 256)
"""The same with the scales in 8 bits, and an fp32 scale for each 256 of those (double quantisation, ibid.)."""

WORKSPACE_BYTES = 2 * (2 * 4096 + 8 * 16) * 1024
"""cuBLAS takes 8.125 MiB a handle from torch's allocator (torch, CUBLAS_WORKSPACE_CONFIG default :4096:2:16:8); the
forward and the backward thread have a handle each."""

HOPPER_WORKSPACE_BYTES = 2 * 32 * 2**20
"""The same from capability 9.0 on: 32 MiB a handle (torch, CublasHandlePool.cpp, `parseChosenWorkspaceSize`)."""


def workspace_bytes(capability: tuple[int, int]) -> int:
    """Return what cuBLAS takes on a GPU of `capability`."""
    return HOPPER_WORKSPACE_BYTES if capability >= (9, 0) else WORKSPACE_BYTES


MOST_CHUNK_TOKENS, MOST_CHUNK_SCORES = 2048, 2**27
"""On a GPU a chunk of the loss has at most so many tokens and scores; 512 MiB of them in fp32."""


def gpu_chunk_tokens(vocab: int) -> int:
    """Return how many tokens' scores exist at a time in the chunked loss on a GPU (`train.loss_heads`).

    Each chunk reads the whole head three times. From about 300 tokens on a GPU computes longer than it reads (H100: 990
    TFLOP/s in 16 bits to 3.35 TB/s).
    """
    return max(256, min(MOST_CHUNK_TOKENS, MOST_CHUNK_SCORES // vocab // 256 * 256))


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA pair on some of a layer's linears."""

    rank: int
    targets: tuple[str, ...] | None = None  # names of the linears; None means all of a layer
    weight_bytes: int = 4
    has_dropout: bool = False
    is_dora: bool = False
    # Modules that train in full next to the pairs; PEFT keeps the frozen one too (`ModulesToSaveWrapper`).
    in_full: tuple[str, ...] = ()
    # Rows of new tokens that train next to the pairs. PEFT makes a copy of the embedding and of the head with them in
    # each step (peft 0.21, `tuners/trainable_tokens/layer.py`).
    new_rows: int = 0

    def covers(self, linear: Linear) -> bool:
        """True when `linear` has a pair."""
        return not linear.is_left_out if self.targets is None else linear.name in self.targets


@dataclass(frozen=True, kw_only=True)
class MemorySetup:
    """The code that runs. Every byte of a plan follows from it, a shape and a size."""

    # Bytes of a weight that is not in 4 bits: embedding, head, norms, and the linears unless `four_bit`.
    weight_bytes: int
    compute_bytes: int  # bytes of a number that enters a matrix product
    stream_bytes: int  # bytes of a number in the residual stream between the layers
    four_bit: bool = False
    double_quant: bool = False
    has_autocast: bool = False  # True when matrix products round their inputs to `compute_bytes` themselves
    adapter: Adapter | None = None  # None means that everything trains
    checkpointing: bool = True
    attention: Attention = "flash"
    repeats_kv: bool = False  # True where grouped keys and values are copied out to the heads before the product
    is_masked: bool = False  # True where rows are padded, so that the kernel needs a mask over rows x tokens x tokens
    head: Head = "standard"
    # Of the head `tiled`: True where a kernel folds a tile of scores in place, as TRL's does on a GPU. Elsewhere torch
    # makes copies of it.
    folds_tiles: bool = True
    chunk_tokens: int = 256  # of the head `chunked`: tokens whose scores exist at a time
    logits_bytes: int = 2  # bytes of a score as the head writes it; the loss always works on fp32
    # True where the caller keeps the model's output, and so the scores, until backward has ended.
    holds_scores: bool = False
    # True where the loss copies the scores without the last token's (transformers before 4.46).
    shifts_scores: bool = False
    # True where each layer's input and the gradient of it live until backward has ended: torch's first FSDP around
    # frozen layers that are checkpointed with `use_reentrant=True`. Its hook on the input refers to that input's
    # gradient accumulator, which holds both (torch, `register_multi_grad_hook`).
    holds_inputs: bool = False
    workspace_bytes: int = WORKSPACE_BYTES  # what cuBLAS takes of the allocator's memory
    optimizer: Optimizer = "adamw"
    # True for torch's foreach optimizers, which hold one more copy of what trains while they step.
    is_foreach: bool = False

    @property
    def trains_all(self) -> bool:
        return self.adapter is None

    @property
    def trains_rows(self) -> bool:
        """Whether rows of new tokens train, in copies of the embedding and of the head."""
        return self.adapter is not None and self.adapter.new_rows > 0

    @property
    def linear_bytes(self) -> float:
        """Bytes of one weight of a layer's linears in memory."""
        if not self.four_bit:
            return float(self.weight_bytes)
        return NF4_DOUBLE_BYTES if self.double_quant else NF4_BYTES

    @property
    def scale_bytes(self) -> float:
        """Bytes of a 4-bit weight's scales, which bitsandbytes keeps next to the parameter, not in it."""
        return self.linear_bytes - NF4_CODE_BYTES if self.four_bit else 0.0

    @property
    def trained_bytes(self) -> int:
        """Bytes of a weight that trains, and of its gradient."""
        return self.adapter.weight_bytes if self.adapter else self.weight_bytes

    @property
    def state_bytes(self) -> float:
        """Optimizer state per weight that trains; adafactor's and that of sgd are too small to count."""
        if self.optimizer == "adamw_8bit":
            return STATE_BYTES_8BIT
        return 2.0 * self.trained_bytes if self.optimizer == "adamw" else 0.0


def trained_params(shape: ModelShape, setup: MemorySetup) -> int:
    """Count the weights that train: all of the model's, or the pairs (and DoRA's magnitudes) of the adapter."""
    adapter = setup.adapter
    if adapter is None:
        return shape.total_params
    pairs = 0
    for count, linears in [(kind.layers, kind.linears) for kind in shape.kinds] + [(1, shape.linears_outside)]:
        covered = [linear for linear in linears if adapter.covers(linear)]
        magnitudes = sum(linear.outputs for linear in covered) if adapter.is_dora else 0
        pairs += count * (adapter.rank * sum(linear.inputs + linear.outputs for linear in covered) + magnitudes)
    rows = adapter.new_rows * shape.hidden * (1 if shape.tied else 2)
    in_full = 0
    for name in adapter.in_full:  # the embedding, the head, or one linear in every layer
        is_end = any(word in name for word in ("embed", "wte", "lm_head"))
        for kind in shape.kinds:
            named = [linear for linear in kind.linears if linear.name == name and not is_end]
            in_full += kind.layers * sum(linear.inputs * linear.outputs for linear in named)
        in_full += shape.vocab * shape.hidden * is_end
    return pairs + rows + in_full


OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "paged_adamw_32bit": "adamw",
    "adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit", "adafactor": "adafactor", "sgd": "sgd",
}  # fmt: skip
"""Paged states count in full: they leave the card only once it is full."""

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def read_memory_setup(cfg: RunConfig) -> MemorySetup:
    """Read the setup from a config in which precision, attention, loss head and optimizer are decided."""
    mode, train, lora = cfg.tuning.mode, cfg.train, cfg.tuning.lora
    compute = BYTES[str(train.precision)]
    weights = 4 if mode == "full" else compute
    # A padded batch needs a mask, with which transformers copies grouped keys and values out to the heads. Before
    # capability 8.0 and in fp32 they are copied without a mask too (`model.weights.repeat_shared_keys`).
    is_masked = cfg.model.attn not in FLASH_KERNELS
    adapter = Adapter(
        rank=lora.r,
        targets=None if lora.target_modules == "auto" else tuple(lora.target_modules),
        has_dropout=lora.dropout > 0,
        is_dora=lora.dora,
        in_full=tuple(lora.modules_to_save),
        new_rows=_count_new_rows(cfg),
    )
    return MemorySetup(
        weight_bytes=weights, compute_bytes=compute, stream_bytes=weights, four_bit=mode == "qlora",
        double_quant=cfg.tuning.double_quant, has_autocast=compute < 4, adapter=None if mode == "full" else adapter,
        checkpointing=train.gradient_checkpointing,
        attention="eager" if cfg.model.attn == "eager" else "efficient" if is_masked else "flash",
        repeats_kv=is_masked, is_masked=is_masked, head=cast("Head", cfg.task.memory_head or train.loss_head),
        logits_bytes=compute, optimizer=OPTIMIZERS[train.optim],  # type: ignore[index]
        is_foreach=train.optim == "adamw_torch",
    )  # fmt: skip


def _count_new_rows(cfg: RunConfig) -> int:
    """Rows that train alone; where their matrices train in full they are counted with these."""
    path = cfg.tuning.new_tokens.path
    if not cfg.tuning.trains_single_rows or path is None:
        return 0
    try:
        return sum(bool(line.strip()) for line in Path(path).read_text(encoding="utf-8-sig").split("\n"))
    except (OSError, UnicodeDecodeError):  # the run says so
        return 0
