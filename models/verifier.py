"""The GLM-5.3 verifier: embedding, decoder layers, final norm, language-model head.

Legend: N tokens of the step, R rows whose logits are asked for, D hidden, V vocabulary.
"""

from __future__ import annotations

from glmspec.models.configs.illegal import ALL_LEGAL, IllegalIds
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.layers.basic import (
    EXPERT_START,
    MLP,
    VOCABULARY_START,
    Linear,
    RMSNorm,
    VocabularyEmbedding,
    legal_logits,
    legal_specs,
)
from glmspec.models.layers.mla import Attended, LatentAttention, Step
from glmspec.models.layers.moe import MixtureOfExperts
from glmspec.models.layers.paged import WritePlan, cache_spec
from glmspec.models.layers.rotary import Rotary, rope_table_spec
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TABLE, TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.limits import EngineLimits
from glmspec.network.module import Module
from glmspec.network.trt import Backend
from glmspec.plugins import argmax
from glmspec.plugins.registration import author


class DecoderLayer(Module):
    """Attention and MLP (dense or experts), each normed before and added to the residual stream."""

    def __init__(self, config: VerifierConfig, index: int) -> None:
        full = config.indexer_types[index] == "full"
        sparse = config.mlp_layer_types[index] == "sparse"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config, full, latent_cache(index), index_cache(index))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.sparse = sparse
        self.mlp = MixtureOfExperts(config) if sparse else MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_ND: Tensor, step: Step, shared: Attended | None) -> tuple[Tensor, Attended]:
        """The residual stream after this layer, and the rows it attended to."""
        attention_ND, attended = self.self_attn(self.input_layernorm(x_ND), step, shared)
        x_ND = x_ND + ops.all_reduce(attention_ND)
        pieces = (step.expert_pieces,) if self.sparse else ()
        return x_ND + ops.all_reduce(self.mlp(self.post_attention_layernorm(x_ND), *pieces)), attended


