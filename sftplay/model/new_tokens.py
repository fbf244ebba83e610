"""New tokens: the terms of a file, their forms, and the extended tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sftplay import log
from sftplay.config.data import held_out_share
from sftplay.config.run import RunConfig
from sftplay.data.cache import content_digest, ensure_folder, fingerprint
from sftplay.data.layouts import read_layout_options, to_record
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Refused, Text
from sftplay.data.row_outcomes import compute_keys, is_held_out
from sftplay.errors import ConfigError, DataError
from sftplay.launch.run_folder import RunFolder

WORD = re.compile(r"[^\W\d_]\w*(?:['’-]\w+)*")

READ_CHARACTERS = 20_000_000
"""Of the training texts, from their beginning: about four million words, half a minute and 600 MB."""

LONGEST_TERM = 100
"""Characters of a term."""

HAS_NO_FORM = "this tokenizer would not give texts with it back unchanged, or would split other words"
IS_ONE_TOKEN = "it is one token already"


def read_terms(path: str) -> list[str]:
    """Return the terms of a file, each once, in its order.

    Raises:
        ConfigError: it cannot be read, holds no term, or one that is too long.
    """
    where = f"tuning.new_tokens.path {path}"
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigError(f"cannot be read: {reason}", where=where, fix="name a text file, one term a line") from None
    for number, line in enumerate(lines, 1):
        if len(line.strip()) > LONGEST_TERM or "\0" in line:
            what = f"this is no term: {line.strip()[:40]!r}, {len(line.strip()):,} characters"
            fix = f"one term a line, {LONGEST_TERM} characters at most"
            raise ConfigError(what, where=f"{where}:{number}", fix=fix)
    terms = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if not terms:
        raise ConfigError("holds no term", where=where, fix="write one term a line")
    return terms


def find_text_source(cfg: RunConfig) -> tuple[str, float]:
    """Return the path of the rows, with documents of the first source of type cpt, and the share held out of them."""
    if cfg.learns_documents:
        trained = [source for source in cfg.sources if source.weight > 0] or cfg.sources
        source = next((candidate for candidate in trained if candidate.type == "cpt"), trained[0])
        path, has_held_out, share = source.path, source.val_path, held_out_share(cfg, source)
    else:
        path, has_held_out, share = cfg.rows_path, cfg.data.val_path, held_out_share(cfg)
    return path, 0.0 if has_held_out else share


def read_training_texts(cfg: RunConfig) -> list[str]:
    """Return the first `READ_CHARACTERS` of the rows, without held-out and unreadable ones."""
    path, held_out = find_text_source(cfg)
    reading, texts, left = read_layout_options(cfg.data), [], READ_CHARACTERS
    part = cfg.task.part("rows")
    for place, row in read_rows(path, read_dialect(cfg.data)):
        if isinstance(row, Refused):
            continue
        try:
            record = part.read_record(row, place, cfg=cfg) if part else to_record(row, place, reading=reading)
        except DataError:  # the pass over all rows reports it
            continue
        if is_held_out(compute_keys(record), held_out):
            continue
        for text in [record.text] if isinstance(record, Text) else [turn.content for turn in record.messages]:
            texts.append(text[:left])
            left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def make_token(content: str, *, single_word: bool = False) -> AddedToken:
    """Make a token to add. It absorbs no spaces around it, and is searched for in the unchanged text."""
    return AddedToken(content, single_word=single_word, lstrip=False, rstrip=False, normalized=False)


def choose_forms(
    backend: Tokenizer, terms: Sequence[str], *, words: Sequence[str] = ()
) -> tuple[dict[str, AddedToken], dict[str, str]]:
    """Return the form of each term, and the reason for each term that cannot be a token.

    Args:
        words: sorted; those among them that begin with a term must not get longer either.
    """
    open_forms: dict[str, list[AddedToken]] = {}
    refused: dict[str, str] = {}
    pieces = sorted(piece.replace("Ġ", " ").replace("▁", " ") for piece in backend.get_vocab())
    for term in terms:
        if backend.token_to_id(term) is not None or len(find_term_ids(backend, term)) < 2:
            refused[term] = IS_ONE_TOKEN
            continue
        is_word = _is_word(term[0]) and _is_word(term[-1])
        open_forms[term] = [make_token(term, single_word=is_word)]
        # As in vocabularies, a word has the space before it; where that splits no longer piece, this form comes first.
        after = bisect_right(pieces, f" {term}")
        if is_word and not (after < len(pieces) and pieces[after].startswith(f" {term}")):
            open_forms[term].insert(0, make_token(f" {term}"))
    while True:
        for term in [term for term, forms in open_forms.items() if not forms]:
            refused[term] = HAS_NO_FORM
            del open_forms[term]
        trial = Tokenizer.from_str(backend.to_str())
        trial.add_tokens([forms[0] for forms in open_forms.values()])
        failed = [term for term in open_forms if not _works(term, words, backend=backend, trial=trial)]
        if not failed:
            return {term: forms[0] for term, forms in open_forms.items()}, refused
        for term in failed:
            open_forms[term].pop(0)


def find_term_ids(backend: Tokenizer, term: str) -> list[int]:
    """Return the tokens of a term behind a word and a space."""
    encoding = backend.encode(f"a {term}", add_special_tokens=False)
    return [id for id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if end > 1]


def _is_word(character: str) -> bool:
    """Say whether the character belongs to a script that puts spaces between words."""
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"


def _works(term: str, words: Sequence[str], *, backend: Tokenizer, trial: Tokenizer) -> bool:
    """Say whether `trial` saves tokens of the term, and every text with it decodes as before or unchanged, and is no
    longer than before."""
    if len(find_term_ids(trial, term)) >= len(find_term_ids(backend, term)):
        return False
    longer = takewhile(lambda word: word.startswith(term), words[bisect_right(words, term) :])
    for text in (*_probes(term), *(f"the {word}" for word in longer)):
        before, after = (tokenizer.encode(text, add_special_tokens=False).ids for tokenizer in (backend, trial))
        kept = (text, backend.decode(before, skip_special_tokens=False))
        if trial.decode(after, skip_special_tokens=False) not in kept or len(after) > len(before):
            return False
    return True


def _probes(term: str) -> Iterator[str]:
    """Yield texts with the term between all kinds of neighbours."""
    yield from (term, f" {term}", f"{term} moves", f"the {term} moves", f"a  {term}  b", f"a\t{term}\nb", f"\n\n{term}")
    yield from (f"({term})", f"the {term}.", f"the {term}, too", f"{term} {term}", f"{term}{term}", f"x{term}")
    yield from (f"the {term}s", f"the {term}ing x", f"the {term}'s", f"the {term}2", f"the {term}-{term}", f"ä{term}ö")
    for left, right in pairwise(term.split(" ")):
        yield f"the {left} {right}"
        yield f"the {left}  {right}"


LIST = "new_tokens.json"
"""The file with the list, in the run folder and in the cache."""

CODE_VERSION = 2
"""Raised when the same terms and texts give another list."""

KEY = "tuning.new_tokens"


@dataclass(frozen=True)
class NewToken:
    """A term that is one new token."""

    term: str
    content: str
    """The text that the token stands for, perhaps with a space before it."""

    single_word: bool
    id: int
    pieces: tuple[int, ...]
    """The tokens that it replaces."""

    count: int
    """Its occurrences in the training texts that were read."""

    @property
    def tokens_saved(self) -> int:
        """Tokens saved in the training texts."""
        return self.count * (len(self.pieces) - 1)


def extend(tokenizer: Any, cfg: RunConfig) -> list[NewToken]:
    """Add the terms of the resolved `cfg` to the tokenizer, and return them as tokens; none if it names no file.

    Raises:
        ConfigError: the file of terms cannot be used, or holds a term that cannot be a token.
    """
    path = cfg.tuning.new_tokens.path
    if path is None:
        return []
    terms, (source, held_out), data = read_terms(path), find_text_source(cfg), cfg.data
    parts = {
        "code": CODE_VERSION,
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "terms": terms,
        "texts": [source, content_digest(source), held_out],
        "reading": [data.format, data.columns, data.system, data.encoding, data.delimiter],
    }

    def write_list(unfinished: Path) -> None:
        chosen = [asdict(token) for token in _choose(cfg, tokenizer, terms)]
        (unfinished / LIST).write_text(json.dumps(chosen, ensure_ascii=False, indent=1), encoding="utf-8")

    folder = ensure_folder(Path(data.processed_dir) / f"terms-{fingerprint(parts)}", write_list)
    tokens = _from_entries(json.loads((folder / LIST).read_text(encoding="utf-8")))
    add_to(tokenizer, tokens)
    return tokens


def _choose(cfg: RunConfig, tokenizer: Any, terms: Sequence[str]) -> list[NewToken]:
    """Return the terms as tokens of a copy of the tokenizer."""
    path, backend = cfg.tuning.new_tokens.path, tokenizer.backend_tokenizer
    texts = read_training_texts(cfg)
    words = sorted({word for text in texts for word in WORD.findall(text)})
    forms, refused = choose_forms(backend, terms, words=words)
    if refused:
        term, reason = next(iter(refused.items()))
        what = f"{len(refused)} of the terms cannot be new tokens, such as {term!r}: {reason}"
        raise ConfigError(what, where=f"{KEY}.path {path}", fix="take them out of the file")
    replaced = {term: tuple(find_term_ids(backend, term)) for term in forms}
    extended = Tokenizer.from_str(backend.to_str())
    extended.add_tokens(list(forms.values()))
    before, after = _count_ids(backend, texts), _count_ids(extended, texts)
    less = f"{before.total():,} without ({1 - after.total() / max(1, before.total()):.1%} less)"
    source, _ = find_text_source(cfg)
    log.say(f"{len(forms)} new tokens: the texts of {source} have {after.total():,} tokens with them, {less}", "data")
    vocabulary = extended.get_vocab()
    ids = {term: vocabulary[form.content] for term, form in forms.items()}
    return [
        NewToken(term, form.content, form.single_word, ids[term], replaced[term], after[ids[term]])
        for term, form in forms.items()
    ]


def extend_for_run(tokenizer: Any, cfg: RunConfig, *, folder: RunFolder) -> list[NewToken]:
    """Extend the tokenizer for a run: its folder keeps the list, and a continued run uses its first list.

    Raises:
        ConfigError: the file of terms or the tokenizer has changed since the run began; and what `extend` raises.
    """
    if tokens := kept_tokens(folder.path):
        source = cfg.tuning.new_tokens.path  # none where a release before this one found the terms
        before = [token.term for token in tokens]
        if source and (now := read_terms(source)) != before:
            lost, found = ([repr(term) for term in a if term not in b] for a, b in ((before, now), (now, before)))
            pairs = (("without", lost), ("with", found))
            changes = "; ".join(f"{word} {', '.join(terms[:5])}" for word, terms in pairs if terms)
            what = f"the new tokens are others than when the run began: {changes or 'in another order'}"
            fix = "restore the file, or train under a new run_name"
            raise ConfigError(what, where=f"{KEY}.path {source}", fix=fix)
        add_to(tokenizer, tokens)
        return tokens
    if tokens := extend(tokenizer, cfg):
        more = [{"pieces_before": len(token.pieces), "tokens_saved": token.tokens_saved} for token in tokens]
        shown = [asdict(token) | counts for token, counts in zip(tokens, more, strict=True)]
        totals = {"count": len(tokens), "tokens_saved": sum(token.tokens_saved for token in tokens)}
        folder.write_json(LIST, {**totals, "tokens": shown})
    return tokens


def add_to(tokenizer: Any, tokens: Sequence[NewToken]) -> None:
    """Add the tokens to `tokenizer`, under their ids.

    Raises:
        ConfigError: they would get other ids, because the list was made for another tokenizer.
    """
    tokenizer.add_tokens([make_token(token.content, single_word=token.single_word) for token in tokens])
    for token in tokens:
        if (found := tokenizer.convert_tokens_to_ids(token.content)) != token.id:
            what = f"the tokenizer is another one than when {token.term!r} became token {token.id}: it is {found} now"
            raise ConfigError(what, where=KEY, fix="restore the model's tokenizer, or train under a new run_name")


def kept_tokens(run: Path) -> list[NewToken]:
    """Return the new tokens that the run in the folder `run` started with; none where it has none."""
    path = run / LIST
    return _from_entries(json.loads(path.read_text(encoding="utf-8"))["tokens"] if path.is_file() else [])


def _from_entries(entries: Sequence[Any]) -> list[NewToken]:
    names = [field.name for field in fields(NewToken)]
    return [NewToken(**{name: entry[name] for name in names} | {"pieces": tuple(entry["pieces"])}) for entry in entries]


def _count_ids(backend: Any, texts: Sequence[str]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for start in range(0, len(texts), 1000):
        for encoding in backend.encode_batch(list(texts[start : start + 1000]), add_special_tokens=False):
            counts.update(encoding.ids)
    return counts
