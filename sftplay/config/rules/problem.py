"""A broken rule of the config, before it is known where its keys were written."""

from __future__ import annotations

from dataclasses import dataclass, field

from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """A rule that is broken: the keys it looked at (the first is where it is reported), what, and one action."""

    keys: tuple[str, ...]
    what: str
    fix: str = field(kw_only=True)
    nearest: tuple[str, ...] = field(default=(), kw_only=True)

    def as_error(self, cfg: RunConfig) -> ConfigError:
        """The violation as an error at the place where `key_in` was written."""
        key = self.key_in(cfg)
        where = f"{cfg.origins[key]} {key}" if key in cfg.origins else key
        return ConfigError(self.what, where=where, fix=self.fix, nearest=self.nearest)

    def key_in(self, cfg: RunConfig) -> str:
        """The key to report it at: the first one that was written down."""
        return next((key for key in self.keys if key in cfg.origins), self.keys[0])
