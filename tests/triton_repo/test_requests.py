"""From a Triton request's tensors to a checked request; every refusal names the input."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from support.models import ASSETS

from glmspec.core.errors import RequestError
from glmspec.runtime.request import Request
from glmspec.runtime.text import Tokenizer
from glmspec.triton_repo.interface import INPUTS
from glmspec.triton_repo.requests import DEFAULT_MAX_TOKENS, Call, parse

DTYPES = {
    "TYPE_STRING": object,
    "TYPE_INT32": np.int32,
    "TYPE_UINT64": np.uint64,
    "TYPE_BOOL": bool,
    "TYPE_FP32": np.float32,
}
FIELD_OF = {name: field for field, spec in INPUTS.items() for name in spec.names}
MESSAGES = [{"role": "user", "content": "Count."}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(ASSETS / "tiny-verifier")


def tensors(inputs: dict) -> dict[str, np.ndarray]:
    """As the Python backend hands them over: text as bytes."""
    arrays = {}
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        values = [one.encode() if isinstance(one, str) else one for one in values]
        dtype = DTYPES[INPUTS[FIELD_OF[name]].dtype] if name in FIELD_OF else object
        arrays[name] = np.array(values, dtype=dtype)
    return arrays


def call(tokenizer, **inputs) -> Call:
    return parse(tensors(inputs), tokenizer)


def refused(tokenizer, **inputs) -> str:
    with pytest.raises(RequestError) as caught:
        call(tokenizer, **inputs)
    return str(caught.value)


def test_defaults(tokenizer):
    made = call(tokenizer, text_input="ab")
    assert made == Call(Request(prompt_ids=(97, 98), max_tokens=DEFAULT_MAX_TOKENS), stream=False)
    assert made.request.speculate and not made.request.ignore_eos and made.request.stop == ()


def of_sampling(name, value):
    return lambda made: getattr(made.request.sampling, name) == value


# What each field looks like once parsed. exclude_input and return_finish_reason leave no trace.
VALUES = {
    "max_tokens": (7, lambda made: made.request.max_tokens == 7),
    "stream": (True, lambda made: made.stream is True),
    "stop": (["a", "é"], lambda made: made.request.stop == ("a", "é")),
    "stop_token_ids": ([5, 6], lambda made: made.request.stop_token_ids == (5, 6)),
    "ignore_eos": (True, lambda made: made.request.ignore_eos is True),
    "speculate": (False, lambda made: made.request.speculate is False),
    "temperature": (0.5, of_sampling("temperature", 0.5)),
    "top_k": (3, of_sampling("top_k", 3)),
    "top_p": (0.5, of_sampling("top_p", 0.5)),
    "min_p": (0.25, of_sampling("min_p", 0.25)),
    "exclude_input": (True, lambda made: True),
    "seed": (2**63, of_sampling("seed", 2**63)),
    "min_tokens": (4, of_sampling("min_tokens", 4)),
    "logit_bias": ('{"7": -1.5, "5": 2}', of_sampling("logit_bias", ((5, 2.0), (7, -1.5)))),
    "logprobs": (2, of_sampling("logprobs", 2)),
    "repetition_penalty": (1.5, of_sampling("repetition_penalty", 1.5)),
    "frequency_penalty": (-0.5, of_sampling("frequency_penalty", -0.5)),
    "presence_penalty": (0.5, of_sampling("presence_penalty", 0.5)),
    "bad_words": (["no"], of_sampling("bad_words", ((110, 111),))),
    "return_finish_reason": (True, lambda made: True),
    "return_cumulative_logprob": (True, of_sampling("logprobs", 0)),
}
PROMPTS = {"text": "ab", "messages": json.dumps(MESSAGES), "input_ids": [97, 98]}


def test_every_field_is_tested_here():
    assert set(VALUES) | set(PROMPTS) == set(INPUTS)


@pytest.mark.parametrize(("field", "name"), [(field, name) for field in VALUES for name in INPUTS[field].names])
def test_every_alias_means_its_field(tokenizer, field, name):
    value, arrived = VALUES[field]
    assert arrived(call(tokenizer, text_input="ab", **{name: value}))


@pytest.mark.parametrize("field", [field for field, spec in INPUTS.items() if len(spec.names) > 1])
def test_two_aliases_at_once_are_refused(tokenizer, field):
    first, second = INPUTS[field].names
    message = refused(tokenizer, text_input="ab", **{first: VALUES[field][0], second: VALUES[field][0]})
    assert message == f"{first} and {second}: the same setting under two names; send one"


def test_each_kind_of_prompt(tokenizer):
    assert call(tokenizer, text_input="ab").request.prompt_ids == (97, 98)
    assert call(tokenizer, input_ids=[5, 6, 7]).request.prompt_ids == (5, 6, 7)
    expected = tokenizer.encode("[gMASK]<sop><|user|>\nCount.<|assistant|>\n")
    assert list(call(tokenizer, messages=json.dumps(MESSAGES)).request.prompt_ids) == expected


@pytest.mark.parametrize(
    "given", [(), ("text", "messages"), ("text", "input_ids"), ("messages", "input_ids"), tuple(PROMPTS)]
)
def test_no_prompt_or_several_are_refused(tokenizer, given):
    message = refused(tokenizer, max_tokens=3, **{INPUTS[field].names[0]: PROMPTS[field] for field in given})
    assert message.startswith("prompt: found ")
    assert message.endswith("expected one of text_input, messages and input_ids")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages: not JSON (Expecting value: line 1 column 1 (char 0))"),
        ("{}", 'messages: expected a JSON list of objects with "role" and "content"'),
        ("[]", 'messages: expected a JSON list of objects with "role" and "content"'),
        ("5", 'messages: expected a JSON list of objects with "role" and "content"'),
        ('["hello"]', 'messages: expected a JSON list of objects with "role" and "content"'),
        ('[{"role": "user"}]', 'messages: expected a JSON list of objects with "role" and "content"'),
        (
            '[{"role": "user", "content": 5}]',
            "messages: the chat template refuses them ('int' object is not iterable)",
        ),
    ],
)
def test_bad_messages_are_refused(tokenizer, messages, message):
    assert refused(tokenizer, messages=messages) == message


@pytest.mark.parametrize("name", ["text_input", "messages", "stop_words", "sampling_param_stop"])
def test_bytes_that_are_no_text_are_refused_naming_the_input(tokenizer, name):
    prompt = {} if name in ("text_input", "messages") else {"text_input": "ab"}
    assert refused(tokenizer, **prompt, **{name: b"a\xff"}) == f"{name}: not UTF-8 text"


@pytest.mark.parametrize("name", ["text_input", "max_tokens", "sampling_param_top_k", "stream"])
@pytest.mark.parametrize("count", [0, 2])
def test_a_scalar_of_several_values_is_refused(tokenizer, name, count):
    value = "ab" if name == "text_input" else 1
    prompt = {} if name == "text_input" else {"text_input": "ab"}
    assert refused(tokenizer, **prompt, **{name: [value] * count}) == f"{name}: found {count} values, expected 1"


def test_a_matrix_of_one_value_is_a_scalar(tokenizer):
    """Clients of older templates send [1, 1]."""
    inputs = {"text_input": np.array([[b"ab"]], dtype=object), "max_tokens": np.array([[4]], dtype=np.int32)}
    assert parse(inputs, tokenizer).request == Request(prompt_ids=(97, 98), max_tokens=4)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 50, "top_p": 0.9},
        {"top_k": 1},
        {"top_k": 1, "temperature": 0.8, "top_p": 0.5},
        {"top_k": 0},
        {"top_p": 1.0},
    ],
)
def test_what_amounts_to_greedy_is_greedy(tokenizer, sampling):
    assert call(tokenizer, text_input="ab", **sampling).request.sampling.plain


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [({"top_k": 2}, 1.0), ({"top_p": 0.5}, 1.0), ({"min_p": 0.1}, 1.0), ({"seed": 3}, 0.0), ({"top_k": -1}, 0.0),
     ({"temperature": 0.5, "top_k": 0}, 0.5)],
)  # fmt: skip
def test_narrowing_the_choice_asks_for_sampling(tokenizer, sampling, temperature):
    assert call(tokenizer, text_input="ab", **sampling).request.sampling.temperature == temperature


@pytest.mark.parametrize("name", INPUTS["exclude_input"].names)
def test_repeating_the_prompt_is_refused(tokenizer, name):
    assert "found False, this version can only do True" in refused(tokenizer, text_input="ab", **{name: False})


@pytest.mark.parametrize("name", ["text_input", "messages"])
def test_text_without_a_tokenizer_is_refused(name):
    value = "ab" if name == "text_input" else json.dumps(MESSAGES)
    assert refused(None, **{name: value}) == f"{name}: this engine has no tokenizer; send input_ids"
    assert call(None, input_ids=[1, 2]).request.prompt_ids == (1, 2)


def test_half_a_surrogate_pair_is_refused(tokenizer):
    """JSON can spell it, and no tokenizer takes it."""
    message = refused(tokenizer, messages=r'[{"role": "user", "content": "\ud800"}]')
    assert message == "prompt: found a text that is not valid Unicode"


@pytest.mark.parametrize(
    "messages",
    [
        "[" * 100_000,  # RecursionError now
        "[" + "1" * 5000 + "]",  # ValueError (too many digits) now
    ],
)
def test_odd_json_is_refused_like_any_other(tokenizer, messages):
    """Else Triton answers with a Python traceback and the server's file paths."""
    assert refused(tokenizer, messages=messages).startswith("messages: ")


