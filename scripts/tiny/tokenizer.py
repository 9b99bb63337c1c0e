"""A byte-level tokenizer in Hugging Face format: id b is byte b, specials follow, no merges."""

from __future__ import annotations

import json
import re
from pathlib import Path

SPECIALS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
)
SPECIAL_ID = {text: 256 + index for index, text in enumerate(SPECIALS)}
END_OF_TEXT = SPECIAL_ID["<|endoftext|>"]
MASK = SPECIAL_ID["[MASK]"]
USER = SPECIAL_ID["<|user|>"]
EOS_IDS = (END_OF_TEXT, USER, SPECIAL_ID["<|observation|>"])
REAL_VOCAB = 256 + len(SPECIALS)
PADDED_VOCAB = 288

_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in SPECIALS) + ")")

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content -%}{{ part.text }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
[gMASK]<sop>
{%- for message in messages -%}
{%- if message.role == 'tool' -%}{{ '<|observation|>\\n' }}
{%- else -%}{{ '<|' + message.role + '|>\\n' }}
{%- endif -%}
{{ text(message.content) }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}
"""


def encode(text: str) -> list[int]:
    """Token ids of a text; special tokens written out in the text become their single id."""
    ids: list[int] = []
    for piece in _SPLIT.split(text):
        if piece in SPECIAL_ID:
            ids.append(SPECIAL_ID[piece])
        else:
            ids.extend(piece.encode("utf-8"))
    return ids


def decode(ids: list[int]) -> str:
    """Text of token ids, specials written out; invalid UTF-8 becomes the replacement character."""
    parts: list[bytes] = []
    for token in ids:
        if token < 256:
            parts.append(bytes([token]))
        elif token < REAL_VOCAB:
            parts.append(SPECIALS[token - 256].encode())
        else:
            raise ValueError(f"token {token} is a padding row of the vocabulary (real ids end at {REAL_VOCAB - 1})")
    return b"".join(parts).decode("utf-8", errors="replace")


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The chat template in Python; the export check compares it with the Jinja one."""
    text = "[gMASK]<sop>" + "".join(f"<|{m['role']}|>\n{m['content']}" for m in messages)
    return text + ("<|assistant|>\n" if add_generation_prompt else "")


def _byte_to_symbol() -> dict[int, str]:
    """The printable stand-in character that byte-level tokenizers use for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {byte: chr(byte) for byte in printable}
    missing = [byte for byte in range(256) if byte not in symbols]
    symbols.update({byte: chr(256 + offset) for offset, byte in enumerate(missing)})
    return symbols


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in _byte_to_symbol().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "[MASK]",
        "additional_special_tokens": [text for text in SPECIALS if text not in ("<|endoftext|>", "[MASK]")],
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def check_tokenizer(folder: Path, samples: list[str], chats: list[list[dict[str, str]]]) -> None:
    """Raise unless both HF loaders agree with `encode`, round-trip the samples and render the same chats."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    auto = AutoTokenizer.from_pretrained(folder)
    for text in samples:
        expected = encode(text)
        for name, ids in (("tokenizers", raw.encode(text).ids), ("AutoTokenizer", auto(text).input_ids)):
            if list(ids) != expected:
                raise ValueError(f"{name} encodes {text[:40]!r} as {ids[:12]}, expected {expected[:12]}")
        if auto.decode(expected) != text or raw.decode(expected, skip_special_tokens=False) != text:
            raise ValueError(f"{text[:40]!r} does not survive encoding and decoding")
    for messages in chats:
        for prompt in (True, False):
            rendered = auto.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            if rendered != render_chat(messages, prompt):
                raise ValueError(f"the chat template gives {rendered!r}, expected {render_chat(messages, prompt)!r}")
