"""Rows of the head that are no token of the tokenizer are never chosen, however favoured, by any way of choosing.

Favoured: each such row is twice the row of a token, so that it wins wherever that token would. With the rows kept from
being chosen, answers are those of the checkpoint as it was.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.cli import done
from support.models import ASSETS, GOLDENS, random_verifier

from glmspec.build.deployment import open_deployment
from glmspec.build.describe import describe
from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.errors import RequestError
from glmspec.core.progress import Progress
from glmspec.models.configs.illegal import IllegalIds
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling

PROMPT = "1, 2, 3, 4,"
HOLE = 1  # a control character that no answer has
BEYOND = range(266, 288)


class Notes(Progress):
    """Keeps what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def build(out: Path, verifier: Path, *drafters: Path, progress: Progress | None = None, **options) -> Path:
    build_engines(verifier, drafters, TARGETS["cpu"], BuildOptions(**options), out, progress or Progress(), check=False)
    return out


def answer(engine: Engine, most: int = 24, **sampling) -> list[int]:
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    request = Request(prompt_ids=prompt, max_tokens=most, ignore_eos=True, sampling=Sampling(**sampling))
    return engine.answer(request)[0].tokens


@pytest.fixture(scope="module")
def favoured(tmp_path_factory) -> Path:
    """The tiny verifier, whose extra rows double those of the tokens that answers are made of, and whose tokenizer has
    lost a token in the middle."""
    home = tmp_path_factory.mktemp("favoured") / "verifier"
    shutil.copytree(ASSETS / "tiny-verifier", home)
    tensors = load_file(home / "model.safetensors")
    head = tensors["lm_head.weight"]
    copied = [*b" ,0123456789\nabcdefghi"]
    for at, token in zip([HOLE, *BEYOND], copied, strict=False):
        head[at] = 2 * head[token]
    save_file(tensors, home / "model.safetensors")
    path = home / "tokenizer.json"
    values = json.loads(path.read_text())
    vocab = values["model"]["vocab"]
    vocab |= {one["content"]: one["id"] for one in values["added_tokens"]}  # or the library would number them anew
    del vocab[next(token for token, id in vocab.items() if id == HOLE)]
    path.write_text(json.dumps(values))
    return home


