"""Ranks in lockstep: logits of TP 2, 4 and 8, with and without expert groups, equal those of one rank."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.models import ASSETS, GOLDENS, LIMITS, random_verifier
from support.networks import author

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES
from glmspec.core.errors import GlmspecError, NetworkError
from glmspec.core.progress import Progress
from glmspec.models.registry import model_of
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.reader import read
from glmspec.network.shards import Mapping
from glmspec.runtime.engine import Engine
from glmspec.runtime.executor import LockstepExecutor
from glmspec.runtime.executor.lockstep import Rendezvous
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.request import Request

SIZES = dict(num_attention_heads=8, num_key_value_heads=8, n_routed_experts=8, intermediate_size=128, vocab_size=101)
LEAST_PAGES = 2  # index_topk 16, page size 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("parallel")
    random_verifier(path / "hf", seed=3, **SIZES)
    return path


def load(folder, mapping: Mapping, **options) -> Model:
    out = folder / f"tp{mapping.tp}ep{mapping.ep}"
    checkpoint = plan_conversion(folder / "hf", ConvertOptions(RECIPES["auto"], mapping)).write(out)
    tensors = [checkpoint.tensors(rank) for rank in range(mapping.tp)]
    return Model(model_of(checkpoint.config, (0, 3, 6)), LIMITS, checkpoint.net_config("float32"), tensors, **options)


def steps() -> list[dict[str, torch.Tensor]]:
    """Two prompts, one beyond index_topk; then a block of five and a single token."""
    generator = torch.Generator().manual_seed(0)

    def rows(pages, start, count, logits):
        ids = torch.randint(0, 101, (count,), generator=generator).tolist()
        return Rows(Span(pages, start, count), ids, logits)

    first, second = [3, 1, 7, 4, 9], [2, 5]
    return [
        pack_rows([rows(first, 0, 29, 2), rows(second, 0, 7, 1)], LIMITS, LEAST_PAGES),
        pack_rows([rows(first, 29, 5, 5), rows(second, 7, 1, 1)], LIMITS, LEAST_PAGES),
    ]


@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
@pytest.mark.parametrize("tp, ep", [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 8)])
def test_all_ranks_together_equal_one(folder, tp, ep, regions):
    whole, divided = load(folder, Mapping()), load(folder, Mapping(tp, ep), regions=regions)
    assert isinstance(divided.executor, LockstepExecutor)
    for inputs in steps():
        expected, found = whole.run(inputs), divided.run(inputs)
        assert found["logits"].shape == expected["logits"].shape  # without the rows that pad the vocabulary
        for name in ("logits", "tap.0", "tap.3", "tap.6"):
            error = (found[name] - expected[name]).abs().max() / expected[name].abs().max()
            assert error < 1e-4, (name, error)
        assert torch.equal(found["greedy_ids"], expected["greedy_ids"])


def test_every_rank_s_network_is_the_same(folder):
    """So that one plan serves all ranks: what differs is in the inputs."""
    model = load(folder, Mapping(4, 2))
    start = [rank.program for rank in model.executor.ranks]
    assert all(one.step_statements == start[0].step_statements for one in start)


def test_a_rank_that_fails_stops_the_others_and_is_named(folder):
    model = load(folder, Mapping(2))
    broken = model.executor.ranks[1]
    original = broken._step

    def step(inputs):
        raise ValueError("a bad day")

    broken._step = step
    with pytest.raises(NetworkError, match="a bad day"):
        model.run(steps()[0])
    broken._step = original
    model.run(steps()[0])  # and the next step works


def test_ranks_that_disagree_are_told_apart():
    """A sum that is missing: every rank would go on with its own term."""
    two = NetworkConfig(compute="float32", mapping=Mapping(2))
    for reduced in (True, False):
        body = (lambda x, w: ops.all_reduce(x * w)) if reduced else (lambda x, w: x * w)
        net = author({"x": torch.ones(1, 3), "w": torch.ones(1, 3)}, body, ("w",), two)
        weights = [{"w": torch.full((1, 3), float(rank))} for rank in range(2)]
        executor = LockstepExecutor(read(net.definition, net.backend), weights, [{}, {}])
        if reduced:
            assert executor.run({"x": torch.ones(1, 3)})["out0"].tolist() == [[1.0] * 3]
        else:
            with pytest.raises(NetworkError, match="output out0: rank 1 and rank 0 disagree"):
                executor.run({"x": torch.ones(1, 3)})


def test_sums_are_taken_in_float32():
    """In bfloat16, 256 + 1 is 256: the second rank's term would be lost, and the third's."""
    four = NetworkConfig(compute="bfloat16", mapping=Mapping(4))
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    net = author({"x": x, "w": x}, lambda x, w: ops.all_reduce(x * w), ("w",), four)
    weights = [{"w": torch.full((1, 1), value, dtype=torch.bfloat16)} for value in (256.0, 1.0, 1.0, 2.0)]
    executor = LockstepExecutor(read(net.definition, net.backend), weights, [{}] * 4)
    assert executor.run({"x": x})["out0"].item() == 260.0


def test_ranks_at_different_layers_are_an_error():
    """A rank that skips a collective meets the others at the wrong one."""
    meeting = Rendezvous(2)
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(meeting.exchange, rank, layer, torch.zeros(1), torch.cat)
            for rank, layer in enumerate(("a/all_reduce.1", "b/all_reduce.1"))
        ]
    for call in calls:
        with pytest.raises(NetworkError, match=r"different layers: a/all_reduce\.1, b/all_reduce\.1"):
            call.result()


def test_an_engine_of_two_ranks_answers_as_one_does(tmp_path):
    """From the command's function to tokens: drafts from a drafter that borrows the divided embedding and head, rank
    files in quantized formats, and the MTP module beside them."""
    checkpoints = GOLDENS / "checkpoints"
    drafter = checkpoints / "dspark"
    answers = {}
    for name, options in {
        "one": {},
        "two": dict(tp=2),
        "four": dict(tp=4, ep=2),
    }.items():
        out = tmp_path / name
        built = BuildOptions(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64, **options)
        build_engines(checkpoints / "verifier", (drafter,), TARGETS["cpu"], built, out, Progress())
        engine = Engine(out)
        assert engine.drafter is not None
        answer, stats = engine.answer(Request(prompt_ids=(5, 9, 2, 33, 17, 8), max_tokens=24, ignore_eos=True))
        answers[name] = (answer.tokens, stats.acceptance_histogram)
    assert answers["two"] == answers["one"] and answers["four"] == answers["one"]


def test_an_engine_with_the_mtp_module(tmp_path):
    """Its network is built and hashed beside the verifier's, divided like it, and drafts; the answer is as before."""
    answers = []
    for mtp in (False, True):
        built = BuildOptions(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64, mtp=mtp, tp=2)
        build_engines(ASSETS / "tiny-verifier", (), TARGETS["cpu"], built, tmp_path / str(mtp), Progress())
        engine = Engine(tmp_path / str(mtp))
        assert engine.drafter_name == ("mtp" if mtp else None)
        answer, stats = engine.answer(Request(prompt_ids=tuple(b"1, 2, 3, 4, 5, 6, 7, "), max_tokens=24))
        answers.append(answer.tokens)
    assert answers[0] == answers[1]
    assert stats.mean_acceptance_length > 2
    record = json.loads((tmp_path / "True" / "mtp" / "config.json").read_text())
    assert {"hidden", "draft_hidden"} <= {one["name"] for side in record["contract"].values() for one in side}
    with pytest.raises(GlmspecError, match="--mtp: found no multi-token-prediction module"):
        without = tmp_path / "hf"
        random_verifier(without, num_hidden_layers=2, indexer_types=["full", "shared"])
        build_engines(without, (), TARGETS["cpu"], BuildOptions(mtp=True), tmp_path / "e", Progress())
