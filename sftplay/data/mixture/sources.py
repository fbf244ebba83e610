"""Each source's rows become a store of tokens, once; a later run with the same rows and settings uses it again."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sftplay.config.data import DataConfig, DatasetConfig, held_out_share
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.layouts.source_types import select_data_config
from sftplay.data.mixture.store import Index
from sftplay.data.mixture.store_writer import StoreWriter
from sftplay.data.pipeline import CODE_VERSION, DEFAULT_SPLIT, READERS, expect_unchanged, sample_records
from sftplay.data.read.digests import kept_digest
from sftplay.data.render.render import Recipe, Renderer
from sftplay.data.render.templates import resolve_template
from sftplay.data.tokenize.one_pass import Input, Preparation

STORE_VERSION = 1
"""To be raised when the same tokens lie in a store in another way; older stores are then not used."""

SMALL_VOCABULARY = 1 << 16
"""Ids below this take two bytes."""


@dataclass(frozen=True)
class SourceJob:
    """Everything that makes a source's store; it can be pickled, and needs no transformers."""

    data: DataConfig
    """The settings by which the rows of this source are read and judged."""

    recipe: Recipe
    max_tokens: int | None
    """Of a chat; None for documents, which are kept whole."""

    inputs: tuple[Input, ...]
    guarded: tuple[str, ...]
    """Files with rows that must not be trained on."""

    digests: dict[str, str]
    """Of all files it reads."""

    id_bytes: int
    only_held_out: bool
    """Rows to train on are left out, because the source has weight 0."""

    @property
    def has_chats(self) -> bool:
        """True if the rows are chats."""
        return self.max_tokens is not None

    @property
    def folder(self) -> Path:
        """Folder of the store: its name changes with everything that can change a token of it."""
        data = self.data
        parts: dict[str, Any] = {
            "code": [CODE_VERSION, STORE_VERSION, platform.python_version(), *map(version, READERS)],
            "files": [[given.path, self.digests[given.path], given.share] for given in self.inputs],
            "guarded": [[path, self.digests[path]] for path in self.guarded],
            "renderer": asdict(self.recipe),
            "max_tokens": self.max_tokens,
            "reading": [data.format, data.columns, data.system, data.encoding, data.delimiter],
            "policies": [data.on_bad_row, data.too_long, data.duplicates, data.contamination],
            "only_held_out": self.only_held_out,
        }
        return Path(data.processed_dir) / fingerprint(parts)

    def _fill(self, files: StoreWriter) -> None:
        renderer = Renderer.from_recipe(self.recipe)
        preparation = Preparation(
            self.data,
            renderer,
            max_tokens=self.max_tokens,
            only_held_out=self.only_held_out,
            only_chats=self.has_chats,
        )
        preparation.run(self.inputs, files, guarded=self.guarded)
        expect_unchanged(self.digests)

    def ensure(self, *, is_streamed: bool = False) -> Path:
        """Return the folder of the store, whole; a store that a killed process has left is completed.

        With `is_streamed` a bad row ends the pass at once, because others read the store already.

        Raises:
            DataError: as `Preparation.run`; or a file has changed meanwhile.
        """
        held_out_first = all(given.share in (0.0, 1.0) for given in self.inputs)
        index = Index(id_bytes=self.id_bytes, has_mask=self.has_chats)

        def write_store(folder: Path) -> None:
            with StoreWriter(folder, index, held_out_first=held_out_first, is_streamed=is_streamed) as files:
                self._fill(files)

        return ensure_folder(self.folder, write_store, resumes=True)


@dataclass(frozen=True)
class Renderers:
    """The renderer of documents, and that of chats; None where there are none."""

    texts: Renderer
    chats: Renderer | None

    @classmethod
    def prove(cls, cfg: RunConfig, tokenizer: Any, *, template: str | None) -> Renderers:
        """The renderers for the sources of `cfg`. `template` goes before `data.template`.

        Raises:
            DataError: the template cannot be proven for the chats.
        """
        texts, chats = Renderer.prove(tokenizer, None, samples=[]), None
        paths = [source.path for source in cfg.sources if source.type == "chat"]
        if paths:
            data = select_data_config(cfg, "chat")
            samples = [record for path in paths for record in sample_records(data, path)]
            chosen = template if template is not None else resolve_template(cfg.data.template, tokenizer)
            chats = Renderer.prove(tokenizer, chosen, samples=samples)
        return cls(texts, chats)


def list_source_jobs(cfg: RunConfig, tokenizer: Any, *, renderers: Renderers) -> list[SourceJob]:
    """List the job of each source, in order.

    Raises:
        DataError: a file cannot be read.
    """
    files = [path for source in cfg.sources for path in _paths(source)]
    files += [cfg.data.test_path] if cfg.data.test_path else []
    digests = {path: kept_digest(path, Path(cfg.data.processed_dir)) for path in files}
    id_bytes = 2 if max(tokenizer.get_vocab().values()) < SMALL_VOCABULARY else 4
    jobs = []
    for source in cfg.sources:
        renderer = renderers.chats if source.type == "chat" else renderers.texts
        assert renderer is not None
        inputs, guarded = _inputs(cfg, source), _guarded(cfg, source)
        jobs.append(
            SourceJob(
                data=select_data_config(cfg, source.type),
                recipe=renderer.recipe(),
                max_tokens=cfg.row_tokens if source.type == "chat" else None,
                inputs=inputs,
                guarded=guarded,
                digests={path: digests[path] for path in (*(given.path for given in inputs), *guarded)},
                id_bytes=id_bytes,
                only_held_out=source.weight == 0,
            )
        )
    return jobs


def _paths(source: DatasetConfig) -> list[str]:
    return [source.path, *([source.val_path] if source.val_path else [])]


def _inputs(cfg: RunConfig, source: DatasetConfig) -> tuple[Input, ...]:
    if source.val_path:
        return Input(source.path, 0.0), Input(source.val_path, 1.0)
    share = held_out_share(cfg, source)
    return (Input(source.path, DEFAULT_SPLIT if share is None else share),)


def _guarded(cfg: RunConfig, source: DatasetConfig) -> tuple[str, ...]:
    """The test rows, and held-out rows of other sources of the type: they must not be trained on here either."""
    others = [other for other in cfg.sources if other.type == source.type]
    found = [cfg.data.test_path, *(other.val_path for other in others)]
    return tuple(dict.fromkeys(path for path in found if path and path != source.val_path))