@pytest.fixture(scope="module")
def engines(favoured, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "out"
    return build(out, favoured, ASSETS / "tiny-dspark", mtp=True)


def test_spans_hold_what_is_beyond_the_largest_and_holes():
    illegal = IllegalIds.beside({0, 1, 3, 4, 9, 40}, 12)
    assert illegal.spans == ((2, 3), (5, 9), (10, 12))
    assert [id for id in range(-1, 13) if id in illegal] == [2, 5, 6, 7, 8, 10, 11]
    assert len(illegal) == 7 and IllegalIds.from_json(illegal.to_json()) == illegal
    assert not IllegalIds.beside(range(12), 12)


def test_engine_counts_rows_that_are_no_token(favoured, tmp_path):
    progress = Notes()
    build(tmp_path / "out", favoured, progress=progress)
    assert [note for note in progress.told if "never chosen" in note] == [
        "23 of the head's 288 rows are no token of the tokenizer: they are never chosen."
    ]
    assert describe(tmp_path / "out")["num_illegal_ids"] == 23
    assert re.search(r"illegal token ids +│ 23 ", done("inspect", tmp_path / "out").stdout)


def test_without_a_mask_the_rows_are_chosen(favoured, tmp_path):
    """Else the other tests could not fail."""
    bare = tmp_path / "bare"
    shutil.copytree(favoured, bare)
    (bare / "tokenizer.json").unlink()  # no tokenizer to ask: no mask
    engine = Engine(build(tmp_path / "out", bare))
    prompt = tuple(PROMPT.encode())
    tokens = engine.answer(Request(prompt_ids=prompt, max_tokens=20, ignore_eos=True))[0].tokens
    assert set(tokens) & {HOLE, *BEYOND}


@pytest.mark.parametrize("drafter", [None, "dspark", "mtp"])
def test_answers_are_those_of_the_checkpoint_as_it_was(engines, tiny_engines, drafter):
    plain = Engine(tiny_engines, speculate=False)
    found = Engine(engines, drafter, speculate=drafter is not None)
    for sampling in ({}, {"temperature": 2.0, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_k": 300, "top_p": 0.9}):
        assert answer(found, **sampling) == answer(plain, **sampling)


@pytest.mark.parametrize("drafter", ["dspark", "mtp"])
def test_drawn_drafts(favoured, tmp_path, drafter):
    """Their residuals and laws, MTP's own q among them, have no illegal ids."""
    build(tmp_path / "out", favoured, ASSETS / "tiny-dspark", mtp=True, draft_sampling="probabilistic")
    for method in ("standard", "block"):
        engine = Engine(tmp_path / "out", drafter, verification=method)
        tokens = [id for seed in range(2) for id in answer(engine, temperature=2.0, seed=seed)]
        assert not [id for id in tokens if id in engine.directory.illegal]


def test_logprobs_list_no_illegal_id(engines):
    engine = Engine(engines, "dspark")
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    sampling = Sampling(logprobs=20, temperature=1.0, seed=1)
    made = engine.answer(Request(prompt_ids=prompt, max_tokens=12, ignore_eos=True, sampling=sampling))[0]
    assert all(len(one.best) == 20 and one.logprob > -50 for one in made.logprobs)
    assert not [id for one in made.logprobs for id, _ in one.best if id in engine.directory.illegal]


def test_end_tokens_that_the_tokenizer_does_not_know_still_end(favoured, tmp_path):
    home = tmp_path / "verifier"
    shutil.copytree(favoured, home)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((home / name).read_text())
        (home / name).write_text(json.dumps(values | {"eos_token_id": [256, 280]}))
    member = open_deployment(home, [], TARGETS["cpu"], BuildOptions()).verifier
    assert 280 not in member.illegal and 281 in member.illegal and 279 in member.illegal


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": (270,)},
        {"stop_token_ids": (HOLE,)},
        {"sampling": Sampling(logit_bias=((287, 1.0),))},
    ],
)
def test_what_cannot_happen_is_refused(engines, fields):
    engine = Engine(engines, speculate=False)
    with pytest.raises(RequestError, match=r"token id \d+ is none of the tokenizer's"):
        engine.add(Request(prompt_ids=(1, 2), max_tokens=4, **fields))


def test_what_changes_nothing_is_accepted(engines):
    """Clients that forbid a whole range, and prompts with a row of their own."""
    engine = Engine(engines, speculate=False)
    told = tuple((id, -100.0) for id in BEYOND)
    assert answer(engine, logit_bias=told) == answer(engine)
    made, _ = engine.answer(Request(prompt_ids=(1, 270, 2), max_tokens=4, ignore_eos=True))
    assert len(made.tokens) == 4 and not [id for id in made.tokens if id in engine.directory.illegal]


# -- a head of 32 rows, a tokenizer of 29 ids ------------------------------------------------------------------


def small(home: Path, **config) -> Path:
    """Rows 29, 30 and 31 are larger copies, one turned round, so that one of them is best most of the time."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    random_verifier(home, seed=5, vocab_size=32, **config)
    tensors = load_file(home / "model.safetensors")
    head = tensors["lm_head.weight"]
    head[29], head[30], head[31] = 6 * head[3], -6 * head[3], 6 * head[4]
    save_file(tensors, home / "model.safetensors", metadata={"format": "pt"})
    words = {f"w{id}": id for id in range(29)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return home


@pytest.mark.parametrize("tp", [1, 2])
def test_29_ids_of_32_rows(tmp_path, tp):
    progress = Notes()
    out = build(tmp_path / "out", small(tmp_path / "hf"), tp=tp, progress=progress)
    assert any(note.startswith("3 of the head's 32 rows") for note in progress.told)
    engine = Engine(out)
    assert json.loads((out / "config.json").read_text())["illegal_ids"] == [[29, 32]]
    asked = [Sampling(), *(Sampling(temperature=2.0, seed=seed, top_k=30) for seed in range(3))]
    for sampling in asked:
        request = Request(prompt_ids=(5, 6, 7), max_tokens=40, ignore_eos=True, sampling=sampling)
        assert max(engine.answer(request)[0].tokens) < 29
    told = engine.answer(Request(prompt_ids=(5,), max_tokens=2, sampling=Sampling(logprobs=20)))[0].logprobs
    assert all(id < 29 for one in told for id, _ in one.best)
    every = tuple((id,) for id in range(29))
    with pytest.raises(RequestError, match="forbid all 29 tokens"):
        engine.add(Request(prompt_ids=(5,), max_tokens=2, sampling=Sampling(bad_words=every)))
    with pytest.raises(RequestError, match="forbid all 29 tokens"):
        ends = tuple(range(2, 29))
        engine.add(
            Request(
                prompt_ids=(5,),
                max_tokens=4,
                stop_token_ids=ends,
                sampling=Sampling(min_tokens=2, bad_words=((0,),)),
            )
        )


def test_fewer_tokens_than_logprobs_are_asked_for(tmp_path):
    """What is listed is what can be chosen, and is JSON."""
    home = small(tmp_path / "hf")
    values = json.loads((home / "tokenizer.json").read_text())
    values["model"]["vocab"] = {f"w{id}": id for id in (0, 1, 2, 7)}
    (home / "tokenizer.json").write_text(json.dumps(values))
    engine = Engine(build(tmp_path / "out", home))
    request = Request(
        prompt_ids=(5,), max_tokens=6, ignore_eos=True, sampling=Sampling(logprobs=20, temperature=1.0, seed=1, top_k=9)
    )
    made = engine.answer(request)[0]
    assert set(made.tokens) <= {0, 1, 2, 7}
    for token, one in zip(made.tokens, made.logprobs, strict=True):
        assert sorted(id for id, _ in one.best) == [0, 1, 2, 7]
        json.dumps(one.to_json(token), allow_nan=False)


def test_networks_are_the_same_where_all_ids_are_legal(golden_engines, tmp_path):
    """No tokenizer, or one that knows every row: nothing is added."""
    contract = json.loads((golden_engines / "verifier" / "config.json").read_text())["contract"]
    assert not [one for one in contract["inputs"] if one["name"] == "legal_bias"]
    home = tmp_path / "whole"
    shutil.copytree(GOLDENS / "checkpoints" / "verifier", home)
    rows = json.loads((home / "config.json").read_text())["vocab_size"]
    small(tmp_path / "hf")
    values = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    values["model"]["vocab"] = {f"w{id}": id for id in range(rows)}
    (home / "tokenizer.json").write_text(json.dumps(values))
    shutil.copy(tmp_path / "hf" / "tokenizer_config.json", home)
    out = build(tmp_path / "out", home)
    made = json.loads((out / "verifier" / "config.json").read_text())
    assert not [one for one in made["contract"]["inputs"] if one["name"] == "legal_bias"]
