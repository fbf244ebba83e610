"""Solver and guide of a model that does not train: the result of a run, or what it started from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.model.load import load_result, load_untrained
from sftplay.model.weights import frozen_dtype, open_model
from sftplay.tasks.score.episodes.cast import ADAPTERS, Role


class FinishedCast:
    """Speaks with the adapter of each role, with a guide's own model, and with the base where a role has neither."""

    def __init__(self, model: Any, *, guide: Any = None) -> None:
        self.model, self._guide = model, guide
        self._adapters = getattr(model, "peft_config", {})

    @contextmanager
    def speaking(self, role: Role) -> Iterator[Any]:
        """The model of this role."""
        if role == "guide" and self._guide is not None:
            yield self._guide
        elif ADAPTERS[role] in self._adapters:
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
    name = ADAPTERS["guide"]
    if (adapter := folder.path / "adapter" / name).is_dir():
        model.load_adapter(str(adapter), name)
    whole = folder.path / "model" / name
    guide = open_model(cfg, str(whole), dtype=frozen_dtype(cfg)).eval() if whole.is_dir() else None
    return FinishedCast(model.eval(), guide=guide)
