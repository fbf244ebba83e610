"""One optimizer step: its rows in micro-batches, a loss over the whole effective batch, gradients averaged once over
processes, and its replay in smaller micro-batches after an out-of-memory error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sftplay import log
from sftplay.config.cluster import SHARDED
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, ran_out_of_memory, said_of_memory
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import OUT_OF_MEMORY, RunFolder
from sftplay.model.adapter import trained_weights_kept
from sftplay.model.out_of_memory import (
    AdaptiveBatches,
    Agreement,
    OutOfMemory,
    Shortage,
    describe_shortages,
    free_memory,
    held_bytes,
)
from sftplay.train.eval_mode import RandomState, random_numbers_kept
from sftplay.train.loss_heads import prove_label_head, put_chunked_head
from sftplay.train.metrics import Observer, StepCounts
from sftplay.train.micro_batches import (
    Batch,
    MicroBatcher,
    SourceLoss,
    count_labels,
    count_rows,
    gather_source_losses,
    labels_per_row,
    model_inputs,
    needs_no_mask,
    on_device,
    split_by_source,
)
from sftplay.train.upstream import find_attention


def average_gradients(model: Any, *, others: Sequence[Any] = ()) -> None:
    """Replace every rank's gradients by their mean over the ranks; a missing gradient counts as zero.

    All ranks call it with the same trainable weights: those of the DistributedDataParallel `model`, and `others`
    outside of it. They are sent in buckets of DDP's own size. Those of weights in shards were averaged by the backward
    pass.
    """
    _reduce(model, others=others, divisor=torch.distributed.get_world_size())


def add_gradients(model: Any) -> None:
    """Do the same with their sum instead of the mean, for losses that are divided by the rows of all ranks already."""
    _reduce(model, others=(), divisor=1)


def _reduce(model: Any, *, others: Sequence[Any], divisor: int) -> None:
    trained = [*(p for p in model.parameters() if p.requires_grad), *others]
    weights = [weight for weight in trained if not isinstance(weight, DTensor)]
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    for bucket in _split_into_buckets([weight.grad for weight in weights], model.bucket_bytes_cap):
        flat = _flatten_dense_tensors(bucket).div_(divisor)
        torch.distributed.all_reduce(flat)
        for gradient, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(mean)


def _split_into_buckets(gradients: list[Any], cap_bytes: int) -> Iterator[list[Tensor]]:
    """Yield successive gradients of one type, up to `cap_bytes` together; a larger one is alone."""
    bucket: list[Tensor] = []
    size_bytes = 0
    for gradient in gradients:
        if bucket and (size_bytes + gradient.nbytes > cap_bytes or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(gradient)
        size_bytes += gradient.nbytes
    if bucket:
        yield bucket


def wants_overlap(cfg: RunConfig) -> bool:
    """Return whether DDP itself must send the gradients, within the last backward pass of a step.

    A hook and a static graph work only inside DDP. In full tuning on GPUs the gradients are as large as the model.
    """
    comm = cfg.cluster.comm
    is_large = cfg.tuning.mode == "full" and torch.cuda.is_available()
    return comm.hook != "none" or comm.static_graph or is_large


def exposed_s(ddp_log: dict[str, Any]) -> float:
    """Return the seconds of the last step in which gradients were sent and nothing was computed, from DDP's own log.

    The log has no times before the second step. They are nanoseconds (torch 2.13, logger.hpp).
    """
    sending, covered = (ddp_log.get(key, 0) for key in ("backward_comm_time", "backward_compute_comm_overlap_time"))
    return max(0, sending - covered) * 1e-9


class GradientSync(Observer):
    """Sets up how gradients are sent, and measures the part of it that computing does not cover."""

    def __init__(self, cfg: RunConfig, heartbeat: Heartbeat) -> None:
        self.comm, self.heartbeat = cfg.cluster.comm, heartbeat
        self._is_ddp = log.world_size() > 1 and cfg.cluster.strategy not in SHARDED
        """False for sharded strategies: they communicate all the time and do not report it."""

        self._averages_itself = cfg.task.averages_itself
        self._exposed_s = self._all_s = 0.0
        self._logged_step = 0

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        hook, handler = self.comm.hook, trainer.accelerator.ddp_handler
        if self._is_ddp and hook != "none":
            handler.comm_hook = DDPCommunicationHookType("power_sgd" if hook == "powersgd" else hook)
        if self._is_ddp and hook == "powersgd":
            # The first two steps send gradients uncompressed, because DDP rebuilds its buckets in them (torch 2.13,
            # powerSGD_hook.py).
            handler.comm_state_option = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._logged_step = state.global_step
        if not self._overlaps():
            return
        self.trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(1)
        hook = self.comm.hook
        if hook == "none" and not self.comm.static_graph:
            return
        setting = f"cluster.comm.hook {hook}" if hook != "none" else "cluster.comm.static_graph"
        log.say(f"{setting}: DDP sends gradients within the backward pass of each step's last micro-batch")
        if self.trainer.replay:
            log.say("  running out of memory in that micro-batch restarts the run; any other one is run again, smaller")
        if hook == "powersgd":
            log.say("  PowerSGD is lossy, keeps one more copy of the gradients, and saves no state in checkpoints")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._overlaps():
            ddp_log = self.trainer.model_wrapped._get_ddp_logging_data()
            self.heartbeat.recount(exposed_s(ddp_log), "backward", truly="communication")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "exposed_communication_share" in logs:
            interval_s = logs["step_s"] * (state.global_step - self._logged_step)
            self._logged_step = state.global_step
            self._all_s += interval_s
            self._exposed_s += logs["exposed_communication_share"] * interval_s

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_ddp and self._all_s:
            when = "beyond what DDP overlaps with computing" if self._overlaps() else "after the computing of each step"
            share = f"{self._exposed_s / self._all_s:.1%} of the time"
            log.say(f"communication: {share} went to exchanging gradients and waiting for other ranks, {when}")

    def _overlaps(self) -> bool:
        sends_afterwards = self._averages_itself or (self.trainer.replay and self.trainer.replay.sends_afterwards)
        return self._is_ddp and not sends_afterwards


CHUNK = 2**10  # how many squares are added up in fp32 at a time


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, fp32 []. With sharded gradients every rank must call it.

    On a CPU torch adds up a whole tensor in fp32, which loses 5e-4 of the norm at 10 million numbers (torch 2.13). Here
    short chunks are added up in fp32, and their sums in fp64.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(isinstance(gradient, DTensor) or gradient.device.type != "cpu" for gradient in gradients):
        return rough_gradient_norm(parameters)
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        whole = flat.numel() // CHUNK * CHUNK
        for chunks in (flat[:whole].view(-1, CHUNK), flat[whole:].view(1, -1)):
            total += torch.linalg.vector_norm(chunks, dim=1, dtype=torch.float32).double().square().sum()
    return total.sqrt().float()


def rough_gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Compute the same, but rounded as torch rounds it, for a quarter of the time on a CPU."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


ADVICE = (
    "`make plan` lists the cheapest changes that fit (a shorter model.max_seq_len, tuning.mode qlora, "
    "train.gradient_checkpointing); `make memory-check` shows who else holds memory"
)


class Replay:
    """Runs windows again after out-of-memory errors, in one attempt at a run where `train.oom_recovery` is on."""

    def __init__(self, cfg: RunConfig, folder: RunFolder) -> None:
        self._folder = folder
        self.sends_afterwards = log.world_size() > 1 and not wants_overlap(cfg)
        """True where gradients are sent after the window all at once, so that any micro-batch can be run again. Full
        tuning on GPUs sends them while the last one computes, because they are as large as the model. So does a hook.
        """

        self.times = 0  # windows that this attempt has run again so far

    def step_down(
        self, micro_batcher: MicroBatcher, shortages: list[Shortage | None], *, step: int, window_rows: int
    ) -> MicroBatcher:
        """Return the micro-batcher for the second run of the same rows; it is the same on every rank. Raise OutOfMemory
        where every micro-batch was a single row already.
        """
        free_memory()
        planned_bytes = self._folder.read_json("plan.json").get("peak_bytes")
        what = f"step {step}: {describe_shortages(shortages, planned_bytes)}"
        smaller = micro_batcher.smaller(window_rows)
        if smaller is None:
            raise OutOfMemory(what, where="training", fix=ADVICE)
        self.times += 1
        log.say(f"{what}; running the same rows again, {smaller.micro_batch} at a time")
        if log.is_main():
            self._folder.add_event(  # a resume reads it
                OUT_OF_MEMORY,
                step=step,
                batch_size_before=micro_batcher.micro_batch,
                batch_size=smaller.micro_batch,
                ranks=[rank for rank, shortage in enumerate(shortages) if shortage],
                planned_bytes=planned_bytes,
                held_bytes=max(shortage.held_bytes for shortage in shortages if shortage),
            )
        return smaller


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """Settings of a trainer's steps."""

    micro_batcher: MicroBatcher | None  # cuts windows; None: the Trainer accumulates
    loss_head: str  # train.loss_head, decided
    replay: Replay | None = None  # what happens when memory runs out for a window; None: the run ends
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    check_loss: Callable[[Tensor], None] | None = None
    """Called with each loss before its backward pass, where that is the last moment to stop (DeepSpeed)."""

    source_names: tuple[str, ...] = ()  # names of a mixture's sources, in the order of their numbers


