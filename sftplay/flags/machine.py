"""Flags of the verbs that look at a machine and at what it will do."""

from __future__ import annotations

from sftplay.flags import PATH, Flags, flag, processes, switch

FLAGS: dict[str, Flags] = {
    "plan": {
        "--gpus": flag("GPUs to plan for instead of these, such as 2xH200"),
        "--vram": flag("one GPU of so much memory, such as 24GiB"),
        "--nproc": flag("processes; else one per GPU", processes),
        "--compare": switch("all modes and strategies side by side"),
    },
    "setup-accelerate": {
        "--out": flag("the file to write", PATH, default="accelerate_configs/this_machine.yaml"),
        "--interactive": switch("let accelerate ask its own questions"),
    },
    "gpu-check": {
        "--fast": switch("leave out the measurements of memory and speed"),
        "--out": flag("the folder for gpu-check.json and gpu-check.md", PATH, default="outputs"),
        "--only": flag("only checks whose name contains one of these words, with commas", default=""),
    },
}
