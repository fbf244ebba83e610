"""Chat and row sampling for `infer` and `infer-batch` with a run of two-turn episodes."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.runs.finished_run import load_renderer


def open_chat(cfg: RunConfig, folder: RunFolder, *, args: Namespace, sampling: Any) -> Any:
    """Open a chat with the run's solver and guide, or with the base model for both."""
    from sftplay.generate.generate import Generator

    finished = cfg.task.finished
    tokenizer, renderer = load_renderer(cfg, folder)
    role_models = finished.open_role_models(cfg, folder, untrained=args.base)
    generator = Generator(role_models.model, tokenizer, renderer.end_token_ids, cfg.score.max_new_tokens, sampling)
    return finished.EpisodeChat(cfg, role_models, renderer=renderer, generator=generator)


def open_row_sampler(cfg: RunConfig, folder: RunFolder, *, sampling: Any) -> tuple[Any, Any]:
    """Open the episode sampler for the rows of a file, and the renderer of their prompts."""
    finished = cfg.task.finished
    _, renderer = load_renderer(cfg, folder)
    role_models = finished.open_role_models(cfg, folder)
    return finished.RowEpisodeSampler(cfg, role_models, renderer=renderer, sampling=sampling), renderer
