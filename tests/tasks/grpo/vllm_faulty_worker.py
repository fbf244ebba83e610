"""Faults inside a vLLM server: methods of its workers, by `--worker-extension-cls` and POST /collective_rpc."""

from __future__ import annotations

from typing import Any

from torch import nn

from sftplay.tasks.grpo import vllm_cpu

FINISH = vllm_cpu.finish_reload


class FaultyWorker:
    """vLLM adds its methods to those of the worker."""

    model_runner: Any

    def keep_the_head(self) -> None:
        """From now on leave the packed head as it is when weights come, as vLLM itself does on a CPU."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        vllm_cpu.finish_reload = finalize_layerwise_reload

    def pack_the_head(self) -> None:
        """Undo `keep_the_head`; the next weights mend the head."""
        vllm_cpu.finish_reload = FINISH

    def drop_out(self) -> None:
        """From now on compute with dropout, which vLLM has not."""
        for module in self.model_runner.model.modules():
            if type(module).__name__.endswith("MLP"):
                module.register_forward_hook(lambda _, given, found: nn.functional.dropout(found, 0.1))
