"""Votes on tasks of ARC, counted over all ranks: each counts the copies it has answered, and each ranks some tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay import log
from sftplay.data.puzzles.arc.answers import read_asked, read_names
from sftplay.data.puzzles.arc.votes import Answer, Tally, share_of, share_solved, solved_at
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.data.puzzles.sampler import Rows
from sftplay.tasks.hrm.gathering import objects_on


class Voting:
    """Takes the answers of this rank while it measures."""

    def __init__(self, puzzles: PuzzleFolder) -> None:
        """Raise DataError where the names of the copies or the tasks do not lie beside the puzzles."""
        self.names, self.tasks = read_names(puzzles.path), read_asked(puzzles.path)
        self.tally = Tally()

    def add(self, rows: Rows, predicted: NDArray[Any], *, q_halt: NDArray[Any]) -> None:
        """Count the answers to a batch, rows of padding left out: uint8 [batch, cells], and fp32 [batch]."""
        for place in np.flatnonzero(rows.mask):
            name = self.names[rows.puzzle_identifiers[place]]
            self.tally.add(Answer(name, rows.inputs[place], predicted[place], float(q_halt[place])))

    def figures(self) -> dict[str, Any]:
        """pass@k of whole tasks by the votes of all ranks; nothing on ranks other than the main one. All call it."""
        rank, world = log.rank(), log.world_size()
        mine = Tally()
        for owner, share in enumerate(self.tally.shares(world)):
            for each in objects_on(owner, share):
                mine.merge(each)
        ballots = mine.ballots()
        tries = [solved_at(task, ballots) for name, task in self.tasks.items() if share_of(name, world) == rank]
        of_all = [k for each in objects_on(0, tries) for k in each]
        if not log.is_main():
            return {}
        return {"tasks": len(of_all), "pass_at": {str(k): share for k, share in share_solved(of_all).items()}}
