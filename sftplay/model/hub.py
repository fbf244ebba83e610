"""Ask the hub for a model: short waits, and errors that say what to do."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from sftplay.errors import MachineError, without_secrets
from sftplay.model.source import check_source, is_hub_shaped, is_local

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
