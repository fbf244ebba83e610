"""The reference's log-probabilities: computed once before the first step, kept next to the data and in the run folder.

They are looked up by the number of a row while the run trains, so that no second model is held in memory then. The pass
computes as training does, under the same autocast and on weights of the same dtypes. In fp32 a run that starts at its
reference therefore has margins of 0 up to rounding, and its first loss is that of 0 to 1e-6. In 16 bits a batch of
another shape may round otherwise: margins begin near 0, and accuracy anywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

from sftplay import log
from sftplay.atomic import write_bytes
from sftplay.config.run import RunConfig
from sftplay.data.cache import fingerprint
from sftplay.errors import ConfigError, DataError, MachineError, RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.model.adapter import attach_adapter
from sftplay.model.out_of_memory import AdaptiveBatches, free_memory, gather_objects
from sftplay.model.source import locate
from sftplay.model.start_point import weights_digests
from sftplay.model.tokenizer import load_tokenizer
from sftplay.model.weights import frozen_dtype, open_model
from sftplay.tasks.preference.shared_prompt import PairCollator, completion_logps, prove
from sftplay.tasks.preference.spec import KINDS, find_reference_model, uses_reference
from sftplay.train.eval_mode import eval_mode, random_numbers_kept
from sftplay.train.exact_batch import ADVICE
from sftplay.train.metrics import Observer
from sftplay.train.micro_batches import Batch
from sftplay.units import plural

Side = Literal["train", "held_out"]
SIDES: tuple[Side, ...] = ("train", "held_out")

CODE_VERSION = 1
"""To be raised when the same rows and weights give other log-probabilities; older files are then not used."""

FILE = "reference.safetensors"  # in the run folder


@dataclass(frozen=True)
class RowLogps:
    """Log-probabilities of rows under one model, in the order of the rows: `sums` fp32, `tokens` int64, [rows, 2]."""

    sums: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class References:
    """The reference's log-probabilities of every row of a run; zeros where a loss has no reference."""

    tables: Mapping[str, Tensor]  # side -> fp32 [rows, 2]

    def look_up(self, side: Side, index: Tensor) -> Tensor:
        """Return those of the rows with the numbers `index`, int64 [n], where `index` lies: fp32 [n, 2]."""
        if not self.tables:
            return torch.zeros(len(index), 2, device=index.device)
        return self.tables[side][index.cpu()].to(index.device)


def compute_logps(model: Any, rows: Any, *, shares: bool, **settings: Any) -> RowLogps:
    """Compute the log-probabilities of both answers of all `rows`; `settings` are those of `compute_rows`."""

    def compute(batch: Batch) -> tuple[Tensor, Tensor]:
        found = completion_logps(model, batch, shares=shares, sides="both")
        return found.sums.float(), found.tokens

    return RowLogps(*compute_rows(compute, model, rows, what="the log-probabilities", **settings))


@torch.no_grad()
def compute_rows(
    compute: Callable[[Batch], Sequence[Tensor]],
    model: Any,
    rows: Any,
    *,
    pad_token_id: int,
    batch_size: int,
    ranks: tuple[int, int] = (0, 1),
    computes_together: bool = False,
    begin: Callable[[], None] = lambda: None,
    what: str = "the evaluation",
    tag: str = "eval",
) -> list[Tensor]:
    """Compute numbers of all `rows` under `model`, which is in evaluation mode: tensors [rows, ...] on the CPU.

    `compute` makes them of a batch where the model is. `ranks` are this rank and the number of all, which share the
    rows: each computes as many, in as many batches, and gets all results. With `computes_together` the model is in
    shards, and no rank may take smaller batches than the others. `begin` is called before each batch.

    Raises:
        OutOfMemory: a batch of a model in shards is too much.
        RuntimeError: a single row is too much.
    """
    rank, world = ranks
    lengths = pc.list_value_length(rows.with_format("arrow")[:]["input_ids"]).to_numpy()
    # Rows of like length share a batch, the longest first: what is too large fails at once.
    order, n = lengths.argsort(kind="stable")[::-1], len(lengths)
    numbers = [int(order[at % n]) for at in range(rank, ceil(n / world) * world, world)]
    collate, device = PairCollator(pad_token_id), next(model.parameters()).device

    def compute_part(part: slice) -> list[Tensor]:
        begin()
        batch = collate([rows[number] for number in numbers[part]])
        found = [values.cpu() for values in compute({key: value.to(device) for key, value in batch.items()})]
        log.progress(min(n, part.stop * world), n, what="rows", tag=tag)
        return found

    batches = AdaptiveBatches(batch_size, what, fix=ADVICE if computes_together else "")
    columns = list(map(torch.cat, zip(*batches.map(len(numbers), compute_part), strict=True)))
    found = [column.new_zeros(n, *column.shape[1:]) for column in columns]
    for places, *parts in gather_objects((numbers, *columns)) if world > 1 else [(numbers, *columns)]:
        for whole, part in zip(found, parts, strict=True):
            whole[places] = part
    return found


