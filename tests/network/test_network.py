"""Authoring: mistakes are named where they are made, and a network's content hash follows everything it computes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.models import GOLDENS

from glmspec.core.errors import NetworkError
from glmspec.core.fields import read_json
from glmspec.models.configs.kinds import parse_config
from glmspec.models.registry import model_of
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import CACHE, WEIGHT, Contract, TensorSpec
from glmspec.network.graph import Network
from glmspec.network.limits import EngineLimits
from glmspec.network.reader import Node, Value, read
from glmspec.network.trt import backend

LIMITS = EngineLimits(
    max_model_len=512, max_num_seqs=4, max_num_batched_tokens=128, page_size=16, segment_rows=12, block_rows=9
)

NAMES = ("verifier", "dspark", "dflash2", "dspark_redvocab")

TRT = backend("tensorrt_rtx")


def config_of(name: str, **changes):
    path = GOLDENS / "checkpoints" / name / "config.json"
    return replace(parse_config(read_json(path), str(path)), **changes)


def author(model, compute: str = "float32", limits: EngineLimits = LIMITS) -> Network:
    return model.author(limits, NetworkConfig(compute=compute), TRT)


def hash_of(net: Network) -> str:
    return read(net.definition, net.backend).content_hash()


# -- the surface --------------------------------------------------------------------------------


def toy(*specs: TensorSpec, compute: str = "float32") -> Network:
    net = Network("toy", NetworkConfig(compute=compute), TRT)
    net.declare(specs or [TensorSpec("x", "float32", ("N", 4))])
    return net


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("y", "bfloat16", ("N", 4)),
        TensorSpec("y", "int32", ("N", 4)),
        TensorSpec("y", "float32", ("N", 5)),
        TensorSpec("y", "float32", ("N",)),
        TensorSpec("y", "float32", ("N", 4, 1)),
    ],
)
def test_an_output_that_is_not_what_was_promised_is_refused(spec):
    net = toy()
    with pytest.raises(NetworkError, match=r"toy: output y .*: the network gives float32\[-1, 4\]"):
        net.output(net.inputs["x"] * 2.0, spec)


def test_sizes_are_numbers_or_refused():
    assert TensorSpec("w", "float32", (3, 4)).sizes == (3, 4)
    with pytest.raises(NetworkError, match=r"w float32\[N, 4\]: found a symbol"):
        _ = TensorSpec("w", "float32", ("N", 4)).sizes


def test_operands_leave_no_input_out():
    x = Value("x", "float32", (3,))
    assert Node("a/b.1", "SELECT", (x, x), (x,), {}).operands == (x, x)
    with pytest.raises(NetworkError, match=r"a/b\.1: found an input that is left out, expected all 2"):
        _ = Node("a/b.1", "SELECT", (x, None), (x,), {}).operands


def test_inputs_come_before_layers():
    net = toy()
    net.inputs["x"] * 2.0
    with pytest.raises(NetworkError, match="before the first layer"):
        net.declare([TensorSpec("late", "float32", (4,))])


def test_layers_are_named_after_their_module():
    names = [node.name for node in read(author(model_of(config_of("verifier"))).definition, TRT).nodes]
    assert len(names) == len(set(names))
    for layer in range(6):
        assert any(name.startswith(f"model.layers.{layer}.self_attn/") for name in names)


def test_the_contract_survives_json():
    for name in NAMES:
        contract = author(model_of(config_of(name))).contract()
        assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract


def test_every_weight_is_an_input_of_its_own_name():
    model = model_of(config_of("verifier"))
    contract = author(model).contract()
    assert [spec.name for spec in contract.of_role(WEIGHT)] == [weight.name for weight in model.weights()]
    caches = {spec.name for spec in contract.of_role(CACHE)}
    assert {f"{name}.updated" for name in caches} == {spec.name for spec in contract.outputs if spec.role == CACHE}


def test_an_unknown_layer_type_is_named():
    net = toy()
    with net.scope("model.layers.7"):
        layer = net.definition.add_non_zero(net.inputs["x"].trt)
        net.add(layer, "nonzero")
    with pytest.raises(NetworkError, match=r"model\.layers\.7/nonzero\.1: layer type NON_ZERO"):
        read(net.definition, TRT)


# -- the content hash ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hashes() -> dict[str, str]:
    return {name: hash_of(author(model_of(config_of(name)))) for name in NAMES}


def test_the_same_network_has_the_same_hash(hashes):
    assert {name: hash_of(author(model_of(config_of(name)))) for name in NAMES} == hashes
    assert len(set(hashes.values())) == len(NAMES)


def test_a_fresh_process_finds_the_same_hash(hashes):
    script = f"""
