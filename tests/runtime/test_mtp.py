"""The MTP network on the executor against the plain PyTorch module that was trained: scripts/tiny, tiny-verifier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import ASSETS, LIMITS
from support.mtp import OracleChain, Outputs, hiddens, load_oracle

from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES
from glmspec.models.mtp import Mtp
from glmspec.models.registry import model_of
from glmspec.models.verifier import Verifier
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import WEIGHT
from glmspec.network.limits import EngineLimits
from glmspec.network.shards import Mapping
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.text import Tokenizer

VERIFIER = ASSETS / "tiny-verifier"
TEXT = EngineLimits(**{**LIMITS.__dict__, "max_num_batched_tokens": 256})
LEAST_PAGES = 6  # index_topk 48, page size 8
PAGES = {"a": [5, 2, 9, 14, 3, 11, 20, 7, 25, 30, 33, 31, 36, 29], "b": [1, 8, 4, 16, 10, 6, 13, 12, 15, 17]}
TOLERANCE = 1e-4  # relative to the largest
LENGTH = 100  # of a prompt: index_topk is 48


@pytest.fixture(scope="module")
def oracle():
    return load_oracle()


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    """Held-out texts, some hundred tokens each."""
    texts = [json.loads(line)["prompt"] for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer(VERIFIER)
    return {name: tokenizer.encode("".join(texts[at : at + 6]))[:120] for name, at in (("a", 0), ("b", 20))}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Checkpoint:
    return convert(tmp_path_factory.mktemp("mtp") / "ck")


def convert(out: Path, recipe: str = "auto", mapping: Mapping | None = None) -> Checkpoint:
    return plan_conversion(VERIFIER, ConvertOptions(RECIPES[recipe], mapping or Mapping())).write(out)


def load(checkpoint: Checkpoint, tree: type = Mtp, compute: str = "float32", **options) -> Model:
    config, net_config = checkpoint.config, checkpoint.net_config(compute)
    weights = [checkpoint.tensors(rank) for rank in range(net_config.mapping.tp)]
    made = Verifier(config, hidden=True) if tree is Verifier else Mtp(config)
    return Model(made, TEXT, net_config, weights, **options)


@pytest.fixture(scope="module", params=[True, False], ids=["ops", "layers"])
def mtp(request, converted) -> Model:
    return load(converted, regions=request.param, lowest_wins=request.param)


def run(model: Model, name: str, start: int, following: list[int], hidden_ND: torch.Tensor) -> Outputs:
    """One step of one sequence. following: the token after each row."""
    rows = Rows(Span(PAGES[name], start, len(following)), following, len(following))
    return model.run(pack_rows([rows], TEXT, LEAST_PAGES) | going_on(hidden_ND))


def going_on(hidden_ND: torch.Tensor) -> dict[str, torch.Tensor]:
    """The hidden states of a step's rows as rows of a larger tensor, in another order."""
    order = torch.randperm(len(hidden_ND) + 3, generator=torch.Generator().manual_seed(0))
    source_HD = torch.full((len(order), hidden_ND.shape[1]), 1e3, dtype=hidden_ND.dtype)
    rows_N = order[: len(hidden_ND)]
    source_HD[rows_N] = hidden_ND
    return {"hidden": source_HD, "hidden_rows": rows_N.int()}


def assert_same(found: Outputs, expected: Outputs) -> None:
    for name, scale in (("draft_hidden", "draft_hidden"), ("logits", "logits"), ("margin", "logits")):
        worst = (found[name] - expected[name]).abs().max() / expected[scale].abs().max()
        assert worst <= TOLERANCE, f"{name}: largest relative error {worst:.2e}"
    assert torch.equal(found["draft_ids"], expected["draft_ids"])


# -- the verifier's side ----------------------------------------------------------------------------


@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
def test_the_verifier_gives_its_hidden_states_when_asked(oracle, prompts, converted, regions):
    ids = prompts["a"][:LENGTH]
    step = pack_rows([Rows(Span(PAGES["a"], 0, LENGTH), ids, 7)], TEXT, LEAST_PAGES)
    asked = load(converted, Verifier, regions=regions).run(step)
    plain = Model(
        model_of(converted.config), TEXT, NetworkConfig(compute="float32"), [converted.tensors(0)], regions=regions
    ).run(step)
    expected = hiddens(oracle, ids)
    assert (asked["hidden"] - expected).abs().max() / expected.abs().max() <= TOLERANCE
    assert "hidden" not in plain
    torch.testing.assert_close(asked["logits"], plain["logits"])
    assert torch.equal(asked["greedy_ids"], plain["greedy_ids"])


