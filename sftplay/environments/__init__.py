"""Turns of something else between those of the model: environments and tools, in processes of their own."""

SHIPPED_ENVIRONMENTS = {
    "twenty_questions": "sftplay.environments.twenty_questions:make",
    "openenv": "sftplay.environments.openenv:make",
    "verifiers": "sftplay.environments.verifiers:make",
}
SHIPPED_TOOLS = {
    "calculator": "sftplay.environments.calculator:calculator",
    "python": "sftplay.environments.python:python",
}
"""Name in a config -> `module:function`."""