def test_two_prompts_are_named_as_they_were_sent(tokenizer):
    assert "'text_input'" in refused(tokenizer, text_input="a", input_ids=[1])


@pytest.mark.parametrize(
    ("text", "why"),
    [("[1]", "numbers"), ('{"a": 1}', "'a' is no token id"), ("{", "Expecting"), ('{"1": "x"}', "numbers")],
)
def test_odd_biases_are_refused(tokenizer, text, why):
    message = refused(tokenizer, text_input="a", logit_bias=text)
    assert message.startswith("logit_bias: expected an object of token ids and biases") and why in message


def test_bad_words_without_a_tokenizer_are_refused():
    assert "bad_words: this engine has no tokenizer" in refused(None, input_ids=[1], bad_words=["no"])


def test_a_templated_chat_gets_no_special_tokens_twice(tmp_path):
    """A tokenizer that adds a prefix by itself, as GLM's may: the template has put it in already."""
    folder = tmp_path / "tokenizer"
    shutil.copytree(ASSETS / "tiny-verifier", folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    values = json.loads((folder / "tokenizer.json").read_text())
    prefix = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("[gMASK]", "<sop>")]
    ids = {entry["content"]: entry["id"] for entry in values["added_tokens"]}
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*prefix, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [*prefix, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in ("[gMASK]", "<sop>")},
    }
    (folder / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = Tokenizer(folder)
    chat = call(tokenizer, messages=json.dumps(MESSAGES)).request.prompt_ids
    assert chat[:2] == (ids["[gMASK]"], ids["<sop>"]) and chat[2:].count(ids["<sop>"]) == 0
    text = call(tokenizer, text_input="ab").request.prompt_ids
    assert text == (ids["[gMASK]"], ids["<sop>"], 97, 98)  # plain text gets what the tokenizer adds
