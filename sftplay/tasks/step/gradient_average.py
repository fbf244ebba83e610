"""Averages gradients over the ranks, or adds them up, after all backward passes of a step.

DistributedDataParallel does the same within the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor


def average_gradients(model: Any, *, beside: Sequence[Any] = ()) -> None:
    """Replace every rank's gradients by their mean over the ranks; a missing gradient counts as zero.

    All ranks must call it with the same trainable weights. `model` is the DistributedDataParallel, and `beside` are
    weights that train outside of it. Gradients are sent in buckets of DDP's own size, which is also all the memory that
    sending takes. Those of weights in shards were averaged by the backward pass.
    """
    trained = [*(p for p in model.parameters() if p.requires_grad), *beside]
    weights = [weight for weight in trained if not isinstance(weight, DTensor)]
    _reduce(weights, model.bucket_bytes_cap, divisor=torch.distributed.get_world_size())


def add_gradients(model: Any) -> None:
    """The same with their sum in place of the mean, for losses that are divided by the rows of all ranks already."""
    _reduce([p for p in model.parameters() if p.requires_grad], model.bucket_bytes_cap, divisor=1)


def _reduce(weights: list[Any], cap_bytes: int, *, divisor: int) -> None:
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    for bucket in _buckets([weight.grad for weight in weights], cap_bytes):
        flat = _flatten_dense_tensors(bucket).div_(divisor)
        torch.distributed.all_reduce(flat)
        for gradient, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(mean)


def _buckets(gradients: list[Any], cap_bytes: int) -> Iterator[list[Tensor]]:
    """Successive gradients of one type, up to `cap_bytes` together; a larger one is alone."""
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
