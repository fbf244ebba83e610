"""Chats -> token ids and labels, by a chat template whose masks have been proven first.

Training, inspection, evaluation and inference all use the same `Renderer`, so a model is asked in exactly the form it
was taught. It cuts nothing and counts nothing; that is `preparation`'s part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sftplay.data.labels import Placed, Refusal, Rendered, encode, labelled, texts_of
from sftplay.data.masks import Marked
from sftplay.data.proof import Proven, prove_masks
from sftplay.data.records import Chat, Message
from sftplay.data.skeletons import Unproven
from sftplay.data.templates import ChatTemplate, template_hash
from sftplay.errors import DataError


class Renderer:
    """A tokenizer, a chat template and the method proven to find the assistant's turns. Made by `Renderer.prove`."""

    def __init__(self, tokenizer: Any, template: ChatTemplate, proven: Proven) -> None:
        self.tokenizer = tokenizer
        self.template = template.text
        self.template_hash = template_hash(template.text)
        self.method = proven.method
        self.rewrites_turns = proven.rewrites_turns
        self._compiled, self._finder = template, proven.finder

    @classmethod
    def prove(cls, tokenizer: Any, template: str, samples: Sequence[Chat]) -> Renderer:
        """A renderer with the first of three mask methods that holds on built-in dialogues and on `samples`.

        Raises:
            DataError: no method holds, or the tokenizer cannot tell where its tokens lie in a text.
        """
        if not getattr(tokenizer, "is_fast", False):
            fix = "use a model whose tokenizer has a tokenizer.json"
            raise DataError("this tokenizer does not say where its tokens lie in the text", where="model.name", fix=fix)
        compiled = ChatTemplate(template, tokenizer.special_tokens_map)
        return cls(tokenizer, compiled, prove_masks(tokenizer, compiled, samples))

    @property
    def end_token_ids(self) -> list[int]:
        """Ids of the tokens that end an assistant turn; generation stops at any of them."""
        return sorted({encoding.ids[-1] for encoding in encode(self.tokenizer, self._finder.ends)})

    def render(self, chats: Sequence[Chat]) -> list[Rendered]:
        """The examples of `chats`, in order: one a chat, several where it had to be split.

        A chat that cannot be trained on gives one with a `problem`.
        """
        placed = self._placed(chats)
        return labelled(placed, encode(self.tokenizer, texts_of(placed)))

    def render_all(self, batches: Iterable[Sequence[Chat]]) -> Iterator[list[Rendered]]:
        """`render` for batch after batch: the tokenizer's own threads work on one while Python lays out the next."""
        with ThreadPoolExecutor(1) as pool:
            waiting = None
            for chats in batches:
                placed = self._placed(chats)
                coming = pool.submit(encode, self.tokenizer, texts_of(placed))
                if waiting:
                    yield labelled(waiting[0], waiting[1].result())
                waiting = (placed, coming)
            if waiting:
                yield labelled(waiting[0], waiting[1].result())

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text that asks the model to answer `messages`.

        Raises:
            DataError: the template refuses them.
        """
        return self._compiled.render(messages, prompts=True)[0]

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that ask the model to answer `messages`; in training the answer follows these same tokens."""
        return list(encode(self.tokenizer, [self.prompt_text(messages)])[0].ids)

    def _placed(self, chats: Sequence[Chat]) -> list[Placed]:
        return [(index, found) for index, chat in enumerate(chats) for found in self._place(chat)]

    def _place(self, chat: Chat) -> list[Marked | Refusal]:
        try:
            found = self._finder.place(chat, self.method, rewrites=self.rewrites_turns)
        except DataError as error:
            return [error.what]
        except Unproven as error:
            return [str(error)]
        return [marked for _, marked in found]
