"""The new tokens of a run: which they are, and the run's tokenizer with them.

The same data, config and tokenizer give the same list on every rank and at every resume.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.data.read.sources import content_digest
from sftplay.errors import ConfigError, DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.model.new_tokens.forms import Form, choose_forms, ids_of
from sftplay.model.new_tokens.terms import find_terms, read_terms, source_of, training_texts, words_of

CODE_VERSION = 1
"""To be raised when the same texts give another list."""

LIST = "new_tokens.json"
"""The file with the list, in the cache and in the run folder."""

KEY = "tuning.new_tokens"
SHOWN = 5
ENCODED_AT_ONCE = 1000


@dataclass(frozen=True)
class NewToken:
    """A term that is a token of its own."""

    term: str
    content: str
    """The text that the token stands for, perhaps with a space before it."""

    single_word: bool
    id: int
    pieces: tuple[int, ...]
    """The tokens that it replaces."""

    count: int
    """How often it occurs in the training texts that were read."""

    @property
    def tokens_saved(self) -> int:
        """Tokens that the training texts lose by it."""
        return self.count * (len(self.pieces) - 1)


def extend(tokenizer: Any, cfg: RunConfig) -> list[NewToken]:
    """Give the tokenizer of the resolved `cfg` its new tokens, and return these; none where the config asks for none.

    Raises:
        ConfigError: the file of terms cannot be used, or holds a term that cannot be a token.
        DataError: no term of the training data would save tokens.
    """
    wanted = cfg.tuning.new_tokens
    if not wanted.is_on:
        return []
    path, held_out = source_of(cfg)
    data = cfg.data
    parts = {
        "code": CODE_VERSION,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "wanted": [wanted.count, wanted.min_count, wanted.path and read_terms(wanted.path)],
        "texts": [path, content_digest(path), held_out],
        "reading": [data.format, data.columns, data.system, data.encoding, data.delimiter],
    }
    folder = Path(data.processed_dir) / f"terms-{fingerprint(parts)}"

    def make(unfinished: Path) -> None:
        (unfinished / LIST).write_text(_as_text(_choose(cfg, tokenizer)), encoding="utf-8")

    ensure_folder(folder, make)
    tokens = _from_entries(json.loads((folder / LIST).read_text(encoding="utf-8")))
    add_to(tokenizer, tokens)
    return tokens


def extend_as_begun(tokenizer: Any, cfg: RunConfig, *, folder: RunFolder) -> list[NewToken]:
    """The same for a run: its folder keeps the list, and a continued run has the one that it began with.

    Raises:
        ConfigError: the file of terms or the tokenizer has changed since the run began; and what `extend` raises.
    """
    tokens = kept_tokens(folder.path)
    if tokens:
        _check_terms(tokens, cfg)
        add_to(tokenizer, tokens)
        return tokens
    if tokens := extend(tokenizer, cfg):
        folder.write_json(LIST, {**_totals(tokens), "tokens": [_shown(token) for token in tokens]})
    return tokens


def add_to(tokenizer: Any, tokens: Sequence[NewToken]) -> None:
    """Give `tokenizer` the tokens, under their ids.

    Raises:
        ConfigError: they get other ids, because the list was made for another tokenizer.
    """
    tokenizer.add_tokens([Form(token.content, token.single_word).as_token() for token in tokens])
    for token in tokens:
        if (found := tokenizer.convert_tokens_to_ids(token.content)) != token.id:
            what = f"the tokenizer is another one than when {token.term!r} became token {token.id}: it is {found} now"
            raise ConfigError(what, where=KEY, fix="restore the model's tokenizer, or train under a new run_name")


def _check_terms(tokens: Sequence[NewToken], cfg: RunConfig) -> None:
    if (source := cfg.tuning.new_tokens.path) is None:
        return  # the data have digests of their own
    before, now = [token.term for token in tokens], read_terms(source)
    if before == now:
        return
    lost, found = ([repr(term) for term in a if term not in b] for a, b in ((before, now), (now, before)))
    changes = [f"{word} {', '.join(terms[:SHOWN])}" for word, terms in (("without", lost), ("with", found)) if terms]
    what = f"the new tokens are others than when the run began: {'; '.join(changes) or 'in another order'}"
    raise ConfigError(what, where=f"{KEY}.path {source}", fix="restore the file, or train under a new run_name")


def kept_tokens(run: Path) -> list[NewToken]:
    """The new tokens that the run in the folder `run` began with; none where it has none."""
    path = run / LIST
    return _from_entries(json.loads(path.read_text(encoding="utf-8"))["tokens"]) if path.is_file() else []


def _choose(cfg: RunConfig, tokenizer: Any) -> list[NewToken]:
    wanted, backend = cfg.tuning.new_tokens, tokenizer.backend_tokenizer
    texts = training_texts(cfg)
    if wanted.path:
        forms, refused = choose_forms(backend, read_terms(wanted.path), words=words_of(texts))
        if refused:
            term, reason = next(iter(refused.items()))
            what = f"{len(refused)} of the terms cannot be new tokens, such as {term!r}: {reason}"
            raise ConfigError(what, where=f"{KEY}.path {wanted.path}", fix="take them out of the file")
    else:
        forms = _found_forms(cfg, texts, backend=backend)
    replaced = {term: tuple(ids_of(backend, term)) for term in forms}
    before = _count_ids(backend, texts)
    tokenizer.add_tokens([form.as_token() for form in forms.values()])
    after = _count_ids(backend, texts)
    log.say(
        f"{len(forms)} new tokens: the texts of {source_of(cfg)[0]} have {after.total():,} tokens with them, "
        f"{before.total():,} without ({1 - after.total() / max(1, before.total()):.1%} less)",
        "data",
    )
    ids = {term: tokenizer.convert_tokens_to_ids(form.content) for term, form in forms.items()}
    return [
        NewToken(term, form.content, form.single_word, ids[term], replaced[term], after[ids[term]])
        for term, form in forms.items()
    ]


def _found_forms(cfg: RunConfig, texts: Sequence[str], *, backend: Any) -> dict[str, Form]:
    wanted = cfg.tuning.new_tokens
    log.status(f"looking for {wanted.count} terms in {source_of(cfg)[0]}", "data")
    # Some will have no form in this tokenizer.
    terms = find_terms(
        texts,
        lambda candidates: [len(ids_of(backend, term)) for term in candidates],
        wanted=2 * wanted.count,
        min_count=wanted.min_count,
    )
    forms, refused = choose_forms(backend, terms, words=words_of(texts))
    forms = dict(list(forms.items())[: wanted.count])
    if not forms:
        what = f"no term occurs {wanted.min_count} times and would save tokens"
        reason = f"; {len(refused)} would, but {next(iter(refused.values()))}" if refused else ""
        fix = f"lower {KEY}.min_count, or leave {KEY} out"
        raise DataError(what + reason, where=source_of(cfg)[0], fix=fix)
    if len(forms) < wanted.count:
        log.say(f"note: only {len(forms)} terms occur {wanted.min_count} times and save tokens", "data")
    return forms


def _count_ids(backend: Any, texts: Sequence[str]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for start in range(0, len(texts), ENCODED_AT_ONCE):
        for encoding in backend.encode_batch(list(texts[start : start + ENCODED_AT_ONCE]), add_special_tokens=False):
            counts.update(encoding.ids)
    return counts


def _totals(tokens: Sequence[NewToken]) -> dict[str, int]:
    return {"count": len(tokens), "tokens_saved": sum(token.tokens_saved for token in tokens)}


def _shown(token: NewToken) -> dict[str, Any]:
    return {**asdict(token), "pieces_before": len(token.pieces), "tokens_saved": token.tokens_saved}


def _as_text(tokens: Sequence[NewToken]) -> str:
    return json.dumps([asdict(token) for token in tokens], ensure_ascii=False, indent=1)


def _from_entries(entries: Sequence[dict[str, Any]]) -> list[NewToken]:
    names = [field.name for field in fields(NewToken)]
    own = ({name: entry[name] for name in names} for entry in entries)
    return [NewToken(**{**entry, "pieces": tuple(entry["pieces"])}) for entry in own]
