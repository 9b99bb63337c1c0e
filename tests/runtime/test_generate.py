"""Answering a file of prompts: lines in order, each as if alone, and a whole file or none."""

from __future__ import annotations

import io
import json
import os
import random
import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.models import GOLDENS
from support.prompt_files import PROMPTS, Files, run

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.errors import EngineError, GlmspecError, RequestError
from glmspec.core.progress import Progress
from glmspec.runtime import generate, terminal
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.options import GenerateOptions
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling


@pytest.fixture(scope="module")
def engine(tiny_engines) -> Engine:
    return Engine(tiny_engines)


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("speculate", [True, False])
def test_every_line_in_order_as_the_engine_alone_answers_it(tiny_engines, engine, files, speculate):
    files.write(*({"prompt": text} for text in PROMPTS), {"prompt_token_ids": [258, 259, 261, 65]})
    run(tiny_engines, files, speculate=speculate)
    prompts = [*(engine.tokenizer.encode(text) for text in PROMPTS), [258, 259, 261, 65]]
    lines = files.read()
    assert len(lines) == len(prompts)
    for ids, line in zip(prompts, lines, strict=True):
        answer, _ = engine.answer(Request(prompt_ids=tuple(ids), max_tokens=12, speculate=speculate))
        assert line["output_token_ids"] == answer.tokens
        assert (line["text"], line["finish_reason"]) == (answer.text, answer.finish_reason)
        stats = line["speculative_decoding"]
        assert (stats["num_spec_tokens"] == 8) if speculate else (stats is None)


def test_many_at_once_equal_each_alone(engine):
    """Case E42 with a model: more requests than run at once, of every length, with and without drafts."""
    rng = random.Random(1)
    requests = [
        Request(
            prompt_ids=tuple(rng.choices(range(256), k=rng.choice([1, 2, 15, 16, 17, 60, 700]))),
            max_tokens=rng.choice([1, 2, 3, 9, 20]),
            ignore_eos=rng.random() < 0.5,
            speculate=at % 3 > 0,
        )
        for at in range(14)
    ]
    together = answer_all(engine, requests)
    for request, job in zip(requests, together, strict=True):
        answer, stats = engine.answer(request)
        assert (job.answer.tokens, job.answer.text) == (answer.tokens, answer.text)
        assert job.answer.finish_reason == answer.finish_reason
        plain, _ = engine.answer(replace(request, speculate=False))
        assert (answer.tokens, answer.finish_reason) == (plain.tokens, plain.finish_reason)
        assert request.speculate or stats.num_steps == job.stats.num_steps == 0
    assert engine.scheduler.pool.free == engine.limits.num_pages - 1


def test_a_prompt_split_over_steps_is_answered_the_same(golden_engines, engine, tmp_path):
    """Random weights, whose answers depend on every token of the prompt."""
    verifier, drafter = (GOLDENS / "checkpoints" / name for name in ("verifier", "dspark"))
    small = BuildOptions(max_num_seqs=1, max_num_batched_tokens=9)
    build_engines(verifier, [drafter], TARGETS["cpu"], small, tmp_path / "small", Progress())
    for length in (8, 9, 10, 60):
        ids = random.Random(length).choices(range(2, 90), k=length)
        request = Request(prompt_ids=tuple(ids), max_tokens=12, ignore_eos=True)
        whole, split = (Engine(folder).answer(request)[0] for folder in (golden_engines, tmp_path / "small"))
        assert split.tokens == whole.tokens
        assert len(set(whole.tokens)) > 1


def test_a_line_s_own_settings_go_before_the_command_s(tiny_engines, engine, files):
    text = PROMPTS[1]
    ids = tuple(engine.tokenizer.encode(text))
    files.write(
        {"prompt": text, "max_tokens": 5},
        {"prompt": text, "temperature": 2.0, "seed": 3, "logprobs": 1},
        {"prompt": text, "top_k": 1},
        {"prompt": text, "bad_words": ["2", "3"], "speculate": False, "seed": None},
    )
    run(tiny_engines, files, temperature=0.0, repetition_penalty=1.1, top_k=None)
    short, drawn, greedy, without = files.read()
    plain = engine.answer(Request(prompt_ids=ids, max_tokens=12, sampling=Sampling(repetition_penalty=1.1)))[0]
    assert short["output_token_ids"] == plain.tokens[:5]
    assert greedy["output_token_ids"] == plain.tokens and "seed" not in greedy
    assert drawn["seed"] == 3 and len(drawn["logprobs"]) == len(drawn["output_token_ids"])
    assert drawn["logprobs"][0].keys() == {"token", "logprob", "top"} and len(drawn["logprobs"][0]["top"]) == 1
    assert not {"2", "3"} & set(without["text"]) and without["speculative_decoding"]["num_spec_steps"] == 0