import json, sys
from dataclasses import replace
from types import SimpleNamespace
from pathlib import Path
from glmspec.core.fields import read_json
from glmspec.network.limits import CONTEXT, EngineLimits
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.reader import read
from glmspec.network.trt import backend
from glmspec.models.configs.kinds import parse_config
hashes = {{}}
for name in {list(reversed(NAMES))!r}:
    path = Path({str(GOLDENS)!r}) / "checkpoints" / name / "config.json"
    model = model_of(parse_config(read_json(path), ""))
    net = model.author({LIMITS!r}, NetworkConfig(compute="float32"), backend("tensorrt_rtx"))
    hashes[name] = read(net.definition, net.backend).content_hash()
print(json.dumps(hashes))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == hashes


@pytest.mark.parametrize(
    "name, changes",
    [
        ("verifier", {"rope_interleave": False}),
        ("verifier", {"indexer_rope_interleave": False}),
        ("verifier", {"rms_norm_eps": 2e-5}),
        ("verifier", {"routed_scaling_factor": 2.0}),
        ("verifier", {"norm_topk_prob": False}),
        ("verifier", {"num_experts_per_tok": 3}),
        ("verifier", {"index_topk": 128}),
        ("verifier", {"indexer_types": ("full", "full", "full", "shared", "full", "shared")}),
        ("verifier", {"mlp_layer_types": ("dense", "dense", *("sparse",) * 4)}),
        ("verifier", {"vocab_size": 97}),
        ("dspark", {"mask_token_id": 94}),
        ("dspark", {"taps": (2, 3, 4)}),
        ("dspark", {"sliding_window": 13}),
        ("dspark", {"sliding_window_non_causal": True}),
        ("dspark", {"window": "relative"}),
        ("dspark", {"sample_from_anchor": False}),
        ("dspark", {"markov": None, "confidence": None}),
        ("dspark", {"confidence": None}),
        ("dflash2", {"layer_types": ("sliding_attention",) * 5}),
        ("dflash2", {"rms_norm_eps": 2e-6}),
    ],
)
def test_a_changed_config_changes_the_hash(hashes, name, changes):
    assert hash_of(author(model_of(config_of(name, **changes)))) != hashes[name]


@pytest.mark.parametrize("changes", [{"page_size": 32}, {"max_model_len": 500}, {"block_rows": 10, "segment_rows": 10}])
def test_limits_that_shape_the_network_change_the_hash(hashes, changes):
    assert hash_of(author(model_of(config_of("verifier")), limits=replace(LIMITS, **changes))) != hashes["verifier"]


def test_taps_and_compute_change_the_hash(hashes):
    assert hash_of(author(model_of(config_of("verifier"), taps=(3,)))) != hashes["verifier"]
    assert hash_of(author(model_of(config_of("verifier")), "bfloat16")) != hashes["verifier"]


def _slice(x, start, size, stride, fill=False):
    layer = x.net.definition.add_slice(x.trt, (start,), (size,), (stride,))
    layer.axes = (1,)
    if fill:
        layer.mode = x.net.api.SampleMode.FILL
    return x.net.add(layer, "slice")


def _cumsum(x, exclusive, reverse):
    at = x.net.constant(1, "int32")
    layer = x.net.definition.add_cumulative(x.trt, at.trt, x.net.api.CumulativeOperation.SUM, exclusive, reverse)
    return x.net.add(layer, "cumsum")


def _rope(x, interleaved):
    x_N14 = ops.reshape(x, (0, 1, 4))
    cos, sin = (ops.narrow(x_N14, 2, at, 2) for at in (0, 2))
    return ops.rope(x_N14, cos, sin, interleaved=interleaved)


def _norm(x, row, eps):
    return ops.layer_norm(x, row, row, eps)


def _plus(x, value):
    return x + x.net.constant(value, "float32")


