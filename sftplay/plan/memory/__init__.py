"""The closed form of memory: what each part of a training step holds on one device."""
