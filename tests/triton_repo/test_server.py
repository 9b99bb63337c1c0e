"""A real tritonserver on the tiny engines: what comes through it is what the engine says in process."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import tritonclient.grpc as grpc

from glmspec.core.errors import RequestError
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import LENGTH, STOP, Answer, Request
from glmspec.runtime.sampling import Sampling
from glmspec.triton_repo import launcher
from glmspec.triton_repo.client import Chunk, Client
from glmspec.triton_repo.launcher import Ports, Server
from glmspec.triton_repo.repository import write_repository

PATIENCE_S = 120  # for a machine under load
TEXTS = ["def add(a, b):\n", "Count: 1, 2, 3,", "| naïve | 中文 |\n", "Once upon a time " * 9]
MESSAGES = [{"role": "system", "content": "You are tiny."}, {"role": "user", "content": "Count from 12 to 30."}]


@pytest.fixture(scope="module")
def repository(tiny_engines, tmp_path_factory):
    out = tmp_path_factory.mktemp("serve") / "repo"
    write_repository(tiny_engines, out, None, True)
    return out


@pytest.fixture(scope="module")
def server(repository):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "EXIT_TIMEOUT_S", 5)  # tests below cancel, and see Client.stream about that
        with Server(repository, Ports.choose(), repository.parent / "log") as started:
            yield started


@pytest.fixture
def client(server) -> Client:
    return client_of(server.ports)


def client_of(ports: Ports) -> Client:
    return Client(f"{ports.host}:{ports.grpc}")


def said(engine: Engine, ids, **fields) -> Answer:
    fields = {"max_tokens": 24, **fields}
    return engine.answer(Request(prompt_ids=tuple(ids), **fields))[0]


def joined(chunks) -> Answer:
    """Chunks put together; only the last may have a reason."""
    chunks = list(chunks)
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    return Answer(tokens, "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason)


def prompts(engine: Engine) -> dict[str, tuple[dict, list[int]]]:
    """Name -> the fields a client sends, the ids they mean."""
    encode = engine.tokenizer.encode
    ids = encode("x = 5\n")
    return {
        **{f"text {at}": ({"text": text}, encode(text)) for at, text in enumerate(TEXTS)},
        "messages": ({"messages": MESSAGES}, encode(engine.tokenizer.chat(MESSAGES))),
        "input_ids": ({"input_ids": ids}, ids),
    }


# Streams.


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("name", [*(f"text {at}" for at in range(len(TEXTS))), "messages", "input_ids"])
def test_a_stream_is_what_the_engine_says(oracle, client, name, speculate):
    fields, ids = prompts(oracle)[name]
    chunks = list(client.stream(**fields, max_tokens=24, speculate=speculate))
    answer, stats = oracle.answer(Request(prompt_ids=tuple(ids), max_tokens=24, speculate=speculate))
    assert joined(chunks) == answer
    assert chunks[-1].stats.to_json() == stats.to_json()
    assert speculate or all(len(chunk.tokens) == 1 for chunk in chunks)  # one response a step


def test_sampled_streams_are_what_the_engine_draws(oracle, client):
    """The settings arrive, and the seed alone says what is drawn."""
    ids = tuple(oracle.tokenizer.encode(TEXTS[0]))
    settings = {"temperature": 3.0, "top_k": 40, "min_p": 0.01, "seed": 2**64 - 1, "min_tokens": 6, "logprobs": 2}
    settings |= {"repetition_penalty": 1.25, "presence_penalty": 0.5}
    chunks = list(client.stream(text=TEXTS[0], max_tokens=24, **settings, logit_bias='{"101": -3}', bad_words=["th"]))
    sampling = Sampling(**settings, logit_bias=((101, -3.0),), bad_words=((116, 104),))
    sampling = replace(sampling, min_p=float(np.float32(0.01)))  # as it travels
    answer, _ = oracle.answer(Request(prompt_ids=ids, max_tokens=24, sampling=sampling))
    assert [token for chunk in chunks for token in chunk.tokens] == answer.tokens
    told = [one for chunk in chunks for one in chunk.logprobs]
    assert [one["token"] for one in told] == answer.tokens
    assert [len(one["top"]) for one in told] == [2] * len(answer.tokens)
    assert sum(one["logprob"] for one in told) == pytest.approx(answer.cumulative_logprob, rel=1e-3)


def test_speculation_yields_several_tokens_a_response_at_times(oracle, client):
    chunks = list(client.stream(text=TEXTS[0], max_tokens=64, ignore_eos=True))
    steps = [len(chunk.tokens) for chunk in chunks]
    accepted = chunks[-1].stats.num_accepted
    assert sum(steps) == 64
    assert sum(step - 1 for step in steps) == accepted


@pytest.mark.parametrize("count", [2, 4])
def test_concurrent_streams_do_not_mix(oracle, server, count):
    found: dict[str, Answer] = {}
    barrier = threading.Barrier(count)
    chosen = dict(list(prompts(oracle).items())[-count:])

    def ask(name: str, fields: dict) -> None:
        barrier.wait(PATIENCE_S)
        found[name] = joined(client_of(server.ports).stream(**fields, max_tokens=60, ignore_eos=True))

    threads = [threading.Thread(target=ask, args=(name, fields)) for name, (fields, _) in chosen.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == {name: said(oracle, ids, max_tokens=60, ignore_eos=True) for name, (_, ids) in chosen.items()}


def test_without_streaming_one_response_holds_the_whole_answer(client):
    streamed = list(client.stream(text=TEXTS[2], max_tokens=24, ignore_eos=True))
    (whole,) = client.stream(text=TEXTS[2], max_tokens=24, ignore_eos=True, stream=False)
    assert len(streamed) > 1
    assert joined([whole]) == joined(streamed)
    assert whole.stats.to_json() == streamed[-1].stats.to_json()


def test_stop_words_cut_the_answer(oracle, client):
    ids = oracle.tokenizer.encode(TEXTS[0])
    free = said(oracle, ids, ignore_eos=True)
    stop = free.text[len(free.text) // 2 :][:3]
    expected = said(oracle, ids, ignore_eos=True, stop=("\x00never\x00", stop))
    found = joined(client.stream(text=TEXTS[0], max_tokens=24, ignore_eos=True, stop=["\x00never\x00", stop]))
    assert found == expected
    assert (found.finish_reason, stop in found.text) == (STOP, False)
    assert free.text.startswith(found.text)


def test_max_tokens_ends_at_the_engines_limit(oracle, client):
    ids = [65] * (oracle.limits.max_model_len - 5)
    found = joined(client.stream(input_ids=ids, max_tokens=500, ignore_eos=True))
    assert (len(found.tokens), found.finish_reason) == (5, LENGTH)


# HTTP.


def post(server: Server, kind: str, body) -> tuple[int, bytes]:
    url = f"http://{server.ports.host}:{server.ports.http}/v2/models/glmspec/{kind}"
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=PATIENCE_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def events(data: bytes) -> list[dict]:
    return [json.loads(part.removeprefix(b"data: ")) for part in data.strip().split(b"\n\n")]


def test_http_generate_gives_the_whole_answer(oracle, server):
    status, data = post(server, "generate", {"text_input": TEXTS[2], "max_tokens": 24, "ignore_eos": True})
    expected = said(oracle, oracle.tokenizer.encode(TEXTS[2]), ignore_eos=True)
    found = json.loads(data)
    assert status == 200
    assert (found["text_output"], found["output_ids"], found["finish_reason"]) == (
        expected.text,
        expected.tokens,
        LENGTH,
    )
    assert found["num_input_tokens"] == len(oracle.tokenizer.encode(TEXTS[2]))


@pytest.mark.parametrize("names", [("max_tokens", "stream"), ("sampling_param_max_tokens", "streaming")])
def test_http_generate_stream_gives_an_event_a_step(oracle, server, names):
    body = {"text_input": TEXTS[0], names[0]: 24, names[1]: True, "ignore_eos": True}
    status, data = post(server, "generate_stream", body)
    expected = said(oracle, oracle.tokenizer.encode(TEXTS[0]), ignore_eos=True)
    found = events(data)
    assert status == 200
    assert len(found) > 1
    assert "".join(one["text_output"] for one in found) == expected.text
    assert [one["finish_reason"] for one in found] == [""] * (len(found) - 1) + [LENGTH]
    assert found[-1]["num_output_tokens"] == 24


def test_http_messages_are_a_json_text(oracle, server):
    status, data = post(server, "generate", {"messages": json.dumps(MESSAGES), "max_tokens": 8, "ignore_eos": True})
    expected = said(oracle, prompts(oracle)["messages"][1], max_tokens=8, ignore_eos=True)
    assert (status, json.loads(data)["output_ids"]) == (200, expected.tokens)


def test_plain_http_infer_is_refused_by_triton(server):
    """Case G49: a decoupled model answers on generate, generate_stream and gRPC streams."""
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
    status, data = post(server, "infer", body)
    assert status == 501
    assert b"decoupled" in data


# Requests that are refused, and a server that goes on.

BAD = {
    "no prompt": ({"max_tokens": 3}, "prompt: found nothing, expected one of text_input, messages and input_ids"),
    "two prompts": ({"text_input": "a", "input_ids": [1, 2]}, "prompt: found ["),
    "negative max_tokens": ({"text_input": "a", "max_tokens": -3}, "max_tokens: found -3, expected at least 1"),
    "too long": ({"text_input": "a" * 5000}, "prompt: found 5000 tokens, expected fewer than {limit} "),
    "empty prompt": ({"text_input": ""}, "prompt: found no tokens, expected at least one"),
    "bad UTF-8": (b'{"text_input": "a\xff"}', "text_input: not UTF-8 text"),
    "bad stop words": (b'{"text_input": "a", "stop_words": ["\xff"]}', "stop_words: not UTF-8 text"),
    "sampling": ({"text_input": "a", "top_p": 1.5}, "top_p: found 1.5, expected 0 to 1"),
    "odd token": ({"input_ids": [5, 9999]}, "prompt: found token id 9999, expected ids from 0 to {last}"),
    "half a character": ({"messages": r'[{"role": "user", "content": "\ud800"}]'}, "prompt: found a text that is not"),
    "bad messages": ({"messages": "hello"}, "messages: not JSON"),
    "two names": (
        {"text_input": "a", "max_tokens": 3, "sampling_param_max_tokens": 3},
        "max_tokens and sampling_param_max_tokens: the same setting under two names",
    ),
    "wrong type": ({"text_input": "a", "max_tokens": "many"}, "Unable to parse"),  # Triton's own words
}


@pytest.mark.parametrize("kind", ["generate", "generate_stream"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_an_error_that_names_it_and_the_server_goes_on(oracle, server, client, name, kind):
    body, message = BAD[name]
    status, data = post(server, kind, body)
    error = json.loads(data.removeprefix(b"data: "))["error"]
    assert status == (500 if name == "wrong type" else 400)
    numbers = {"limit": oracle.limits.max_model_len, "last": oracle.verifier.config.vocab_size - 1}
    assert error.startswith(message.format(**numbers))
    assert "Traceback" not in error and ".py" not in error
    ids = oracle.tokenizer.encode("x")
    assert joined(client.stream(text="x", max_tokens=3)) == said(oracle, ids, max_tokens=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt: found nothing"),
        ({"text": "a", "max_tokens": 0}, "max_tokens: found 0, expected at least 1"),
        ({"text": "a", "temperature": -0.5}, "temperature: found -0.5"),
        ({"text": "a", "stop": [""]}, "stop: found an empty text"),
    ],
)
def test_the_client_raises_the_servers_message(client, fields, message):
    with pytest.raises(RequestError, match=f"^{message}"):
        list(client.stream(**fields))


def test_an_unknown_grpc_input_is_refused_by_name(server):
    heard, ended = [], threading.Event()
    text = grpc.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"a"], dtype=object))
    seed = grpc.InferInput("seed", [1], "INT32")
    seed.set_data_from_numpy(np.array([5], dtype=np.int32))
    with grpc.InferenceServerClient(f"{server.ports.host}:{server.ports.grpc}") as raw:
        raw.start_stream(lambda result, error: (heard.append((result, error)), ended.set()))
        raw.async_stream_infer("glmspec", [text, seed])
        assert ended.wait(PATIENCE_S)
    assert heard[0][0] is None
    assert "seed" in heard[0][1].message()


@pytest.mark.parametrize(
    ("name", "value"), [("best_of", 5), ("max_token", 5), ("frequency_penalty", 5.5), ("response_format", "json")]
)
def test_an_http_field_with_no_effect_is_refused_by_name(server, name, value):
    """Unknown ones too: Triton's generate endpoints turn them into request parameters (request.parameters())."""
    status, data = post(server, "generate", {"text_input": "a", "max_tokens": 3, name: value})
    assert status == 400
    assert name in json.loads(data)["error"]