def test_the_verifier_s_network_is_the_same_when_not_asked(converted):
    config, net_config, weights = converted.config, converted.net_config("float32"), [converted.tensors(0)]
    default = Model(model_of(config), TEXT, net_config, weights)
    assert Model(Verifier(config), TEXT, net_config, weights).network_sha256 == default.network_sha256
    assert load(converted, Verifier).network_sha256 != default.network_sha256
    assert not any("layers.7." in spec.name for spec in default.contract.inputs)


# -- the module ---------------------------------------------------------------------------------------


def test_the_contract(converted):
    contract = load(converted).contract
    inputs, outputs = ({spec.name: spec for spec in side} for side in (contract.inputs, contract.outputs))
    verifier = load(converted, Verifier).contract
    steps = {spec.name: spec for spec in verifier.inputs if spec.role in ("step", "table")}
    assert {name: inputs[name] for name in steps} == steps
    given = {spec.name: spec for spec in verifier.outputs}["hidden"]
    assert inputs["hidden"] == replace(given, dims=("H", given.dims[1]))
    assert (inputs["hidden_rows"].dtype, inputs["hidden_rows"].dims) == ("int32", ("N",))
    caches = {"cache.layers.7.latent", "cache.layers.7.index"}
    assert inputs.keys() - steps.keys() - caches - {"hidden", "hidden_rows"} == {
        spec.name for spec in contract.of_role(WEIGHT)
    }
    assert outputs.keys() == {"logits", "draft_ids", "margin", "draft_hidden", *(f"{name}.updated" for name in caches)}
    shared = {spec.name for spec in contract.of_role(WEIGHT)} & {spec.name for spec in verifier.of_role(WEIGHT)}
    assert shared == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("length", [1, 2, 47, 48, 49, LENGTH])
def test_prefill_below_and_above_index_topk(oracle, prompts, mtp, length):
    ids = prompts["a"][: length + 1]
    hidden = hiddens(oracle, ids[:-1])
    expected = OracleChain(oracle).run(0, ids[1:], hidden)
    assert_same(run(mtp, "a", 0, ids[1:], hidden), expected)


def test_chunks_then_single_steps(oracle, prompts, mtp):
    ids, at = prompts["a"][: LENGTH + 1], 0
    hidden, whole = hiddens(oracle, ids[:-1]), OracleChain(oracle)
    expected = whole.run(0, ids[1:], hidden)
    for count in (40, 1, 20, 30, 1, 1, 7):
        rows = slice(at, at + count)
        found = run(mtp, "a", at, ids[1:][rows], hidden[rows])
        assert_same(found, {name: tensor[rows] for name, tensor in expected.items()})
        at += count
    assert at == LENGTH


@pytest.mark.parametrize("length", [20, 46, LENGTH])
def test_three_chained_drafts(oracle, prompts, mtp, length):
    """Each on the last one's token and `draft_hidden`; and once more after a verify step, over what the chain wrote."""
    ids = prompts["a"][: length + 4]
    hidden, chain = hiddens(oracle, ids[:-1]), OracleChain(oracle)
    at, following, states = 0, ids[1 : length + 1], hidden[:length]
    for _ in range(2):
        for _ in range(3):
            found, expected = run(mtp, "a", at, following, states), chain.run(at, following, states)
            assert_same(found, expected)
            at, following, states = at + len(following), [int(found["draft_ids"][-1])], found["draft_hidden"][-1:]
        # Two tokens stood, with hidden states of the verifier: rows of the drafts are written over.
        at, following, states = length, ids[length + 1 : length + 3], hidden[length : length + 2]


def test_two_sequences_in_one_step(oracle, prompts, mtp):
    a, b = prompts["a"][:61], prompts["b"][:72]
    states = {"a": hiddens(oracle, a[:-1]), "b": hiddens(oracle, b[:-1])}
    expected = {name: OracleChain(oracle).run(0, ids[1:], states[name]) for name, ids in (("a", a), ("b", b))}
    for (at_a, count_a), (at_b, count_b) in (((0, 50), (0, 3)), ((50, 1), (3, 60)), ((51, 9), (63, 8))):
        rows = [
            Rows(Span(PAGES["a"], at_a, count_a), a[1:][at_a : at_a + count_a], count_a),
            Rows(Span(PAGES["b"], at_b, count_b), b[1:][at_b : at_b + count_b], count_b),
        ]
        hidden = torch.cat([states["a"][at_a : at_a + count_a], states["b"][at_b : at_b + count_b]])
        found = mtp.run(pack_rows(rows, TEXT, LEAST_PAGES) | going_on(hidden))
        both = {
            name: torch.cat([expected["a"][name][at_a : at_a + count_a], expected["b"][name][at_b : at_b + count_b]])
            for name in found
            if name in expected["a"]
        }
        assert_same(found, both)


