"""Text in and out through a real tokenizer: chat template, decoding as tokens arrive, what is refused."""

from __future__ import annotations

import random
import shutil

import pytest
from support.models import ASSETS

from glmspec.core.errors import CheckpointError, RequestError
from glmspec.runtime.text import Tokenizer

MESSAGES = [{"role": "user", "content": "Count to 3."}, {"role": "assistant", "content": "1 2 3"}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ASSETS / "tiny-verifier")


@pytest.fixture
def copy(tmp_path):
    """A tokenizer folder to spoil."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(ASSETS / "tiny-verifier" / name, folder / name)
    return folder


@pytest.mark.parametrize("text", ["plain", "naïve 中文 🙂\n", "", " two  spaces "])
def test_text_survives_the_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("seed", range(100))
def test_streamed_pieces_join_to_the_whole_decode(tokenizer, seed):
    """Whole, broken and unfinished characters, and special tokens in between."""
    rng = random.Random(seed)
    kinds = [
        lambda: list(rng.choice("aé中🙂\ufffd").encode()),
        lambda: [rng.randrange(128, 256)],
        lambda: list("🙂".encode())[: rng.randint(1, 3)],
        lambda: [rng.randrange(256, 266)],
    ]
    ids = [token for _ in range(rng.randint(1, 10)) for token in rng.choice(kinds)()]
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ids)


def test_a_piece_comes_with_the_last_byte_of_its_character(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(byte) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]
    assert stream.finish() == ""


def test_an_unfinished_character_comes_out_as_a_mark_at_the_end(tokenizer):
    stream = tokenizer.stream()
    assert [stream.push(byte) for byte in (0x61, 0xF0, 0x9F)] == ["a", "", ""]
    assert stream.finish() == "\ufffd"


def test_streams_are_independent(tokenizer):
    one, two = tokenizer.stream(), tokenizer.stream()
    first, second = "é".encode()
    assert (one.push(first), two.push(ord("x")), one.push(second)) == ("", "x", "é")


def test_a_conversation_becomes_the_template_text_with_special_tokens(tokenizer):
    text = tokenizer.chat(MESSAGES)
    assert text == "[gMASK]<sop><|user|>\nCount to 3.<|assistant|>\n1 2 3<|assistant|>\n"
    ids = tokenizer.encode(text)
    assert ids[:3] == tokenizer.encode("[gMASK]") + tokenizer.encode("<sop>") + tokenizer.encode("<|user|>")
    assert tokenizer.decode(ids) == "\nCount to 3.\n1 2 3\n"  # special tokens are not text


def test_messages_without_a_chat_template_are_refused(copy):
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match=r"^messages: the tokenizer has no chat template; send text instead$"):
        Tokenizer(copy).chat(MESSAGES)


def test_what_the_template_refuses_is_named(copy):
    (copy / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match=r"^messages: the chat template refuses them \(roles must alternate\)$"):
        Tokenizer(copy).chat(MESSAGES)


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_folder_that_is_no_tokenizer_is_named(copy, content):
    (copy / "tokenizer.json").unlink()
    if content is None:
        shutil.rmtree(copy)
    else:
        (copy / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=f"^{copy}: not a tokenizer that transformers can load"):
        Tokenizer(copy)
