"""Votes on tasks of ARC, counted over all ranks: each counts the copies it has answered, and each ranks some tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay import log
from sftplay.data.puzzles.arc.answers import read_asked, read_names
from sftplay.data.puzzles.arc.canvas import ALPHABET
from sftplay.data.puzzles.arc.task import LARGEST
from sftplay.data.puzzles.arc.votes import Answer, Tally, ranks_of, share_of, share_of_inputs_solved, share_solved
from sftplay.data.puzzles.folder import PuzzleFolder
from sftplay.data.puzzles.sampler import Rows
from sftplay.tasks.hrm.gathering import objects_on


def is_arc(puzzles: PuzzleFolder) -> bool:
    """Whether the folder says that it holds tasks of ARC; where it looks so and says nothing, that is told."""
    facts = puzzles.facts
    looks_so = (facts.seq_len, facts.vocab_size) == (LARGEST**2, len(ALPHABET.symbols))
    if looks_so and not facts.kind and facts.num_puzzle_identifiers > 1:
        what = 'no votes are counted: dataset.json names no kind; write "kind": "arc" there, with identifiers.json and'
        log.say(f"{puzzles.path}: {what} test_puzzles.json in the folder above, if these are tasks of ARC", "eval")
    return facts.kind == "arc"


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
        """pass@k of whole tasks and of test inputs by the votes of all ranks; nothing on ranks other than the main one.

        All ranks call it.
        """
        rank, world = log.rank(), log.world_size()
        mine = Tally()
        for owner, share in enumerate(self.tally.shares(world)):
            for each in objects_on(owner, share):
                mine.merge(each)
        ballots = mine.ballots()
        ranks = [ranks_of(task, ballots) for name, task in self.tasks.items() if share_of(name, world) == rank]
        of_all = [each for of_rank in objects_on(0, ranks) for each in of_rank]
        if not log.is_main():
            return {}
        strict, partial = share_solved([max(each) for each in of_all]), share_of_inputs_solved(of_all)
        named = {"pass_at": strict, "pass_at_partial": partial}
        return {"tasks": len(of_all)} | {name: {str(k): v for k, v in of_k.items()} for name, of_k in named.items()}
