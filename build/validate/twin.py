"""Stage "twin": a scaled-down model of the same config, computed by the networks and by transformers.

The twin keeps what decides the arithmetic (kinds of layers and their order, rotary bases and flags, routing, norms) and
shrinks what only decides its size. Random weights with random norms and biases; a context beyond `index_topk`; a chunk
of a prompt, then a block. Three comparisons: float32 on one rank, every layer run, against transformers; float32 on the
deployment's ranks in lockstep; and its number formats on those ranks, one layer at a time on the same input, against
the same weights dequantized.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glmspec.build.deployment import Deployment
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.report import Fault
from glmspec.convert.calibration import Activations
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES, Recipe, Rule, quantizable
from glmspec.convert.source import Source
from glmspec.convert.storage import weights_of
from glmspec.core.errors import ConfigError, MissingCapability
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.layer_group import STREAM, LayerGroup
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.formats import BLOCK
from glmspec.network.limits import EngineLimits
from glmspec.network.shards import Mapping
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span

_TOPK, _VOCAB, _PROMPT, _BLOCK_ROWS = 24, 509, 41, 7
_LIMITS = EngineLimits(
    max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64, page_size=8, segment_rows=16, block_rows=_BLOCK_ROWS
)
_PAGES = (3, 1, 6, 2, 8, 5, 4, 7)
EXACT = 1e-4  # of the largest value: float32, sums in another order
# Relative L2 of what a layer adds to the stream, where activations are rounded: about twice what sound layers show.
ROUNDED = {"fp8_block": 0.35, "fp8": 0.5, "nvfp4": 0.5}
_ADVICE = "The networks would compute something else than the published model: report it, with your config.json."
# What the twin takes from the deployment's config.json: what decides the arithmetic.
_KEPT = (
    "architectures", "model_type", "hidden_act", "n_shared_experts", "norm_topk_prob", "routed_scaling_factor",
    "rope_parameters", "rope_theta", "rope_interleave", "indexer_rope_interleave", "rms_norm_eps", "scoring_func",
    "topk_method", "n_group", "topk_group", "attention_bias", "mlp_bias",
)  # fmt: skip
# Keys that say in another way what the lists of the twin say; the published class adds them.
_SHORTHANDS = ("first_k_dense_replace", "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")


@dataclass(frozen=True)
class _Twin:
    """The shrunken model on disk, and what transformers computes: streams [layers + 1][N, D], logits [N, V]."""

    folder: Path
    config: dict[str, Any]
    ids: list[int]
    streams: list[torch.Tensor]
    logits: torch.Tensor


def check(case: Case, _) -> StageResult:
    """All comparisons."""
    deployment = case.deployment
    with tempfile.TemporaryDirectory() as home:
        case.tick("the twin in transformers")
        twin = make_twin(Path(home), deployment)
        case.tick("the twin in float32, layer by layer")
        faults = list(plain_faults(twin, Mapping()))
        if deployment.mapping.tp > 1:
            case.tick("the twin on all ranks")
            faults += plain_faults(twin, deployment.mapping)
        case.tick("the twin in the deployment's number formats")
        format_facts, wrong = format_faults(twin, deployment)
    mapping, layers = deployment.mapping, twin.config["num_hidden_layers"]
    facts = (
        f"{layers} layers, {len(twin.ids)} tokens, index_topk {_TOPK}: float32 against transformers, on one rank"
        + (f" and on {mapping.tp} (ep {mapping.ep}) in lockstep" if mapping.tp > 1 else ""),
        *format_facts,
    )
    return StageResult(facts, (*faults, *wrong), {"layers": layers, "tokens": len(twin.ids)})


def make_twin(home: Path, deployment: Deployment) -> _Twin:
    """Write the twin's checkpoint, and run transformers on it."""
    try:
        from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise MissingCapability(f"transformers with GLM-5.3's class cannot be imported ({error}).") from None

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    values = shrunken(deployment)
    options: dict[str, Any] = values | {"attn_implementation": "eager"}
    try:
        config = GlmMoeDsaConfig(**options)
    except Exception as error:  # whatever its checks raise
        raise ConfigError(f"the twin's config: transformers refuses it ({error}).") from None
    generator = torch.Generator().manual_seed(0)
    model = GlmMoeDsaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name:
                tensor.copy_(_random(name, tensor, generator))
    model.save_pretrained(home / "hf")
    # The published class adds shorthands and drops keys that it does not know: the networks must see the deployment's.
    path = home / "hf" / "config.json"
    saved = {k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k not in _SHORTHANDS}
    path.write_text(json.dumps(saved | values), encoding="utf-8")
    ids = torch.randint(2, _VOCAB, (_PROMPT,), generator=generator).tolist()
    streams: list[torch.Tensor] = []
    hooks = [model.model.embed_tokens, *model.model.layers]
    for module in hooks:
        module.register_forward_hook(lambda _, __, out: streams.append((out[0] if isinstance(out, tuple) else out)[0]))
    with torch.no_grad(), stable_topk():
        logits = model(torch.tensor([ids])).logits[0]
    return _Twin(home, values, ids, [stream.reshape(len(ids), -1) for stream in streams], logits)


