"""The buffer in which TRL takes log-probabilities: no wider than the vocabulary, on a CPU of learned tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from trl.kernels import chunked_logprob
from trl.trainer import utils

from sftplay import log
from sftplay.machine.compiler import compiler_remedy, find_compiler_problem


@contextmanager
def fitted_tiles(vocab: int) -> Iterator[None]:
    """Meanwhile TRL's forward passes take a buffer of so many columns for each token, where that is fewer than 32768.

    Columns beyond the vocabulary are never used, but they take memory. On a CPU they are huge pages, which the kernel
    fills with zeros each time. And on a CPU TRL computes the scores of prompts and padding, too, to throw them away: it
    leaves them out on GPUs alone, for the sake of devices that would compile each shape anew (trl 1.16,
    `_fused_forward`). The numbers are the same; gradients are to the last bits of rounding.
    """
    width, real = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton

    def leaves_out(device: torch.device) -> bool:
        return device.type == "cpu" or bool(real(device))

    utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton = min(width, vocab), leaves_out
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton = width, real


def avoid_triton() -> None:
    """Where Triton cannot build kernels for this process's GPU, let TRL compute its tiles by torch from now on.

    The choice is made anew in every pass (trl 1.16, kernels/chunked_logprob.py, `_use_triton`), also backwards.
    """
    if torch.cuda.is_available() and (problem := find_compiler_problem()):
        chunked_logprob._use_triton = lambda device: False
        log.say(
            f"{problem}: log-probabilities are computed by torch, not by TRL's Triton kernels ({compiler_remedy()})"
        )
