"""In which form a term enters a tokenizer: decided by trial, so that texts come back unchanged.

A tokenizer finds an added token in a text before it splits that text into words. So the form decides what happens to
the spaces beside a term, and to longer words that begin with it.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenizers import AddedToken, Tokenizer

SPACES = ("Ġ", "▁")
"""How vocabularies write a space."""

HAS_NO_FORM = "this tokenizer would not give texts with it back unchanged, or would split other words"
IS_ONE_TOKEN = "it is one token already"


@dataclass(frozen=True)
class Form:
    """A term as the tokenizer will look for it."""

    content: str
    single_word: bool = False

    def as_token(self) -> AddedToken:
        """The token to add. It takes no space beside it, and is looked for in the text as it stands."""
        return AddedToken(self.content, single_word=self.single_word, lstrip=False, rstrip=False, normalized=False)


def choose_forms(
    backend: Tokenizer, terms: Sequence[str], *, words: Sequence[str] = ()
) -> tuple[dict[str, Form], dict[str, str]]:
    """The form of each term, and the reason for each term that cannot be a token.

    Args:
        words: sorted; those among them that begin with a term must not get longer either.
    """
    open_forms = {term: list(_forms_of(term)) for term in terms}
    pieces, refused = _sorted_pieces(backend), {}
    for term in terms:
        if backend.token_to_id(term) is not None or len(ids_of(backend, term)) < 2:
            refused[term] = IS_ONE_TOKEN
            del open_forms[term]
            continue
        if _begins_another(f" {term}", pieces):
            open_forms[term] = [form for form in open_forms[term] if form.content[:1] != " "]
    while True:
        for term in [term for term, forms in open_forms.items() if not forms]:
            refused[term] = HAS_NO_FORM
            del open_forms[term]
        trial = Tokenizer.from_str(backend.to_str())
        trial.add_tokens([forms[0].as_token() for forms in open_forms.values()])
        failed = [
            term
            for term in open_forms
            if not _works(term, [*_probes(term), *_longer(term, words)], backend=backend, trial=trial)
        ]
        if not failed:
            return {term: forms[0] for term, forms in open_forms.items()}, refused
        for term in failed:
            open_forms[term].pop(0)


def ids_of(backend: Tokenizer, term: str) -> list[int]:
    """The tokens of a term behind a word and a space."""
    encoding = backend.encode(f"a {term}", add_special_tokens=False)
    return [id for id, (_, end) in zip(encoding.ids, encoding.offsets, strict=True) if end > 1]


def _forms_of(term: str) -> Iterator[Form]:
    """With the space before it, as vocabularies hold words; else the bare word, which leaves that space a token."""
    if _is_word(term[0]) and _is_word(term[-1]):
        yield Form(f" {term}")
        yield Form(term, single_word=True)
    else:
        yield Form(term)


def _is_word(character: str) -> bool:
    """Whether it belongs to a word that has spaces around it."""
    return character.isalnum() and unicodedata.east_asian_width(character) not in "WF"


def _sorted_pieces(backend: Tokenizer) -> list[str]:
    pieces = list(backend.get_vocab())
    for mark in SPACES:
        pieces = [piece.replace(mark, " ") for piece in pieces]
    return sorted(pieces)


def _begins_another(text: str, pieces: Sequence[str]) -> bool:
    """Whether one of the sorted `pieces` begins with the text and goes on: it would be split."""
    after = bisect_right(pieces, text)
    return after < len(pieces) and pieces[after].startswith(text)


def _longer(term: str, words: Sequence[str]) -> Iterator[str]:
    for word in words[bisect_right(words, term) :]:
        if not word.startswith(term):
            return
        yield f"the {word}"


def _works(term: str, texts: Sequence[str], *, backend: Tokenizer, trial: Tokenizer) -> bool:
    saves = len(ids_of(trial, term)) < len(ids_of(backend, term))
    return saves and all(_is_kept(text, backend, trial=trial) for text in texts)


def _is_kept(text: str, backend: Tokenizer, *, trial: Tokenizer) -> bool:
    """Whether the text comes back as before, or as it is, and has no more tokens than before."""
    before, after = (each.encode(text, add_special_tokens=False).ids for each in (backend, trial))
    kept = (text, backend.decode(before, skip_special_tokens=False))
    return trial.decode(after, skip_special_tokens=False) in kept and len(after) <= len(before)


def _probes(term: str) -> Iterator[str]:
    """Texts with the term between all kinds of neighbours."""
    yield from (term, f" {term}", f"{term} moves", f"the {term} moves", f"a  {term}  b", f"a\t{term}\nb", f"\n\n{term}")
    yield from (f"({term})", f"the {term}.", f"the {term}, too", f"{term} {term}", f"{term}{term}", f"x{term}")
    yield from (f"the {term}s", f"the {term}ing x", f"the {term}'s", f"the {term}2", f"the {term}-{term}", f"ä{term}ö")
    for left, right in pairwise(term.split(" ")):
        yield f"the {left} {right}"
        yield f"the {left}  {right}"