def test_a_line_may_be_a_conversation_and_say_what_it_is(tiny_engines, engine, files):
    messages = [{"role": "user", "content": "Count from 12 to 30."}]
    ids = tuple(engine.tokenizer.encode(engine.tokenizer.chat(messages), templated=True))
    files.write({"messages": messages, "id": 7}, {"prompt": PROMPTS[0], "messages": messages, "kind": "code"})
    run(tiny_engines, files)
    expected = [ids, tuple(engine.tokenizer.encode(PROMPTS[0]))]
    for line, one in zip(files.read(), expected, strict=True):
        assert line["output_token_ids"] == engine.answer(Request(prompt_ids=one, max_tokens=12))[0].tokens


@pytest.mark.parametrize("chat", [False, True])
def test_texts_instead_of_a_file(tiny_engines, engine, files, chat):
    text = "Count from 12 to 30."
    ids = engine.tokenizer.encode(text)
    if chat:
        ids = engine.tokenizer.encode(engine.tokenizer.chat([{"role": "user", "content": text}]), templated=True)
    options = GenerateOptions(
        source=None, prompts=(text,), chat=chat, output=files.output, statistics=None, settings={"max_tokens": 9}
    )
    generate.generate(lambda: Engine(tiny_engines), options, Progress())
    answer, _ = engine.answer(Request(prompt_ids=tuple(ids), max_tokens=9))
    assert files.read()[0]["output_token_ids"] == answer.tokens


def test_output_goes_through_a_link_and_into_nothing_but_files(tiny_engines, files, tmp_path):
    files.write({"prompt": "a"})
    target, files.output = files.output, tmp_path / "link.jsonl"
    files.output.symlink_to(target)
    run(tiny_engines, files, 2)
    assert files.output.is_symlink() and len(target.read_text().splitlines()) == 1
    files.output = tmp_path / "pipe"
    os.mkfifo(files.output)
    with pytest.raises(RequestError, match="found something else, expected a file"):
        run(tiny_engines, files, 2)


def test_settings_are_checked_before_anything_is_loaded(files):
    files.write({"prompt": "a"})
    options = GenerateOptions(
        source=files.source, prompts=(), output=files.output, statistics=None, settings={"top_p": 2.0, "max_tokens": 3}
    )
    with pytest.raises(RequestError, match="top_p: found 2"):
        generate.generate(lambda: pytest.fail("loaded"), options, Progress())


def test_statistics_of_all_answers(tiny_engines, files):
    """Pooled before division; positions sum to the length less one."""
    files.write(*({"prompt": text} for text in PROMPTS))
    run(tiny_engines, files, 30, statistics=files.output.with_name("stats.json"))
    found = json.loads(files.output.with_name("stats.json").read_text())
    parts = [line["speculative_decoding"] for line in files.read()]
    steps, accepted, proposed = (
        sum(part[key] for part in parts) for key in ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    )
    assert found["drafter"] == "dspark"
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert found["draft_acceptance_rate"] == pytest.approx(accepted / proposed)
    assert len(found["position_rates"]) == 8
    assert sum(found["position_rates"]) == pytest.approx(found["mean_acceptance_length"] - 1)


