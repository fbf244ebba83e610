"""Config and tokenizer -> the rows of a mixture, from memory-mapped stores, and the report that counts each token."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from sftplay.config.data import DataConfig, SourceType, held_out_share
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, expect_unchanged, fingerprint, kept_digest
from sftplay.data.layouts import select_data_config
from sftplay.data.mixture.mixture import BlockForm, Document, MixSource, Mixture, SourceRows
from sftplay.data.mixture.store import Documents, Index, Store, StoreWriter, nothing_to_learn
from sftplay.data.pipeline import describe_rows, sample_records
from sftplay.data.records import Chat, chat_from_json
from sftplay.data.render.render import Recipe, Renderer
from sftplay.data.render.templates import resolve_template
from sftplay.data.row_outcomes import SIDES, Side, account_line
from sftplay.data.tokenize import REFUSED, Input, Preparation

STORE_VERSION = 1  # to be raised when the same tokens lie in a store in another way; older stores are then not used


@dataclass(frozen=True)
class SourceJob:
    """Everything that makes a source's store."""

    data: DataConfig  # the settings by which the rows of this source are read and judged
    recipe: Recipe
    max_tokens: int | None  # of a chat; None for documents, which are kept whole
    inputs: tuple[Input, ...]
    guarded: tuple[Input, ...]  # what they hold out must not be trained on
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
        inputs: tuple[Input, ...] = (Input(source.path, held_out_share(cfg, source)),)
        if source.val_path:
            inputs = Input(source.path, 0.0), Input(source.val_path, 1.0)
        # Test rows, and held-out rows of other sources of the type, must not be trained on here either. What others
        # split off by a share that is not larger is held out here too: the same hash decides.
        others = [other for other in cfg.sources if other.type == source.type]
        files = [cfg.data.test_path, *(other.val_path for other in others)]
        known = [Input(path, 1.0) for path in files if path and path != source.val_path]
        if source.weight:
            shares = ((other.path, held_out_share(cfg, other)) for other in others if not other.val_path)
            known += [Input(path, share) for path, share in shares if share > inputs[0].share]
        guarded = tuple(dict.fromkeys(known))
        jobs.append(
            SourceJob(
                data=select_data_config(cfg, source.type),
                recipe=renderers[source.type].recipe(),
                max_tokens=cfg.row_tokens if source.type == "chat" else None,
                inputs=inputs,
                guarded=guarded,
                digests={given.path: digests[given.path] for given in (*inputs, *guarded)},
                id_bytes=id_bytes,
                only_held_out=source.weight == 0,
            )
        )
    return jobs


SUMMED = ["read", "kept", "cut", "refused", "tokens_read", "tokens", "label_tokens", "first_of_document"]
SUMMED += ["masked_tokens", "cut_tokens", "documents", "trainable_tokens"]


def mixture_report(
    cfg: RunConfig,
    train: Mixture,
    *,
    sources: Sequence[MixSource],
    renderer: Renderer,
    jobs: Sequence[SourceJob],
) -> dict[str, Any]:
    """Return the content of `data_report.json`.

    Of each source `tokens_read` = tokens + cut_tokens + sum of dropped_tokens, and `tokens` = label_tokens +
    first_of_document + masked_tokens.
    """
    total = sum(source.weight for source in sources)
    planned = train.read_times()
    found, warnings, notes = {}, [], []
    for source, job in zip(sources, jobs, strict=True):
        n_rows, n_epochs = planned.get(source.number, (0, 0.0))
        report = source.store.report()
        train_counts, held_out_counts = (
            _count_side(source.store.sides[side], report.get("sources", {}).get(side, {}), cfg=cfg) for side in SIDES
        )
        found[source.name] = {
            "path": cfg.sources[source.number].path,
            "type": source.kind,
            "weight": source.weight,
            "planned_share": source.weight / total,
            "planned_rows": n_rows,
            "planned_epochs": n_epochs,
            **train_counts,
            "held_out": held_out_counts,
            "refused_rows": str(source.store.folder / REFUSED),
            "fingerprint": job.folder.name,
        }
        # Muennighoff et al., Scaling Data-Constrained Language Models (2023), find that up to four epochs teach almost
        # as much as fresh data.
        if n_epochs > 4:
            what = f"{source.name} is read {n_epochs:.1f} times; more of it, or a smaller weight, keeps the model from"
            warnings.append(f"{what} memorizing it")
        of_source = f" datasets.{source.name}." if cfg.datasets else " data."
        notes += [f"{source.name}: {note.replace(' data.', of_source)}" for note in report.get("notes", [])]
        if job.only_held_out and len(job.inputs) == 1:
            few = f"{job.inputs[0].share:g} of its rows is measured ({of_source.strip()}split)"
            notes.append(f"{source.name}: {few};{of_source}val_path={job.inputs[0].path} measures all")
    sums: dict[str, Counter[str]] = {"dropped": Counter(), "dropped_tokens": Counter()}
    for name, counts in sums.items():
        for entry in found.values():
            counts.update(entry.get(name, {}))
    return {
        **{name: sum(entry.get(name, 0) for entry in found.values()) for name in SUMMED},
        **{name: dict(counts) for name, counts in sums.items()},
        "block_size": cfg.row_tokens,
        "rows": len(train),
        "mask_method": renderer.method,
        "template_hash": renderer.template_hash,
        "sources": found,
        "files": {path: digest for job in jobs for path, digest in job.digests.items()},
        "warnings": warnings,
        "notes": notes,
    }