def pass_settings(trainer: Any) -> dict[str, Any]:
    """Return how all ranks of a trainer compute numbers of rows together: `shares`, and settings of `compute_rows`.

    A model in shards needs all ranks in each forward pass. Copies of a whole one compute without the wrapper, which
    would have them wait for each other.
    """
    is_sharded = trainer.micro_batcher is None
    return {
        "model": trainer.model_wrapped if is_sharded else trainer.model,
        "pad_token_id": trainer.processing_class.pad_token_id,
        "shares": trainer.shares_prompt,
        "batch_size": trainer.args.per_device_eval_batch_size,
        "ranks": (log.rank(), log.world_size()),
        "computes_together": is_sharded,
        "begin": partial(trainer.heartbeat.enter, "evaluation"),
    }


@dataclass(frozen=True)
class ReferenceKind:
    """Which weights the reference has, and whether the model that trains can still compute them."""

    name: Literal["base", "adapter", "path"]
    survives_training: bool
    """Whether it can be computed in the middle of a run: weights that do not train, or another model."""

    @classmethod
    def find(cls, cfg: RunConfig) -> ReferenceKind:
        """Find the kind of a run. A new adapter begins at zero, so it starts as its base: both share a cache."""
        if cfg.preference.reference not in KINDS:
            return cls("path", survives_training=True)
        continues = cfg.model.adapter is not None and not cfg.model.merge_adapter
        # DoRA divides by a norm and multiplies by it again, which rounds.
        starts_as_base = not continues and not (cfg.tuning.mode != "full" and cfg.tuning.lora.dora)
        if cfg.preference.reference == "adapter_off" or starts_as_base:
            return cls("base", survives_training=cfg.tuning.mode != "full")
        return cls("adapter", survives_training=False)


