"""Where the puzzle embeddings lie, decided from bytes: whole on every process, or shared out where only that fits."""

from __future__ import annotations

from sftplay.config.schema.hrm import TablePlacement
from sftplay.config.schema.run import RunConfig
from sftplay.plan.memory.forecast import Forecast, Place
from sftplay.plan.puzzles import PuzzleModelShape, foresee_puzzles
from sftplay.plan.sizing.decisions import Decision
from sftplay.units import format_bytes

TABLE = "hrm.puzzle_emb_placement"

VERDICTS = ("does_not_fit", "tight", "fits")


def can_be_shared_out(shape: PuzzleModelShape, processes: int) -> bool:
    """Whether a process would hold fewer rows than there are."""
    return processes > 1 and shape.puzzles.table > shape.puzzles.embedding


def choose_table(cfg: RunConfig, shape: PuzzleModelShape, *, place: Place) -> Decision:
    """`replicated` or `sharded`, for a config in which all but the sizes is decided."""
    if not can_be_shared_out(shape, place.world_size):
        return Decision("replicated", "there is nothing to share out")
    whole, shared = (_fewest_rows(cfg, shape, place=place, placement=each) for each in ("replicated", "sharded"))
    filled = f"{format_bytes(whole.peak_bytes)} of {format_bytes(whole.budget_bytes)}"
    if VERDICTS.index(shared.verdict) > VERDICTS.index(whole.verdict):
        return Decision("sharded", f"with a whole table on each process even the fewest rows take {filled}")
    if whole.verdict == "fits":
        return Decision("replicated", "a whole table on each process fits, and needs no exchange of rows")
    return Decision("replicated", f"even the fewest rows take {filled}, and sharding alone would not change that")


def _fewest_rows(cfg: RunConfig, shape: PuzzleModelShape, *, place: Place, placement: TablePlacement) -> Forecast:
    """The forecast of the smallest micro-batch that the config allows."""
    share, train = cfg.train.effective_batch_size // place.world_size, cfg.train
    given = train.batch_size if isinstance(train.batch_size, int) else None
    if given is None and isinstance(train.grad_accum, int):
        given = share // train.grad_accum
    tried = cfg.with_values({TABLE: placement}, "placement")
    return foresee_puzzles(tried, shape.of(tried.hrm), place=place)(given or 1)


def note_on_table(cfg: RunConfig, processes: int) -> tuple[str, ...]:
    """A note where sharding was asked for and there is nobody to share with."""
    if cfg.hrm.puzzle_emb_placement == "sharded" and processes == 1:
        return (f"{TABLE} sharded has no effect with one process",)
    return ()