# What is told apart -> two bodies. i: x float32 [N, 4], w float32 [4, 4], row float32 [4], ids int32 [3, 1].
PAIRS = {
    "activation": (lambda i: ops.sigmoid(i.x), lambda i: ops.relu(i.x)),
    "cast": (lambda i: ops.cast(i.x, "float16"), lambda i: ops.cast(i.x, "bfloat16")),
    "concat axis": (lambda i: ops.concat([i.w, i.w], 0), lambda i: ops.concat([i.w, i.w], 1)),
    "constant value": (lambda i: i.x * 2.0, lambda i: i.x * 2.0000002),
    "constant shape": (lambda i: _plus(i.x, [[1.0]]), lambda i: _plus(i.x, [[1.0] * 4])),
    "cumsum exclusive": (lambda i: _cumsum(i.x, False, False), lambda i: _cumsum(i.x, True, False)),
    "cumsum reverse": (lambda i: _cumsum(i.x, False, False), lambda i: _cumsum(i.x, False, True)),
    "elementwise operation": (lambda i: i.x + 2.0, lambda i: i.x * 2.0),
    "operands swapped": (lambda i: i.x - ops.relu(i.x), lambda i: ops.relu(i.x) - i.x),
    "gather axis": (lambda i: ops.gather(i.w, i.ids, 0), lambda i: ops.gather(i.w, i.ids, 1)),
    "gather mode": (lambda i: ops.gather(i.w, i.ids), lambda i: ops.gather_nd(i.w, i.ids)),
    "matmul transpose": (lambda i: ops.matmul(i.x, i.w), lambda i: ops.matmul(i.x, i.w, transpose_b=True)),
    "norm epsilon": (lambda i: _norm(i.x, i.row, 1e-6), lambda i: _norm(i.x, i.row, 1e-5)),
    "reduce operation": (lambda i: ops.reduce(i.x, "SUM", 1), lambda i: ops.reduce(i.x, "MAX", 1)),
    "reduce axis": (lambda i: ops.reduce(i.w, "SUM", 1), lambda i: ops.reduce(i.w, "SUM", 0)),
    "reduce keep": (lambda i: ops.reduce(i.x, "SUM", 1), lambda i: ops.reduce(i.x, "SUM", 1, keep=False)),
    "rope interleaved": (lambda i: _rope(i.x, True), lambda i: _rope(i.x, False)),
    "transpose": (lambda i: ops.transpose(i.w, (1, 0)), lambda i: ops.transpose(i.w, (0, 1))),
    "reshape": (lambda i: ops.reshape(i.x, (0, 4)), lambda i: ops.reshape(i.x, (-1, 4))),
    "slice start": (lambda i: _slice(i.x, 0, 2, 1), lambda i: _slice(i.x, 1, 2, 1)),
    "slice stride": (lambda i: _slice(i.x, 0, 2, 1), lambda i: _slice(i.x, 0, 2, 2)),
    "slice mode": (lambda i: _slice(i.x, 0, 4, 1), lambda i: _slice(i.x, 0, 4, 1, fill=True)),
    "softmax axis": (lambda i: ops.softmax(i.x, 0), lambda i: ops.softmax(i.x, 1)),
    "topk k": (lambda i: ops.topk(i.x, 2, 1)[1], lambda i: ops.topk(i.x, 3, 1)[1]),
    "topk axis": (lambda i: ops.topk(i.w, 2, 1)[0], lambda i: ops.topk(i.w, 2, 0)[0]),
    "unary operation": (lambda i: ops.unary(i.x, "SQRT"), lambda i: ops.unary(i.x, "EXP")),
    "input read": (lambda i: i.x * i.row, lambda i: i.x * ops.narrow(i.w, 0, 0, 1)),
}


def toy_hash(body) -> str:
    net = toy(
        TensorSpec("x", "float32", ("N", 4)),
        TensorSpec("w", "float32", (4, 4)),
        TensorSpec("row", "float32", (4,)),
        TensorSpec("ids", "int32", (3, 1)),
    )
    net.definition.mark_output(body(SimpleNamespace(**net.inputs)).trt)
    return hash_of(net)


@pytest.mark.parametrize("pair", PAIRS)
def test_every_attribute_is_in_the_hash(pair):
    one, other = PAIRS[pair]
    assert toy_hash(one) == toy_hash(one)
    assert toy_hash(one) != toy_hash(other)


def test_an_input_s_shape_and_dtype_are_in_the_hash():
    specs = [
        TensorSpec("x", "float32", ("N", 4)),
        TensorSpec("x", "float32", ("N", 5)),
        TensorSpec("x", "bfloat16", ("N", 4)),
    ]
    hashes = set()
    for spec in specs:
        net = toy(spec)
        net.output(ops.relu(net.inputs["x"]), replace(spec, name="y"))
        hashes.add(hash_of(net))
    assert len(hashes) == 3


def test_a_region_and_its_attributes_are_in_the_hash():
    def in_region(scale):
        def body(i):
            with i.x.net.region("toy_op", [i.x], {"scale": scale}) as outputs:
                outputs.append(i.x * 2.0)
            i.x.net.finish()
            return outputs[0]

        return body

    assert len({toy_hash(lambda i: i.x * 2.0), toy_hash(in_region(1.0)), toy_hash(in_region(2.0))}) == 3
