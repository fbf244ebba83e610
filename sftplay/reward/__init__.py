"""Rewards that can be checked: pure functions from completions to numbers, called so that none can hang or lie.

A reward gets the completions of a batch and the columns of their rows, and returns a number for each. None means that
the machinery failed and nothing is known: it is counted, and never becomes 0.
"""
