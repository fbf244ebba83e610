"""Hold what an engine answers against the trained model: prompt ids, greedy ids, log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from sftplay import __version__, log
from sftplay.atomic import read_object
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export.adapter_names import WEIGHTS, find_mounted, rename_for_vllm, served_class
from sftplay.export.merge import RECORD, adapter_digest, find_adapter, find_base, find_base_file, load_unquantised
from sftplay.export.serve import base_folder
from sftplay.export.server import find_lora_rank
from sftplay.launch.run_folder import RunFolder
from sftplay.model.hub import first_line
from sftplay.model.source import ADAPTER_CONFIG
from sftplay.model.start_point import digest_result
from sftplay.parity import by_vllm, causes
from sftplay.parity.by_transformers import READ_ERRORS, answer_all
from sftplay.parity.by_vllm import Server, find_server
from sftplay.parity.causes import Load, Tensors, find_altered_tensors
from sftplay.parity.compare import BOUNDS, LOOSEST, Comparison, Reference, compare, find_change
from sftplay.parity.engine import EngineReply, Question
from sftplay.parity.questions import choose_questions
from sftplay.parity.results import find_gguf_files, keep_result

Engine = Literal["transformers", "vllm", "llama.cpp"]
Against = Literal["merged", "adapter", "gguf"]


@dataclass(frozen=True)
class Request:
    """What the command line asks for; empty texts mean that parity decides."""

    engine: Engine
    against: Against | None = None
    served: Path | None = None
    """The folder or file instead of the run's own merged/, adapter/ or GGUF."""

    file: str = ""
    count: int = 20
    max_new_tokens: int = 64
    url: str = ""
    """A server that runs already."""

    name: str = ""
    """Of the model on that server."""

    finds_engine: bool = False
    """No engine was named: a server that gives no ids is not vLLM."""

    has_gpu: bool = False


