"""Rules about the model of puzzles: what it is made of, what has no place in a run of task mode hrm.

Nothing here looks at the puzzles, at the number of processes or at the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.keys import keys_in
from sftplay.config.layers import NO_PRETRAINED
from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.tasks.hrm.section import HrmConfig

OF_TEXT = ("model.", "tuning.", "cpt.", "rewards.", "sandbox.", "eval.")
"""Beginnings of keys about models that are trained already, and about texts."""

OF_PUZZLES = ("data.train_path", "data.val_path", "eval.after")
"""Keys of `data` and `eval` that mean something here."""

IDLE_OF_TRAINING = (
    "epochs", "batching", "probe", "gradient_checkpointing", "packing", "loss_head", "optim", "neftune_alpha",
    "dataloader_num_workers", "dataloader_pin_memory", "oom_recovery",
)  # fmt: skip


def broken_hrm_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Every rule of task mode hrm that the config breaks."""
    yield from _starts_from_nothing(cfg)
    yield from _shape(cfg)
    yield from _not_offered(cfg)


def idle_hrm_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    hrm = cfg.hrm
    for key, _ in keys_in(cfg):
        if key.startswith((*OF_TEXT, "data.")) and key not in OF_PUZZLES:
            yield key, "task_mode", "task_mode hrm learns puzzles from nothing: no pretrained model, no text"
    for name in IDLE_OF_TRAINING:
        instead = {"epochs": "; hrm.epochs counts", "optim": "; hrm.optim chooses"}.get(name, "")
        yield f"train.{name}", "task_mode", f"task_mode hrm does not use it{instead}"
    if cfg.train.max_steps is not None:
        yield "hrm.epochs", "train.max_steps", f"train.max_steps {cfg.train.max_steps} ends the run"
    if hrm.arch == "single":
        yield "hrm.h_layers", "hrm.arch", "arch single has one module, with hrm.l_layers blocks"
    if hrm.positions == "learned":
        yield "hrm.rope_theta", "hrm.positions", "positions learned has no rotary embeddings"
    if hrm.n_supervision == 1:
        for name in ("halt_exploration", "q_continue"):
            yield f"hrm.{name}", "hrm.n_supervision", "n_supervision 1 leaves nothing to decide"
    yield from _idle_embeddings(hrm)


def _idle_embeddings(hrm: HrmConfig) -> Iterator[tuple[str, str, str]]:
    if hrm.puzzle_emb_dim == 0:
        for name in ("puzzle_emb_lr", "puzzle_emb_weight_decay", "puzzle_emb_placement", "emb_sync_every"):
            yield f"hrm.{name}", "hrm.puzzle_emb_dim", "puzzle_emb_dim 0 has no puzzle embeddings"
    elif hrm.puzzle_emb_placement == "sharded":
        yield "hrm.emb_sync_every", "hrm.puzzle_emb_placement", "sharded puzzle embeddings have one copy of each row"


def _starts_from_nothing(cfg: RunConfig) -> Iterator[Problem]:
    if cfg.model.name != NO_PRETRAINED:
        what = f"{cfg.model.name!r} is given, but task_mode hrm makes its model of the section hrm, from nothing"
        yield Problem(("model.name", "task_mode"), what, fix="remove model.name")
    if cfg.model.adapter is not None:
        what = "names an adapter, but task_mode hrm has no pretrained model"
        yield Problem(("model.adapter", "task_mode"), what, fix="remove it")
    if cfg.tuning.mode != "full":
        what = f"{cfg.tuning.mode} adapts a pretrained model, and task_mode hrm has none: every weight trains"
        yield Problem(("tuning.mode", "task_mode"), what, fix="remove tuning.mode")


def _shape(cfg: RunConfig) -> Iterator[Problem]:
    hrm, keys = cfg.hrm, ("hrm.hidden_size", "hrm.num_heads")
    if hrm.hidden_size % hrm.num_heads:
        near = max(1, round(hrm.hidden_size / hrm.num_heads)) * hrm.num_heads
        what = f"{hrm.hidden_size} is no multiple of hrm.num_heads {hrm.num_heads}"
        yield Problem(keys, what, fix=f"write hrm.hidden_size: {near}")
    elif hrm.positions == "rope" and hrm.hidden_size // hrm.num_heads % 2:
        what = f"a head of {hrm.hidden_size // hrm.num_heads} cannot be rotated: rope needs an even number"
        yield Problem((*keys, "hrm.positions"), what, fix=f"write hrm.hidden_size: {2 * hrm.hidden_size}")
    dim = hrm.hidden_size if hrm.puzzle_emb_dim is None else hrm.puzzle_emb_dim
    if hrm.puzzle_emb_len is not None and not 0 < dim <= hrm.puzzle_emb_len * hrm.hidden_size:
        needed = -(-dim // hrm.hidden_size)
        what = f"{hrm.puzzle_emb_len} positions of {hrm.hidden_size} do not hold hrm.puzzle_emb_dim {dim}"
        what = what if dim else "puzzle_emb_dim 0 has no puzzle embeddings, so nothing fills these positions"
        fix = f"write hrm.puzzle_emb_len: {needed}, or more" if dim else "remove hrm.puzzle_emb_len"
        yield Problem(("hrm.puzzle_emb_len", "hrm.puzzle_emb_dim"), what, fix=fix)


def _not_offered(cfg: RunConfig) -> Iterator[Problem]:
    train, strategy = cfg.train, cfg.cluster.strategy
    if strategy not in ("auto", "ddp"):
        what = f"{strategy} shards a model, and task mode hrm trains a small one on several processes by ddp"
        yield Problem(("cluster.strategy", "task_mode"), what, fix="write cluster.strategy: ddp")
    if train.precision == "fp16":
        what = "fp16 would overflow in its loss; bf16 needs a GPU from 2020 on, fp32 runs everywhere"
        yield Problem(("train.precision", "task_mode"), what, fix="write train.precision: auto")
    for key in ("train.best_metric", "train.early_stopping", "eval.before"):
        if cfg.get_value(key):
            what = "is not offered in task mode hrm, which measures puzzles while it trains and keeps the last weights"
            yield Problem((key, "task_mode"), what, fix="remove it; hrm.ema averages, hrm.stop_at_exact stops")


class PuzzleSpec(TaskSpec):
    """A model of puzzles is trained from nothing."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        return broken_hrm_rules(cfg)

    def start_from(self, cfg: RunConfig) -> str | None:
        return cfg.hrm.start_from

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        return idle_hrm_keys(cfg)


SPEC = PuzzleSpec()