def mixture_table(report: Mapping[str, Any]) -> str:
    """Format the report for people."""
    lines = [account_line(report)]
    for name, source in report["sources"].items():
        held_out = source["held_out"]
        planned = f"read {source['planned_epochs']:.2f} times in {source['planned_rows']:,} rows"
        lines += [
            f"  {name:<14} {source['type']}, share {source['planned_share']:.1%}   {source['path']}",
            f"    train        {source['documents']:,} documents, {source['tokens']:,} tokens,"
            f" {source['label_tokens']:,} learned; {planned}",
            f"    held out     {held_out['documents']:,} documents, {held_out['tokens']:,} tokens"
            + "".join(f"; dropped {n:,}: {why.replace('_', ' ')}" for why, n in held_out.get("dropped", {}).items()),
        ]
        tokens = source.get("dropped_tokens", {})
        lines += [
            f"    dropped      {count:,}: {reason.replace('_', ' ')}, {tokens.get(reason, 0):,} tokens"
            for reason, count in source.get("dropped", {}).items()
        ]
        if source.get("cut_tokens"):
            n_cut, n_chats = source["cut_tokens"], source["cut"]
            lines.append(f"    cut          {n_cut:,} tokens of {n_chats:,} chats that are too long")
        if source.get("refused"):
            lines.append(f"    refused      reasons with file and line in {source['refused_rows']}")
    lines.append(f"  blocks         {report['rows']:,} rows of at most {report['block_size']:,} tokens")
    lines += [f"  warning        {warning}" for warning in report["warnings"]]
    return "\n".join([*lines, *(f"  note           {note}" for note in report["notes"])])


def _count_side(documents: Documents, counts: Mapping[str, Any], *, cfg: RunConfig) -> dict[str, Any]:
    """Return the counts of one side, and how its tokens are used when it is read once."""
    n_documents, n_tokens, n_learned = len(documents.table), documents.n_tokens, documents.n_learned
    n_first = n_documents
    if cfg.cpt.cross_document and documents.learned is None:  # the tokens before a document are its context
        n_first = min(n_documents, 1)
        n_learned = n_tokens - n_first
    dropped = sum(counts.get("dropped_tokens", {}).values()) + counts.get("cut_tokens", 0)
    return {
        **counts,
        "documents": n_documents,
        "tokens_read": n_tokens + dropped,
        "tokens": n_tokens,
        "label_tokens": n_learned,
        "first_of_document": n_first,
        "masked_tokens": n_tokens - n_learned - n_first,
    }


@dataclass(frozen=True)
class MixtureRows:
    """Everything a run needs from its sources."""

    train: Mixture
    held_out: dict[str, SourceRows]
    """Rows of each source that holds some out, in the order of the config; long documents continue over rows."""

    sources: list[MixSource]  # all of them, in the order of the config
    renderer: Renderer  # the renderer of the chats, or of the documents if there are no chats
    steps: int  # optimizer steps of the run: `train` has that many effective batches of rows
    steps_per_epoch: int
    fingerprint: str  # changes with any row or its place; a longer run begins with the same rows
    report: dict[str, Any]  # the content of `data_report.json`

    def source(self, name: str) -> MixSource:
        return next(source for source in self.sources if source.name == name)

    def documents(self, name: str, side: Side = "held_out") -> Iterator[Document]:
        """Yield every document of a source's side, whole."""
        return self.source(name).documents(side)

    def held_out_chats(self, name: str) -> list[Chat]:
        return [chat_from_json(json.loads(line)) for line in self.source(name).store.chats()]


def load_mixture(cfg: RunConfig, tokenizer: Any, *, renderer_template: str | None = None) -> MixtureRows:
    """Return the rows of all sources of `cfg`, tokenised where no earlier run has done it, mixed by their weights.

    `renderer_template` is the text of a chat template that goes before `data.template`: the one stored with a model.
    Several processes may call this at once; one tokenises and the others wait.
    Raise DataError where a file cannot be read, a row is bad and the config says error, the template cannot be proven,
    or a source with a weight has nothing to learn.
    """
    renderers = prove_renderers(cfg, tokenizer, template=renderer_template)
    jobs = list_source_jobs(cfg, tokenizer, renderers=renderers)
    sources = []
    for number, (source, job) in enumerate(zip(cfg.sources, jobs, strict=True)):
        store = Store.open(job.ensure())
        if source.weight and not store.sides["train"].n_learned:
            raise nothing_to_learn(store, path=source.path)
        sources.append(MixSource(number, source.name, source.type, source.weight, store))
    form = BlockForm(cfg.row_tokens, cfg.cpt.cross_document, cfg.cpt.weights_of)
    train = Mixture(sources, form, seed=cfg.seed)
    steps, per_epoch = _count_steps(cfg, train)
    train.n_rows = steps * cfg.train.effective_batch_size
    held_out = {source.name: SourceRows(source, "held_out", form=form) for source in sources}
    renderer = renderers.get("chat") or renderers["cpt"]
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


def _count_steps(cfg: RunConfig, train: Mixture) -> tuple[int, int]:
    """Count the steps of the run, and of one epoch: every document with a weight read once, or else every chat."""
    batch, tokens, steps = cfg.train.effective_batch_size, cfg.cpt.train_tokens, cfg.train.max_steps
    if tokens is not None:
        steps = math.ceil(tokens / (batch * (cfg.row_tokens - 1)))
    all_sources = range(len(train.sources))
    read = [at for at in all_sources if train.sources[at].kind == "cpt"] or all_sources

    def steps_until(sources: Sequence[int], epochs: Fraction, *, first: bool = False) -> int:
        ends = [train.schedule.rows_until(at, epochs) for at in sources]
        return math.ceil((min(ends) if first else max(ends)) / batch)

    if steps is None:
        steps = steps_until(read, Fraction(str(cfg.train.epochs)))
    if cfg.cpt.on_source_end == "stop":
        steps = min(steps, steps_until(all_sources, Fraction(1), first=True))
    return steps, steps_until(read, Fraction(1))