class ComputeReferences(Observer):
    """Gives the trainer its `references` before the first step: from the run folder, from the cache next to the data,
    or by a pass of all ranks over the rows.
    """

    def __init__(self, cfg: RunConfig, pairs: Any, *, folder: RunFolder) -> None:
        """`pairs` are the rows of a run: `train`, `held_out` and `fingerprint`."""
        self.cfg, self.pairs, self.folder = cfg, pairs, folder
        self.sides: dict[Side, Any] = {}
        for side in SIDES:
            if (rows := getattr(pairs, side)) is not None and len(rows):
                self.sides[side] = rows

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not uses_reference(self.cfg):
            self.trainer.references = References({})
            return
        kind = ReferenceKind.find(self.cfg)
        key = compute_key(self.cfg, self.pairs, kind=kind, folder=self.folder) if log.is_main() else ""
        kept = self.folder.path / FILE
        cached = Path(self.cfg.data.processed_dir) / "references" / f"{key}.safetensors"
        facts = {"key": key, "rows": self.pairs.fingerprint}
        # A run that has made steps goes on with its own file, wherever its model lies by now.
        wanted = {kept: {"rows": facts["rows"]} if state.global_step else facts, cached: facts}
        tables = self._read(wanted) if log.is_main() else None
        # The nodes of a run may have no disk in common.
        tables = gather_objects(tables, self.trainer.heartbeat)[0]
        if tables is None:
            if state.global_step and not kind.survives_training:
                what = f"there is none for this run, and its weights have been trained for {state.global_step} steps"
                fix = f"put {FILE} back into the run folder, or start a new run"
                raise RunError(what, where=str(kept), fix=fix)
            tables = self._compute(kind)
            if log.is_main():
                keep_in_cache(cached, tables, facts=facts)
        if log.is_main() and not (state.global_step and kept.is_file()):
            write_tables(kept, tables, facts=facts)
        self.trainer.references = References(tables)
        self.trainer.heartbeat.take_seconds()  # the pass belongs to no step

    def _read(self, wanted: Mapping[Path, Mapping[str, str]]) -> dict[str, Tensor] | None:
        """Read the first file that is sound; say why others are not used."""
        counts = {str(side): len(rows) for side, rows in self.sides.items()}
        for path, facts in wanted.items():
            if not path.is_file():
                continue
            tables, problem = read_tables(path, facts=facts, counts=counts)
            if tables is not None:
                log.say(f"log-probabilities of {sum(counts.values()):,} rows come from {path}", "reference")
                return tables
            log.say(f"note: {path} is not used, as it {problem}", "reference")
        return None

    def _compute(self, kind: ReferenceKind) -> dict[str, Tensor]:
        trainer, cfg = self.trainer, self.cfg
        names = {"start": "the model that the run starts from", "adapter_off": "the base, without the adapter"}
        name = names.get(cfg.preference.reference, cfg.preference.reference)
        number = sum(map(len, self.sides.values()))
        log.say(f"computing the log-probabilities of {plural(number, 'row')} under {name}", "reference")
        settings = pass_settings(trainer)
        tables = dict[Side, Tensor]()
        with random_numbers_kept(), trainer.heartbeat.within("evaluation"), eval_mode(trainer.model_wrapped):
            with reference_weights(cfg, trainer, kind=kind) as other, trainer.compute_loss_context_manager():
                if other is not None:
                    settings |= {"model": other, "shares": find_shares(cfg, other), "computes_together": False}
                for side, rows in self.sides.items():
                    tables[side] = compute_logps(rows=rows, tag="reference", **settings).sums
            del other, settings
        free_memory()
        for side, table in tables.items():
            if bad := (~table.isfinite()).any(1).nonzero().flatten().tolist():
                rows = self.sides[side]
                places = ", ".join(str(rows[number]["row"]) for number in bad[:5])
                what = f"{len(bad)} rows have a log-probability that is not finite: {places}"
                fix = "look at these rows; or write train.precision: fp32 or bf16, where it is fp16"
                raise RunError(what, where=f"reference, {side}", fix=fix)
        return {str(side): table for side, table in tables.items()}


@contextmanager
def reference_weights(cfg: RunConfig, trainer: Any, *, kind: ReferenceKind) -> Iterator[Any]:
    """Inside, the trainer's model has the reference's weights, and None is given; or another model is given."""
    if kind.name == "path":
        with not_sharded(trainer):
            other = open_reference(cfg)
        yield other
        return
    has_adapter = hasattr(trainer.model, "disable_adapter")
    with trainer.model.disable_adapter() if kind.name == "base" and has_adapter else nullcontext():
        yield None


@contextmanager
def not_sharded(trainer: Any) -> Iterator[None]:
    """Inside, a model is opened whole also in a run of ZeRO-3, where transformers would shard it."""
    # accelerate makes it, and transformers looks for it wherever a model is opened.
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    config = getattr(plugin, "dschf", None)
    if config is not None:
        unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if config is not None:
            set_hf_deepspeed_config(config)


@contextmanager
def named_as_reference(where: str) -> Iterator[None]:
    """Inside, what cannot be opened is reported at the key that names the reference, not at `model.name`."""
    try:
        yield
    except (ConfigError, DataError, MachineError) as error:
        fix = error.fix.replace("model.name", "preference.reference")
        raise type(error)(error.what, where=where, fix=fix) from error


def open_reference(cfg: RunConfig) -> Any:
    """Open the model that `preference.reference` names, whole on this process's device, in the form of the run's own:
    in 4 bits for qlora, in fp32 where all weights train.

    Raises:
        ConfigError: it reads other tokens than the model that trains.
        MachineError: the weights cannot be read.
    """
    found = find_reference_model(cfg)
    where = cfg.describe_origin("preference.reference")
    source = locate(found.name)
    named = cfg.model.model_copy(update={"name": source, "revision": found.revision, "adapter": None})
    tokens = load_tokenizer(cfg.model)
    with named_as_reference(where):
        others = load_tokenizer(named)
    if tokens.get_vocab() != others.get_vocab():
        what = f"{cfg.preference.reference} reads other tokens than {cfg.model.name}"
        raise ConfigError(what, where=where, fix="name a model with the same tokenizer, or write start")
    dtype = torch.float32 if cfg.tuning.mode == "full" else frozen_dtype(cfg)
    with named_as_reference(where):
        model = open_model(cfg, source, dtype=dtype, revision=found.revision)
    return (model if found.adapter is None else attach_adapter(model, found.adapter)).eval()


