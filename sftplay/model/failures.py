"""Explain why a model's files cannot be opened, and what to do. Imports no torch, which tokenizers do not need."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from sftplay import log
from sftplay.config.layers import walk
from sftplay.config.run import ModelConfig
from sftplay.errors import ConfigError, MachineError, SftplayError, machine_refusal, without_secrets
from sftplay.model.hub import FOLDER_FIX
from sftplay.model.source import PICKLE_FIX, REFUSED_PICKLE, SAFE_COPY, describe_pickle, is_local, read_shape


@contextmanager
def refusing(to_refusal: Callable[[Exception], SftplayError]) -> Iterator[None]:
    """Raise `to_refusal(error)` for any error of a library that opens foreign files. Its traceback goes to the log.

    Such a file can hold anything, and a library may raise anything: a KeyError, a TypeError.
    """
    try:
        yield
    except SftplayError:
        raise
    except Exception as error:
        # torch's message about a pickle advises to switch its check off: users must not see that.
        advises = isinstance(error, pickle.UnpicklingError) or REFUSED_PICKLE in str(error)
        if os.environ.get(log.FOLLOWED) == log.REDIRECTED and not advises:
            traceback.print_exc()
        raise (machine_refusal(error) or to_refusal(error)) from error


def describe_error(error: Exception) -> str:
    """Return a library's error in one line; with the type of the error where the message alone says little."""
    lines = [line.strip() for line in without_secrets(str(error)).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    speaks = isinstance(error, OSError | ValueError | RuntimeError | SafetensorError) and text
    return text if speaks else f"{type(error).__name__}: {text}".removesuffix(": ")


def explain_failure(error: Exception, model: ModelConfig, *, where: str) -> SftplayError:
    """Return the refusal for a library's `error` while it opened `model`, with what to do."""
    if refusal := refused_code(error, model):
        return refusal
    if isinstance(error, pickle.UnpicklingError) or REFUSED_PICKLE in str(error):
        return MachineError(f"the model's pickle {describe_pickle(error)}", where=where, fix=SAFE_COPY)
    fix = f"check the name, the connection and the files, {FOLDER_FIX}; the run's log says more"
    if is_local(model.name):
        found = ""
        if isinstance(error, KeyError | AttributeError):  # a setting of config.json that a library does not know
            settings = walk(read_shape(model.name))
            words = {text: at[-1] for at, text in settings if isinstance(text, str) and isinstance(at[-1], str)}
            word = max((word for word in words if len(word) > 2 and word in str(error)), key=len, default="")
            found = f": {words[word]} is {word!r} in its config.json" if word else ""
        fix = f"correct its files, or copy the model again{found}; the run's log says more"
    elif "safetensors" in str(error):
        fix = f"if it has pickled weights only: {PICKLE_FIX}"
    return MachineError(f"the model cannot be loaded ({describe_error(error)})", where=where, fix=fix)


def refused_code(error: Exception, model: ModelConfig) -> ConfigError | None:
    """Return the refusal of a model that runs only with its own code, None for any other error."""
    if model.trust_remote_code or "trust_remote_code" not in str(error):
        return None
    return ConfigError(
        f"{model.name} runs only with Python code that ships with it, which could do anything you can",
        where="model.trust_remote_code",
        fix="read that code; if you trust it, set model.trust_remote_code: true",
    )


def announce_trust(model: ModelConfig, what: str) -> None:
    """Warn that foreign code may run, where it is allowed."""
    if model.trust_remote_code:
        log.say(f"warning: model.trust_remote_code is true: Python code that ships with {what} may run here", "model")
