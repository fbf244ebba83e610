"""The checks of `gpu-check`: each promise of the kit that a machine can show, as a row of a table."""
