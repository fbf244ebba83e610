"""Private names of TRL that the kit uses, each with a release that has it: why its range in pyproject.toml ends."""

from __future__ import annotations

TRAINER = "trl.trainer.grpo_trainer"
UTILITIES = "trl.trainer.utils"

PRIVATE_NAMES = {
    "_CHUNKED_LOGPROB_CHUNK_SIZE": (UTILITIES, "1.16"),
    "_use_triton": (UTILITIES, "1.16"),
    "_buffered_inputs": (TRAINER, "1.16"),
    "_calculate_rewards": (TRAINER, "1.16"),
    "_dist": (TRAINER, "1.16"),
    "_entropy_bonus_enabled": (TRAINER, "1.16"),
    "_generate": (TRAINER, "1.16"),
    "_generate_and_score_completions": (TRAINER, "1.16"),
    "_generate_single_turn": (TRAINER, "1.16"),
    "_get_per_token_logps_and_entropies": (TRAINER, "1.16"),
    "_logs": (TRAINER, "1.16"),
    "_metrics": (TRAINER, "1.16"),
    "_step": (TRAINER, "1.16"),
    "_tokenize_prompts": (TRAINER, "1.16"),
}
"""Name -> the module that has it, and the release in which it was read. Task grpo alone uses them."""
