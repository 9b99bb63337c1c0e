"""Stop texts and bad words that are special tokens: what is accepted works, what cannot match is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support.cli import done, refused
from support.models import ASSETS

from glmspec.core.errors import RequestError
from glmspec.runtime.ending import Ending
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import MAX_STOPS, STOP, STOP_LONGEST, Request
from glmspec.runtime.settings import request_of
from glmspec.runtime.text import Tokenizer
from glmspec.triton_repo.requests import parse

USER, THINK = 261, 265


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ASSETS / "tiny-verifier")


@pytest.fixture(scope="module")
def engine(tiny_engines) -> Engine:
    return Engine(tiny_engines, "dspark")


def request(tokenizer, **said) -> Request:
    return request_of([65, 66], {"max_tokens": 8, **said}, tokenizer)


@pytest.mark.parametrize(
    ("stops", "ids"), [(["<|user|>"], (USER,)), (["</think>", "x"], (THINK,)), (["[MASK]"], (257,)), (["<|user"], ())]
)
def test_a_special_token_is_stopped_at_by_its_id(tokenizer, stops, ids):
    made = request(tokenizer, stop=stops)
    assert (made.stop, made.stop_token_ids) == (tuple(stops), ids)
    assert request(tokenizer, stop=stops, stop_token_ids=[*ids, 7]).stop_token_ids == (*ids, 7)


def test_an_added_token_that_is_text_is_looked_for_in_text(tmp_path):
    folder = shutil.copytree(ASSETS / "tiny-verifier", tmp_path / "t")
    values = json.loads((folder / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["special"] = token["id"] != THINK
    (folder / "tokenizer.json").write_text(json.dumps(values))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said["additional_special_tokens"].remove("</think>")
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = Tokenizer(folder)
    made = request(tokenizer, stop=["</think>\n"])
    assert made.stop_token_ids == ()
    answer = Ending(made, (), tokenizer.stream(), 8).take([97, THINK, 10, 98])
    assert (answer.text, answer.finish_reason) == ("a", STOP)


@pytest.mark.parametrize("text", ["<|user|>\n", "a</think>", " <think>", "<think></think>", "[MASK] b"])
def test_a_special_token_with_more_can_never_match(tokenizer, text):
    with pytest.raises(RequestError, match=r"^stop: found .* holds the special token .* so never appears in text"):
        request(tokenizer, stop=["fine", text])


@pytest.mark.parametrize("stop", ["<|user|>", "<|observation|>", "</think>"])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_answer_ends_there(engine, stop, ignore_eos):
    """The bias makes it the only token that can be chosen, drafted or not."""
    token = engine.tokenizer.special[stop]
    said = {"max_tokens": 12, "stop": [stop], "ignore_eos": ignore_eos, "logit_bias": {str(token): 100.0}}
    for speculate in (True, False):
        made = request_of(list(b"1, 2, 3, "), {**said, "speculate": speculate}, engine.tokenizer)
        answer, _ = engine.answer(made)
        assert (answer.tokens, answer.text, answer.finish_reason) == ([token], "", STOP)


@pytest.mark.parametrize(("number", "length", "words"), [
    (MAX_STOPS + 1, 3, f"stop: found {MAX_STOPS + 1} texts, expected at most {MAX_STOPS}"),
    (100_000, 3, "stop: found 100000 texts"),
    (1, STOP_LONGEST + 1, f"stop: found a text of {STOP_LONGEST + 1} characters"),
])  # fmt: skip
def test_more_than_can_be_looked_for_is_refused(tokenizer, number, length, words):
    with pytest.raises(RequestError, match=words):
        request(tokenizer, stop=["x" * length] * number).check(288, 100, True)


def test_as_many_as_allowed_pass(tokenizer):
    request(tokenizer, stop=["x" * STOP_LONGEST] * MAX_STOPS).check(288, 100, True)


def test_bad_words_that_are_special_tokens_are_their_ids(tokenizer):
    assert request(tokenizer, bad_words=["<|user|>", "a</think>"]).sampling.bad_words == ((USER,), (97, THINK))


def test_triton_s_inputs_and_prompt_lines_mean_the_same(tokenizer, tiny_engines, tmp_path):
    inputs = {
        "text_input": np.array([b"a"], dtype=object),
        "stop_words": np.array([b"</think>", b"z"], dtype=object),
        "max_tokens": np.array([4], dtype=np.int32),
    }
    assert parse(inputs, tokenizer).request.stop_token_ids == (THINK,)
    inputs["stop_words"] = np.array([b"</think> "], dtype=object)
    with pytest.raises(RequestError, match="holds the special token '</think>'"):
        parse(inputs, tokenizer)
    line = {"prompt": "1, 2, 3, ", "stop": ["</think>"], "logit_bias": {str(THINK): 100.0}}
    (tmp_path / "in.jsonl").write_text("\ufeff" + json.dumps(line) + "\n", encoding="utf-8")  # an editor's mark
    done(
        "generate",
        tiny_engines,
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out.jsonl",
        "--max-tokens",
        4,
    )
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert (answer["output_token_ids"], answer["text"], answer["finish_reason"]) == ([THINK], "", STOP)
    message = refused(1, "generate", tiny_engines, "--prompt", "a", "--stop", "<think>x", "--max-tokens", 2)
    assert "holds the special token '<think>'" in message
