"""What decides how a trainer computes its steps, handed to it when it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from sftplay.heartbeat import Heartbeat
from sftplay.tasks.step.micro_batches import MicroBatcher
from sftplay.tasks.step.replay import Replay


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """How a trainer computes its steps."""

    micro_batcher: MicroBatcher | None
    """How windows are cut; None: the Trainer accumulates."""

    loss_head: str
    """train.loss_head, decided."""

    replay: Replay | None = None
    """What happens when memory runs out for a window; None: the run ends."""

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    check_loss: Callable[[Tensor], None] | None = None
    """Called with each loss before its backward pass, where that is the last moment to stop (DeepSpeed)."""

    source_names: tuple[str, ...] = ()
    """Names of a mixture's sources, in the order of their numbers."""
