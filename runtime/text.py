"""Text in and out: the checkpoint's tokenizer and chat template, and decoding as tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glmspec.convert.tokenizer import load_tokenizer
from glmspec.core.errors import RequestError


class Tokenizer:
    """A Hugging Face tokenizer folder. special: the tokens that are no text (decoding leaves them out) and their ids.
    Raises `CheckpointError` for a folder that is none (see `convert/tokenizer.py`)."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(folder)
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special and token.content}

    def encode(self, text: str, templated: bool = False) -> list[int]:
        """Token ids of a prompt. templated: the text is from `chat`, which has put in its special tokens; to any other
        the tokenizer adds those it adds by itself."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=not templated)
        except TypeError:  # half of a surrogate pair, which JSON can spell
            raise RequestError("prompt: found a text that is not valid Unicode") from None

    def chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text of a conversation, up to where the assistant speaks. Its special tokens are in it."""
        if not self._tokenizer.chat_template:
            raise RequestError("messages: the tokenizer has no chat template; send text instead")
        try:
            return self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates raise jinja2 errors of any kind
            raise RequestError(f"messages: the chat template refuses them ({error})") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder for one sequence's tokens."""
        return TextStream(self._tokenizer)


class TextStream:
    """Decodes one sequence token by token. Bytes of an unfinished character wait for the rest of it."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._shown = ""

    def push(self, token: int) -> str:
        """The text that becomes certain with this token; often one character, sometimes none."""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._shown += piece
        return piece

    def finish(self) -> str:
        """The text that is left when no more tokens come: an unfinished character decodes to a replacement mark."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return whole[len(self._shown) :] if whole.startswith(self._shown) else ""
