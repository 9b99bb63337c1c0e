"""Networks with plugins in place of layers: authored over a stand-in that checks what is around them for real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.forms import SIZES, conversion
from support.models import ASSETS, random_verifier
from support.tensorrt_stand_in import networks_with_plugins

from glmspec.build import plugin_variants
from glmspec.build.bundle import contract_of
from glmspec.build.deployment import Deployment, open_deployment
from glmspec.build.engine import build_engines
from glmspec.build.plugin_variants import check_plugins, graphs_of, variants_of
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.errors import ConfigError, MissingCapability
from glmspec.core.progress import Progress
from glmspec.network.reader import Graph, read
from glmspec.network.shards import Mapping
from glmspec.network.trt import Backend, backend
from glmspec.plugins import OPS, registration
from glmspec.plugins.variants import network_variants, regions_of

SPECS = {plugin.id: plugin for op in OPS.values() for plugin in op.plugins}
DRAFTERS = ("tiny-dflash2", "tiny-dspark")


@pytest.fixture
def plugged(monkeypatch):
    """A backend that has plugins."""
    for module in networks_with_plugins(monkeypatch):
        yield Backend(module)


def deployed(target: str = "b200", **options) -> Deployment:
    folders = tuple(ASSETS / name for name in DRAFTERS)
    return open_deployment(ASSETS / "tiny-verifier", folders, TARGETS[target], BuildOptions(mtp=True, **options))


def layers_of(graph: Graph) -> list[list]:
    """The layers of each region."""
    made: dict[int, list] = {}
    for node in graph.nodes:
        if node.region:
            made.setdefault(node.region["region"], []).append(node)
    return list(made.values())


@pytest.mark.parametrize("sampling", ["greedy", "probabilistic"])
def test_every_region_that_has_plugins_gets_them(plugged, sampling):
    """And nothing else changes: the same contract, the same layers elsewhere."""
    deployment = deployed(draft_sampling=sampling)
    for member in deployment.members:
        for profile in deployment.profiles(member):
            plain = deployment.author(member, profile, backend())
            with_plugins = deployment.author(member, profile, plugged, plugged=True)
            assert with_plugins.contract() == plain.contract()
            one, other = (read(net.definition, net.backend) for net in (plain, with_plugins))
            changed = False
            for layers, plugins, wanted in zip(layers_of(one), layers_of(other), regions_of(one), strict=True):
                head, told = layers[0].region, plugins[0].region
                assert (told["op"], told["attributes"]) == (head["op"], head["attributes"])
                variants, kept = network_variants([wanted], "SM100")
                made = [node.attributes["id"] for node in plugins if node.kind == "PLUGIN_V3"]
                if not kept:
                    assert set(made) >= {variant.plugin.id for variant in variants}
                    assert {node.kind for node in plugins} <= {"PLUGIN_V3", "SHUFFLE"} or not variants, head["op"]
                changed |= bool(made)
                for node in plugins:
                    if node.kind == "PLUGIN_V3":
                        spec = SPECS[node.attributes["id"]]
                        assert node.attributes.keys() == {"id", "sm", *spec.attributes}
                        assert node.attributes["sm"] == "SM100"
            assert changed == (one.content_hash() != other.content_hash())


def test_the_kernels_of_a_deployment_are_those_its_networks_launch(plugged):
    deployment = deployed()
    kernels = variants_of(deployment, graphs_of(deployment, backend()))
    assert not kernels.kept
    found = set()
    for member in deployment.members:
        for profile in deployment.profiles(member):
            net = deployment.author(member, profile, plugged, plugged=True)
            graph = read(net.definition, net.backend)
            found |= {node.attributes["id"] for node in graph.nodes if node.kind == "PLUGIN_V3"}
    assert {variant.plugin.id for variant in kernels.variants} == found


QUANTIZED = ("NVFP4 weights and activations", "NVFP4 weights", "FP8 blocks", "FP8 weights")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """Written before a stand-in takes the name of TensorRT, which transformers looks for."""
    home = tmp_path_factory.mktemp("quantized")
    random_verifier(home / "hf", seed=4, **SIZES)
    for name in QUANTIZED:
        conversion(home / "hf", name, Mapping()).write(home / name)
    return {name: home / name for name in QUANTIZED}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_experts_get_their_plugins(checkpoints, plugged, name):
    """Codes are read two a byte, which a bundle's contract knows; what is compiled before is what is launched."""
    deployment = open_deployment(checkpoints[name], (), TARGETS["b200"], BuildOptions(max_model_len=256))
    wanted = variants_of(deployment, graphs_of(deployment, backend()))
    verifier, launched = deployment.verifier, {}
    for profile in deployment.profiles(verifier):
        net = deployment.author(verifier, profile, plugged, plugged=True)
        assert net.contract() == contract_of(deployment, verifier, profile, backend())
        launched |= net.kernels
        codes = net.inputs["model.layers.1.mlp.experts.down_proj"]
        assert codes.dtype == ("int8" if name.startswith("NVFP4") else "float8_e4m3fn")
    assert not wanted.kept and launched.keys() <= set(wanted.variants)
    assert any(variant.plugin.name.startswith("experts_") for variant in launched)


