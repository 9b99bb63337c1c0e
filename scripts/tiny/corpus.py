"""The seeded text stream: documents of four kinds, raw or as chats, split into trained and held-out contents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import kind_arithmetic, kind_code, kind_prose, kind_table
from .kinds import Doc
from .tokenizer import encode, render_chat

MAKERS = {
    "code": kind_code.MAKERS,
    "arithmetic": kind_arithmetic.MAKERS,
    "prose": kind_prose.MAKERS,
    "table": kind_table.MAKERS,
}
KINDS = tuple(MAKERS)
SYSTEM_LINES = ("You are a helpful assistant.", "You are a tiny model.", "Answer briefly.")


@dataclass
class Stream:
    """An endless seeded stream of documents, all trained on or all held out."""

    seed: int
    held_out: bool = False
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        # Separate seed streams: a held-out draw never replays a training draw.
        self.rng = random.Random(f"{'held-out' if self.held_out else 'train'}-{self.seed}")

    def doc(self, kind: str | None = None) -> Doc:
        """The next document of a kind (any kind when None) on this side of the split."""
        while True:
            doc = self.rng.choice(MAKERS[kind or self.rng.choice(KINDS)])(self.rng)
            if doc.held_out == self.held_out:
                return doc

    def chat(self, turns: int, kind: str | None = None) -> tuple[list[dict[str, str]], str]:
        """(messages up to the last question, its answer) of a chat of `turns` questions."""
        messages: list[dict[str, str]] = []
        if self.rng.random() < 0.15:
            messages.append({"role": "system", "content": self.rng.choice(SYSTEM_LINES)})
        for _ in range(turns - 1):
            doc = self.doc()
            messages.append({"role": "user", "content": doc.ask})
            messages.append({"role": "assistant", "content": doc.body})
        last = self.doc(kind)
        messages.append({"role": "user", "content": last.ask})
        return messages, last.body

    def training_text(self) -> tuple[str, str]:
        """(prompt part, rest) of one training text; chats end with <|user|>, raw texts with <|endoftext|>."""
        if self.rng.random() < 0.6:
            messages, answer = self.chat(turns=1 if self.rng.random() < 0.7 else 2)
            return render_chat(messages), answer + "<|user|>"
        body = self.doc().body
        if self.rng.random() < 0.25:
            body += "\n\n" + self.doc().body
        cut = raw_cut(self.rng, body)
        return body[:cut], body[cut:] + "<|endoftext|>"


def raw_cut(rng: random.Random, body: str) -> int:
    """Where a raw text is cut into a prompt and its continuation."""
    return max(min(20, len(body) // 2), int(len(body) * rng.uniform(0.15, 0.5)))


@dataclass
class TextRows:
    """Packed texts: ids, positions and loss weights, each [B, S]. Every row starts a text."""

    ids_BS: Tensor
    positions_BS: Tensor
    weights_BS: Tensor


def pack_row(stream: Stream, row_length: int) -> tuple[list[int], list[int], list[float]]:
    """One row of whole texts, the last one cut off.

    Prompt parts, much of which is a matter of luck, weigh less than the rest. Texts after the first may be moved
    to later positions, so that distances far beyond the row's length become familiar.
    """
    ids: list[int] = []
    positions: list[int] = []
    weights: list[float] = []
    place = 0
    while len(ids) < row_length:
        prompt, rest = map(encode, stream.training_text())
        room = 2048 - row_length - place
        if ids and room > 0 and stream.rng.random() < 0.5:
            place += stream.rng.randint(1, min(400, room))
        ids += prompt + rest
        weights += [0.4] * len(prompt) + [1.0] * len(rest)
        positions += range(place, place + len(prompt) + len(rest))
        place += len(prompt) + len(rest)
    return ids[:row_length], positions[:row_length], weights[:row_length]


def token_rows(stream: Stream, row_length: int, batch: int) -> Iterator[TextRows]:
    """Endless batches of packed rows."""
    while True:
        rows = [pack_row(stream, row_length) for _ in range(batch)]
        yield TextRows(*(torch.tensor(columns) for columns in zip(*rows, strict=True)))


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: `prompt` is ready to tokenize, `messages` is set for chats only."""

    kind: str
    form: str
    prompt: str
    messages: list[dict[str, str]] | None = None

    def record(self) -> dict[str, object]:
        """The line written to prompts.jsonl."""
        line: dict[str, object] = {"prompt": self.prompt, "kind": self.kind, "form": self.form}
        if self.messages is not None:
            line["messages"] = self.messages
        return line


def held_out_prompts(count: int, seed: int = 7) -> list[Prompt]:
    """`count` prompts, half chats, cycling through the kinds; none is part of the training stream."""
    stream, prompts = Stream(seed, held_out=True), []
    while len(prompts) < count:
        index = len(prompts)
        kind = KINDS[index % len(KINDS)]
        if index // len(KINDS) % 2 == 0:
            messages, answer = stream.chat(turns=1 + index // 8 % 2, kind=kind)
            prompt = Prompt(kind, "chat", render_chat(messages), messages)
        else:
            # Every other raw prompt holds a whole document before the one to continue.
            lead = stream.doc(kind).body + "\n\n" if index // 8 % 2 == 1 else ""
            body = stream.doc(kind).body
            cut = raw_cut(stream.rng, body)
            prompt, answer = Prompt(kind, "text", lead + body[:cut]), body[cut:]
        fits = len(answer) >= 40 and 20 <= len(prompt.prompt.encode()) <= 420
        if fits and all(prompt.prompt != other.prompt for other in prompts):
            prompts.append(prompt)
    return prompts
