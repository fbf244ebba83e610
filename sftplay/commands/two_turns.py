"""What `infer` and `infer-batch` do with a run that answers twice."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.runs.finished_run import load_renderer


def open_talk(cfg: RunConfig, folder: RunFolder, *, args: Namespace, sampling: Any) -> Any:
    """Episodes with the run's solver and guide, or with its base for both."""
    from sftplay.generate.generate import Generator
    from sftplay.tasks.score.finished import EpisodeTalk, open_cast

    tokenizer, renderer = load_renderer(cfg, folder)
    cast = open_cast(cfg, folder, untrained=args.base)
    generator = Generator(cast.model, tokenizer, renderer.end_token_ids, cfg.score.max_new_tokens, sampling)
    return EpisodeTalk(cfg, cast, renderer=renderer, generator=generator)


def open_row_player(cfg: RunConfig, folder: RunFolder, *, sampling: Any) -> tuple[Any, Any]:
    """What plays the rows of a file, and the renderer of their prompts."""
    from sftplay.tasks.score.finished import RowPlayer, open_cast

    _, renderer = load_renderer(cfg, folder)
    return RowPlayer(cfg, open_cast(cfg, folder), renderer=renderer, sampling=sampling), renderer