def test_logits_only_for_the_rows_asked_for_and_hidden_states_for_all(oracle, prompts, mtp):
    ids = prompts["a"][:31]
    hidden = hiddens(oracle, ids[:-1])
    rows = Rows(Span(PAGES["a"], 0, 30), ids[1:], num_logits=2)
    found = mtp.run(pack_rows([rows], TEXT, LEAST_PAGES) | going_on(hidden))
    expected = OracleChain(oracle).run(0, ids[1:], hidden)
    assert_same(found, expected | {name: expected[name][-2:] for name in ("logits", "draft_ids", "margin")})


def test_it_drafts_what_the_verifier_says(prompts, converted):
    """The two networks together, the trained module on text it was not trained on: most drafts stand."""
    ids = prompts["b"][:LENGTH]
    step = pack_rows([Rows(Span(PAGES["a"], 0, LENGTH), ids, LENGTH)], TEXT, LEAST_PAGES)
    verifier = load(converted, Verifier).run(step)
    greedy = verifier["greedy_ids"]
    found = run(load(converted), "a", 0, ids[1:], verifier["hidden"][:-1])
    assert (found["draft_ids"] == greedy[1:]).float().mean() > 0.8


# -- forms --------------------------------------------------------------------------------------------


def trace(model: Model, ids: list[int], hidden: torch.Tensor) -> list[Outputs]:
    """A prompt beyond index_topk, then three chained drafts."""
    dtype = next(spec.dtype for spec in model.contract.inputs if spec.name == "hidden")
    steps, at, following, states = [], 0, ids[1:], hidden.to(getattr(torch, dtype))
    for _ in range(4):
        steps.append(run(model, "a", at, following, states))
        last = steps[-1]
        at, following, states = at + len(following), [int(last["draft_ids"][-1])], last["draft_hidden"][-1:]
    return steps


@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
@pytest.mark.parametrize("recipe", ["auto", "nvfp4"])
@pytest.mark.parametrize("tp, ep", [(2, 1), (2, 2), (4, 2)])
def test_ranks_together_equal_one(oracle, prompts, tmp_path, recipe, tp, ep, regions):
    ids = prompts["a"][: LENGTH + 1]
    hidden = hiddens(oracle, ids[:-1])
    expected = trace(load(convert(tmp_path / "one", recipe)), ids, hidden)
    divided = load(convert(tmp_path / "many", recipe, Mapping(tp, ep)), regions=regions)
    for found, whole in zip(trace(divided, ids, hidden), expected, strict=True):
        assert found["logits"].shape == whole["logits"].shape
        assert_same(found, whole)


@pytest.mark.parametrize("regions", [True, False], ids=["ops", "layers"])
def test_nvfp4_experts_equal_their_weights_dequantized(oracle, prompts, tmp_path, regions):
    checkpoint = convert(tmp_path / "ck", "nvfp4")
    assert checkpoint.net_config("float32").formats["model.layers.7.mlp.experts.gate_up_proj"] == "nvfp4"
    ids = prompts["a"][: LENGTH + 1]
    hidden = hiddens(oracle, ids[:-1])
    found = trace(load(checkpoint, regions=regions), ids, hidden)
    config, plain = checkpoint.config, NetworkConfig(compute="float32")
    model = Model(Mtp(config), TEXT, plain, [checkpoint.load()], regions=regions)
    for one, other in zip(found, trace(model, ids, hidden), strict=True):
        assert torch.equal(one["logits"], other["logits"])
        assert torch.equal(one["draft_hidden"], other["draft_hidden"])


@pytest.mark.parametrize("recipe", ["auto", "fp8", "nvfp4"])
def test_bfloat16(oracle, prompts, tmp_path, recipe):
    """Near float32 with the weights as trained: the drafts of almost every row are the same."""
    ids = prompts["a"][: LENGTH + 1]
    hidden = hiddens(oracle, ids[:-1])
    expected = OracleChain(oracle).run(0, ids[1:], hidden)
    (found, *_) = trace(load(convert(tmp_path / "ck", recipe), compute="bfloat16"), ids, hidden)
    assert found["logits"].dtype == found["draft_hidden"].dtype == torch.bfloat16
    distance = (found["logits"].float() - expected["logits"]).norm() / expected["logits"].norm()
    assert distance < 0.1
    assert (found["draft_ids"] == expected["draft_ids"]).float().mean() >= 0.95
