"""ARC: tasks of coloured grids, their copies with other colours and directions, and the votes on their answers."""
