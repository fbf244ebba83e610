"""The doctor's findings about the model hub: whether it answers, the token, and the cache of this machine.

A token is never shown. The findings say whether there is one and whether the hub accepts it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from sftplay.machine.doctor.check_result import CheckResult
from sftplay.machine.doctor.system import nearest_folder

WAIT_S = 4.0  # longest wait for the hub's answer
TRUE_VALUES = ("1", "ON", "YES", "TRUE")  # values of an environment variable that huggingface_hub reads as true
LOGIN = "hf auth login, or export HF_TOKEN="


def check_hub(model: str | None, *, is_fast: bool, environ: Mapping[str, str] = os.environ) -> list[CheckResult]:
    """Offline settings, cache and token; without `is_fast` also whether the hub answers. `model`: a run's hub name."""
    results, folder = [], _cache_folder(environ)
    if not os.access(nearest_folder(folder), os.W_OK):
        fix = "export HF_HOME=<a folder of yours>"
        results.append(CheckResult("warn", "hub cache", f"{folder} cannot be written", fix))
    cached, names = model is not None and is_cached(model, environ), ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    if offline := next((name for name in names if environ.get(name, "").upper() in TRUE_VALUES), ""):
        if model is None or cached:
            return [*results, CheckResult("ok", "hub", f"{offline} is set: the hub is not asked")]
        what = f"{offline} is set, and {model} is not in the cache here"
        return [*results, CheckResult("stop", "hub", what, f"unset {offline}, then make download-model MODEL={model}")]
    token = find_token(environ)
    if is_fast:
        state = "is set" if token else "is not set; gated models need one"
        return [*results, CheckResult("ok", "hub token", f"{state} (the hub was not asked about it)")]
    endpoint = environ.get("HF_ENDPOINT", "").rstrip("/")
    if not endpoint and find_spec("huggingface_hub"):
        endpoint = import_module("huggingface_hub.constants").ENDPOINT
    code, error = _request(f"{endpoint}/api/whoami-v2" if token else endpoint, token)
    if error and cached:
        return [*results, CheckResult("ok", "hub", f"does not answer ({error}); {model} is in the cache here")]
    if error:
        fix = "check the network and HTTPS_PROXY, or work offline: export HF_HUB_OFFLINE=1"
        return [*results, CheckResult("warn", "hub", f"does not answer ({error})", fix)]
    results.append(CheckResult("ok", "hub", "answers"))
    if token and code in (401, 403):
        return [*results, CheckResult("warn", "hub token", "the hub refuses it", LOGIN)]
    state = "the hub accepts it" if token else f"is not set; gated models need one ({LOGIN})"
    return [*results, CheckResult("ok", "hub token", state)]


def find_token(environ: Mapping[str, str] = os.environ) -> str:
    """The hub's token, from where the hub's own client reads it; empty when there is none."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if environ.get(name):
            return environ[name].strip()
    path = Path(environ.get("HF_TOKEN_PATH") or _home(environ) / "token")
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_cached(model: str, environ: Mapping[str, str] = os.environ) -> bool:
    """True when the cache of this machine holds a config.json of the hub's model."""
    folder = _cache_folder(environ) / f"models--{model.replace('/', '--')}"
    return any(folder.glob("snapshots/*/config.json"))


def _home(environ: Mapping[str, str]) -> Path:
    base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environ.get("HF_HOME") or base / "huggingface").expanduser()


def _cache_folder(environ: Mapping[str, str]) -> Path:
    return Path(
        environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or _home(environ) / "hub"
    ).expanduser()


def _request(url: str, token: str) -> tuple[int, str]:
    """The status code; 0 with the reason when the hub does not answer. Any status code shows that the hub is there."""
    import urllib.error  # importing these two takes as long as all the rest of the doctor
    import urllib.request

    headers = {"User-Agent": "sftplay-doctor", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        request = urllib.request.Request(url, headers=headers, method="GET" if token else "HEAD")
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, ""
    except urllib.error.URLError as error:
        return 0, str(error.reason)
    except (OSError, ValueError) as error:
        return 0, str(error) or type(error).__name__
