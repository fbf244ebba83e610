"""Solver and guide of a model that does not train: the result of a run, or what it started from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.model.load import load_result, load_untrained
from sftplay.tasks.score.episodes.cast import ADAPTERS, Role


class FinishedCast:
    """Speaks with the adapter of each role, and with the base where a role has none."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._adapters = getattr(model, "peft_config", {})

    @contextmanager
    def speaking(self, role: Role) -> Iterator[Any]:
        """The model of this role."""
        if ADAPTERS[role] in self._adapters:
            self.model.set_adapter(ADAPTERS[role])
            yield self.model
        elif self._adapters:
            with self.model.disable_adapter():
                yield self.model
        else:
            yield self.model


def open_cast(cfg: RunConfig, folder: RunFolder, *, untrained: bool = False) -> FinishedCast:
    """The result of a run, or, `untrained`, what the run started from.

    Raises:
        MachineError: the weights cannot be read.
    """
    if untrained:
        return FinishedCast(load_untrained(cfg, folder.path))
    model = load_result(cfg, folder.path)
    guide = folder.path / "adapter" / ADAPTERS["guide"]
    if guide.is_dir():
        model.load_adapter(str(guide), ADAPTERS["guide"])
    return FinishedCast(model.eval())
