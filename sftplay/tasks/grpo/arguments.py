"""Convert the section `grpo` to arguments of TRL's GRPOConfig, without importing torch or TRL.

It imports transformers only for `grpo.generation: continuous`.
"""

from __future__ import annotations

import os
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.launch.generation_server import DEFAULT_URL, URL
from sftplay.machine.libraries import page_argument
from sftplay.machine.ports import free_port

SAME_NAMES = (
    "num_generations", "max_completion_length", "num_iterations", "loss_type", "importance_sampling_level", "epsilon",
    "epsilon_high", "delta", "beta", "scale_rewards", "mask_truncated_completions", "top_entropy_quantile",
    "entropy_coef", "off_policy_mask_threshold", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
)  # fmt: skip
"""Keys that TRL calls as the kit does."""

PAGE_TOKENS = 32  # tokens per page of the cache


def grpo_arguments(cfg: RunConfig) -> dict[str, Any]:
    """Return the arguments of GRPOConfig for task grpo; no value of `cfg` is `auto`.

    They override `RunSetup.arguments`. The Trainer accumulates micro-batches itself. It neither evaluates nor looks for
    the best weights, because its evaluation would sample completions without the kit's order and rewards.
    """
    grpo, train = cfg.grpo, cfg.train
    return {
        "per_device_train_batch_size": int(train.batch_size),
        "gradient_accumulation_steps": int(train.grad_accum),
        "steps_per_generation": grpo.steps_per_generation * int(train.grad_accum),
        "eval_strategy": "no",
        "eval_steps": None,
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "greater_is_better": None,
        "shuffle_dataset": False,
        "multi_objective_aggregation": grpo.aggregation,
        **{name: getattr(grpo, name) for name in SAME_NAMES},
        **_generation_arguments(cfg),
        **grpo.extra,
    }


def _generation_arguments(cfg: RunConfig) -> dict[str, Any]:
    kind, vllm = cfg.grpo.generation, cfg.grpo.vllm
    if kind == "vllm_colocate":
        return {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": vllm.memory_share,
            "vllm_enable_sleep_mode": vllm.sleep,
            "vllm_tensor_parallel_size": vllm.tensor_parallel,
            "vllm_max_model_length": cfg.prompt_tokens + cfg.grpo.max_completion_length,
        }
    if kind == "vllm_server":
        url = vllm.url or os.environ.get(URL)
        server = {"vllm_server_base_url": url or DEFAULT_URL, "vllm_server_timeout": float(vllm.timeout)}
        # Two runs on one node would collide on TRL's default port for weights.
        ports = {} if vllm.url or not url else {"vllm_group_port": free_port(0)}
        return {"use_vllm": True, "vllm_mode": "server", **server, **ports}
    arguments = {"use_vllm": False, "use_transformers_continuous_batching": kind == "continuous"}
    if kind != "continuous":
        return arguments
    # Pages for all completions of a process at full length; TRL would take half of the free memory.
    pages = -(-(cfg.prompt_tokens + cfg.grpo.max_completion_length) // PAGE_TOKENS)
    cache = {page_argument(): PAGE_TOKENS, "num_blocks": pages * int(cfg.grpo.generation_rows or 1) + 1}
    return {**arguments, "transformers_continuous_batching_config": cache}
