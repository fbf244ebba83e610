"""Choose how the rows of a mixture's source are read: as documents, or as chats in any layout."""

from __future__ import annotations

from sftplay.config.data import DataConfig
from sftplay.config.run import RunConfig


def select_data_config(cfg: RunConfig, kind: str) -> DataConfig:
    """The section `data` as it holds for sources of a type: only layouts of that type are read."""
    data = cfg.data
    if kind == "cpt":
        columns = {field: column for field, column in data.columns.items() if field == "text"}
        return data.model_copy(update={"format": "text", "columns": columns, "system": None})
    others = {field: column for field, column in data.columns.items() if field != "text"}
    return data.model_copy(update={"format": "auto" if data.format == "text" else data.format, "columns": others})
