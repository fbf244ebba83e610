"""Mazes for tests, with a way that a plain search has found."""

from __future__ import annotations

from random import Random

SIZE = 30


def make_maze(seed: int) -> tuple[str, str]:
    """A question and its answer: random walls, and the shortest way from S to G."""
    for attempt in range(1000):
        generator = Random(seed * 1000 + attempt)
        grid = [["#" if generator.random() < 0.3 else " " for _ in range(SIZE)] for _ in range(SIZE)]
        start, goal = ((generator.randrange(SIZE), generator.randrange(SIZE)) for _ in range(2))
        grid[start[0]][start[1]], grid[goal[0]][goal[1]] = "S", "G"
        if start != goal and (way := shortest_way(grid, start, goal)) is not None:
            question = "".join(map("".join, grid))
            for row, column in way:
                grid[row][column] = "o"
            return question, "".join(map("".join, grid))
    raise AssertionError("no maze")


def shortest_way(grid: list[list[str]], start: tuple[int, int], goal: tuple[int, int]) -> list[tuple[int, int]] | None:
    """The cells between start and goal."""
    came = {start: start}
    edge = [start]
    while edge and goal not in came:
        reached = []
        for row, column in edge:
            for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
                inside = 0 <= cell[0] < SIZE and 0 <= cell[1] < SIZE
                if inside and grid[cell[0]][cell[1]] != "#" and cell not in came:
                    came[cell] = (row, column)
                    reached.append(cell)
        edge = reached
    if goal not in came:
        return None
    way = []
    while (goal := came[goal]) != start:
        way.append(goal)
    return way