def test_messages_beyond_the_parser_get_an_error_that_names_them(server):
    status, data = post(server, "generate", {"messages": "[" * 100_000})
    assert status == 400
    assert json.loads(data)["error"].startswith("messages: ")


# Clients that go away.


class Runner(threading.Thread):
    """Reads a long stream until told to stop, or to its end."""

    def __init__(self, client: Client, **fields) -> None:
        super().__init__()
        self.chunks: list[Chunk] = []
        self.ended, self.started, self.leave = threading.Event(), threading.Event(), threading.Event()
        self._stream = client.stream(**fields)
        self.start()

    def run(self) -> None:
        for chunk in self._stream:
            self.chunks.append(chunk)
            self.started.set()
            if self.leave.is_set():
                self._stream.close()
                return
        self.ended.set()


LONG = {"text": "abc", "max_tokens": 2000, "ignore_eos": True, "speculate": False}


def test_streams_closed_early_free_their_seats(oracle, server, client):
    """More than there are seats, each as long as one that runs all the time: a new request is answered before it
    ends only if theirs are free."""
    runner = Runner(client, **LONG)
    assert runner.started.wait(PATIENCE_S)
    for _ in range(oracle.limits.max_num_seqs + 2):
        stream = client.stream(**LONG)
        next(stream)
        stream.close()
    found = joined(client.stream(text=TEXTS[1], max_tokens=12))
    assert not runner.ended.is_set()
    runner.leave.set()
    runner.join(PATIENCE_S)
    assert found == said(oracle, oracle.tokenizer.encode(TEXTS[1]), max_tokens=12)


