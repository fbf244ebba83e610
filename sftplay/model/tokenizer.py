"""Opens a model's tokenizer as the kit needs it: fast, padded on the right, with a pad token of its own."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from sftplay.config.schema import ModelConfig
from sftplay.errors import DataError, MachineError
from sftplay.model.locate import locate


def load_tokenizer(model: ModelConfig, folder: str | None = None) -> Any:
    """The tokenizer of `model`, or the one stored in `folder`.

    Raises:
        MachineError: hub or folder did not give one.
        DataError: it has neither a pad nor an end-of-text token.
    """
    source = folder or locate(model.name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=None if folder else model.revision, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise MachineError(
            f"no tokenizer could be opened ({str(error).splitlines()[0]})",
            where=f"model.name {source}",
            fix="check the name and the connection, or point model.name to a downloaded folder",
        ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError("has no pad token and no end-of-text token", where=f"tokenizer of {source}", fix="add one")
        # Padding carries no label and no attention, so sharing the end token's id is harmless.
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer
