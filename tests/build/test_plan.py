"""Ahead-of-time builds for a GPU that is not here: every network compiles, with its weights as inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from support.models import ASSETS, GOLDENS

from glmspec.build import plan
from glmspec.build.plan import build_plan
from glmspec.build.routes import set_build_route
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES
from glmspec.core.errors import NetworkError
from glmspec.models.mtp import Mtp
from glmspec.models.registry import model_of
from glmspec.models.verifier import Verifier
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import CACHE, WEIGHT, TensorSpec
from glmspec.network.graph import Network
from glmspec.network.limits import CONTEXT, EngineLimits, Ranges
from glmspec.network.trt import backend

TRT = backend("tensorrt_rtx")
LIMITS = EngineLimits(
    max_model_len=500, max_num_seqs=2, max_num_batched_tokens=64, page_size=16, segment_rows=12, block_rows=9
)
FEWER_LAYERS = {"layer_types": ("sliding_attention", "full_attention")}  # one of each kind


class Watched:
    """A builder that keeps the profile it was asked for."""

    def __init__(self, builder) -> None:
        self._builder = builder

    def __getattr__(self, name: str):
        return getattr(self._builder, name)

    def create_optimization_profile(self):
        self.profile = self._builder.create_optimization_profile()
        return self.profile


def config_of(name: str):
    return plan_conversion(GOLDENS / "checkpoints" / name).config


def k_and_ranges(config) -> tuple[int, Ranges]:
    k = LIMITS.index_topk(config.index_topk) if hasattr(config, "index_topk") else 0
    return k, LIMITS.profiles(k, getattr(config, "sliding_window", None) or 0)[CONTEXT]


def build(config, compute: str) -> tuple[Network, bytes]:
    tree = model_of(config, taps=(0, 2, 6) if hasattr(config, "index_topk") else ())
    return build_tree(tree, config, NetworkConfig(compute=compute))


def build_tree(tree, config, net_config: NetworkConfig) -> tuple[Network, bytes]:
    net = tree.author(LIMITS, net_config, TRT)
    net.builder = Watched(net.builder)
    _, ranges = k_and_ranges(config)
    return net, build_plan(net, ranges, "SM120").plan


@pytest.mark.parametrize(
    "name, compute, changes",
    [
        ("verifier", "float32", {}),
        ("verifier", "bfloat16", {}),
        ("dspark", "float32", {}),
        ("dspark_redvocab", "bfloat16", {}),
        ("dflash2", "float32", FEWER_LAYERS),
        ("dflash2", "bfloat16", FEWER_LAYERS),
    ],
)
def test_every_network_compiles(name, compute, changes):
    config = replace(config_of(name), **changes)
    net, plan = build(config, compute)
    assert len(plan) > 100_000
    _check_bindings(net, plan)
    _check_profile(net, config)


HIDDEN = partial(Verifier, hidden=True)


@pytest.mark.parametrize(
    "make, recipe",
    [(Mtp, "auto"), (Mtp, "nvfp4"), (partial(Mtp, sampled=True), "auto"), (HIDDEN, "auto"), (HIDDEN, "nvfp4")],
    ids=["mtp", "mtp nvfp4", "mtp with drawn drafts", "verifier with hidden", "verifier with hidden nvfp4"],
)
def test_the_mtp_module_and_what_feeds_it_compile(make, recipe):
    conversion = plan_conversion(ASSETS / "tiny-verifier", ConvertOptions(RECIPES[recipe]))
    config = conversion.config if make is not HIDDEN else first_layers(conversion.config, 4)
    net, plan = build_tree(make(config), config, conversion.net_config("bfloat16"))
    contract = net.contract()
    assert "hidden" in {spec.name for spec in (contract.outputs if make is HIDDEN else contract.inputs)}
    assert all(spec.name.encode() in plan for spec in (*contract.inputs, *contract.outputs))
    _check_profile(net, config)


def first_layers(config, count: int):
    """The verifier's first layers, of every kind."""
    kinds = {name: getattr(config, name)[:count] for name in ("indexer_types", "mlp_layer_types")}
    made = replace(config, num_hidden_layers=count, **kinds)
    assert all(set(kinds[name]) == set(getattr(config, name)) for name in kinds)
    return made


def _check_bindings(net: Network, plan: bytes) -> None:
    """Everything of the contract is bound by name; weights carry the compute dtype unless they insist on one."""
    contract = net.contract()
    assert all(spec.name.encode() in plan for spec in (*contract.inputs, *contract.outputs))
    weights = {spec.name: spec for spec in contract.of_role(WEIGHT)}
    assert "lm_head.weight" in weights
    assert {spec.dtype for spec in weights.values()} <= {net.compute, "float32", "int32"}
    caches = {spec.name: spec.dims for spec in contract.of_role(CACHE)}
    assert {spec.name: spec.dims for spec in contract.outputs if spec.role == CACHE} == {
        f"{name}.updated": dims for name, dims in caches.items()
    }