def test_a_dropped_http_stream_frees_its_seat(oracle, server, client):
    runner = Runner(client, **LONG)
    assert runner.started.wait(PATIENCE_S)
    body = json.dumps({"text_input": "abc", "stream": True, **{key: LONG[key] for key in list(LONG)[1:]}})
    for _ in range(oracle.limits.max_num_seqs + 2):
        connection = http.client.HTTPConnection(server.ports.host, server.ports.http, timeout=PATIENCE_S)
        connection.request("POST", "/v2/models/glmspec/generate_stream", body)
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        response.close()
        connection.close()
    found = joined(client.stream(text=TEXTS[1], max_tokens=12))
    assert not runner.ended.is_set()
    runner.leave.set()
    runner.join(PATIENCE_S)
    assert found == said(oracle, oracle.tokenizer.encode(TEXTS[1]), max_tokens=12)


# The end. A server of its own, through the command line.


def test_sigterm_lets_a_running_stream_finish(oracle, repository, tmp_path):
    ports = [part for name in ("http", "grpc", "metrics") for part in (f"--{name}-port", "0")]
    command = [sys.executable, "-c", "from glmspec.build.cli import main; main()", "serve", str(repository), *ports]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ready = process.stdout.readline()
        port = int(re.match(r"Ready: gRPC 127\.0\.0\.1:(\d+) ", ready)[1])
        runner = Runner(Client(f"127.0.0.1:{port}"), **{**LONG, "max_tokens": 150})
        assert runner.started.wait(PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        runner.join(PATIENCE_S)
        code = process.wait(PATIENCE_S)
    finally:
        process.kill()
        _, errors = process.communicate()
    expected = said(oracle, oracle.tokenizer.encode("abc"), max_tokens=150, ignore_eos=True)
    assert joined(runner.chunks) == expected
    assert len(runner.chunks) == 150
    assert (code, "Traceback" in errors) == (0, False), errors
    with socket.socket() as one:
        assert one.connect_ex(("127.0.0.1", port)) != 0
    assert [path.suffix for path in tmp_path.iterdir() if path.name.startswith("glmspec-triton-")] == [".log"]