if TYPE_CHECKING:
    from transformers import Trainer as Base  # the trainer that comes after the mixin
else:
    Base = object


def reduce_in_fp32(accelerator: Any) -> None:
    """Let FSDP compute in 16 bits, and sum gradients and return losses in fp32; accelerate would do all in 16 bits."""
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if half is not None and plugin is not None:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)


class StepTrainerMixin(Base):
    """What callbacks ask a trainer for, also where a task's steps are its own (grpo, hrm, score).

    It comes before transformers' Trainer.
    """

    def __init__(self, step: StepSetup, **named: Any) -> None:
        super().__init__(**named)
        reduce_in_fp32(self.accelerator)
        self.heartbeat, self.micro_batcher = step.heartbeat, step.micro_batcher
        self.replay: Replay | None = None
        self.source_names: tuple[str, ...] = ()
        self.held_out_sources: dict[str, dict[str, float]] = {}
        self.counts = StepCounts()
        self.last_loss: Any = 0.0
        self.held_out_figures: dict[str, float] = {}
        """Evaluation figures since the last line of metrics."""

    def count_step(self, rows: list[int], lengths: list[int], *, padded_tokens: int, label_tokens: int) -> None:
        """Count the rows of a step, and the tokens of its texts."""
        self.counts.rows += rows
        self.counts.lengths += lengths
        self.counts.tokens += sum(lengths)
        self.counts.padded_tokens += padded_tokens
        self.counts.label_tokens += label_tokens

    def take_counts(self) -> StepCounts:
        """Return the counts so far, and reset them."""
        taken, self.counts = self.counts, StepCounts()
        return taken

    def take_held_out_figures(self) -> dict[str, float]:
        """Return the figures of the last evaluation, for one line of metrics."""
        held_out, self.held_out_figures = self.held_out_figures, {}
        return held_out

    def rows_not_finite(self) -> list[int]:
        """Return no rows: the loss of a step is one sum, or depends on other rows."""
        return []

    def _backward(self, loss: Tensor) -> None:
        self.heartbeat.enter("backward")
        # DDP would send gradients in each backward pass; they are sent once, after the last pass.
        with self.model_wrapped.no_sync() if log.world_size() > 1 else nullcontext():
            self.accelerator.backward(loss)
        self.heartbeat.enter("forward")


