"""A character model that adds four digits step by step, and redoes the steps that a hint names: `builtin:steps`.

A problem is `a+b+c+d=`, its answer the three running sums modulo 5, such as `4+3+1+0=` 233. A hint is no answer: it is
the number of the first wrong step, or 0. The model is warmed up on noisy traces of three kinds: `a+b+c+d=` y1 y2 y3,
then `?` h, then `?h>` z1 z2 z3. A step is the right one from the digit before it in some traces, else any digit. In
second answers the steps before h are mostly those of the first answer. Problems that are held out are in no trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sftplay.model.toys.digits import BASE, ID, DigitsRecipe


@dataclass(frozen=True, kw_only=True)
class StepsRecipe(DigitsRecipe):
    """Everything that decides the weights of the model. `solves` is the share of steps that are right on purpose."""

    steps: int = 800
    solves: float = 0.6
    hints: float = 0.5
    """Share of the hints that are the first wrong step on purpose."""

    follows: float = 0.8
    """Share of the second answers that keep what stands before the hinted step."""

    def traces(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """As in DigitsRecipe."""
        rows = self.rows
        operands = _problems(rows, generator)

        def mostly(value: Tensor, share: float) -> Tensor:
            chance = torch.rand(rows, generator=generator) < share
            return torch.where(chance, value, torch.randint(BASE, (rows,), generator=generator))

        first, is_right = list[Tensor](), list[Tensor]()
        total, before = operands[0], operands[0]
        for operand in operands[1:]:
            total = (total + operand) % BASE
            before = mostly((before + operand) % BASE, self.solves)
            first.append(before)
            is_right.append(before == total)
        wrong = ~torch.stack([*is_right, torch.zeros(rows, dtype=torch.bool)])
        place = (wrong.int().argmax(0) + 1) % (len(first) + 1)
        picked = torch.randint(len(first) + 1, (rows,), generator=generator)
        hint = torch.where(torch.rand(rows, generator=generator) < self.hints, place, picked)
        keeps = torch.rand(rows, generator=generator) < self.follows
        is_blank = torch.rand(rows, generator=generator) < self.blanks
        redone_from = torch.where(hint == 0, len(first) + 1, hint) * (keeps & ~is_blank)
        second, before = list[Tensor](), operands[0]
        for step, (operand, said) in enumerate(zip(operands[1:], first, strict=True), 1):
            before = torch.where(redone_from > step, said, mostly((before + operand) % BASE, self.solves))
            second.append(before)
        return _rows(operands, first, hint=hint, second=second, is_blank=is_blank)


def _problems(rows: int, generator: torch.Generator) -> list[Tensor]:
    """The four digits of each problem, none of them held out; see data/step_sums/generate.py."""
    digits = torch.randint(BASE, (4, rows), generator=generator)
    a, b, c, d = digits
    is_held_out = (a + 2 * b + 3 * c + 4 * d) % BASE == 0
    return [a, b, c, torch.where(is_held_out, (d + 1) % BASE, d)]


def _rows(
    operands: list[Tensor], first: list[Tensor], *, hint: Tensor, second: list[Tensor], is_blank: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens and targets of traces, with the hint and, where `is_blank`, without it."""
    zero, like = ID["0"], operands[0]

    def same(number: int) -> Tensor:
        return torch.full_like(like, number)

    plus, end, nothing = same(ID["+"]), same(ID["<end>"]), same(-100)
    asked = [each for operand in operands for each in (operand + zero, plus)]
    asked[-1] = same(ID["="])
    y, z, h = [each + zero for each in first], [each + zero for each in second], hint + zero
    unsaid = [nothing] * (len(asked) - 1)
    told = [*asked, *y, same(ID["?"]), h, same(ID[">"]), *z]
    said = [*unsaid, *y, end, h, end, *z, end]
    blank = [*asked, *y, same(ID["?"]), same(ID[">"]), *z, same(ID["<pad>"])]
    unhinted = [*unsaid, *y, end, nothing, *z, end, nothing]
    choose = is_blank[:, None]
    return (
        torch.where(choose, torch.stack(blank, 1), torch.stack(told, 1)),
        torch.where(choose, torch.stack(unhinted, 1), torch.stack(said, 1)),
    )
