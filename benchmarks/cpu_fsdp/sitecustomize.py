"""For benchmarks on CPUs only: lets accelerate shard a model by FSDP2 over gloo, which it does on accelerators only.

On PYTHONPATH it changes one answer of accelerate, that a launch of several processes on CPUs is none of MULTI_CPU, from
which alone accelerate does not go on to FSDP (accelerate 1.15, `PartialState._prepare_backend`). What runs is then the
kit's FSDP settings and torch's FSDP2; not an unmodified accelerate. In bf16 it also answers for the GPU that is asked.
"""

import os
import sys

if "sftplay.tasks.worker" in sys.orig_argv and os.environ.get("ACCELERATE_USE_FSDP") == "true":
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16":  # both ask a GPU whether it computes in bf16
        import transformers.training_args
        from accelerate import accelerator

        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        accelerator.is_bf16_available = lambda *_, **__: True
