"""Where an answer ends: the cut falls at the same token and the same character however the steps fall."""

from __future__ import annotations

import codecs
import random

import pytest
from support.models import ASSETS

from glmspec.runtime.accept import Accepted
from glmspec.runtime.ending import Ending
from glmspec.runtime.request import LENGTH, STOP, Answer, Request, TokenLogprob
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.stats import SpecStats
from glmspec.runtime.text import Tokenizer

EOS = 2


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte level: id b is byte b, ids from 256 on are special."""
    return Tokenizer(ASSETS / "tiny-verifier")


def ending(most=100, stop=(), end_ids=(EOS,), text=None, ignore_eos=False) -> Ending:
    request = Request(prompt_ids=(1,), max_tokens=most, stop=tuple(stop), ignore_eos=ignore_eos)
    return Ending(request, end_ids, text, most)


def feed(one: Ending, *blocks) -> Answer:
    """What a client puts together from the steps up to the last."""
    answer = Answer()
    for block in blocks:
        answer.add(one.take(block))
        if answer.finish_reason:
            break
    return answer


def steps(data: bytes, size: int) -> list[list[int]]:
    return [list(data[at : at + size]) for at in range(0, len(data), size)]


@pytest.mark.parametrize(
    ("block", "budget", "tokens", "reason"),
    [
        ([7, 8, EOS, 9, 9], 4, [7, 8, EOS], STOP),
        ([7, 8, 9, 9, EOS], 4, [7, 8, 9, 9], LENGTH),
        ([7, 8, EOS, 9, 9], 1, [7], LENGTH),
        ([EOS, 9, 9], 1, [EOS], STOP),
        ([7, 8, 9, EOS], 4, [7, 8, 9, EOS], STOP),  # end token and budget on the same token
        ([7, 8, 9, 9], 4, [7, 8, 9, 9], LENGTH),
        ([7, 8, 9], 4, [7, 8, 9], None),
    ],
)
def test_end_token_and_budget_inside_a_block(block, budget, tokens, reason):
    answer = feed(ending(budget), block)
    assert (answer.tokens, answer.finish_reason) == (tokens, reason)


def test_budget_counts_over_steps():
    answer = feed(ending(5), [7, 8], [9], [7, 8, EOS])
    assert (answer.tokens, answer.finish_reason) == ([7, 8, 9, 7, 8], LENGTH)


@pytest.mark.parametrize("end", [29, 30, 31])
def test_every_end_token_ends(end):
    answer = feed(ending(end_ids=(29, 30, 31)), [7, end, 9])
    assert (answer.tokens, answer.finish_reason) == ([7, end], STOP)


def test_ignore_eos_passes_every_end_token_and_keeps_the_rest():
    answer = feed(ending(4, end_ids=(29, 30, 31), ignore_eos=True), [29, 30, 31], [7, 8])
    assert (answer.tokens, answer.finish_reason) == ([29, 30, 31, 7], LENGTH)


def test_ignore_eos_still_heeds_stop_texts(tokenizer):
    one = ending(stop=["!"], end_ids=(256,), text=tokenizer.stream(), ignore_eos=True)
    answer = feed(one, [256, *b"a!b"])
    assert (answer.text, answer.finish_reason) == ("a", STOP)


def test_end_token_in_a_fully_accepted_block_leaves_nothing_behind():
    """Case C23: end token at slot 2 of 5 drafts, all accepted: three emitted, three counted."""
    sequence = Sequence(Request(prompt_ids=(5, 6), max_tokens=50), ending(50), 52, SpecStats(5))
    sequence.cached = 1
    drafts = [7, 8, EOS, 9, 9]
    logprobs = tuple(TokenLogprob(-float(at), ()) for at in range(6))
    delta = sequence.advance(1, drafts, Accepted(5, [*drafts, 9], logprobs))
    assert [one.logprob for one in delta.logprobs] == [0, -1, -2]
    assert delta.tokens == (7, 8, EOS)
    assert sequence.tokens == [5, 6, 7, 8, EOS]
    assert sequence.finished
    assert (sequence.stats.num_steps, sequence.stats.num_accepted) == (1, 3)
    assert sequence.stats.num_draft_tokens == 5
    assert (delta.accepted, delta.rejected) == (3, ())


@pytest.mark.parametrize("accepted", range(4))
def test_a_verified_block_leaves_one_token_pending(accepted):
    """The next anchor. More would cost a step without drafts, fewer would skip a row."""
    sequence = Sequence(Request(prompt_ids=(5, 6, 7), max_tokens=50), ending(50), 53, SpecStats(3))
    assert sequence.advance(3, [], Accepted(0, [8])).tokens == (8,)  # the prompt's own rows, and the first token
    assert (sequence.cached, sequence.pending) == (3, 1)
    truth = [9, 10, 11, 12]
    drafts = truth[:accepted] + [99] * (3 - accepted)
    delta = sequence.advance(1, drafts, Accepted(accepted, truth[: accepted + 1]))
    assert delta.tokens == tuple(truth[: accepted + 1])
    assert (delta.accepted, delta.rejected) == (accepted, tuple(drafts[accepted:]))
    assert (sequence.cached, sequence.pending) == (4 + accepted, 1)


def test_cached_length_is_the_committed_length_after_a_cut():
    """Case C23, 'KV length = committed': rows of dropped tokens do not count."""
    sequence = Sequence(Request(prompt_ids=(5, 6), max_tokens=50), ending(50), 52, SpecStats(5))
    sequence.cached = 1
    drafts = [7, 8, EOS, 9, 9]
    sequence.advance(1, drafts, Accepted(5, [*drafts, 9]))
    assert sequence.cached <= len(sequence.tokens)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("said", "stops", "text"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),  # the first to be completed, whatever the order
        ("ababac!", ["abac"], "ab"),  # begins, fails, and begins again inside itself
        ("aaab!", ["aab"], "a"),
        ("one tw, two", ["two"], "one tw, "),  # begins and does not complete: the text is let go
        ("aab!", ["ab", "aab"], ""),  # two completed by one character: the one that began first
        ("aab!", ["aab", "ab"], ""),
        ("stop", ["stop"], ""),
        ("naïve 中文 text", ["文"], "naïve 中"),  # characters of several tokens
        ("naïve 中文 text", ["中文 t"], "naïve "),
    ],
)
def test_stop_text_is_cut_wherever_steps_fall(tokenizer, size, said, stops, text):
    answer = feed(ending(stop=stops, text=tokenizer.stream()), *steps(said.encode(), size))
    assert (answer.text, answer.finish_reason) == (text, STOP)
    kept = bytes(answer.tokens).decode()
    assert said.startswith(kept)
    assert any(kept == text + stop for stop in stops)  # its tokens stay; nothing after them does


def test_unfinished_stop_text_is_held_until_it_cannot_complete(tokenizer):
    one = ending(stop=["END"], text=tokenizer.stream())
    shown = [one.take(list(piece)).text for piece in (b"a E", b"N", b"X", b"E", b"N")]
    assert shown == ["a ", "", "ENX", "", ""]


@pytest.mark.parametrize(("last", "reason"), [([256], STOP), ([ord("N")], LENGTH)])
def test_held_text_comes_out_at_another_end(tokenizer, last, reason):
    one = ending(4, stop=["END"], end_ids=(256,), text=tokenizer.stream())
    answer = feed(one, list(b"a E"), last)
    assert (answer.text, answer.finish_reason) == ("a E" + ("N" if reason == LENGTH else ""), reason)


@pytest.mark.parametrize("size", range(1, 6))
def test_joined_deltas_are_the_whole_decode(tokenizer, size):
    ids = [*"é中🙂x".encode(), 0xE4, 0xB8, *b"y", 0xF0, 0x9F]  # a broken character inside, an unfinished one last
    answer = feed(ending(len(ids), text=tokenizer.stream()), *[ids[at : at + size] for at in range(0, len(ids), size)])
    assert answer.text == tokenizer.decode(ids) == "é中🙂x\ufffdy\ufffd"


def test_no_delta_holds_half_a_character(tokenizer):
    one = ending(text=tokenizer.stream())
    assert [one.take([byte]).text for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]


# Any partition of any script against one token at a time, with tokens that hold several characters or parts of one.

PIECES = [b"a", b"b", b"ab", b"ba", b"", b"aab", b"c", "é".encode(), "é".encode()[:1], "é".encode()[1:], b"b\xc3"]


class Stream:
    """The text of PIECES as it becomes certain."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(PIECES[token])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def naive(script, end_ids, stops, most):
    """Decodes everything anew after every token; (tokens, text, reason)."""
    for count in range(1, len(script) + 1):
        stream = Stream()
        text = "".join(stream.push(token) for token in script[:count])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return script[:count], text[: min(found)], STOP
        if script[count - 1] in end_ids or count == most:
            return script[:count], text + stream.finish(), STOP if script[count - 1] in end_ids else LENGTH
    held = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
    return script, text[: len(text) - held], None


@pytest.mark.parametrize("seed", range(200))
def test_any_partition_into_blocks_equals_one_token_at_a_time(seed):
    rng = random.Random(seed)
    script = [rng.randrange(len(PIECES)) for _ in range(rng.randint(1, 24))]
    end_ids = rng.sample(range(len(PIECES)), rng.choice([0, 0, 1, 2]))
    stops = ["".join(rng.choices("aabbcé", k=rng.randint(1, 4))) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    most = rng.randint(1, 26)
    blocks, at = [], 0
    while at < len(script):
        size = rng.randint(1, 9)
        blocks.append(script[at : at + size])
        at += size
    answer = feed(ending(most, stops, end_ids, Stream()), *blocks)
    assert (answer.tokens, answer.text, answer.finish_reason) == naive(script, end_ids, stops, most)
