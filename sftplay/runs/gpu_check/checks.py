"""The table of all checks of `make gpu-check`, in the order in which they run."""

from __future__ import annotations

from sftplay.runs.gpu_check import delivery, facts, memory, recovery, runs, several_processes, speed

CHECKS = (
    *facts.CHECKS,
    *runs.CHECKS,
    *recovery.CHECKS,
    *delivery.CHECKS,
    *several_processes.CHECKS,
    *memory.CHECKS,
    *speed.CHECKS,
)
