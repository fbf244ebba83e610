"""The fingerprint of a run: everything its weights depend on; and the differences of two of them.

It is in every checkpoint's marker, so that a resume can name what has changed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sftplay import __version__, log
from sftplay.config.keys import DRAWN, SIZES, differences, held_out_decides, values_that_decide_weights
from sftplay.config.run import RunConfig
from sftplay.config.section import find_spec
from sftplay.data.render.render import Renderer
from sftplay.machine.probe import probe
from sftplay.model.source import locate
from sftplay.model.weights_digest import weights_digest, weights_digests
from sftplay.places import ROOT
from sftplay.train.setup import RunSetup
from sftplay.train.task import Rows

if TYPE_CHECKING:
    from sftplay.model.new_tokens import NewToken

BATCH_ROWS = 1000


def describe_renderer(renderer: Renderer) -> dict[str, Any]:
    """Return what a renderer adds to the fingerprint and the manifest of a run."""
    return {
        "template_sha256": renderer.template_hash,
        "tokenizer_sha256": hashlib.sha256(renderer.recipe().tokenizer.encode()).hexdigest(),
        "mask_method": renderer.method,
    }


def compute_fingerprint(cfg: RunConfig, rows: Rows, *, new_tokens: Sequence[NewToken] = ()) -> dict[str, Any]:
    """Return config, files, rows, template, tokenizer, starting weights, processes and kit of this run; plain JSON.

    `cfg` names folders, not runs. Weights on a hub have no digest: model.revision pins them.
    """
    digests = [rows.order.digest if rows.order else rows_digest(part) for part in (rows.train, rows.held_out)]
    return {
        "kit": __version__,
        "config": values_that_decide_weights(cfg),
        "world_size": log.world_size(),
        "data_files": rows.report["files"],
        "rows": len(rows.train),
        "rows_sha256": digests[0],
        "held_out_sha256": digests[1] if rows.held_out is not None else None,
        "template_sha256": rows.recipe.get("template_sha256"),
        "tokenizer_sha256": rows.recipe.get("tokenizer_sha256"),
        "new_tokens": {token.content: token.id for token in new_tokens},
        "weights": starting_weights(cfg),
    }


def starting_weights(cfg: RunConfig) -> dict[str, str]:
    """Map each file of weights that the run starts from to its digest; empty where it starts from its seed."""
    if not cfg.task.reads_text:
        start = find_spec(cfg).start_from(cfg)
        return {} if start is None else {start: weights_digest(Path(start))}
    return weights_digests(locate(cfg.model.name)) | weights_digests(cfg.model.adapter)


def weights_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each changed file of the base, or of the adapter that the run starts from."""
    if "weights" not in before or "weights" not in now:
        return []
    old, new = before["weights"], now["weights"]
    return [
        f"{path} has changed (content {_shorten(old.get(path))} then, {_shorten(new.get(path))} now)"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
    ]


def rows_digest(rows: Any) -> str:
    """Return a hex sha256 of all token ids and labels, row by row; it does not depend on how they are stored."""
    digest = hashlib.sha256()
    tables = [] if rows is None else rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(BATCH_ROWS)
    for table in tables:
        for chunk in (chunk for name in table.column_names for chunk in table[name].chunks):
            for numbers in (chunk.value_lengths(), chunk.flatten()):
                digest.update(numbers.cast(pa.int64()).to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, resized: bool = False) -> list[str]:
    """Return a line for each config key, and for the number of processes, that makes this another run.

    `resized` allows other sizes and another number of processes: the launching command keeps the sizes of the first
    start unless they do not fit this machine or that number.
    """
    if "config" not in before or "config" not in now:
        return []
    changed = [
        f"{key} was {old!r} and is {new!r} now"
        for key, old, new in differences(before["config"], now["config"])
        if not (resized and key in (*SIZES, DRAWN))
    ]
    if before.get("world_size") not in (None, now["world_size"]) and not resized:
        changed.append(f"it ran on {before['world_size']} processes and runs on {now['world_size']} now")
    return changed


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return lines that say why the rows have changed, their own digests last; empty when every token is the same."""
    if "rows_sha256" not in before or "rows_sha256" not in now:
        return []
    compared = {"rows_sha256": "training rows"}
    if held_out_decides(now["config"]):
        compared["held_out_sha256"] = "held-out rows"
    lines = [
        f"{what}: fingerprint {_shorten(before[key])} then, {_shorten(now[key])} now"
        for key, what in compared.items()
        if before[key] != now[key]
    ]
    if not lines:
        return []
    if before["rows"] != now["rows"]:
        lines[0] += f", {before['rows']:,} then, {now['rows']:,} now"
    causes = [
        f"{path} has changed (content {_shorten(old)} then, {_shorten(now['data_files'].get(path))} now)"
        for path, old in before["data_files"].items()
        if now["data_files"].get(path) != old
    ]
    for key, what in (("tokenizer_sha256", "tokenizer"), ("template_sha256", "chat template")):
        if before[key] != now[key]:
            causes.append(f"the {what} has changed ({_shorten(before[key])} then, {_shorten(now[key])} now)")
    if before["kit"] != now["kit"]:
        causes.append(f"the kit was {before['kit']} and is {now['kit']} now")
    return [*causes, *lines]


def _shorten(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def write_manifest(setup: RunSetup, rows: Rows, *, parameters: dict[str, Any], task: dict[str, Any]) -> None:
    """Record versions, machine, code, data, template, seed, sizing and what trains; `task` adds what only it knows."""
    setup.folder.write_json(
        "manifest.json",
        {
            "kit": __version__,
            "git_commit": git_commit(),
            "machine": probe().as_dict(),
            "python": sys.version.split()[0],
            "seed": setup.cfg.seed,
            "origins": setup.cfg.origins,
            "template_sha256": rows.recipe.get("template_sha256"),
            "mask_method": rows.recipe.get("mask_method"),
            "data": rows.report["sources"],
            "data_files": rows.report["files"],
            "order_sha256": setup.order_hash,
            "steps": setup.steps,
            "model": parameters,
            **task,
            "sizing": setup.folder.read_json("plan.json"),
        },
    )


def git_commit() -> str | None:
    """Return the commit of the kit's checkout, None outside one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
