"""Reinforcement learning from rewards (GRPO): the model samples completions and learns from their rewards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import prepare_prompts, prompts_table
from sftplay.environments.processes import EnvironmentSpec, describe_tools
from sftplay.environments.rollouts import Rollouts, prove_dialogue
from sftplay.evaluate.evaluate import evenly_spaced
from sftplay.evaluate.rewarded import evaluate_prompts
from sftplay.launch.generation_server import DEFAULT_URL, URL
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import free_port
from sftplay.machine.releases import page_argument
from sftplay.model.tokenizer import shipped_end_ids
from sftplay.tasks.grpo.sampling import PromptRows, SamplingMixin, find_run_order
from sftplay.tasks.grpo.scoring import KeepDraws, RewardScorer
from sftplay.tasks.grpo.variants import variant_arguments
from sftplay.tasks.grpo.vllm_weights import send_to_vllm, vllm_chosen
from sftplay.tasks.grpo.watch import EvaluatePrompts, SignalHealth, WatchBaseWeights
from sftplay.train.checkpointing import describe_renderer
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.upstream import avoid_triton, on_one_gpu

SAME_NAMES = (
    "num_generations", "max_completion_length", "num_iterations", "loss_type", "importance_sampling_level", "epsilon",
    "epsilon_high", "delta", "beta", "scale_rewards", "mask_truncated_completions", "top_entropy_quantile",
    "entropy_coef", "off_policy_mask_threshold", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
)  # fmt: skip
"""Keys that TRL calls as the kit does."""

SENT = "sent_to_vllm"  # in the run's folder: the adapter, where a server reads it from files
PAGE_TOKENS = 32  # tokens per page of the cache


def grpo_arguments(cfg: RunConfig) -> dict[str, Any]:
    """Return the arguments of GRPOConfig, which override `RunSetup.arguments`; no value of `cfg` is `auto`.

    The Trainer does not evaluate: it would sample completions without the kit's order and rewards.
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
        **variant_arguments(cfg),
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


class PromptTrainer(SamplingMixin, GRPOTrainer):
    """TRL's trainer with the kit's prompts and rewards."""

    def train(self, *given: Any, **named: Any) -> Any:
        """Train, and end a vLLM in this process, which would otherwise fail behind the end of the process group."""
        try:
            return super().train(*given, **named)
        finally:
            if self.use_vllm and self.cfg.grpo.generation == "vllm_colocate":
                self.vllm_generation.llm.llm_engine.engine_core.shutdown()


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Load the prompts in `cfg.data`, and set the tokenizer's chat template. Raise DataError where none is left, or the
    template is refused for turns: before a model is opened."""
    spec = EnvironmentSpec.from_config(cfg)
    prompts = prepare_prompts(cfg, tokenizer, called="prompts", tools=describe_tools(spec))
    if spec is not None:
        prove_dialogue(cfg, prompts)
    order, known = find_run_order(cfg, prompts)
    return Rows(
        train=PromptRows(prompts.train, order),
        held_out=PromptRows(prompts.held_out) if len(prompts.held_out) else None,
        report=prompts.report,
        recipe=describe_renderer(prompts.renderer),
        source=prompts,
        order=known,
        trainer_evaluates=False,
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    log.show(prompts_table(rows.report))


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Answer the held-out prompts greedily, and score the answers by the rewards of the run."""
    evaluate_prompts(model, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> PromptTrainer:
    """Build the trainer that samples completions of the prompts in training order."""
    avoid_triton()
    cfg, scorer = parts.cfg, RewardScorer(parts.cfg, parts.rows.report["columns"])
    # Completions also end with the chat template's end tokens. TRL reads them from the model's generation config.
    ends = sorted({*parts.rows.source.renderer.end_token_ids, *shipped_end_ids(parts.model.generation_config)})
    parts.model.generation_config.eos_token_id = ends
    asks = getattr(parts.model.config.get_text_config(), "output_router_logits", False)
    # As in task sft: TRL would have every mixture of experts add a loss of its router, a mean of each micro-batch.
    arguments = {"router_aux_loss_coef": None if asks else 0.0, **parts.arguments, **grpo_arguments(cfg)}
    if cfg.grpo.generation.startswith("vllm"):  # vLLM reads its own copy of the model's generation config
        arguments["generation_kwargs"] = {"stop_token_ids": ends, **(arguments.get("generation_kwargs") or {})}
    rollouts = Rollouts.open(cfg, parts.rows.source, end_ids=ends)
    config = GRPOConfig(**arguments, reward_weights=list(scorer.training_weights.values()))
    frozen = [WatchBaseWeights(parts.folder)] if cfg.tuning.mode != "full" else []
    config = on_one_gpu(config)
    with vllm_chosen(cfg, parts.model, config):
        trainer = PromptTrainer(
            parts.step,
            cfg=cfg,
            run_folder=parts.folder.path,
            scorer=scorer,
            rollouts=rollouts,
            questions=parts.rows.source.train,
            model=parts.model,
            processing_class=parts.tokenizer,
            args=config,
            # TRL takes only a `datasets.Dataset`, which does not keep columns of any type.
            train_dataset=Dataset.from_dict({"prompt": [""]}),
            # The watch is first, so that a step with a changed base leaves no complete checkpoint.
            callbacks=[*frozen, *parts.callbacks, SignalHealth(cfg), KeepDraws()],
        )
    trainer.train_dataset = parts.train
    if trainer.use_vllm:
        send_to_vllm(trainer, cfg, parts.folder.path / SENT)
    if parts.rows.held_out is not None:
        assert parts.rows.order is not None
        evaluation = EvaluatePrompts(
            cfg,
            evenly_spaced(parts.rows.source.held_out, cfg.eval.limit),
            scorer=scorer,
            folder=parts.folder.eval,
            every=cfg.train.eval_steps or parts.rows.order.steps_per_epoch,
            prompt_version=parts.rows.source.renderer.template_hash,
        )
        trainer.add_callback(evaluation)
    return trainer
