"""Each source's rows become a store of tokens, once; a later run with the same rows and settings uses it again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sftplay.atomic import read_object, write_text
from sftplay.config.data import DataConfig, SourceType, held_out_share
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.files import list_files
from sftplay.data.layouts import select_data_config
from sftplay.data.mixture.store import Index, StoreWriter
from sftplay.data.pipeline import DEFAULT_SPLIT, describe_rows, expect_unchanged, sample_records
from sftplay.data.read import content_digest, is_hub_name
from sftplay.data.render.render import Recipe, Renderer
from sftplay.data.render.templates import resolve_template
from sftplay.data.tokenize import Input, Preparation

FOLDER = "digests"
WORTH_BYTES = 1 << 24  # smaller files are hashed at once
GRAIN_NS = 2_000_000_000
"""Two changes within the clock's grain leave one stamp. A file that was changed so shortly before is hashed again."""


def kept_digest(path: str, folder: Path) -> str:
    """As `content_digest`; the digest of a large file or folder is kept below `folder` while no file's stamp changes.
    Raise DataError where a file cannot be read.
    """
    if is_hub_name(path):
        return content_digest(path)
    stamps = _read_stamps(path)
    if sum(stamp[1] for stamp in stamps) < WORTH_BYTES:
        return content_digest(path)
    note = folder / FOLDER / f"{fingerprint({'path': str(Path(path).absolute())})}.json"
    known = read_object(note)
    if known.get("stamps") == stamps:
        return str(known["digest"])
    began = time.time_ns()
    digest = content_digest(path)
    if max(stamp[4] for stamp in stamps) < began - GRAIN_NS and _read_stamps(path) == stamps:
        with suppress(OSError):
            write_text(note, json.dumps({"path": path, "stamps": stamps, "digest": digest}))
    return digest


def _read_stamps(path: str) -> list[list[Any]]:
    """Name, size, inode, and the times in ns of the last change of content, and of anything: no program sets that."""
    found = [(str(file), file.stat()) for file in list_files(path)]
    return [[name, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns] for name, stat in found]


STORE_VERSION = 1  # to be raised when the same tokens lie in a store in another way; older stores are then not used


@dataclass(frozen=True)
class SourceJob:
    """Everything that makes a source's store; it can be pickled, and needs no transformers."""

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
                expect_unchanged(self.digests)

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
    digests = {path: kept_digest(path, Path(cfg.data.processed_dir)) for path in (*rows, cfg.data.test_path) if path}
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
