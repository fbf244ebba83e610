"""Names of models that a wrong name may have been meant to be."""

from __future__ import annotations

from collections.abc import Iterable

from sftplay.errors import nearest_names
from sftplay.plan.find_shape import read_table


def nearest_models(name: str, more: Iterable[str] = ()) -> list[str]:
    """Return up to three names of the table (and `more`) that `name` may have been meant to be, best first.

    Names that go on where `name` ends come first; without a slash, only last parts are compared.
    """
    spelled = {known if "/" in name else known.rpartition("/")[2]: known for known in [*sorted(read_table()), *more]}
    lowered = {word.lower(): known for word, known in spelled.items()}
    longer = [word for word in sorted(lowered) if name and word.startswith(name.lower())]
    best = longer or nearest_names(name.lower(), lowered)
    return [lowered[word] for word in best[:3]]
