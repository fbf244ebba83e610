"""One training step of a real model on fake tensors: what the closed form of memory is checked against.

The model is transformers', the adapter PEFT's, the chunked loss the kit's, the optimizer torch's; shapes and dtypes are
real, contents are not, so that a step of a large model takes seconds and no memory. What a CPU would do differently
from a GPU is replaced in `plan/gpu_kernels`. It does not know what the allocator rounds up or keeps, the CUDA context,
or more than one GPU, and imports nothing of the closed form.

In what the kit holds its weights: `full` in fp32, `lora` and `qlora` in the run's precision beside an fp32 adapter,
each under autocast to the run's precision; 16-bit outputs are turned into fp32 by accelerate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oracle.cases import TraceSettings
from oracle.gpu_kernels import CudaKernels, InPlaceSums, KernelTemporaries, replaced
from oracle.live_bytes import Block, LiveBytes
from oracle.traced_model import DTYPES, adapt, build_causal

CHUNK = 256
"""Rows of scores that the chunked loss computes at a time."""


@dataclass(frozen=True)
class Traced:
    """The bytes of one step in its steady state: the optimizer's states exist."""

    peaks_bytes: dict[str, int]
    """By phase: load (weights and states at rest), forward (embedding and layers), head (scores and loss), loss
    (their backward), backward (layers and embedding), step (clipping and optimizer)."""

    static_bytes: dict[str, int]
    """Parameters and buffers by dtype."""

    kept: tuple[Block, ...] = ()
    """All blocks besides the resting ones when the last layer's forward has ended."""


def trace_step(config: Mapping[str, Any], how: TraceSettings) -> Traced:
    """Run one training step of the model that `config` (a config.json's content) describes.

    Takes some seconds of one core. Raises what transformers raises for a config it cannot build.
    """
    labelled = max(1, round(how.batch * how.seq * how.labels_share))
    with ExitStack() as stack:
        for context in reads_answered(how, labelled):
            stack.enter_context(context)
        stack.enter_context(FakeTensorMode())
        live = stack.enter_context(LiveBytes())
        stack.enter_context(KernelTemporaries())
        stack.enter_context(InPlaceSums())  # counts references, so that no other mode may hold a tensor before it
        step = _Step(config, how, live, labelled)
        return step.run()


def recompute(causal: Any, options: dict[str, Any]) -> None:
    """Recompute the model's layers in the backward pass, under the name that the installed transformers has for it."""
    (getattr(causal, "activation_checkpointing_enable", None) or causal.gradient_checkpointing_enable)(options)


@contextmanager
def _quiet() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def reads_answered(how: TraceSettings, labelled: int) -> Iterator[Any]:
    """Contexts in which what code asks the device or the contents of a tensor is answered as on a GPU."""
    from transformers import masking_utils

    ask = torch.is_autocast_enabled
    yield _quiet()
    # PEFT asks without a device, which means CUDA.
    yield replaced(torch, "is_autocast_enabled", lambda device="cpu": ask(device))
    yield replaced(masking_utils, "fast_all", lambda _mask: not how.padded)
    yield replaced(masking_utils, "is_tracing", lambda *_, **__: False)  # a fake tensor counts as tracing
    yield CudaKernels(host_reads=labelled)


class _Step:
    """A model and what trains it, and the step itself."""

    def __init__(self, config: Mapping[str, Any], how: TraceSettings, live: LiveBytes, labelled: int) -> None:
        self.how, self.live, self.labelled = how, live, labelled
        self.causal = build_causal(config, how)
        self.model = adapt(self.causal, how)
        self.model.train()
        self._checkpoint()
        self._place_head()
        self._watch_head()
        self.forward = self._under_autocast()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = self._rested_optimizer()
        self.kept: tuple[Block, ...] = ()

    def run(self) -> Traced:
        """The step, one micro-batch after the other."""
        live = self.live
        live.forget_peaks()
        live.enter_phase("load")
        self.resting = {id(block) for block in live.alive()}
        for _ in range(self.how.micro_batches):
            self._run_micro_batch()
        live.enter_phase("step")
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        if self.optimizer is not None:
            self.optimizer.step()
        return Traced(dict(live.peaks_bytes), _bytes_by_dtype(self.model), self.kept)

    def _run_micro_batch(self) -> None:
        how, live = self.how, self.live
        live.enter_phase("forward")
        ids = torch.zeros(how.batch, how.seq, dtype=torch.int64)
        batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
        if how.head == "standard":
            batch["shift_labels"] = torch.zeros(1, self.labelled, dtype=torch.int64)
        with self._whole_rows():
            output = self.forward(**batch, use_cache=False, num_items_in_batch=torch.ones(()))
        loss = output["loss"]
        if not how.keeps_output:
            del output
        live.enter_phase("loss")
        loss.backward()

    def _whole_rows(self) -> Any:
        """Linear attention asks whether a mask of ones is one; of rows without padding it gets none then."""
        module, name = sys.modules[type(self.causal).__module__], "create_recurrent_attention_mask"
        if self.how.padded or not hasattr(module, name):
            return nullcontext()
        return replaced(module, name, lambda *_, **__: None)

    def _checkpoint(self) -> None:
        if not self.how.checkpointing:
            return
        # A fake generator has no state to keep; the GPU's copy of it is a few bytes a layer.
        # `Tensor.backward` runs outside of CudaKernels, so that a layer's second forward has to enter it again.
        options = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), CudaKernels(host_reads=0)),
        }
        recompute(self.causal, options)
        if self.how.method != "full":
            self.model.enable_input_require_grads()  # as TRL does

    def _place_head(self) -> None:
        if self.how.head == "chunked":
            from sftplay.train.loss_heads import put_chunked_head

            put_chunked_head(self.causal, proves=False)
        elif self.how.head == "standard":
            self.causal.get_output_embeddings().register_forward_pre_hook(self._select)

    def _select(self, _head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        positions = torch.zeros(self.labelled, dtype=torch.int64)
        return (inputs[0].reshape(1, -1, inputs[0].shape[-1])[:, positions],)

    def _watch_head(self) -> None:
        self.causal.base_model.register_forward_hook(self._enter_head)

    def _enter_head(self, _decoder: nn.Module, _inputs: Any, output: Any) -> None:
        self.kept = tuple(block for block in self.live.alive() if id(block) not in self.resting)
        self.live.enter_phase("head")
        output[0].register_hook(lambda _grad: self.live.enter_phase("backward"))

    def _under_autocast(self) -> Any:
        if self.how.autocast == "fp32":
            return self.model
        forward = torch.autocast("cpu", dtype=DTYPES[self.how.autocast])(self.model.forward)
        if not self.how.fp32_output:
            return forward
        from accelerate.utils import convert_outputs_to_fp32

        return convert_outputs_to_fp32(forward)

    def _rested_optimizer(self) -> Any:
        """The optimizer after a step on gradients of zero, so that its states exist."""
        if self.how.optimizer == "none":
            return None
        fused = self.how.optimizer == "adamw_fused"
        optimizer = torch.optim.AdamW(self.trained, fused=fused, foreach=None if fused else True)
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return optimizer


def _bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.numel() * tensor.element_size()
    return sizes
