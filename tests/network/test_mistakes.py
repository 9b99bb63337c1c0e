"""A mistake in a network is named where it was made."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from support.models import GOLDENS

from glmspec.build.plan import build_plan
from glmspec.core.errors import NetworkError
from glmspec.core.fields import read_json
from glmspec.models.configs.kinds import parse_config
from glmspec.models.registry import model_of
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.graph import Network
from glmspec.network.limits import CONTEXT, EngineLimits
from glmspec.network.trt import backend

LIMITS = EngineLimits(
    max_model_len=512, max_num_seqs=4, max_num_batched_tokens=128, page_size=16, segment_rows=12, block_rows=9
)

TRT = backend("tensorrt_rtx")


def config_of(name: str, **changes):
    path = GOLDENS / "checkpoints" / name / "config.json"
    return replace(parse_config(read_json(path), str(path)), **changes)


def author(model, compute: str = "float32", limits: EngineLimits = LIMITS) -> Network:
    return model.author(limits, NetworkConfig(compute=compute), TRT)


def part(model, path: str):
    """The module or weight at a dotted path."""
    for key in path.split("."):
        model = model[int(key)] if key.isdigit() else getattr(model, key)
    return model


def wrong_weight(path: str, *shape: int, dtype: str | None = None):
    """A plant: another shape or dtype for one weight of the model."""

    def plant(model):
        weight = part(model, path)
        weight.shape, weight.dtype = shape or weight.shape, dtype or weight.dtype

    return plant


def wrong_end(path: str, spoil):
    """A plant: `spoil` applied to what one module returns, inside that module."""

    def plant(model):
        module = part(model, path)
        forward = module.forward
        module.forward = lambda *args: spoil(forward(*args))

    return plant


def add_float32(x):
    return x + x.net.constant([[1.0]], "float32")


def add_positions(x):
    return x + x.net.inputs["positions"]


def add_seven_columns(x):
    return x + x.net.constant(np.ones((1, 7)), x.dtype)


def index_by_itself(x):
    return ops.gather(x, x)


@pytest.mark.parametrize(
    "name, path, plant",
    [
        ("verifier", "model.layers.2.self_attn/", wrong_weight("model.layers.2.self_attn.w_uk", dtype="float32")),
        ("verifier", "model.layers.1.mlp.gate/", wrong_weight("model.layers.1.mlp.gate.weight", dtype="bfloat16")),
        ("verifier", "model.layers.3.mlp.experts/", wrong_end("model.layers.3.mlp.experts", add_float32)),
        ("verifier", "model.layers.0.mlp/", wrong_end("model.layers.0.mlp", add_positions)),
        ("verifier", "model.embed_tokens/", wrong_end("model.embed_tokens", index_by_itself)),
        ("dspark", "layers.1.self_attn.q_norm/", wrong_weight("layers.1.self_attn.q_norm.weight", dtype="float32")),
        ("dspark", "markov_head/", wrong_weight("markov_head.markov_w2.weight", dtype="float32")),
        ("dflash2", "layers.4.mlp_conv/", wrong_weight("layers.4.mlp_conv.base_kernel", dtype="float32")),
        ("dflash2", "candidate_selector/", wrong_weight("candidate_selector.successor_codebook", dtype="float32")),
        ("dspark_redvocab", "layers.0.mlp/", wrong_end("layers.0.mlp", add_float32)),
    ],
)
def test_a_wrong_dtype_is_named_by_module_path(name, path, plant):
    model = model_of(config_of(name))
    plant(model)
    with pytest.raises(NetworkError, match=f"^{re.escape(path)}.*type"):
        author(model, "bfloat16")


@pytest.mark.parametrize(
    "name, path, plant",
    [
        (
            "verifier",
            "model.layers.2.self_attn.o_proj/",
            wrong_weight("model.layers.2.self_attn.o_proj.weight", 64, 63),
        ),
        ("verifier", "model.layers.5.self_attn/", wrong_weight("model.layers.5.self_attn.w_uv", 4, 31, 16)),
        (
            "verifier",
            "model.layers.1.self_attn.indexer.k_norm/",
            wrong_weight("model.layers.1.self_attn.indexer.wk.weight", 30, 64),
        ),
        ("verifier", "model.layers.4.mlp/", wrong_end("model.layers.4.mlp", add_seven_columns)),
        ("verifier", "lm_head/", wrong_weight("lm_head.weight", 96, 65)),
        ("dspark", "layers.1.self_attn/", wrong_weight("layers.1.self_attn.v_proj.weight", 33, 64)),
        ("dspark", "fc/", wrong_weight("fc.weight", 64, 128)),
        ("dspark", "confidence_head.proj/", wrong_weight("confidence_head.proj.weight", 1, 64)),
        ("dflash2", "layers.3.mlp/", wrong_end("layers.3.mlp", add_seven_columns)),
        ("dspark_redvocab", "markov_head/", wrong_weight("markov_head.markov_w2.weight", 47, 8)),
    ],
)
def test_a_wrong_shape_is_named_by_module_path(name, path, plant):
    model = model_of(config_of(name))
    plant(model)
    with pytest.raises(NetworkError, match=f"^{re.escape(path)}"):
        author(model)


@pytest.mark.parametrize(
    "path, plant",
    [
        ("layers.1.mlp_conv/", wrong_weight("layers.1.mlp_conv.kernel_projection.weight", 15, 64)),
        ("candidate_selector/", wrong_weight("candidate_selector.successor_codebook", 96, 7)),
    ],
)
def test_what_only_the_builder_sees_is_named_too(path, plant):
    """A reshape of run-time rows that never comes out even is legal to author."""
    model = model_of(config_of("dflash2"))
    plant(model)
    net, window = author(model), model.config.sliding_window
    with pytest.raises(NetworkError, match=f"^dflash2: .*{re.escape(path)}reshape"):
        build_plan(net, LIMITS.profiles(0, window)[CONTEXT], "SM120")


def test_the_next_network_does_not_inherit_a_complaint():
    broken = model_of(config_of("dspark_redvocab"))
    broken.fc.weight.shape = (64, 63)
    with pytest.raises(NetworkError):
        author(broken)
    TRT.errors.append("said after the last layer, and nobody asked")
    author(model_of(config_of("dspark_redvocab")))