def find_shares(cfg: RunConfig, model: Any) -> bool:
    """Return whether `model` computes the prompt of a pair once, as the config wants it and its weights prove it."""
    return cfg.preference.shared_prompt is not False and prove(model)


def compute_key(cfg: RunConfig, pairs: Any, *, kind: ReferenceKind, folder: RunFolder) -> str:
    """Return the name of the cache's file: it changes with everything that decides the numbers, up to rounding."""
    tuning, starts_from = cfg.tuning, dict[str, str]()
    if kind.name == "path":
        found = find_reference_model(cfg)
        starts_from |= find_digests(found.name, found.revision)
        starts_from |= find_digests(str(found.adapter), None) if found.adapter else {}
    else:
        # Where a base was merged, or got rows for new tokens, the run keeps it.
        kept_base = folder.path / "base"
        starts_from |= find_digests(str(kept_base) if kept_base.is_dir() else cfg.model.name, cfg.model.revision)
        if cfg.model.adapter is not None and (kind.name == "adapter" or cfg.model.merge_adapter):
            starts_from |= {f"adapter/{name}": value for name, value in find_digests(cfg.model.adapter, None).items()}
    is_rounded = log.world_size() > 1 and cfg.cluster.strategy.startswith("zero")  # DeepSpeed does that
    parts = {
        "code": CODE_VERSION,
        "rows": pairs.fingerprint,
        "counts": [len(rows) if (rows := getattr(pairs, side)) is not None else 0 for side in SIDES],
        "kind": kind.name,
        "weights": starts_from,
        "precision": cfg.train.precision,
        "stored": "fp32" if tuning.mode == "full" and not is_rounded else cfg.train.precision,
        "four_bit": [tuning.quant_type, tuning.double_quant] if tuning.mode == "qlora" else None,
        "dora": kind.name == "adapter" and tuning.lora.dora,
    }
    return fingerprint(parts)


def find_digests(name: str, revision: str | None) -> dict[str, str]:
    """Map the files of weights of a model to their digests; of a hub's model those in the hub's cache."""
    folder = Path(locate(name))
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(cached, str):
            return {name: str(revision)}
        folder = Path(cached).parent
    return {Path(path).name: digest for path, digest in weights_digests(str(folder)).items()}


def keep_in_cache(path: Path, tables: Mapping[str, Tensor], *, facts: Mapping[str, str]) -> None:
    """Write the tables where later runs look; where there is no room the run goes on without."""
    try:
        write_tables(path, tables, facts=facts)
    except OSError as error:
        log.say(f"note: later runs compute this again: {path} cannot be written ({error.strerror})", "reference")
    else:
        log.say(f"kept for later runs on these rows: {path}", "reference")


def write_tables(path: Path, tables: Mapping[str, Tensor], *, facts: Mapping[str, str]) -> None:
    """Write the tables with what they belong to, whole or not at all."""
    write_bytes(path, save(dict(tables), metadata={**facts, "crc32": checksum(tables)}))


def read_tables(
    path: Path, *, facts: Mapping[str, str], counts: Mapping[str, int]
) -> tuple[dict[str, Tensor] | None, str]:
    """Return the tables of a file, or None and why it cannot be used: it is damaged, or belongs to something else."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = file.metadata() or {}
            tables = {side: file.get_tensor(side) for side in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        return None, f"cannot be read ({str(error).splitlines()[0]})"
    if stored.get("crc32") != checksum(tables):
        return None, "is damaged: its numbers are not those that were written"
    shapes = {side: (tuple(table.shape), table.dtype) for side, table in tables.items()}
    wanted = {side: ((count, 2), torch.float32) for side, count in counts.items()}
    if shapes != wanted or any(stored.get(name) != value for name, value in facts.items()):
        return None, "belongs to other rows or another model"
    return tables, ""


def checksum(tables: Mapping[str, Tensor]) -> str:
    """Return a checksum of all numbers; it guards against accidents, not against an attacker."""
    crc = 0
    for side in sorted(tables):
        crc = zlib.crc32(tables[side].contiguous().numpy().tobytes(), zlib.crc32(side.encode(), crc))
    return f"{crc:08x}"
