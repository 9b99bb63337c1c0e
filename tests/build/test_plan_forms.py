"""Ahead-of-time builds of the verifier in every number format and division, dynamic and static (SM120)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.forms import FORMS, SIZES, conversion
from support.models import random_verifier

from glmspec.build.plan import build_plan
from glmspec.models.layer_group import LayerGroup
from glmspec.models.registry import model_of
from glmspec.network.limits import CONTEXT, GENERATION, EngineLimits
from glmspec.network.reader import read
from glmspec.network.shards import Mapping
from glmspec.network.trt import backend

TRT = backend("tensorrt_rtx")
LIMITS = EngineLimits(
    max_model_len=500, max_num_seqs=2, max_num_batched_tokens=64, page_size=16, segment_rows=12, block_rows=9
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("forms")
    random_verifier(home / "hf", seed=4, **SIZES)
    return home / "hf"


@pytest.mark.parametrize("name, mapping", [*((name, Mapping()) for name in FORMS), ("mixed", Mapping(4, 2))])
def test_every_form_compiles(folder, name, mapping):
    planned = conversion(folder, name, mapping)
    net_config = planned.net_config("bfloat16")
    assert net_config.formats and bool(net_config.scaled) == FORMS[name][1]
    net = model_of(planned.config, taps=(0, 3)).author(LIMITS, net_config, TRT)
    kinds = {node.kind for node in read(net.definition, TRT).nodes}
    assert "DEQUANTIZE" in kinds and ("DIST_COLLECTIVE" in kinds) == (mapping.tp > 1)
    rounds = net_config.scaled or "fp8_block" in net_config.formats.values()
    assert bool({"QUANTIZE", "DYNAMIC_QUANTIZE"} & kinds) == bool(rounds)
    ranges = LIMITS.profiles(LIMITS.index_topk(planned.config.index_topk))
    assert len(build_plan(net, ranges[CONTEXT], "SM120").plan) > 100_000


def test_a_static_bucket_has_no_run_time_sizes(folder):
    planned = conversion(folder, "FP8 blocks", Mapping(2))
    ranges = LIMITS.profiles(LIMITS.index_topk(planned.config.index_topk))[GENERATION]
    net_config = replace(
        planned.net_config("bfloat16"), sizes={symbol: most for symbol, (_, _, most) in ranges.items()}
    )
    net = model_of(planned.config).author(LIMITS, net_config, TRT)
    assert all(isinstance(dim, int) for spec in net.contract().inputs for dim in spec.dims)
    assert all(-1 not in value.shape for node in read(net.definition, TRT).nodes for value in node.outputs)
    build_plan(net, {}, "SM120")


def test_groups_of_layers_are_the_whole_network(folder):
    """Each layer in one group, with the names, inputs and attributes that it has in the whole."""
    planned = conversion(folder, "mixed", Mapping(2))
    net_config, rows = planned.net_config("bfloat16"), LIMITS.index_topk(planned.config.index_topk)
    whole = read(model_of(planned.config, (0, 1, 3)).author(LIMITS, net_config, TRT).definition, TRT)
    parts = [
        read(LayerGroup(planned.config, (0, 1, 3), span, rows).author(LIMITS, net_config, TRT).definition, TRT)
        for span in (range(0, 1), range(1, 3))
    ]

    def layers(graph) -> dict[str, tuple]:
        named = (node for node in graph.nodes if node.name.startswith(("model.", "lm_head")))
        return {node.name: (node.kind, str(node.attributes), node.outputs[0].shape) for node in named}

    def makers(graph) -> dict[str, str]:
        """Which layer gives each tap."""
        made = {value.name: node.name for node in graph.nodes for value in node.outputs}
        return {name: layer for name, layer in made.items() if name.startswith("tap.")}

    assert makers(parts[0]) | makers(parts[1]) == makers(whole) and len(makers(whole)) == 3
    together = layers(parts[0]) | layers(parts[1])
    assert together == layers(whole)
    assert {value.name for part in parts for value in part.inputs} >= {value.name for value in whole.inputs}
    outputs = {value.name for part in parts for value in part.outputs}
    assert outputs - {value.name for value in whole.outputs} == {"group.stream", "group.rows", "group.visible"}
