"""Private names of TRL, transformers and DeepSpeed: one function for each use, with the release in which it was read.

They are why the ranges in pyproject.toml end. What classes of the kit override by inheritance stays with these classes.
Of TRL 1.16 (`trl/trainer/grpo_trainer.py`): `_calculate_rewards`, `_generate`, `_generate_and_score_completions`,
`_generate_single_turn`, `_get_per_token_logps_and_entropies`, `_tokenize_prompts`. Of transformers 5.17 (`trainer.py`):
`_clip_grad_norm`, `_prepare_inputs`, `_save_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from sftplay import log
from sftplay.machine.probe import compiler_remedy, find_compiler_problem


def fitted_tiles(vocab: int) -> AbstractContextManager[None]:
    """Inside, TRL's forward passes take a buffer of `vocab` columns for each token, where that is fewer than 32768, and
    on a CPU no logits of prompts and padding. Values are the same, gradients are so up to rounding (trl 1.16,
    trainer/utils.py, `_fused_forward`)."""
    from trl.trainer import utils

    given, width = utils._use_triton, min(utils._CHUNKED_LOGPROB_CHUNK_SIZE, vocab)
    return replaced_attributes(
        utils, _CHUNKED_LOGPROB_CHUNK_SIZE=width, _use_triton=lambda device: device.type == "cpu" or bool(given(device))
    )


def avoid_triton() -> None:
    """Let TRL compute its tiles by torch from now on, where Triton cannot build kernels for this process's GPU (trl
    1.16, kernels/chunked_logprob.py, `_use_triton`).
    """
    import torch
    from trl.kernels import chunked_logprob

    if torch.cuda.is_available() and (problem := find_compiler_problem()):
        chunked_logprob._use_triton = lambda device: False
        log.say(
            f"{problem}: log-probabilities are computed by torch, not by TRL's Triton kernels ({compiler_remedy()})"
        )


def skip_inference_operator() -> None:
    """Let DeepSpeed start on CPUs without compiling its all-reduce for inference (deepspeed 0.19, comm/torch.py)."""
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None


def read_micro_batches(trainer: Any) -> list[dict[str, Any]] | None:
    """Return the micro-batches of the rollout batch that a GRPOTrainer trains on (trl 1.16, `_prepare_inputs`)."""
    return trainer._buffered_inputs


def replace_micro_batches(trainer: Any, micro_batches: list[dict[str, Any]]) -> None:
    """Let a GRPOTrainer train on these micro-batches until it samples again (trl 1.16, `_prepare_inputs`)."""
    trainer._buffered_inputs = micro_batches


def count_micro_steps(trainer: Any) -> int:
    """Return the forward and backward passes of a GRPOTrainer so far (trl 1.16, `_prepare_inputs`)."""
    return int(trainer._step)


def restore_micro_steps(trainer: Any, passes: int) -> None:
    """Continue the count of a GRPOTrainer, which its checkpoints do not hold (trl 1.16, `_prepare_inputs`)."""
    trainer._step = passes


def read_completion_figures(trainer: Any) -> dict[str, float | None]:
    """Return length and truncation of the completions sampled last (trl 1.16, `_generate_and_score_completions`)."""
    metrics = trainer._metrics["train"]
    return {
        "clipped_ratio": metrics["completions/clipped_ratio"][-1],
        "completion_tokens": metrics["completions/mean_length"][-1],
    }


def read_last_advantages(trainer: Any, rows: int) -> list[float]:
    """Return the advantages of so many completions of all ranks (trl 1.16, `_generate_and_score_completions`)."""
    return list(trainer._logs["advantages"])[-rows:]


def has_entropy_bonus(trainer: Any) -> bool:
    """Return whether the loss has an entropy bonus (trl 1.16, GRPOTrainer.__init__)."""
    return bool(trainer._entropy_bonus_enabled)


def is_engine_fsdp(generation: Any) -> bool:
    """Return whether FSDP shards the model that a `VLLMGeneration` sends (trl 1.16, generation/vllm_generation.py)."""
    return bool(generation._dist.is_fsdp)


def logit_scales(model: Any) -> list[str]:
    """Return the settings by which a causal model changes the products of its head (trl 1.16, trainer/utils.py,
    `_add_fused_lm_head`)."""
    names = ("final_logit_softcapping", "logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")
    config = model.config.get_text_config()
    return [name for name in names if getattr(config, name, None) not in (None, 1, 1.0)]


def replace_sent_weights(generation: Any, read: Callable[[], Iterable[tuple[str, Any]]]) -> None:
    """Let a `VLLMGeneration` send the weights of `read` (trl 1.16, generation/vllm_generation.py)."""
    generation._iter_named_params = read


def read_sent_weights(generation: Any) -> Iterable[tuple[str, Any]]:
    """Return the weights that a `VLLMGeneration` sends, by name (trl 1.16, generation/vllm_generation.py)."""
    return generation._iter_named_params()


def replace_sync(generation: Any, sync: Callable[[], None]) -> None:
    """Let a `VLLMGeneration` bring vLLM the newest weights by `sync` (trl 1.16, generation/vllm_generation.py)."""
    generation.sync_weights = sync


@contextmanager
def replaced_attributes(target: Any, **values: Any) -> Iterator[None]:
    """Inside, the attributes have these values; afterwards they have their former ones."""
    before = {name: getattr(target, name) for name in values}
    vars(target).update(values)
    try:
        yield
    finally:
        vars(target).update(before)


def vllm_replaced(**names: Any) -> AbstractContextManager[None]:
    """Inside, a new `VLLMGeneration` takes these for `VLLMClient`, `LLM` (trl 1.16, generation/vllm_generation.py)."""
    if not names:
        return nullcontext()
    from trl.generation import vllm_generation

    return replaced_attributes(vllm_generation, **names)


@contextmanager
def last_logits_processor(model: Any, make: Callable[[], Callable[..., Any]]) -> Iterator[None]:
    """Inside, `model.generate` ends its logits processors with one of `make`; TRL passes none to it.

    Source: transformers 5.17, generation/utils.py, `_get_logits_processor`.
    """
    processors = model._get_logits_processor

    def with_last(*given: Any, **named: Any) -> Any:
        chosen = processors(*given, **named)
        chosen.append(make())
        return chosen

    model._get_logits_processor = with_last
    try:
        yield
    finally:
        del model._get_logits_processor


def tuned_for_decoding(model: Any) -> Any:
    """Return the context in which `generate` reads single tokens: experts are computed by another kernel (transformers
    5.17, generation/utils.py, `_optimize_model_for_decode`)."""
    return model._optimize_model_for_decode()


def read_padding(config: Any) -> Any:
    """Return the tensor of the token that `generate` writes after a row's end (transformers 5.17, generation/utils.py,
    `_prepare_special_tokens`)."""
    return config._pad_token_tensor


def gather_zero3_weights(trainer: Any, *, leaves_out_frozen: bool) -> dict[str, Any] | None:
    """Gather a model that ZeRO-3 shards in 16 bits; only the main rank gets it (deepspeed 0.19, runtime/engine.py)."""
    return trainer.deepspeed._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=leaves_out_frozen)


def find_attention(model: Any) -> str:
    """Return the name of the attention of a causal model (transformers 5.17, configuration_utils.py)."""
    return str(getattr(model.config.get_text_config(), "_attn_implementation", ""))


@contextmanager
def attention_for_host(model: Any) -> Iterator[None]:
    """Inside, a model in the host's memory, which will be split over GPUs, attends without flash attention
    (transformers 5.17, configuration_utils.py)."""
    config, attention = model.config.get_text_config(), find_attention(model)
    waits = "flash" in attention and model.get_input_embeddings().weight.device.type == "cpu"
    if waits:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        if waits:
            config._attn_implementation = attention


def on_one_gpu(arguments: Any) -> Any:
    """Return the training arguments for one GPU a process, however many it sees: the Trainer would copy the model to
    each (transformers 5.17, training_args.py, `n_gpu`)."""
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments
