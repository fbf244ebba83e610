"""Open a model's tokenizer as the kit needs it: fast, padded on the right, with a pad token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, GenerationConfig

from sftplay.config.run import ModelConfig, RunConfig
from sftplay.data.render.render import Renderer
from sftplay.errors import ConfigError, DataError, MachineError, SftplayError
from sftplay.model.hub import FOLDER_FIX, announce_trust, check_reachable, describe_error, refused_code, refusing
from sftplay.model.source import ADAPTER_CONFIG, locate

if TYPE_CHECKING:
    from sftplay.model.new_tokens import NewToken


def load_tokenizer(model: ModelConfig, folder: str | None = None) -> Any:
    """Return the tokenizer of the resolved `model`, or the one stored in `folder`.

    An adapter to start from brings its own tokenizer, with the chat template of its training.

    Raises:
        ConfigError: it needs code that ships with it, which is not trusted.
        MachineError: the hub or the folder has none.
        DataError: it has neither a pad nor an end-of-text token.
    """
    kept = folder
    if kept is None and model.adapter is not None:
        adapter = Path(model.adapter)
        if not (adapter / ADAPTER_CONFIG).is_file():
            fix = "name the folder of the adapter, such as outputs/RUN/adapter"
            raise ConfigError(f"{model.adapter} is no adapter's folder", where="model.adapter", fix=fix)
        kept = model.adapter if (adapter / "tokenizer_config.json").is_file() else None
    source, revision = (kept, None) if kept else (locate(model.name), model.revision)
    where = f"model.name {source}"
    options = {} if check_reachable(source, revision, where=where) else {"local_files_only": True}
    announce_trust(model, f"the tokenizer {source}")

    def explain(error: Exception) -> SftplayError:
        fix = f"check the name and the connection, {FOLDER_FIX}"
        if Path(source).is_dir():
            fix = "correct the files of the tokenizer and config.json there, or copy the model again"
        refusal = MachineError(f"no tokenizer could be opened ({describe_error(error)})", where=where, fix=fix)
        return refused_code(error, model) or refusal

    with refusing(explain):
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=model.trust_remote_code, **options
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError("has no pad token and no end-of-text token", where=f"tokenizer of {source}", fix="add one")
        # Padding carries no label and no attention, so sharing the end token's id is harmless.
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def load_extended(cfg: RunConfig) -> tuple[Any, list[NewToken]]:
    """Return the tokenizer of the resolved `cfg` with the new tokens that it asks for, and these tokens.

    Raises what `load_tokenizer` and `new_tokens.extend` raise.
    """
    tokenizer = load_tokenizer(cfg.model)
    if not cfg.tuning.new_tokens.is_on:
        return tokenizer, []
    from sftplay.model.new_tokens import extend

    return tokenizer, extend(tokenizer, cfg)


def set_end_tokens(config: GenerationConfig, tokenizer: Any) -> None:
    """Add the chat template's end tokens to those at which generation with plain transformers stops."""
    ends = {*end_token_ids(tokenizer), *shipped_end_ids(config)}
    config.eos_token_id = min(ends) if len(ends) == 1 else sorted(ends)
    config.pad_token_id = tokenizer.pad_token_id
    sampling = ("temperature", "top_p", "top_k", "min_p", "typical_p")
    if not config.do_sample and any(getattr(config, key, None) is not None for key in sampling):
        # Several shipped configs name a temperature without sampling; transformers reads that and refuses to write it.
        for key in sampling:
            setattr(config, key, None)


def shipped_end_ids(config: GenerationConfig) -> list[int]:
    """Return the tokens at which generation stops by a model's own config; one of them may be 0."""
    ends = config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or [])


def end_token_ids(tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the chat template's, or the tokenizer's own where it has no template."""
    if tokenizer.chat_template:
        return list(Renderer.prove(tokenizer, tokenizer.chat_template, samples=[]).end_token_ids)
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
