"""The GLM-5.3 verifier: embedding, decoder layers, final norm, language-model head.

    token ids -> embed_tokens -> [decoder layer] x L -> norm -> lm_head -> logits, greedy ids
    decoder layer:  x += all_reduce(self_attn(input_layernorm(x)));  x += all_reduce(mlp(post_attention_layernorm(x)))

Every rank has the same network, so one plan serves all. What differs is in the inputs: a rank's part of the weights,
and where its vocabulary and its experts begin. A sublayer ends in one all-reduce; the vocabulary is looked up in parts
and summed, its logits are gathered. Latents and index keys are on every rank: they are small, and the choice of rows
must be the same everywhere.

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
from glmspec.models.layers.mla import LatentAttention, Segments, SelectedRows, Step
from glmspec.models.layers.moe import MixtureOfExperts
from glmspec.models.layers.paged import WritePlan, cache_spec
from glmspec.models.layers.rotary import Rotary, rope_table_spec
from glmspec.models.network_model import NetworkModel
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TABLE, TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.limits import EngineLimits
from glmspec.network.module import Module
from glmspec.plugins import argmax


class DecoderSublayers(Module):
    """Attention and MLP (dense or experts), each normed before and added to the residual stream."""

    def __init__(self, config: VerifierConfig, index: int) -> None:
        full = config.indexer_types[index] == "full"
        self.sparse = config.mlp_layer_types[index] == "sparse"
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config, full, latent_cache(index), index_cache(index))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config) if self.sparse else MLP(config.hidden_size, config.intermediate_size)

    def sublayers(self, x_ND: Tensor, step: Step, selected: SelectedRows | None) -> tuple[Tensor, SelectedRows]:
        """The residual stream after both, [N, D], and the rows attended to. selected: by the layer before."""
        attention_ND, attended = self.self_attn(self.input_layernorm(x_ND), step, selected)
        x_ND = x_ND + ops.all_reduce(attention_ND)
        h_ND = self.post_attention_layernorm(x_ND)
        y_ND = self.mlp(h_ND, step.expert_tiles, step.expert_prompts) if self.sparse else self.mlp(h_ND)
        return x_ND + ops.all_reduce(y_ND), attended


class DecoderLayer(DecoderSublayers):
    """One of the verifier's layers."""

    def forward(self, x_ND: Tensor, step: Step, selected: SelectedRows | None) -> tuple[Tensor, SelectedRows]:
        """See `sublayers`."""
        return self.sublayers(x_ND, step, selected)


class DecoderStack(Module):
    """`model.*` of the checkpoint."""

    def __init__(self, config: VerifierConfig) -> None:
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size)
        self.layers = [DecoderLayer(config, index) for index in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Verifier(NetworkModel):
    """The verifier as a network.

    taps: k asks for the residual stream after k layers (0 is the embedding), as `tap.k`. hidden: asks for the
    head's input, the normed end of the stream, of every row; the MTP module goes on from it. illegal: ids that are
    never chosen.
    """

    name = "verifier"

    def __init__(
        self,
        config: VerifierConfig,
        taps: tuple[int, ...] = (),
        *,
        hidden: bool = False,
        illegal: IllegalIds = ALL_LEGAL,
    ) -> None:
        self.config, self.taps, self.hidden, self.illegal = config, taps, hidden, illegal
        self.model = DecoderStack(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.named()

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """Step inputs, tables and caches."""
        return [
            *step_specs(self.config, limits, net_config),
            *legal_specs(self.config.vocab_size, self.illegal, net_config),
            *(
                spec
                for index in range(self.config.num_hidden_layers)
                for spec in cache_specs(self.config, index, limits, net_config)
            ),
        ]

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks `logits`, `greedy_ids`, the taps and `hidden` as outputs."""
        step, selected = step_of(net, self.config, limits), None
        x_ND = self.model.embed_tokens(net.inputs["token_ids"])
        self.tap(0, x_ND)
        for index, layer in enumerate(self.model.layers, 1):
            x_ND, selected = layer(x_ND, step, selected)
            self.tap(index, x_ND)
        self.head(x_ND)

    def tap(self, layers: int, x_ND: Tensor) -> None:
        """Mark the residual stream after so many layers as an output, if a drafter reads it."""
        if layers in self.taps:
            net = x_ND.net
            net.output(x_ND, TensorSpec(tap_name(layers), net.compute, ("N", self.config.hidden_size)))

    def head(self, x_ND: Tensor) -> None:
        """Mark `logits`, `greedy_ids` and, if it is asked for, `hidden` as outputs."""
        net, config, logit_rows_R = x_ND.net, self.config, x_ND.net.inputs["logit_rows"]
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
    """Step inputs and tables of decoder layers over packed rows; caches come from `cache_specs`."""
    return [
        TensorSpec("token_ids", "int32", ("N",)),
        TensorSpec("positions", "int32", ("N",)),
        *Segments.specs(),
        *WritePlan.specs("N"),
        TensorSpec("logit_rows", "int32", ("R",)),
        rope_table_spec(limits.table_positions, config.qk_rope_head_dim, net_config.compute),
        *rank_specs(net_config),
    ]


def step_of(net: Network, config: VerifierConfig, limits: EngineLimits) -> Step:
    """The step of a network that declared `step_specs`, or those that its layers read."""
    net_config, k = net.config, limits.index_topk(config.index_topk)
    profile, experts = net_config.profile, config.n_routed_experts // net_config.mapping.ep
    # Elements of the largest tensors: plugins read keys and latents in their pages and the experts that are hit, layers
    # gather them first and compute all.
    index_columns = 1 if net_config.plugins else config.index_head_dim
    latent_elements = 1 if net_config.plugins else k * config.latent_dim
    expert_elements = 1 if net_config.plugins else experts * max(config.hidden_size, 2 * config.moe_intermediate_size)
    index_tiles = limits.index_tiles(index_columns, profile)
    pairs = limits.profiles(0)[profile]["N"][2] * config.num_experts_per_tok
    return Step(
        net=net,
        positions_N=net.inputs["positions"],
        segments=Segments.of(net) if "segment_rows" in net.inputs else None,
        rotary=Rotary.at(net.inputs["positions"]),
        plan=WritePlan.of(net),
        index_topk=k,
        index_tiles=index_tiles,
        index_heads=limits.index_heads(config.index_n_heads, index_tiles, profile),
        attention_tiles=limits.row_tiles(latent_elements, profile),
        expert_tiles=limits.row_tiles(expert_elements, profile),
        expert_prompts=int(pairs >= 64 * config.n_routed_experts),  # as many as a larger tile has
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
    """Tables that tell a rank which part of the vocabulary and which experts are its own."""
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