def test_off_is_off(plugged):
    deployment = deployed(plugins="off")
    net = deployment.author(deployment.verifier, "generation", plugged, plugged=True)
    kinds = {node.kind for node in read(net.definition, net.backend).nodes}
    assert "PLUGIN_V3" not in kinds
    assert variants_of(deployment, graphs_of(deployment, backend())).variants == ()


@pytest.mark.parametrize("target", ["cpu", "rtx-pro-6000"])
def test_on_is_refused_where_there_are_none(target):
    with pytest.raises(ConfigError, match=f"--plugins: found on, expected auto or off for --target {target}"):
        deployed(target, plugins="on")


def test_without_python_plugins_there_is_a_way_out(monkeypatch, plugged):
    import sys

    monkeypatch.setitem(sys.modules, "tensorrt.plugin", None)
    deployment = deployed()
    with pytest.raises(MissingCapability, match="tensorrt has no Python plugins"):
        deployment.author(deployment.verifier, "generation", plugged, plugged=True)


def test_engine_passes_it_on(tmp_path: Path):
    """--plugins of the command line reaches the record."""
    from support.cli import refused

    said = refused(
        1, "engine", "--verifier", ASSETS / "tiny-verifier", "--target", "cpu", "--plugins", "on", "-o", tmp_path / "e"
    )
    assert "--plugins: found on" in said


def test_on_is_refused_where_a_size_is_not_taken(monkeypatch):
    """Every rule of the plugins is met here, so one is made up."""
    deployment = deployed(plugins="on")
    graphs = graphs_of(deployment, backend())
    check_plugins(deployment, graphs)
    reason = "argmax: a vocabulary of 288, expected a larger one"
    monkeypatch.setattr(plugin_variants, "network_variants", lambda regions, sm: ([], [reason]))
    with pytest.raises(ConfigError, match=f"--plugins on: found sizes that plugins do not take; use auto. {reason}"):
        check_plugins(deployment, graphs)
    check_plugins(replace(deployment, plugins="auto"), graphs)


def test_what_several_products_take_is_rounded_once():
    """Queries, keys and latents are made of the same rows; TensorRT would launch a plugin for each."""
    deployment = deployed(quant="fp8")
    graph = graphs_of(deployment, backend())[0]
    inputs = [
        node.region["inputs"][0] for node in graph.nodes if node.region and node.region.get("op") == "quantize_blocks"
    ]
    layers = deployment.verifier.config.num_hidden_layers
    assert len(set(inputs)) == len(inputs) >= 3 * layers


def test_engine_refuses_it_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(plugin_variants, "network_variants", lambda regions, sm: ([], ["argmax: made up"]))
    with pytest.raises(ConfigError, match="--plugins on: found sizes that plugins do not take; use auto"):
        options = BuildOptions(plugins="on", max_model_len=128)
        build_engines(ASSETS / "tiny-verifier", (), TARGETS["b200"], options, tmp_path / "e", Progress(), check=False)
    assert not list(tmp_path.iterdir())


def test_what_is_compiled_before_a_build_is_what_tensorrt_asks_for(monkeypatch):
    """So a kernel that fails does so by name, before TensorRT has it."""
    registration.compiled.cache_clear()
    stands = networks_with_plugins(monkeypatch, launch=True)
    deployment = deployed()
    (member,) = (one for one in deployment.members if one.name == "dspark")
    net = deployment.author(member, "generation", Backend(next(stands)), plugged=True)
    asked = registration.compiled.cache_info().misses
    registration.compile_kernels(net.kernels, lambda name: None)
    assert registration.compiled.cache_info().misses == asked == len(net.kernels) > 0
    next(stands, None)