class DecoderStack(Module):
    """`model.*` of the checkpoint."""

    def __init__(self, config: VerifierConfig) -> None:
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Verifier(Module):
    """The verifier as a network: owns the engine's inputs and outputs.

    taps: k asks for the residual stream after k layers (0 is the embedding), as `tap.k`. hidden: asks for what the head
    reads, the normed end of the stream, of every row; the MTP module goes on from it. illegal: ids that are
    never chosen.
    """

    def __init__(
        self,
        config: VerifierConfig,
        taps: tuple[int, ...] = (),
        *,
        hidden: bool = False,
        illegal: IllegalIds = ALL_LEGAL,
    ) -> None:
        self.config = config
        self.taps = taps
        self.hidden = hidden
        self.illegal = illegal
        self.model = DecoderStack(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.named()

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """Step inputs, tables and caches; the weights come from `weight_inputs`."""
        specs = step_specs(self.config, limits, net_config) + legal_specs(
            self.config.vocab_size, self.illegal, net_config
        )
        for index in range(self.config.num_hidden_layers):
            specs += cache_specs(self.config, index, limits, net_config)
        return specs

    def author(self, limits: EngineLimits, net_config: NetworkConfig, backend: Backend) -> Network:
        """The whole network, the same for every rank."""
        net = Network("verifier", net_config, backend, author)
        net.declare(self.input_specs(limits, net_config) + self.weight_inputs(net_config))
        for weight in self.weights():
            weight.bind(net)
        with net.scope(self.path):
            self.forward(net.inputs.get("token_ids"), net.inputs.get("logit_rows"), step_of(net, self.config, limits))
        return net.finish()

    def forward(self, token_ids_N: Tensor, logit_rows_R: Tensor, step: Step) -> None:
        """Marks `logits`, `greedy_ids`, the taps and `hidden` as outputs."""
        x_ND, attended = self.model.embed_tokens(token_ids_N), None
        self.tap(0, x_ND)
        for index, layer in enumerate(self.model.layers, 1):
            x_ND, attended = layer(x_ND, step, attended)
            self.tap(index, x_ND)
        self.head(x_ND, logit_rows_R)

    def tap(self, layers: int, x_ND: Tensor) -> None:
        """Mark the residual stream after so many layers as an output, if a drafter reads it."""
        if layers in self.taps:
            net = x_ND.net
            net.output(x_ND, TensorSpec(tap_name(layers), net.compute, ("N", self.config.hidden_size)))

    def head(self, x_ND: Tensor, logit_rows_R: Tensor) -> None:
        """Mark `logits`, `greedy_ids` and, if it is asked for, `hidden` as outputs."""
        net, config = x_ND.net, self.config
        if self.hidden:
            hidden_ND = self.model.norm(x_ND)
            net.output(hidden_ND, hidden_spec(config, net.compute))
            hidden_RD = ops.gather(hidden_ND, logit_rows_R)
        else:  # only the rows that are asked for
            hidden_RD = self.model.norm(ops.gather(x_ND, logit_rows_R))
        logits_RV = legal_logits(self.lm_head(hidden_RD), config.vocab_size)
        net.output(logits_RV, TensorSpec("logits", net.compute, ("R", config.vocab_size)))
        net.output(argmax.native(logits_RV), TensorSpec("greedy_ids", "int32", ("R",)))


def step_specs(config: VerifierConfig, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
    """What a run of decoder layers over packed rows reads: step inputs and tables, without caches."""
    return [
        TensorSpec("token_ids", "int32", ("N",)),
        TensorSpec("positions", "int32", ("N",)),
        TensorSpec("segment_rows", "int32", ("G", "S")),  # rows of the step, a segment a line
        TensorSpec("row_slot", "int32", ("N", 2)),  # the inverse: (segment, place in it) of a row
        TensorSpec("page_table", "int32", ("G", "M")),
        *WritePlan.specs("N"),
        TensorSpec("logit_rows", "int32", ("R",)),
        rope_table_spec(limits.table_positions, config.qk_rope_head_dim, net_config.compute),
        *rank_specs(net_config),
    ]


def step_of(net: Network, config: VerifierConfig, limits: EngineLimits) -> Step:
    """The step of a network that declared `step_specs`, or what its layers read of them."""
    inputs, net_config, k = net.inputs, net.config, limits.index_topk(config.index_topk)
    # Plugins read keys and latents in their pages; layers gather them first.
    pieces = limits.index_pieces(1 if net_config.plugins else config.index_head_dim, net_config.profile)
    gathered = 1 if net_config.plugins else k * config.latent_dim
    experts = (
        config.n_routed_experts // net_config.mapping.ep * max(config.hidden_size, 2 * config.moe_intermediate_size)
    )
    return Step(
        net=net,
        positions_N=inputs["positions"],
        segment_rows_GS=inputs.get("segment_rows"),
        row_slot_N2=inputs.get("row_slot"),
        page_table_GM=inputs.get("page_table"),
        rotary=Rotary.at(inputs["positions"]),
        plan=WritePlan.of(net),
        index_topk=k,
        index_pieces=pieces,
        index_heads=limits.index_heads(config.index_n_heads, pieces, net_config.profile),
        attention_pieces=limits.row_pieces(gathered, net_config.profile),
        expert_pieces=limits.row_pieces(experts if net_config.moe == "composed" else 1, net_config.profile),
    )


def cache_specs(
    config: VerifierConfig, layer: int, limits: EngineLimits, net_config: NetworkConfig
) -> list[TensorSpec]:
    """The caches of one decoder layer."""
    specs = [cache_spec(latent_cache(layer), 1, limits.page_size, config.latent_dim, net_config.compute)]
    if config.indexer_types[layer] == "full":
        specs.append(cache_spec(index_cache(layer), 1, limits.page_size, config.index_head_dim, net_config.compute))
    return specs


def hidden_spec(config: VerifierConfig, compute: str, rows: str = "N") -> TensorSpec:
    """The normed hidden state of every row: an output here, an input of the MTP module, which has other rows."""
    return TensorSpec("hidden", compute, (rows, config.hidden_size))


def rank_specs(net_config: NetworkConfig) -> list[TensorSpec]:
    """What tells a rank which part of the vocabulary and which experts are its own."""
    names = [VOCABULARY_START] * (net_config.mapping.tp > 1) + [EXPERT_START] * (net_config.mapping.ep > 1)
    return [TensorSpec(name, "int32", (1,), TABLE) for name in names]


def latent_cache(layer: int) -> str:
    """Name of a layer's cache of MLA latents."""
    return f"cache.layers.{layer}.latent"


def index_cache(layer: int) -> str:
    """Name of a full-indexer layer's cache of index keys."""
    return f"cache.layers.{layer}.index"


def tap_name(tap: int) -> str:
    """Name of the residual stream after `tap` layers, an output here and an input of the drafters."""
    return f"tap.{tap}"
