"""Networks with FP8 and NVFP4 weights on the executor, against the same weights dequantized.

Weight-only forms compute the same numbers. Forms that round activations too are compared on the trained tiny verifier
(a random one is chaotic: a rounded score reroutes tokens); the bounds are about twice what was measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from support.models import ASSETS, LIMITS, calibrated, random_verifier

from glmspec.convert.calibration import Activations
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES, Recipe, Rule
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.network.shards import Mapping
from glmspec.plugins import moe_fp8
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span
from glmspec.runtime.text import Tokenizer

VERIFIER = ASSETS / "tiny-verifier"
LEAST_PAGES = 6  # index_topk 48, page size 8
TEXT = EngineLimits(**{**LIMITS.__dict__, "max_num_batched_tokens": 256})


@dataclass(frozen=True)
class Kind:
    """A recipe, whether activations are calibrated, and how far the logits may be from those of plain weights."""

    recipe: Recipe
    calibrated: bool
    bound: float  # relative L2 of the logits; 0: the same numbers
    agreement: float = 1.0  # rows whose best token is the same


def whole(name: str, *rules: tuple[str, str]) -> Recipe:
    return Recipe(name, tuple(Rule(*rule) for rule in rules), "bfloat16")


MIXED = whole("mixed", ("*.mlp.experts.*", "nvfp4"), ("*.self_attn.o_proj", "fp8"), ("*", "fp8_block"))
KINDS = {
    "FP8 blocks": Kind(RECIPES["fp8"], False, 0.05, 0.97),
    "NVFP4 experts, weights only": Kind(RECIPES["nvfp4"], False, 0),
    "NVFP4 experts and their inputs": Kind(RECIPES["nvfp4"], True, 0.15, 0.93),
    "FP8, weights only": Kind(whole("fp8 weights", ("*", "fp8")), False, 0),
    "FP8 and inputs": Kind(whole("fp8 inputs", ("*", "fp8")), True, 0.3, 0.9),
    "mixed": Kind(MIXED, True, 0.2, 0.93),
}


@pytest.fixture(scope="module")
def activations() -> Activations:
    """One amax for every module, wide enough for all of them."""
    return calibrated(VERIFIER, 16.0)


@pytest.fixture(scope="module")
def step() -> dict[str, torch.Tensor]:
    """Two prompts, all rows' logits."""
    lines = (ASSETS / "prompts.jsonl").read_text().splitlines()
    tokenizer = Tokenizer(VERIFIER)
    first, second = (tokenizer.encode(json.loads(lines[at])["prompt"])[:100] for at in (0, 20))
    rows = [
        Rows(Span(list(range(1, 14)), 0, len(first)), first, len(first)),
        Rows(Span(list(range(14, 27)), 0, len(second)), second, len(second)),
    ]
    return pack_rows(rows, TEXT, LEAST_PAGES)


def converted(kind: Kind, activations: Activations, out):
    options = ConvertOptions(kind.recipe, Mapping(), activations if kind.calibrated else Activations())
    return plan_conversion(VERIFIER, options).write(out)


def logits(checkpoint, net_config: NetworkConfig, weights, step, **options) -> torch.Tensor:
    return Model(model_of(checkpoint.config), TEXT, net_config, weights, **options).run(step)["logits"].float()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_a_quantized_network_equals_its_weights_dequantized(name, compute, activations, step, tmp_path):
    kind = KINDS[name]
    checkpoint = converted(kind, activations, tmp_path / "ck")
    net_config = checkpoint.net_config(compute)
    assert net_config.formats and bool(net_config.scaled) == kind.calibrated
    found = logits(checkpoint, net_config, [checkpoint.tensors(0)], step)
    plain = NetworkConfig(compute=compute)
    expected = logits(checkpoint, plain, [checkpoint.load()], step)
    if compute == "float32" and not kind.bound:
        assert torch.equal(found, expected)
    # In bfloat16 NVFP4's two scales are multiplied in bfloat16 first, and sums round as they like.
    assert distance(found, expected) <= (kind.bound or (0 if compute == "float32" else 0.02))
    agree = (found.argmax(-1) == expected.argmax(-1)).float().mean()
    assert agree >= (kind.agreement if kind.bound or compute == "float32" else 0.98)