class ExactBatchMixin(StepTrainerMixin):
    """Runs before a TRL trainer's own methods: `class WindowedSFTTrainer(ExactBatchMixin, SFTTrainer)`."""

    def __init__(self, step: StepSetup, *, model: Any, **named: Any) -> None:
        # TRL makes the adapter of a 4-bit base bf16.
        with trained_weights_kept(model) if hasattr(model, "get_base_model") else nullcontext():
            super().__init__(step, model=model, **named)
        # The class of Gemma 4 says no, and the Trainer would leave out the count; `prove_label_head` asks the model.
        self.model_accepts_loss_kwargs = True
        self.replay, self.source_names = step.replay, step.source_names
        self.clipped_norm: Tensor | None = None  # of this step's gradients, where they are clipped by it
        self.last_windows: list[Batch] = []  # the rows of this rank's last step
        self._accumulated_step, args, model = -1, self.args, self.model
        # In fp16 DeepSpeed's own scaler skips steps that are not finite.
        self._check_loss = step.check_loss if self.is_deepspeed_enabled and not args.fp16 else None
        self._agreement = Agreement(args.device)
        self._source_sums = torch.zeros(len(step.source_names), 2, dtype=torch.float64)  # of losses and label tokens
        self.held_out_labels_per_row = labels_per_row(named.get("eval_dataset"))
        self.eval_batches = AdaptiveBatches(args.per_device_eval_batch_size, "the evaluation")
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._wants_one_row = "flash" in find_attention(base)
        self.label_head, self.label_head_off = None, ""
        name = type(base).__name__
        if args.label_smoothing_factor and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            what = (
                f"the Trainer would take each label for its own token, not the next, as {name} is no class of its list"
            )
            raise ConfigError(what, where="train.extra.label_smoothing_factor", fix="leave it out")
        with self.accelerator.autocast():
            if step.loss_head == "standard" and not args.label_smoothing_factor:
                self.label_head, self.label_head_off = prove_label_head(base)
            is_half = args.bf16 or args.fp16
            self._drops_mask = self.micro_batcher is not None and needs_no_mask(base, args.device, is_half=is_half)
            if step.loss_head == "chunked":
                put_chunked_head(base, proves=self.micro_batcher is not None)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, but leave windows in the host's memory, where cutting them waits for no GPU."""
        loader = super().get_train_dataloader()
        if self.micro_batcher is not None:
            loader.device = None
        return loader

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward over all micro-batches of the window; return the sum of their losses.

        A micro-batch that sends gradients while it computes is not run again: the other ranks would wait for them.
        Raise OutOfMemory where memory does not suffice for a single row of the window.
        """
        count_rows(self.counts, inputs)
        if self.micro_batcher is None:
            return self._accumulate(model, inputs, n_items=num_items_in_batch)
        self.last_windows = [inputs]
        replay, padded_tokens = self.replay, self.counts.padded_tokens
        start = RandomState() if replay else None
        sends_afterwards = bool(replay and replay.sends_afterwards)
        sends_in_backward = self.accelerator.num_processes > 1 and not sends_afterwards
        while True:
            micro_batches = list(self.micro_batcher.cut(inputs))
            alone = micro_batches[:-1] if sends_in_backward else micro_batches
            losses, shortage = self._attempt(model, alone, n_items=num_items_in_batch)
            if not replay or not start:
                break
            shortages = self._agreement.all_shortages(shortage, self.heartbeat)
            if not shortages:
                break
            model.zero_grad(set_to_none=True)
            start.restore()
            self.counts.padded_tokens = padded_tokens
            self.micro_batcher = replay.step_down(
                self.micro_batcher, shortages, step=self.state.global_step + 1, window_rows=len(inputs["row"])
            )
        if sends_in_backward:
            losses.append(self._run_micro_batch(model, micro_batches[-1], n_items=num_items_in_batch))
        elif sends_afterwards:
            with self.heartbeat.within("communication"):
                average_gradients(model)
        total = sum(loss for _, loss in losses)
        self.last_loss = total.detach()
        self._count_losses(losses, num_items_in_batch)
        return total

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradients by their exact norm where torch's is not exact; return the norm before clipping."""
        if self.micro_batcher is None or self.args.device.type != "cpu":
            self.clipped_norm = super()._clip_grad_norm(model)
            return self.clipped_norm
        self.clipped_norm = gradient_norm(model.parameters())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, self.clipped_norm)
        return self.clipped_norm

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        """Evaluate as the Trainer does, and add the loss of each source of a mixture to the metrics."""
        output = super().evaluation_loop(*given, **named)
        if self.source_names:
            device = self.args.device
            self.held_out_sources = gather_source_losses(self._source_sums, self.source_names, device=device)
            self._source_sums = torch.zeros_like(self._source_sums)
        output.metrics.update({f"eval_{name}_loss": source["loss"] for name, source in self.held_out_sources.items()})
        return output

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """Evaluate without a trace in the run's random numbers: the Trainer's loader of rows takes one."""
        with random_numbers_kept():
            return super().evaluate(*given, **named)

    def _save_checkpoint(self, *given: Any) -> None:
        with random_numbers_kept():
            super()._save_checkpoint(*given)

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return nothing beyond the figures of every task."""
        return {}

    @property
    def last_rows(self) -> list[int]:
        """Ids of the rows of this rank's last step."""
        return [row for window in self.last_windows for row in window["row"].tolist()]

    @torch.no_grad()
    def rows_not_finite(self) -> list[int]:
        """Return ids of the last step's rows whose loss alone, without dropout, is not finite. Asks no other rank."""
        row_ids = []
        self.model.eval()
        # Where weights are sharded, a rank cannot compute alone.
        for window in self.last_windows if self.micro_batcher is not None else ():
            for n, width in enumerate(window["attention_mask"].sum(1).tolist()):
                row = {key: value[n : n + 1, :width] for key, value in model_inputs(window).items()}
                row = on_device(row, self.args.device)
                with self.compute_loss_context_manager():
                    loss = self._model_loss(self.model, row, return_outputs=False, n_items=1)
                if not torch.isfinite(loss):
                    row_ids.append(int(window["row"][n]))
        self.model.train()
        return row_ids

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the sum of the label tokens' losses over `num_items_in_batch`, without TRL's entropy and accuracy."""
        if model.training:
            inputs = self._select_inputs(inputs)
            return self._model_loss(model, inputs, return_outputs=return_outputs, n_items=num_items_in_batch)
        # Held out. When memory runs out, in ever smaller batches without communication.
        rows = len(inputs["input_ids"])
        if self.held_out_labels_per_row:
            # The Trainer multiplies by the processes for DDP's mean over gradients; there is none here.
            # No tensor: FSDP would cast it to 16 bits.
            num_items_in_batch = rows * self.held_out_labels_per_row * self.accelerator.num_processes

        def measure(batch: Batch, part: slice) -> Any:
            self.heartbeat.enter("evaluation")  # a beat for each batch: only a single one can take too long
            selected = {key: value[part] for key, value in self._select_inputs(batch).items()}
            return self._model_loss(model, selected, return_outputs=True, n_items=num_items_in_batch)

        # A mean over rows is no sum over batches, and sharded weights need all ranks at once.
        if num_items_in_batch is None or self.micro_batcher is None:
            measured = measure(inputs, slice(rows))
            return measured if return_outputs else measured[0]
        total = outputs = None
        for source, batch in split_by_source(inputs):
            for loss, found in self.eval_batches.map(len(batch["input_ids"]), partial(measure, batch)):
                total, outputs = loss if total is None else total + loss, found
                if source is not None:
                    self._source_sums[source, 0] += float(loss * num_items_in_batch / self.accelerator.num_processes)
            if source is not None:
                self._source_sums[source, 1] += int(count_labels(batch).sum())
        return (total, outputs) if return_outputs else total

    def _attempt(
        self, model: nn.Module, micro_batches: Iterable[Batch], *, n_items: Any
    ) -> tuple[list[SourceLoss], Shortage | None]:
        """Return the losses of the micro-batches, and where memory ran out. No micro-batch sends gradients anywhere.

        The error, and what it refers to (the graph), are released when this returns.
        """
        losses: list[SourceLoss] = []
        for micro_batch in micro_batches:
            try:
                with self.accelerator.no_sync(model):
                    losses.append(self._run_micro_batch(model, micro_batch, n_items=n_items))
            except RuntimeError as error:
                if not self.replay or not ran_out_of_memory(error):
                    raise
                rows, tokens = len(micro_batch["input_ids"]), micro_batch["input_ids"].numel()
                return losses, Shortage(rows, tokens, self.heartbeat.phase, held_bytes(), said_of_memory(error))
        return losses, None

    def _accumulate(self, model: nn.Module, inputs: Batch, *, n_items: Any) -> Tensor:
        """Run a micro-batch that the Trainer accumulates. Ranks communicate in it: it cannot be run again."""
        step = self.state.global_step
        if step != self._accumulated_step:
            self._accumulated_step, self.last_windows, self.last_loss = step, [], 0.0
        self.last_windows.append(inputs)
        only_source = {"source": torch.tensor(0)} if len(self.source_names) == 1 else {}
        losses = [self._run_micro_batch(model, self._select_inputs(inputs) | only_source, n_items=n_items)]
        self.last_loss = self.last_loss + losses[0][1].detach()
        self._count_losses(losses, n_items)
        return losses[0][1]

    def _run_micro_batch(self, model: nn.Module, micro_batch: Batch, *, n_items: Any) -> SourceLoss:
        source = int(micro_batch["source"]) if "source" in micro_batch else None
        self.counts.padded_tokens += micro_batch["input_ids"].numel()
        self.heartbeat.enter("forward")
        inputs = on_device(self._select_inputs(micro_batch), self.args.device)
        return source, super().training_step(model, inputs, n_items)

    def _select_inputs(self, batch: Batch) -> Batch:
        dropped = "attention_mask" if self._drops_mask else None
        return {key: value for key, value in model_inputs(batch).items() if key != dropped}

    def _model_loss(self, model: nn.Module, inputs: Batch, *, return_outputs: bool, n_items: Any) -> Any:
        if "position_ids" in inputs and self._wants_one_row:
            # Packed rows one behind the other, int64 [1, rows * tokens]. No row's first token has a label, so that the
            # loss stays the same.
            inputs = {key: value.reshape(1, -1) for key, value in inputs.items()}
        if torch.is_tensor(n_items):  # the Trainer has divided it; FSDP casts floats to 16 bits
            n_items = n_items.round().long()
        # With a cache the attention of packed rows would leak from one into the next.
        inputs = {**inputs, "use_cache": False}
        if self.label_head is not None:
            inputs["shift_labels"] = self.label_head.narrow(inputs["labels"])
        try:
            loss = Trainer.compute_loss(self, model, inputs, return_outputs, n_items)
        finally:
            if self.label_head is not None:
                self.label_head.widen()
        if model.training:
            if self._check_loss is not None:
                self._check_loss(loss.detach())
            self.heartbeat.enter("backward")
        return loss

    def _count_losses(self, losses: list[SourceLoss], label_tokens: Any) -> None:
        # The Trainer has divided by the label tokens of all ranks, and multiplied by the processes for DDP's mean.
        if label_tokens is not None:
            processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            for source, loss in losses:
                loss_sum = loss.detach().double() * (label_tokens / processes)
                self.counts.add_loss(loss_sum)
                if source is not None:
                    self.counts.sources[source].add_loss(loss_sum)