def shrunken(deployment: Deployment) -> dict[str, Any]:
    """The deployment's config.json with small sizes, which all its ranks divide in 128-wide blocks."""
    weights, config = deployment.verifier.weights, deployment.verifier.verifier_config
    values = {key: weights.hf_config[key] for key in _KEPT if key in weights.hf_config}
    tp, ep = deployment.mapping.tp, deployment.mapping.ep
    layers = _telling_layers(config)
    experts = max(8, 2 * ep)
    return values | dict(
        vocab_size=_VOCAB,
        hidden_size=128,
        intermediate_size=BLOCK * tp,
        moe_intermediate_size=BLOCK * tp,
        num_hidden_layers=layers,
        num_attention_heads=2 * tp,
        num_key_value_heads=2 * tp,
        n_routed_experts=experts,
        num_experts_per_tok=min(config.num_experts_per_tok, 3),
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        qk_head_dim=64,
        head_dim=16,
        v_head_dim=64,
        index_topk=_TOPK,
        index_n_heads=4,
        index_head_dim=32,
        mlp_layer_types=list(config.mlp_layer_types[:layers]),
        indexer_types=list(config.indexer_types[:layers]),
        max_position_embeddings=512,
        num_nextn_predict_layers=0,
        eos_token_id=1,
        bos_token_id=0,
        pad_token_id=0,
        dtype="float32",
    )


def plain_faults(twin: _Twin, mapping: Mapping) -> Iterator[Fault]:
    """The plain network in float32 against transformers: each layer's stream, then the logits. On one rank every layer
    of the network is run, on several its ops."""
    checkpoint = _converted(twin, ConvertOptions(RECIPES["auto"], mapping))
    every, on = tuple(range(len(twin.streams))), f" on {mapping.tp} ranks" if mapping.tp > 1 else ""
    model = Model(
        model_of(checkpoint.config, every),
        _LIMITS,
        checkpoint.net_config("float32"),
        _tensors(checkpoint),
        regions=mapping.tp > 1,
    )
    outputs = _run(model, twin)
    for layer, expected in enumerate(twin.streams):
        error = _largest(outputs[f"tap.{layer}"], expected)
        if not error <= EXACT:  # NaN too
            where = "model.embed_tokens" if layer == 0 else f"model.layers.{layer - 1}"
            yield Fault(where, f"its output (tap {layer}){on} differs from transformers' by {error:.1e}.", _ADVICE)
            return
    error = _largest(outputs["logits"], twin.logits)
    if not error <= EXACT:
        yield Fault("lm_head", f"the logits{on} differ from transformers' by {error:.1e}.", _ADVICE)
    if not torch.equal(outputs["greedy_ids"].long(), twin.logits.argmax(-1)):
        yield Fault("argmax", f"the greedy tokens{on} differ from transformers'.", _ADVICE)


def format_faults(twin: _Twin, deployment: Deployment) -> tuple[list[str], list[Fault]]:
    """The deployment's formats on its ranks, a layer at a time: what it adds to the stream, against dequantized weights
    on one rank with the same input."""
    net_config = deployment.verifier.weights.net_config("float32")
    if not net_config.formats:
        return [], []
    recipe, activations = _recipe(net_config), _activations(twin, net_config)
    divided = _converted(twin, ConvertOptions(recipe, net_config.mapping, activations))
    single = _converted(twin, ConvertOptions(recipe, Mapping(), activations))
    own, plain = divided.net_config("float32"), NetworkConfig(compute="float32")
    weights, whole, faults, config = _tensors(divided), [single.load()], [], single.config
    assert isinstance(config, VerifierConfig)  # as the twin's is
    worst, allowed = 0.0, 0.0
    handed = _step(twin, 0, len(twin.ids)) | {STREAM: twin.streams[0]}
    for layer in range(len(twin.streams) - 1):
        tree = LayerGroup(config, (layer + 1,), range(layer, layer + 1), _LIMITS.index_topk(_TOPK))
        expected = Model(tree, _LIMITS, plain, whole).run(handed)
        outputs = Model(tree, _LIMITS, own, weights).run(handed)
        tap = f"tap.{layer + 1}"
        added = expected[tap] - twin.streams[layer]
        error = float((outputs[tap] - expected[tap]).norm() / added.norm())
        bound = _bound(own, layer)
        worst, allowed = max(worst, error), max(allowed, bound)
        if not error <= bound:
            why = f"what it adds is {error:.1e} from its dequantized weights', allowed {bound}."
            faults.append(Fault(f"model.layers.{layer}", why, _ADVICE))
        handed |= {name: tensor for name, tensor in expected.items() if name.startswith("group.")}
        handed[STREAM] = twin.streams[layer + 1]
    rounds = "activations are rounded" if allowed > EXACT else "only weights are quantized"
    fact = (
        f"{', '.join(own.kinds)}, a layer at a time: {worst:.1e} from dequantized weights (allowed {allowed}: {rounds})"
    )
    return [fact], faults