@pytest.mark.parametrize("name", KINDS)
def test_dequantize_then_bfloat16(name, activations, step, tmp_path):
    """Against weights dequantized and rounded to bfloat16: the bound of the form, and that rounding's own."""
    kind = KINDS[name]
    checkpoint = converted(kind, activations, tmp_path / "ck")
    found = logits(checkpoint, checkpoint.net_config("float32"), [checkpoint.tensors(0)], step)
    rounded = {key: tensor.bfloat16() for key, tensor in checkpoint.load().items()}
    expected = logits(checkpoint, NetworkConfig(compute="float32"), [rounded], step)
    assert distance(found, expected) <= kind.bound + 0.02


@pytest.mark.parametrize("name", KINDS)
def test_ops_and_layers_agree(name, activations, step, tmp_path):
    """The lowering of every op, layer by layer, in the whole network. A value on the edge of two codes may fall either
    way, where sums are taken in another order."""
    checkpoint = converted(KINDS[name], activations, tmp_path / "ck")
    net_config, weights = checkpoint.net_config("float32"), [checkpoint.tensors(0)]
    ops, layers = (logits(checkpoint, net_config, weights, step, regions=regions) for regions in (True, False))
    assert distance(layers, ops) <= (0.05 if KINDS[name].bound else 1e-5)


# Widths that 128-wide blocks of four ranks divide.
WIDE = dict(
    num_hidden_layers=2,
    indexer_types=["full", "shared"],
    first_k_dense_replace=1,
    num_attention_heads=16,
    num_key_value_heads=16,
    v_head_dim=32,
    qk_nope_head_dim=24,
    intermediate_size=512,
    moe_intermediate_size=512,
    n_routed_experts=4,
    vocab_size=101,
)


@pytest.mark.parametrize("mapping", [Mapping(2), Mapping(4), Mapping(4, 2)], ids=["tp2", "tp4", "tp4 ep2"])
@pytest.mark.parametrize("name", KINDS)
def test_ranks_with_quantized_shards_equal_one(name, mapping, tmp_path):
    """Shards keep their scales and blocks are never cut, so ranks multiply the numbers that one rank does."""
    random_verifier(tmp_path / "hf", seed=5, **WIDE)
    amax = calibrated(tmp_path / "hf", 16.0) if KINDS[name].calibrated else Activations()
    ids = torch.randint(0, 101, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    step = pack_rows([Rows(Span([1, 2, 3, 4], 0, 30), ids, 30)], TEXT, LEAST_PAGES)
    found = {}
    for each in (Mapping(), mapping):
        options = ConvertOptions(KINDS[name].recipe, each, amax)
        checkpoint = plan_conversion(tmp_path / "hf", options).write(tmp_path / f"ck{each.tp}")
        weights = [checkpoint.tensors(rank) for rank in range(each.tp)]
        found[each.tp] = logits(checkpoint, checkpoint.net_config("float32"), weights, step)
    assert distance(found[mapping.tp], found[1]) <= (0.02 if KINDS[name].bound else 1e-5)


def test_experts_and_their_halves_share_the_largest_input_scale():
    """A smaller one would saturate what another expert was calibrated for."""
    g = torch.Generator().manual_seed(0)
    experts = torch.tensor([[0, 1]] * 3, dtype=torch.int32), torch.rand(3, 2, generator=g)
    codes = [(torch.randn(shape, generator=g) * 50).to(torch.float8_e4m3fn) for shape in ((2, 64, 16), (2, 16, 32))]
    scales, middle = (torch.rand(2, 2, generator=g), torch.rand(2, generator=g)), torch.rand(2, generator=g)
    x, input = 9 * torch.randn(3, 16, generator=g), torch.tensor([[0.001, 0.0043], [0.0151, 0.002]])
    largest = torch.full((2, 2), 0.0151)
    of = [
        moe_fp8.reference(x, *experts, *codes, *scales, given, middle, prompts=0)
        for given in (input, largest, largest * 2)
    ]
    assert torch.equal(of[0], of[1]) and not torch.equal(of[0], of[2])
