"""What the backend unsloth cannot do, or does in a way of its own that the config could not ask otherwise.

Nothing here looks at the machine: whether unsloth is there is for `plan.backend`.
"""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.rules.violation import Violation
from sftplay.config.schema.run import RunConfig

KEY = "tuning.backend"


def broken_backend_rules(cfg: RunConfig) -> Iterator[Violation]:
    """Every key that an unsloth run would not follow; none when another backend, or auto, is asked for."""
    if cfg.tuning.backend == "unsloth":
        yield from unsloth_conflicts(cfg)


def unsloth_conflicts(cfg: RunConfig) -> Iterator[Violation]:
    """The same whatever backend is asked for. Read in the source of unsloth and unsloth_zoo 2026.10.9."""
    for key, conflicts, what, word in _conflicts(cfg):
        if conflicts:
            yield Violation((key, KEY), f"{what}, with {KEY} unsloth", f"write {word}, or {KEY}: bnb")


def _conflicts(cfg: RunConfig) -> Iterator[tuple[str, bool, str, str]]:
    """Key, whether it is in the way, what happens to it, what to write instead."""
    model, tuning, train = cfg.model, cfg.tuning, cfg.train
    in_4_bits = tuning.mode == "qlora"
    yield "tuning.mode", tuning.mode == "full", "full is not offered", "tuning.mode: lora or qlora"
    # Both loaders write nf4 and double quantisation into a BitsAndBytesConfig of their own.
    fixed = in_4_bits and tuning.quant_type != "nf4"
    yield "tuning.quant_type", fixed, f"{tuning.quant_type} would be ignored for nf4", "tuning.quant_type: nf4"
    fixed = in_4_bits and not tuning.double_quant
    yield "tuning.double_quant", fixed, "false would be ignored", "tuning.double_quant: true"
    # It reopens an adapter with a base that it chooses by the adapter's own file.
    goes_on = model.adapter is not None and not model.merge_adapter
    yield "model.adapter", goes_on, "an adapter cannot be continued", "model.merge_adapter: true"
    yield "model.attn", model.attn == "eager", "eager would be ignored for its own attention", "model.attn: auto"
    # Its attention keeps packed rows apart by a list of lengths of its trainer's, not by the position ids used here.
    yield "train.packing", train.packing is True, "packed rows would not be kept apart", "train.packing: auto"
    other = train.loss_head in ("chunked", "liger")
    yield "train.loss_head", other, f"{train.loss_head} would meet a loss of its own", "train.loss_head: auto"