def _check_profile(net: Network, config) -> None:
    k, ranges = k_and_ranges(config)
    for spec in net.contract().inputs:
        if any(isinstance(dim, str) for dim in spec.dims):
            for bound, shape in enumerate(net.builder.profile.get_shape(spec.name)):
                assert tuple(shape) == tuple(d if isinstance(d, int) else ranges[d][bound] for d in spec.dims)
    if "page_table" in net.inputs:  # not where all layers slide
        least, _, most = net.builder.profile.get_shape("page_table")
        assert least[1] >= -(-k // LIMITS.page_size)
        assert most[1] * LIMITS.page_size >= LIMITS.max_model_len


def test_the_verifier_s_page_table_never_holds_fewer_rows_than_k():
    """TensorRT accepts a profile whose least length is below K unchecked, so ours must not offer one."""
    least, _, most = LIMITS.profiles(256)[CONTEXT]["M"]
    assert least * LIMITS.page_size >= 256
    assert most == LIMITS.pages_per_sequence


@pytest.mark.parametrize("name", ["verifier", "dspark", "dflash2", "dspark_redvocab"])
def test_the_contract_lists_the_checkpoint_s_weights(name):
    conversion = plan_conversion(GOLDENS / "checkpoints" / name)
    contract = model_of(conversion.config).author(LIMITS, NetworkConfig(compute="float32"), TRT).contract()
    listed = {spec.name: spec.dims for spec in contract.of_role(WEIGHT)}
    held = {weight.name: weight.dims for weight in conversion.plan.weights}
    assert held.items() <= listed.items()
    assert listed.keys() - held.keys() <= {"embed_tokens.weight", "lm_head.weight"}  # a drafter's, from the verifier


def toy(body, dims) -> Network:
    net = Network("toy", NetworkConfig(compute="float32"), TRT)
    net.declare([TensorSpec("x", "float32", dims)])
    with net.scope("model.layers.7"):
        made = body(net.inputs["x"])
    net.output(made, TensorSpec("y", made.dtype, tuple(d if d >= 0 else "N" for d in made.shape)))
    return net.finish()


@pytest.mark.parametrize(
    "body, layer",
    [
        (lambda x: ops.topk(x, 64, 0)[0], "topk"),  # longer than a segment ever is
        (lambda x: ops.reshape(x, (-1, 7)), "reshape"),  # rows that never come out even
    ],
)
def test_the_builder_s_complaint_names_network_and_layer(body, layer):
    net = toy(body, ("S", 4))
    with pytest.raises(NetworkError, match=rf"^toy: TensorRT could not build .*model\.layers\.7/{layer}\.1"):
        build_plan(net, LIMITS.profiles(0)[CONTEXT], "SM120")


def test_an_impossible_profile_is_an_error():
    """K beyond what a page table can hold: the least number of pages is above the most."""
    net = toy(lambda x: x * 2.0, ("M", 4))
    with pytest.raises(NetworkError, match="toy"):
        build_plan(net, LIMITS.profiles(4096)[CONTEXT], "SM120")


@pytest.mark.parametrize("names", [(), ("MULTIDEVICE_RUNTIME_10_16",)], ids=["TensorRT 11", "TensorRT 10.16"])
def test_ranks_ask_for_collectives_where_they_are_a_preview(names):
    asked = []
    api = SimpleNamespace(PreviewFeature=SimpleNamespace(**dict.fromkeys(names, "collectives")))
    net = SimpleNamespace(api=api, config=SimpleNamespace(mapping=SimpleNamespace(tp=2), plugins=""))
    plan._aim(net, SimpleNamespace(set_preview_feature=lambda *call: asked.append(call)), "SM100")
    assert asked == [("collectives", True)] * len(names)


def test_switches_of_the_compiler():
    """Those that this TensorRT has, for Blackwell."""
    routes = "-peep:match_dual_gemm, -kgen:codegen:cuda_tile"

    def switched(capability: str, version: str, **has: str) -> str:
        config = SimpleNamespace(**has)
        said = set_build_route(config, capability, version)
        assert said == getattr(config, "build_route", "")
        return said

    both = "-peep:match_dual_gemm=off -kgen:codegen:cuda_tile=0"
    assert switched("SM100", "11.1.0.106", build_route="", all_build_routes=routes) == both
    assert switched("SM103", "11.2", build_route="") == f"{both} -mlir:collective:fp4=off"
    assert switched("SM100", "11.0.1", build_route="", all_build_routes=routes) == "-peep:match_dual_gemm=off"
    assert switched("SM90", "11.1", build_route="", all_build_routes=routes) == ""
    assert switched("SM120", "1.7.1") == ""
