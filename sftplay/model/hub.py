"""Ask the hub for a model, with short waits; and explain why a model's files cannot be opened, and what to do."""

from __future__ import annotations

import json
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from sftplay import log
from sftplay.config.layers import walk
from sftplay.config.run import ModelConfig
from sftplay.errors import ConfigError, MachineError, SftplayError, machine_refusal, without_secrets
from sftplay.model.source import (
    PICKLE_FIX,
    REFUSED_PICKLE,
    SAFE_COPY,
    check_source,
    describe_pickle,
    is_hub_shaped,
    is_local,
    read_shape,
)

CONNECT_S = 9.0
"""Longest wait for the hub's first answer. Its client would try six times and give up after about 50 s."""


def check_reachable(name: str, revision: str | None, *, where: str) -> bool:
    """Return True when the hub has the model `name`, False when it does not answer but the model is in the local cache.

    It makes one short request before a library starts its own retries. After an answer, a slow connection has all the
    time it needs. Folders are always reachable.

    Raises:
        MachineError: the hub does not answer, or has no such model for this user.
        ConfigError: `name` is the path of a folder that is not, or no longer, there.
    """
    if is_local(name):
        return True
    if not is_hub_shaped(name):
        check_source(name, where)
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    from sftplay.machine.releases import hub_client

    cached = isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=CONNECT_S)
    except (hub_client().TransportError, errors.OfflineModeIsEnabled) as error:
        if cached:
            return False
        raise unreachable(name, error, where=where) from error
    except errors.EntryNotFoundError:
        return True  # the library that opens it reports what is missing
    except errors.GatedRepoError as error:
        fix = f"accept its terms on its page, and log in with `hf auth login` or HF_TOKEN; {FOLDER_FIX}"
        what = f"the hub gives {name} only to those who accepted its terms"
        raise MachineError(what, where=where, fix=fix) from error
    except errors.RevisionNotFoundError as error:
        fix = "correct model.revision, or leave it out"
        raise MachineError(f"{name} has no such revision", where=where, fix=fix) from error
    except errors.RepositoryNotFoundError as error:
        fix = f"check the name; if it is private, log in with `hf auth login` or HF_TOKEN; {FOLDER_FIX}"
        what = f"there is no folder {name}, and the hub has no such model"
        raise MachineError(what, where=where, fix=fix) from error
    except (errors.HfHubHTTPError, OSError, ValueError):
        return True  # a mirror with answers of its own
    return True


def find_commit(name: str, revision: str | None) -> str | None:
    """Return the commit at which this machine has last opened the hub's model `name`; None for any other model."""
    if is_local(name) or not is_hub_shaped(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def fetch_weights(name: str, revision: str | None) -> None:
    """Bring the safetensors of the hub's model `name` into its cache, so that several processes can open them at once.

    Other formats, and a download that breaks off, are left to the library that opens the model, which reports them.

    Raises:
        MachineError: the hub does not answer and the cache has nothing, or it has no such model for this user.
    """
    if is_local(name) or not check_reachable(name, revision, where=f"model.name {name}"):
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    from sftplay.machine.releases import hub_client

    with suppress(hub_client().HTTPError, OSError, ValueError, KeyError):
        # transformers looks for weights in one file, or in the list of its parts.
        try:
            hf_hub_download(name, "model.safetensors", revision=revision)
        except EntryNotFoundError:
            parts = hf_hub_download(name, "model.safetensors.index.json", revision=revision)
            index = json.loads(Path(parts).read_text(encoding="utf-8"))
            for file in sorted(set(index["weight_map"].values())):
                hf_hub_download(name, file, revision=revision)


def unreachable(name: str, error: BaseException, *, where: str) -> MachineError:
    """Return the error for a hub that does not answer, with what to do about the model `name`."""
    command = f"make download-model MODEL={name}"
    fix = f"download it where there is a connection ({command}) and point model.name to the folder"
    return MachineError(f"the hub cannot be reached ({first_line(error)})", where=where, fix=fix)


FOLDER_FIX = "or point model.name to a folder with its files"


def first_line(error: BaseException) -> str:
    """Return an error's message in one line, without tokens and passwords."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return without_secrets(text)


def quieten_hub() -> None:
    """Keep transformers from asking the hub to convert pickled weights, which opens a pull request there."""
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")


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
    if "not support an attention implementation" in str(error):
        fix = "write model.attn: eager"
    elif is_local(model.name):
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
