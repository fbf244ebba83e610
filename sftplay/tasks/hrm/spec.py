"""Rules about the model of puzzles: what it is made of, what has no place in a run of task mode hrm.

The rules look neither at the puzzles nor at the number of processes or the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sftplay.config.keys import keys_in
from sftplay.config.layers import NO_PRETRAINED
from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.errors import ConfigError, DataError, nearest_names


class PuzzleSpec(TaskSpec):
    """A model of puzzles is trained from nothing."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        hrm, train, strategy = cfg.hrm, cfg.train, cfg.cluster.strategy
        keys = ("hrm.hidden_size", "hrm.num_heads")
        if cfg.model.name != NO_PRETRAINED:
            what = f"{cfg.model.name!r} is given, but task_mode hrm makes its model of the section hrm, from nothing"
            yield Problem(("model.name", "task_mode"), what, fix="remove model.name")
        if cfg.model.adapter is not None:
            what = "names an adapter, but task_mode hrm has no pretrained model"
            yield Problem(("model.adapter", "task_mode"), what, fix="remove it")
        if cfg.tuning.mode != "full":
            what = f"{cfg.tuning.mode} adapts a pretrained model, and task_mode hrm has none: every weight trains"
            yield Problem(("tuning.mode", "task_mode"), what, fix="remove tuning.mode")
        if hrm.hidden_size % hrm.num_heads:
            near = max(1, round(hrm.hidden_size / hrm.num_heads)) * hrm.num_heads
            what = f"{hrm.hidden_size} is no multiple of hrm.num_heads {hrm.num_heads}"
            yield Problem(keys, what, fix=f"write hrm.hidden_size: {near}")
        elif hrm.positions == "rope" and hrm.hidden_size // hrm.num_heads % 2:
            what = f"a head of {hrm.hidden_size // hrm.num_heads} cannot be rotated: rope needs an even number"
            yield Problem((*keys, "hrm.positions"), what, fix=f"write hrm.hidden_size: {2 * hrm.hidden_size}")
        dim = hrm.embedding_size
        if hrm.puzzle_emb_len is not None and not 0 < dim <= hrm.puzzle_emb_len * hrm.hidden_size:
            needed = -(-dim // hrm.hidden_size)
            what = f"{hrm.puzzle_emb_len} positions of {hrm.hidden_size} do not hold hrm.puzzle_emb_dim {dim}"
            what = what if dim else "puzzle_emb_dim 0 has no puzzle embeddings, so nothing fills these positions"
            fix = f"write hrm.puzzle_emb_len: {needed}, or more" if dim else "remove hrm.puzzle_emb_len"
            yield Problem(("hrm.puzzle_emb_len", "hrm.puzzle_emb_dim"), what, fix=fix)
        if strategy not in ("auto", "ddp"):
            what = f"{strategy} shards a model, and task mode hrm trains a small one on several processes by ddp"
            yield Problem(("cluster.strategy", "task_mode"), what, fix="write cluster.strategy: ddp")
        if train.precision == "fp16":
            what = "fp16 would overflow in its loss; bf16 needs a GPU from 2020 on, fp32 runs everywhere"
            yield Problem(("train.precision", "task_mode"), what, fix="write train.precision: auto")
        for key in ("train.best_metric", "train.early_stopping", "eval.before"):
            if cfg.get_value(key):
                why = "which measures puzzles while it trains and keeps the last weights"
                what = f"is not offered in task mode hrm, {why}"
                yield Problem((key, "task_mode"), what, fix="remove it; hrm.ema averages, hrm.stop_at_exact stops")

    def list_inputs(self, cfg: RunConfig) -> list[str]:
        return [key for key in ("data.train_path", "data.val_path", "hrm.start_from") if cfg.get_value(key)]

    def check_input(self, cfg: RunConfig, key: str, *, where: str) -> None:
        """Refuse a file of weights that is not there, and puzzles that are not there or not sound.

        Built-in puzzles are made when they are needed.
        """
        path = str(cfg.get_value(key))
        if key == "hrm.start_from":
            if not Path(path).is_file():
                near = nearest_names(Path(path).name, [file.name for file in Path(path).parent.glob("*")])
                other = f"did you mean {str(Path(path).with_name(near[0]))!r}?" if near else ""
                fix = other or "name a file step_N of HRM's or TRM's code"
                raise ConfigError(f"there is no file {path!r}", where=where, fix=fix, nearest=near)
            return
        from sftplay.tasks.hrm.puzzles.sampler import BUILTIN, NAMES, open_split  # brings numpy

        try:
            if not path.startswith(BUILTIN) or path.removeprefix(BUILTIN) not in NAMES:
                open_split(path, "train" if key == "data.train_path" else "test", key=where)
        except DataError as error:
            raise DataError(f"{error.where}: {error.what}", where=where, fix=error.fix) from None

    def start_from(self, cfg: RunConfig) -> str | None:
        return cfg.hrm.start_from

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        hrm = cfg.hrm
        # Keys about models that are trained already, and about texts.
        sections = ("model.", "tuning.", "cpt.", "rewards.", "sandbox.", "eval.", "data.")
        for key, _ in keys_in(cfg):
            if key.startswith(sections) and key not in ("data.train_path", "data.val_path", "eval.after"):
                yield key, "task_mode", "task_mode hrm learns puzzles from nothing: no pretrained model, no text"
        for name in (
            "epochs", "batching", "probe", "gradient_checkpointing", "packing", "loss_head", "optim", "neftune_alpha",
            "dataloader_num_workers", "dataloader_pin_memory", "oom_recovery",
        ):  # fmt: skip
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
        sync, placement = "hrm.emb_sync_every", "hrm.puzzle_emb_placement"
        if hrm.puzzle_emb_dim == 0:
            for key in ("hrm.puzzle_emb_lr", "hrm.puzzle_emb_weight_decay", placement, sync):
                yield key, "hrm.puzzle_emb_dim", "puzzle_emb_dim 0 has no puzzle embeddings"
        elif hrm.puzzle_emb_placement == "sharded":
            yield sync, placement, "sharded puzzle embeddings have one copy of each row"


SPEC = PuzzleSpec()
