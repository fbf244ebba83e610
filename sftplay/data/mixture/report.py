"""The data report of a mixture: for each source the tokens read, those in the loss, and its planned share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.data.mixture.documents import Documents
from sftplay.data.mixture.mixture import MixSource, Mixture
from sftplay.data.mixture.sources import SourceJob
from sftplay.data.render.render import Renderer
from sftplay.data.tokenize.one_pass import REFUSED
from sftplay.data.tokenize.policies import SIDES

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
    for source in sources:
        source.store.refresh()
    total = sum(source.weight for source in sources)
    is_known = all(source.store.index.is_whole for source in train.sources)
    planned: dict[int, tuple[int | None, float | None]] = {**(train.read_times() if is_known else {})}
    found, warnings, notes = {}, [], []
    for source, job in zip(sources, jobs, strict=True):
        n_rows, n_epochs = planned.get(source.number, (None, None) if source.weight and not is_known else (0, 0.0))
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
        if n_epochs and n_epochs > 4:
            what = f"{source.name} is read {n_epochs:.1f} times; more of it, or a smaller weight, keeps the model from"
            warnings.append(f"{what} memorizing it")
        notes += report.get("notes", [])
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
    lines = [
        f"data report      {report['read']:,} read = {report['kept']:,} kept + {report['cut']:,} cut"
        f" + {sum(report['dropped'].values()):,} dropped + {report['refused']:,} refused"
    ]
    for name, source in report["sources"].items():
        held_out, planned = source["held_out"], "more is being tokenised"
        if source["planned_rows"] is not None:
            planned = f"read {source['planned_epochs']:.2f} times in {source['planned_rows']:,} rows"
        lines += [
            f"  {name:<14} {source['type']}, share {source['planned_share']:.1%}   {source['path']}",
            f"    train        {source['documents']:,} documents, {source['tokens']:,} tokens,"
            f" {source['label_tokens']:,} learned; {planned}",
            f"    held out     {held_out['documents']:,} documents, {held_out['tokens']:,} tokens",
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
