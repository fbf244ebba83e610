"""Each source's rows become a store of tokens, once; a later run with the same rows and settings uses it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sftplay.config.data import DataConfig, SourceType, held_out_share
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.digests import expect_unchanged, kept_digest
from sftplay.data.layouts import select_data_config
from sftplay.data.mixture.store import Index, StoreWriter
from sftplay.data.pipeline import DEFAULT_SPLIT, describe_rows, sample_records
from sftplay.data.render.render import Recipe, Renderer
from sftplay.data.render.templates import resolve_template
from sftplay.data.tokenize import Input, Preparation

STORE_VERSION = 1  # to be raised when the same tokens lie in a store in another way; older stores are then not used


@dataclass(frozen=True)
class SourceJob:
    """Everything that makes a source's store."""

    data: DataConfig  # the settings by which the rows of this source are read and judged
    recipe: Recipe
    max_tokens: int | None  # of a chat; None for documents, which are kept whole
    inputs: tuple[Input, ...]
    guarded: tuple[str, ...]  # files with rows that must not be trained on
    digests: dict[str, str]  # of all files it reads
    id_bytes: int
    only_held_out: bool  # rows to train on are left out, because the source has weight 0

    @cached_property
    def folder(self) -> Path:
        """Folder of the store: its name changes with everything that can change a token of it."""
        parts = describe_rows(self.data, self.inputs, guarded=self.guarded, digests=self.digests, recipe=self.recipe)
        parts["code"].insert(1, STORE_VERSION)
        parts |= {"max_tokens": self.max_tokens, "only_held_out": self.only_held_out}
        return Path(self.data.processed_dir) / fingerprint(parts)

    def ensure(self) -> Path:
        """Return the folder of the store, whole; a store that a killed process has left is completed.

        Raise DataError for the same reasons as `Preparation.run`, or where a file has changed meanwhile.
        """
        has_chats, max_tokens = self.max_tokens is not None, self.max_tokens
        index = Index(id_bytes=self.id_bytes, has_mask=has_chats)

        def write_store(folder: Path) -> None:
            with StoreWriter(folder, index) as files:
                renderer, only_held_out = Renderer.from_recipe(self.recipe), self.only_held_out
                preparation = Preparation(
                    self.data, renderer, max_tokens=max_tokens, only_held_out=only_held_out, only_chats=has_chats
                )
                preparation.run(self.inputs, files, guarded=self.guarded)
                expect_unchanged(self.digests, self.data.processed_dir)

        return ensure_folder(self.folder, write_store, resumes=True)


def prove_renderers(cfg: RunConfig, tokenizer: Any, *, template: str | None) -> dict[SourceType, Renderer]:
    """Return the renderer of documents, and that of chats if there are any. `template` goes before `data.template`.
    Raise DataError where the template cannot be proven for the chats.
    """
    renderers: dict[SourceType, Renderer] = {"cpt": Renderer.prove(tokenizer, None, samples=[])}
    paths = [source.path for source in cfg.sources if source.type == "chat"]
    if paths:
        data = select_data_config(cfg, "chat")
        samples = [record for path in paths for record in sample_records(data, path)]
        chosen = template if template is not None else resolve_template(cfg.data.template, tokenizer)
        renderers["chat"] = Renderer.prove(tokenizer, chosen, samples=samples)
    return renderers


def list_source_jobs(cfg: RunConfig, tokenizer: Any, *, renderers: Mapping[SourceType, Renderer]) -> list[SourceJob]:
    """List the job of each source, in order. Raises DataError: a file cannot be read."""
    rows = [path for source in cfg.sources for path in (source.path, source.val_path)]
    digests = {path: kept_digest(path, cfg.data.processed_dir) for path in (*rows, cfg.data.test_path) if path}
    id_bytes = 2 if max(tokenizer.get_vocab().values()) < 1 << 16 else 4
    jobs = []
    for source in cfg.sources:
        share = held_out_share(cfg, source)
        inputs: tuple[Input, ...] = (Input(source.path, DEFAULT_SPLIT if share is None else share),)
        if source.val_path:
            inputs = Input(source.path, 0.0), Input(source.val_path, 1.0)
        # Test rows, and held-out rows of other sources of the type, must not be trained on here either.
        foreign = [cfg.data.test_path, *(other.val_path for other in cfg.sources if other.type == source.type)]
        guarded = tuple(dict.fromkeys(path for path in foreign if path and path != source.val_path))
        jobs.append(
            SourceJob(
                data=select_data_config(cfg, source.type),
                recipe=renderers[source.type].recipe(),
                max_tokens=cfg.row_tokens if source.type == "chat" else None,
                inputs=inputs,
                guarded=guarded,
                digests={path: digests[path] for path in (*(given.path for given in inputs), *guarded)},
                id_bytes=id_bytes,
                only_held_out=source.weight == 0,
            )
        )
    return jobs
