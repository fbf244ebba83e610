"""The checks of `make gpu-check`, by subject: what the kit promises, tried on this machine."""