class ParityCheck:
    """One comparison of an engine with a run. Raise ConfigError where there is nothing to hold against the run."""

    def __init__(self, cfg: RunConfig, folder: RunFolder, renderer: Any, request: Request) -> None:
        self.cfg, self.folder, self.renderer, self.request = cfg, folder, renderer, request
        self.tokenizer, self.trusts_code = renderer.tokenizer, cfg.model.trust_remote_code
        self.server: Server | None = None
        self.notes: list[str] = []
        self.against, self.served = self._find_served()
        self.reference = Reference(cfg, folder, tokenizer=self.tokenizer, end_ids=renderer.end_token_ids)

    def run(self) -> dict[str, Any]:
        """Ask engine and trained model, compare, write parity.json, and return the result.

        Raises:
            MachineError: the engine is not installed, or the base cannot be read.
            DataError: no row can be asked.
        """
        context = self._base_config.get_text_config()
        limit = getattr(context, "max_position_embeddings", None)
        room = limit - self.request.max_new_tokens - 1 if isinstance(limit, int) and limit > 0 else None
        questions, origin = choose_questions(
            self.cfg, self.folder, self.renderer, file=self.request.file, count=self.request.count, room=room
        )
        if self.server and self.request.finds_engine and not self.server.gives_ids(questions[0]):
            self.request = replace(self.request, engine="transformers")
        where = self.server.url if self.server else self.served
        log.say(f"{self.request.engine} with {where}: {len(questions)} {origin} prompts", "parity")
        try:
            reply, fresh = self._ask(questions)
        except RunError as error:
            refused = f"{error.where}: {error.what}" if error.where else error.what
        else:
            return self._judge(questions, origin, reply, fresh)
        result = self._describe(self.request.engine, origin, Comparison(len(questions), 0, 0, 0, None, None, None))
        result |= {"bound": None, "adapter_changes_answers": None}
        faults = self._find_faults(questions, dtype_faults=self._read_dtype()[1], is_equal=False)
        return self._finish(result, [*faults, f"the engine does not answer: {refused}"])

    def _judge(
        self, questions: Sequence[Question], origin: str, reply: EngineReply, fresh: EngineReply | None
    ) -> dict[str, Any]:
        stored, dtype_faults = self._read_dtype()
        precision = max((reply.dtype or "float32", stored or "float32"), key=lambda name: BOUNDS.get(name, LOOSEST))
        if reply.dtype is None and stored is None:
            precision = self._base_dtype or "bfloat16"
        bound = BOUNDS.get(precision, LOOSEST)
        expected = self.reference.answer([question.prompt_ids for question in questions], self.request.max_new_tokens)
        found, changes, why = self._compare(questions, reply, expected, bound)
        faults = []
        if fresh is not None and found.differs(bound) and (parted := _count_parted(reply, fresh, bound)):
            again, _, _ = self._compare(questions, fresh, expected, bound)
            so = "answers otherwise" if again.differs(bound) else "gives the run's answers"
            what = "stale prefix cache: the server answers from keys and values of an earlier adapter or base"
            rows = f"{parted} of {len(questions)} rows; with a cache salt it {so}"
            faults.append(f"{what} ({rows}); restart it, or load the adapter under a new name")
        if changes is None:
            self.notes.append(f"whether the adapter changes answers cannot be told: {why}")
        is_equal = not (faults or found.differs(bound) or changes is False)
        faults += self._find_faults(questions, dtype_faults=dtype_faults, is_equal=is_equal)
        if reply.template and not any("chat template differs" in fault for fault in faults):
            faults += causes.explain_template(self.tokenizer.chat_template, reply.template)
        if not is_equal and not faults:
            faults.append(self._guess(found, changes, bound))
        elif changes is False:
            faults.append("the engine answers as the base")
        result = self._describe(reply.version, origin, found) | {
            "bound": bound, "precision": precision, "adapter_changes_answers": changes,
        }  # fmt: skip
        return self._finish(result, faults)

    def _compare(
        self, questions: Sequence[Question], reply: EngineReply, expected: Sequence[Sequence[int]], bound: float
    ) -> tuple[Comparison, bool | None, str]:
        """Compare the answers with the trained model's, which are `expected`, and with its base's."""
        pairs = [
            (answer.prompt_ids or question.prompt_ids, answer.answer_ids)
            for question, answer in zip(questions, reply.answers, strict=True)
        ]
        alone = [(question.prompt_ids, answer) for question, answer in zip(questions, expected, strict=True)]
        of_run, run_alone = self.reference.score(pairs), self.reference.score(alone)
        texts = [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in expected]
        found = compare(
            questions, reply, expected=expected, texts=texts, scores=of_run, bound=bound,
            end_ids=self.reference.all_end_ids, max_new_tokens=self.request.max_new_tokens,
        )  # fmt: skip
        of_base = self.reference.score_base([*pairs, *alone])
        if of_base is None:
            return found, None, "the model that the run started from cannot be opened"
        changes, why = find_change(
            reply, expected=expected, of_run=of_run, of_base=of_base[: len(pairs)], run_alone=run_alone,
            base_alone=of_base[len(pairs) :], bound=bound, is_same=found.same_answer_ids == found.n,
        )  # fmt: skip
        return found, changes, why

    # what is served

    def _find_served(self) -> tuple[Against, Path | None]:
        request, path = self.request, self.folder.path
        if request.url:
            return self._find_on_server()
        is_whole = (path / "model").is_dir()
        against = request.against
        if against is None:
            has_merged = (path / "merged").is_dir() or is_whole
            against = "gguf" if request.engine == "llama.cpp" else "merged" if has_merged else "adapter"
            if request.served:
                against = _guess_kind(request.served)
        _check_kind(request.engine, against)
        if request.served:
            if not request.served.exists():
                raise ConfigError("is not there", where=str(request.served), fix="name what is served: SERVED=")
            return against, request.served
        if against == "adapter":
            return against, find_adapter(self.cfg, self.folder)
        if against == "merged":
            served = path / ("model" if is_whole else "merged")
            if not served.is_dir():
                raise ConfigError("no merged model here", where=str(served), fix="make merge")
            return against, served
        files = find_gguf_files(self.folder)
        if len(files) != 1:
            names = ", ".join(file.name for file in files)
            what = f"has {len(files)} GGUF files: {names}" if files else "has no GGUF file"
            fix = f"name one: SERVED={files[0]}" if files else "make export FORMAT=gguf"
            raise ConfigError(what, where=str(path), fix=fix)
        return against, files[0]

    def _find_on_server(self) -> tuple[Against, Path | None]:
        request = self.request
        if request.engine == "llama.cpp":
            fix = "leave it out: the file is opened here"
            raise ConfigError("llama.cpp is not asked over the network", where="--url", fix=fix)
        if request.against:
            _check_kind(request.engine, request.against)
        self.server, model = find_server(request.url, request.name, likely=self.folder.path.resolve().name)
        against: Against = request.against or ("adapter" if model.get("parent") else "merged")
        root = str(request.served or model.get("root") or "")
        if Path(root).is_absolute() or request.served:
            served = Path(root)
        else:  # the server names no folder: the run's own is likely
            whole = "model" if (self.folder.path / "model").is_dir() else "merged"
            served = self.folder.path / ("adapter" if against == "adapter" else whole)
        known = served if any((served / name).is_file() for name in ("config.json", ADAPTER_CONFIG)) else None
        if known is None:
            self.notes.append("what the server serves does not lie on this machine: its files were not looked at")
        return against, known

    def _ask(self, questions: Sequence[Question]) -> tuple[EngineReply, EngineReply | None]:
        """Return the engine's answers; of a server that runs already, also those past its prefix cache."""
        request, served = self.request, self.served
        if self.server:
            return self._ask_server(questions, self.server)
        assert served is not None
        if request.engine == "transformers":
            # The end of a turn belongs to the adapter's tokenizer; its base need not know it.
            ends = self.renderer.end_token_ids if self.against == "adapter" else ()
            return answer_all(
                served, questions, max_new_tokens=request.max_new_tokens, end_ids=ends, trusts_code=self.trusts_code
            ), None
        if request.engine == "llama.cpp":
            from sftplay.parity.by_llama_cpp import answer_all as answer_by_llama_cpp

            return answer_by_llama_cpp(served, questions, max_new_tokens=request.max_new_tokens), None
        adapter = served if self.against == "adapter" else None
        if adapter and self._explain_mounting():
            find_lora_rank(adapter)  # its refusals come first
            raise RunError("vLLM was not started, since it would leave modules of the adapter out")
        base = Path(self._served_base)
        folder = served if not adapter else base if base.is_dir() else base_folder(self.cfg, self.folder)
        return by_vllm.answer_all(
            folder, questions, max_new_tokens=request.max_new_tokens, adapter=adapter, tokenizer=self.tokenizer,
            log_file=(self.folder.logs / "parity-vllm.log").resolve(), trusts_code=self.trusts_code,
            has_gpu=request.has_gpu,
        ), None  # fmt: skip

    def _ask_server(self, questions: Sequence[Question], server: Server) -> tuple[EngineReply, EngineReply | None]:
        tokens, is_vllm = self.request.max_new_tokens, self.request.engine == "vllm"
        given = server.ask(questions, max_new_tokens=tokens, gives_ids=is_vllm)
        version = f"{'vLLM' if is_vllm else 'transformers'} at {server.url}"
        if not any(answer.answer_ids for answer in given):
            self.notes.append("compared by texts alone: this server gives neither ids nor log-probabilities")
            return EngineReply(version, given), None
        salted = server.ask(questions, max_new_tokens=tokens, salt=True)
        return EngineReply(version, given), EngineReply(version, salted)

    @property
    def _served_base(self) -> str:
        """The base that the served adapter names, where it is here; else the run's."""
        assert self.served is not None
        named = str(read_object(self.served / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
        return named if named and Path(named).is_dir() else find_base(self.cfg, self.folder)[0]

    # what is wrong with it

    def _find_faults(self, questions: Sequence[Question], *, dtype_faults: Sequence[str], is_equal: bool) -> list[str]:
        """Return what the files of what is served say, the likeliest cause first."""
        said = causes.explain_trained_template(self.tokenizer.chat_template, self.folder)
        if self.served is None:
            return said
        if self.against == "gguf":
            from sftplay.parity.gguf_causes import explain_gguf

            return said + explain_gguf(self.served, self.reference, questions)
        said += self._explain_words(questions)
        if self.against == "adapter":
            unmounted = self._explain_mounting()
            if is_equal:  # what was measured counts, not the tables of one release
                self.notes += unmounted
            said = ([] if is_equal else unmounted) + said + self._explain_adapter(self.served)
        else:
            said += self._explain_configs(self.served)
            said += dtype_faults
            said += self._explain_weights(self.served)
        if self.reference.folder.path.joinpath("adapter").is_dir():
            said += causes.explain_seal(self.folder, self.cfg)
        return said

    def _explain_words(self, questions: Sequence[Question]) -> list[str]:
        """Compare tokenizer and chat template of what is served with the run's."""
        assert self.served is not None
        has_tokenizer = (self.served / "tokenizer_config.json").is_file()
        if not has_tokenizer and self.against == "adapter":
            return []  # whoever serves it brings the tokenizer
        tokenizer, said = causes.open_tokenizer(self.served, trusts_code=self.trusts_code)
        if tokenizer is None:
            return said
        said = causes.explain_template(self.tokenizer.chat_template, tokenizer.chat_template)
        said = said or causes.explain_second_template(self.served, self.tokenizer.chat_template)
        said += causes.explain_tokenizer(self.tokenizer, tokenizer, questions) or causes.explain_rules(
            self.tokenizer, tokenizer, self.served
        )
        return said or causes.explain_prompts(self.tokenizer, tokenizer, questions)

    def _explain_configs(self, served: Path) -> list[str]:
        """Compare what config.json and generation_config.json say with the run and its base."""
        base = self._base_settings
        known = {*self.reference.all_end_ids, self.tokenizer.eos_token_id}
        for name in ("config.json", "generation_config.json"):
            given = base[name].get("eos_token_id")
            known |= {given} if isinstance(given, int) else set(given or [])
        said = causes.explain_config(self._base_config, served, trusts_code=self.trusts_code)
        said += causes.explain_class(self._base_config, served, bos=self.tokenizer.bos_token_id)
        ends = self.renderer.end_token_ids
        said += causes.explain_ends(served, ends, known=known, tokenizer=self.tokenizer)
        if base["config.json"]:  # else the base is not at hand
            said += causes.explain_generation(base["config.json"] | base["generation_config.json"], served)
        return said + causes.explain_index(served)

    @cached_property
    def _base_settings(self) -> dict[str, dict[str, Any]]:
        """The base's config.json and generation_config.json as they are stored; empty where they are not at hand."""
        names = ("config.json", "generation_config.json")
        found = {name: find_base_file(self.cfg, self.folder, name=name) for name in names}
        return {name: read_object(path) if path else {} for name, path in found.items()}

    @cached_property
    def _vllm_names(self) -> dict[str, list[str]] | None:
        """The names by which vLLM mounts the run's adapter, where what is served has those and not the run's own."""
        trained = read_keys(self.folder.path / "adapter")
        if self.request.engine != "vllm" or self.served is None or not trained:
            return None
        renamed = rename_for_vllm(self._base_settings["config.json"], trained) or {}
        served = set(read_keys(self.served))
        fits = served & {name for names in renamed.values() for name in names}
        return renamed if len(fits) > len(served & set(trained)) else None

    def _explain_mounting(self) -> list[str]:
        """Say how many modules of the adapter vLLM mounts, from names alone, where these are not all."""
        if self.request.engine != "vllm" or self.against != "adapter" or self.served is None:
            return []
        keys, config = read_keys(self.served), self._base_settings["config.json"]
        found = find_mounted(config, keys, "vllm") if keys and config else None
        if found is None or not found.is_known or found.mounts_all:
            return []
        count = f"the adapter's keys match {found.matched} of {found.total} modules of {served_class(config)} in vLLM"
        return [f"{count}; {found.first_unmatched} for one fits nothing ({found.fix})"]

    def _explain_adapter(self, served: Path) -> list[str]:
        said = causes.explain_adapter(
            self.reference.model, served, trained=self.folder.path / "adapter", cfg=self.cfg, names=self._vllm_names
        )
        base = self._served_base
        trained = find_base(self.cfg, self.folder)[0]
        if Path(base).is_dir() and Path(trained).is_dir() and not Path(base).samefile(trained):
            said += [f"base: {text}" for text in causes.explain_config(self._base_config, Path(base),
                                                                      trusts_code=self.trusts_code)]  # fmt: skip
        return said

    def _explain_weights(self, served: Path) -> list[str]:
        """Compare the served weights with the trained ones, tensor by tensor."""
        try:
            whole, loading = AutoModelForCausalLM.from_pretrained(
                served, dtype="auto", output_loading_info=True, trust_remote_code=self.trusts_code
            )
        except READ_ERRORS as error:
            return [f"the weights cannot be opened ({first_line(error)})"]
        if missing := sorted(loading["missing_keys"]):
            return [f"{len(missing)} weights are missing, {missing[0]} for one"]
        said = causes.explain_tie(whole)
        if unknown := sorted(loading["unexpected_keys"]):
            said.append(f"{len(unknown)} weights in it belong to no part of the model, {unknown[0]} for one")
        is_own = self.folder.path.joinpath("model").exists() and served.samefile(self.folder.path / "model")
        if is_own:
            return said
        trained = dict(self.reference.merged().named_parameters(remove_duplicate=False))
        loads: dict[str, Load] = {name: value.detach for name, value in whole.named_parameters(remove_duplicate=False)}
        altered = find_altered_tensors(Tensors(trained, loads, _LazyBase(self.cfg, self.folder)))
        made_from = read_object(served / RECORD).get("adapter_sha256")
        if altered and made_from and made_from != adapter_digest(self.folder):
            said.append(f"{RECORD} says it was merged from an earlier adapter than the run's present one")
        return said + altered

    def _guess(self, found: Comparison, changes: bool | None, bound: float) -> str:
        """Return the likely cause where the files say nothing."""
        if found.first is not None and found.first.position < 0:
            return "the engine reads other tokens than the run: another tokenizer, chat template, or tokens it adds"
        if changes is False:
            what = "the engine answers as the base: the adapter is not in effect"
            return what if self.against == "adapter" else f"{what} (it serves the base, or an older merge)"
        if found.first is not None and (found.max_logprob_diff or 0.0) <= bound:
            return "the engine ends answers elsewhere: another end token, or a limit of its own"
        if self.server:
            return "the server's weights are not those of the files here: it was started with others, or rounds them"
        return "the engine computes something else from the same files: a defect or a setting of the engine"

    @cached_property
    def _base_config(self) -> Any:
        if (self.folder.path / "model").is_dir():
            return AutoConfig.from_pretrained(self.folder.path / "model", trust_remote_code=self.trusts_code)
        name, revision = find_base(self.cfg, self.folder)
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=self.trusts_code)

    @property
    def _base_dtype(self) -> str | None:
        dtype = self._base_config.dtype
        return None if dtype is None else str(dtype).removeprefix("torch.")

    def _read_dtype(self) -> tuple[str | None, list[str]]:
        """Return in what most of what is served is stored, and what contradicts that."""
        if self.served is None or self.against == "adapter":
            return self._base_dtype if self.against == "adapter" and self.server else None, []
        if self.against == "gguf":
            from sftplay.parity.gguf_causes import read_precision

            return read_precision(self.served), []
        return causes.explain_dtype(self.served, stored=self._base_dtype)

    # the result

    def _describe(self, version: str, origin: str, found: Comparison) -> dict[str, Any]:
        first = None
        if found.first is not None:
            texts = {f"{key}_text": self._decode(getattr(found.first, key)) for key in ("wanted", "found")}
            first = asdict(found.first) | texts
        return {
            "engine": self.request.engine, "version": version, "against": self.against,
            "served": None if self.served is None else str(self.served), "url": self.server and self.server.url,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "kit": __version__, "n": found.n, "prompts": origin,
            "max_new_tokens": self.request.max_new_tokens, "same_prompt_ids": found.same_prompt_ids,
            "same_answer_ids": found.same_answer_ids, "ties": found.ties,
            "max_logprob_diff": _finite(found.max_logprob_diff), "mean_logprob_diff": _finite(found.mean_logprob_diff),
            "first_difference": first, "weights": digest_result(self.folder.result),
        }  # fmt: skip

    def _decode(self, token: int | str | None) -> str | None:
        known = isinstance(token, int) and token < len(self.tokenizer)
        return self.tokenizer.decode([token]) if known else token if isinstance(token, str) else None

    def _finish(self, result: dict[str, Any], faults: Sequence[str]) -> dict[str, Any]:
        """Add verdict and cause, and keep the result in parity.json next to those of other engines."""
        self.reference.close()
        result |= {
            "verdict": "differs" if faults else "ok",
            "cause": "; ".join(faults[:4]) or None,
            "faults": list(faults),
        }
        result["notes"] = self.notes
        keep_result(self.folder, result)
        return result


class _LazyBase(Mapping[str, Load]):
    """The base's weights by name; it is opened when the first one is asked for."""

    def __init__(self, cfg: RunConfig, folder: RunFolder) -> None:
        self._cfg, self._folder = cfg, folder

    @cached_property
    def _weights(self) -> dict[str, torch.Tensor]:
        try:
            return dict(load_unquantised(self._cfg, self._folder).named_parameters(remove_duplicate=False))
        except MachineError:
            return {}

    def __getitem__(self, name: str) -> Load:
        return self._weights[name].detach

    def __iter__(self) -> Any:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _count_parted(reply: EngineReply, fresh: EngineReply, bound: float) -> int:
    """Return in how many rows a server answers otherwise where its prefix cache cannot help."""
    return sum(
        list(a.answer_ids) != list(b.answer_ids) or any(abs(x - y) > bound for x, y in zip(a.logprobs, b.logprobs))
        for a, b in zip(reply.answers, fresh.answers, strict=True)
    )


def _check_kind(engine: Engine, against: Against) -> None:
    if (against == "gguf") != (engine == "llama.cpp"):
        what = f"{engine} does not serve {'a GGUF file' if against == 'gguf' else 'a folder of weights'}"
        raise ConfigError(what, where="--against", fix="llama.cpp goes with gguf, the others with merged or adapter")


def _guess_kind(path: Path) -> Against:
    if path.suffix == ".gguf":
        return "gguf"
    return "adapter" if (path / ADAPTER_CONFIG).is_file() else "merged"


def read_keys(adapter: Path) -> list[str]:
    """Return the names in an adapter's weights; none where they cannot be read."""
    with suppress(OSError, SafetensorError), safe_open(adapter / WEIGHTS, framework="pt") as file:
        return list(file.keys())
    return []


def _finite(value: float | None) -> float | None:
    return value if value is None or abs(value) < float("inf") else None
