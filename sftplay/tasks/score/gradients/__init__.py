"""The forward and backward passes of a step: what models say of actions that were drawn, and what they learn."""