def test_answers_on_a_terminal_are_coloured(engine):
    """Accepted drafts, rejected ones and the verifier's own can be told apart, and the text is whole."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", highlight=False, width=400)
    request = Request(prompt_ids=tuple(engine.tokenizer.encode(PROMPTS[0])), max_tokens=40)
    ((job,), seconds) = terminal.watch(engine, [request], console)
    shown = out.getvalue()
    assert seconds > 0
    assert "\x1b[32m" in shown and "\x1b[9;31m" in shown
    without = re.sub("\x1b\\[9;31m.*?\x1b\\[0m", "", shown, flags=re.S).partition("own\n")[2]
    assert re.sub("\x1b\\[[0-9;]*m", "", without) == job.answer.text + "\n"


def test_blank_lines_are_ignored_and_counted(tiny_engines, files):
    files.write("", {"prompt": "a"}, "   ", {"prompt": "b"}, "")
    run(tiny_engines, files, 2)
    assert len(files.read()) == 2
    files.write("", {"prompt": "a"}, "", "{")
    with pytest.raises(RequestError, match=f"^{files.source}: line 4: not JSON"):
        run(tiny_engines, files)


def test_an_empty_file_gives_an_empty_file(tiny_engines, files):
    files.write()
    run(tiny_engines, files)
    assert files.output.read_bytes() == b""


@pytest.mark.parametrize("drafter", ["dflash2", "tiny-dflash2"])
def test_a_drafter_by_its_name_or_its_folder_says_the_same(tiny_engines, engine, files, drafter):
    files.write({"prompt": PROMPTS[0]})
    run(tiny_engines, files, drafter=drafter)
    answer, _ = engine.answer(Request(prompt_ids=tuple(engine.tokenizer.encode(PROMPTS[0])), max_tokens=12))
    assert files.read()[0]["output_token_ids"] == answer.tokens


def test_without_a_tokenizer_ids_only(golden_engines, files):
    files.write({"prompt_token_ids": [5, 6, 7]})
    run(golden_engines, files, 3)
    assert set(files.read()[0]) == {"output_token_ids", "finish_reason", "speculative_decoding"}
    files.write({"prompt": "a"})
    with pytest.raises(RequestError, match=r"line 1: prompt: this engine has no tokenizer; give prompt_token_ids$"):
        run(golden_engines, files, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object with either prompt or prompt_token_ids"),
        ({}, "expected an object with either prompt or prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "expected an object with either prompt or prompt_token_ids"),
        ({"prompt": "a", "n": 2, "tools": []}, "n, tools: not a setting of a line, expected some of max_tokens"),
        ({"prompt": "a", "temprature": 1}, "temprature: not a setting of a line"),
        ({"messages": []}, "messages: expected a JSON list of objects"),
        ({"messages": [{"role": "user"}]}, "messages: expected a JSON list of objects"),
        ({"prompt": "a", "temperature": "hot"}, "temperature: found 'hot', expected a number"),
        ({"prompt": "a", "seed": True}, "seed: found True, expected a whole number"),
        ({"prompt": "a", "stop": "x"}, "stop: found 'x', expected a list of texts"),
        ({"prompt": "a", "top_p": 2}, "top_p: found 2, expected 0 to 1"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: expected an object of token ids and biases"),
        ({"prompt": "a", "min_tokens": 13}, "min_tokens: found 13, expected at most max_tokens"),
        ({"prompt": 5}, "prompt: found 5, expected a text"),
        ({"prompt": ""}, "prompt: found no tokens"),
        ({"prompt_token_ids": "1"}, "prompt_token_ids: expected a list of integers"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids: expected a list of integers"),
        ({"prompt_token_ids": [1, 2.0]}, "prompt_token_ids: expected a list of integers"),
        ({"prompt_token_ids": [10**30]}, "prompt: found token id 10{30}, expected ids from 0 to"),
        ({"prompt_token_ids": [1] * 5000}, "prompt: found 5000 tokens, expected fewer than"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(tiny_engines, files, monkeypatch, line, message):
    monkeypatch.setattr(generate, "answer_all", lambda *_: pytest.fail("started"))
    files.write({"prompt": "fine"}, line)
    with pytest.raises(RequestError, match=f"^{files.source}: line 2: {message}"):
        run(tiny_engines, files)
    assert list(files.source.parent.iterdir()) == [files.source]


def test_an_older_output_survives_a_failure_and_is_replaced_whole(tiny_engines, files, monkeypatch):
    files.output.write_text("older\n")
    files.write({"prompt": "a"})

    def broken(*_):
        raise RuntimeError("out of order")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(Engine, "step", broken)
        run(tiny_engines, files)
    assert files.output.read_text() == "older\n"
    run(tiny_engines, files, 2)
    assert len(files.read()) == 1
    assert sorted(files.source.parent.iterdir()) == [files.source, files.output]


def test_an_unknown_drafter_is_refused(tiny_engines, files):
    files.write({"prompt": "a"})
    with pytest.raises(EngineError, match=r"drafter 'eagle': no such drafter in this engine directory\. It has:"):
        run(tiny_engines, files, drafter="eagle")


@pytest.mark.parametrize("odd", ["\u2028", "\u0085"])
def test_a_line_separator_inside_a_text_does_not_end_the_line(tiny_engines, files, odd):
    """JSON lets U+2028 and U+0085 stand in a text as they are; only a newline ends a line of the file."""
    files.source.write_text(json.dumps({"prompt": f"a{odd}b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    run(tiny_engines, files, 2)
    assert len(files.read()) == 1


@pytest.mark.parametrize(
    ("data", "where"),
    [(b'{"prompt": "\xff"}\n', "{source}: not UTF-8"), (b'{"prompt": "\\ud800"}\n', "{source}: line 1: ")],
)
def test_input_that_is_no_text_is_named(tiny_engines, files, data, where):
    files.source.write_bytes(data)
    with pytest.raises(RequestError, match=f"^{where.format(source=files.source)}"):
        run(tiny_engines, files)


def test_a_missing_output_folder_is_named_before_anything_runs(tiny_engines, files, monkeypatch):
    monkeypatch.setattr(generate, "answer_all", lambda *_: pytest.fail("started"))
    files.write({"prompt": "a"})
    files.output = files.output.parent / "nowhere" / "out.jsonl"
    with pytest.raises(GlmspecError, match="nowhere"):
        run(tiny_engines, files)


@pytest.mark.parametrize("line", ["[" * 100_000, "[" + "1" * 5000 + "]"])
def test_json_beyond_the_parser_is_named(tiny_engines, files, line):
    files.write(line)
    with pytest.raises(RequestError, match=f"^{files.source}: line 1: not JSON"):
        run(tiny_engines, files)
