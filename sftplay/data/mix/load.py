"""Config and tokenizer -> the rows of a mixture, from memory-mapped stores, and the report that counts each token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.encode.render import Renderer
from sftplay.data.mix.mixture import BlockForm, Document, MixSource, Mixture, SourceRows
from sftplay.data.mix.report import mixture_report
from sftplay.data.mix.sources import Renderers, jobs_of
from sftplay.data.mix.store import Store
from sftplay.data.prepare.policies import Side
from sftplay.data.records import Chat, chat_from_json
from sftplay.errors import DataError


@dataclass(frozen=True)
class MixtureRows:
    """Everything a run needs of its sources."""

    train: Mixture
    held_out: dict[str, SourceRows]
    """Rows of each source that holds some out, in the order of the config; long documents continue over rows."""

    sources: list[MixSource]
    """All of them, in the order of the config."""

    renderer: Renderer
    """What rendered the chats; or the documents, where there are no chats."""

    steps: int
    """Optimizer steps of the run: `train` has that many effective batches of rows."""

    steps_per_epoch: int | None
    """None where nobody knows yet how long the sources are."""

    fingerprint: str
    """Changes with any row or its place; a longer run begins with the same rows."""

    report: dict[str, Any]
    """The content of `data_report.json`."""

    def source(self, name: str) -> MixSource:
        """The source of that name."""
        return next(source for source in self.sources if source.name == name)

    def documents(self, name: str, side: Side = "held_out") -> Iterator[Document]:
        """Every document of a source's side, whole."""
        return self.source(name).documents(side)

    def held_out_chats(self, name: str) -> list[Chat]:
        """The held-out chats of a source."""
        return [chat_from_json(json.loads(line)) for line in self.source(name).store.chats()]


def load_mixture(cfg: RunConfig, tokenizer: Any, *, renderer_template: str | None = None) -> MixtureRows:
    """The rows of all sources of `cfg`, tokenised where no earlier run has done it, mixed by their weights.

    `renderer_template` is the text of a chat template that goes before `data.template`: the one stored with a model.
    Several processes may call this at once; one tokenises and the others wait.

    Raises:
        DataError: a file cannot be read, a row is bad and the config says error, the template cannot be proven, or a
            source with a weight has nothing to learn.
    """
    renderers = Renderers.prove(cfg, tokenizer, template=renderer_template)
    jobs = jobs_of(cfg, tokenizer, renderers=renderers)
    sources = [
        MixSource(number, source.name, source.type, source.weight, Store.open(ensure_folder(job.folder, job.make)))
        for number, (source, job) in enumerate(zip(cfg.sources, jobs, strict=True))
    ]
    for source in sources:
        _expect_labels(source, cfg)
    form = BlockForm(cfg.row_tokens, cfg.cpt.cross_document, cfg.cpt.weights_of)
    train = Mixture(sources, form, seed=cfg.seed)
    steps, per_epoch = _steps(cfg, train)
    train.n_rows = steps * cfg.train.effective_batch_size
    held_out = {source.name: SourceRows(source, "held_out", form=form) for source in sources}
    renderer = renderers.chats or renderers.texts
    parts = {
        "stores": [job.folder.name for job in jobs],
        "weights": [source.weight for source in sources],
        "form": [form.size, form.crosses_documents, form.unit],
        "seed": cfg.seed,
    }
    return MixtureRows(
        train=train,
        held_out={name: rows for name, rows in held_out.items() if len(rows)},
        sources=sources,
        renderer=renderer,
        steps=steps,
        steps_per_epoch=per_epoch,
        fingerprint=fingerprint(parts),
        report=mixture_report(cfg, train, sources=sources, renderer=renderer, jobs=jobs),
    )


def _expect_labels(source: MixSource, cfg: RunConfig) -> None:
    """Raise DataError where a source has a weight and teaches nothing: its share could never be reached."""
    documents = source.store.sides["train"]
    if source.weight and documents.is_whole and not documents.n_learned:
        counts = source.store.report()["sources"].get("train", {})
        reasons = [f"{count:,} {reason.replace('_', ' ')}" for reason, count in counts.get("dropped", {}).items()]
        raise DataError(
            ", ".join([f"nothing is left to learn: {counts.get('read', 0):,} rows read", *reasons]),
            where=cfg.sources[source.number].path,
            fix=f"give the source {source.name!r} rows, hold out less of it, or weight: 0",
        )


def _steps(cfg: RunConfig, train: Mixture) -> tuple[int, int | None]:
    """Optimizer steps of the run, and of one epoch: every document with a weight read once, or else every chat."""
    batch, tokens = cfg.train.effective_batch_size, cfg.cpt.train_tokens
    read = [at for at, source in enumerate(train.sources) if source.kind == "cpt"] or range(len(train.sources))
    per_epoch = math.ceil(max(train.schedule.rows_until(at, Fraction(1)) for at in read) / batch)
    steps = cfg.train.max_steps
    if steps is None and tokens is not None:
        steps = math.ceil(tokens / (batch * (cfg.row_tokens - 1)))
    if steps is None:
        epochs = Fraction(str(cfg.train.epochs))
        steps = math.ceil(max(train.schedule.rows_until(at, epochs) for at in read) / batch)
    if cfg.cpt.exhausted == "stop":
        ends = min(train.schedule.rows_until(at, Fraction(1)) for at in range(len(train.sources)))
        steps = min(steps, math.ceil(ends / batch))
    return steps, per_epoch