def _bound(net_config: NetworkConfig, layer: int) -> float:
    """How far a layer may be off: exact where only weights are quantized."""
    prefix = f"model.layers.{layer}."
    rounds = {
        format
        for name, format in net_config.formats.items()
        if name.startswith(prefix) and (format == "fp8_block" or name in net_config.scaled)
    }
    return max((ROUNDED[format] for format in rounds), default=EXACT)


def _converted(twin: _Twin, options: ConvertOptions) -> Checkpoint:
    """The twin's checkpoint, converted."""
    out = Path(tempfile.mkdtemp(dir=twin.folder)) / "ck"
    return plan_conversion(twin.folder / "hf", options).write(out)


def _tensors(checkpoint: Checkpoint) -> list[dict[str, torch.Tensor]]:
    return [checkpoint.tensors(rank) for rank in range(checkpoint.mapping.tp)]


def _run(model: Model, twin: _Twin) -> dict[str, torch.Tensor]:
    """A chunk of the prompt, then a block; all rows' outputs."""
    outputs, cut = [], len(twin.ids) - _BLOCK_ROWS
    for start, stop in ((0, cut), (cut, len(twin.ids))):
        step = model.run(_step(twin, start, stop))
        outputs.append({name: tensor.clone() for name, tensor in step.items() if not name.startswith("cache.")})
    return {name: torch.cat([out[name] for out in outputs]) for name in outputs[0]}


def _step(twin: _Twin, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The inputs of a step over some of the tokens."""
    rows = Rows(Span(list(_PAGES), start, stop - start), twin.ids[start:stop], stop - start)
    return pack_rows([rows], _LIMITS, -(-_TOPK // _LIMITS.page_size))


def _telling_layers(config: VerifierConfig) -> int:
    """As few layers as show every kind there is."""
    kinds = list(zip(config.mlp_layer_types, config.indexer_types, strict=True))
    return max(min(2, len(kinds)), *(kinds.index(kind) + 1 for kind in set(kinds)))


def _recipe(net_config: NetworkConfig) -> Recipe:
    """Rules that give the twin the formats of the deployment, by the kind of matrix."""
    kinds = {_kind(name): format for name, format in net_config.formats.items()}
    rules = [Rule(f"*{kind}", format) for kind, format in sorted(kinds.items(), key=lambda item: -len(item[0]))]
    return Recipe("twin", (*rules, Rule("*", "bfloat16")) if rules else (), "auto")


def _kind(name: str) -> str:
    """`.self_attn.q_b_proj` of `model.layers.7.self_attn.q_b_proj.weight`; experts by their own spelling."""
    module = name.removesuffix(".weight").split(".", 3)[3]
    return ".mlp.experts.*" if module.startswith("mlp.experts.") else f".{module}"


def _activations(twin: _Twin, net_config: NetworkConfig) -> Activations:
    """An amax for every module whose activations the deployment rounds by a scale of the checkpoint."""
    kinds = {_kind(name) for name in net_config.scaled}
    modules = [name.removesuffix(".weight") for name in weights_of(Source(twin.folder / "hf"))]
    return Activations({name: 16.0 for name in modules if quantizable(name) and _kind(f"{name}.weight") in kinds})


def _random(name: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A default start is a weak oracle (norms 1, biases 0): everything is random, linears 1.5 / sqrt(fan in)."""
    noise = torch.randn(tensor.shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    return 0.2 * noise if tensor.dim() < 2 else 1.5 * tensor.shape[-1] ** -0.5 * noise


@contextmanager
def stable_topk() -> Iterator[None]:
    """transformers' indexer picks among equal scores arbitrarily; the networks take the lowest row."""
    from torch.return_types import topk as result

    original = torch.Tensor.topk

    def topk(self, k, dim=-1, largest=True, sorted=True):
        values, indices = self.sort(dim=dim, descending=largest, stable=True)
        return result((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    torch.Tensor.topk = topk
    try:
        yield
    finally:
        torch.Tensor.topk = original


def _largest(outputs: torch.Tensor, expected: torch.Tensor) -> float:
    return float((outputs - expected).abs().max() / expected.abs().max())
