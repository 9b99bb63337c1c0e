"""The DFlash block that every drafter is built on: tapped features in, a block of drafts out.

    taps of kept rows -> fc -> hidden_norm -> features -> every layer's K/V caches           (append context)
    [anchor, mask, mask, ...] -> embed_tokens -> [block layer] x L -> norm -> lm_head -> drafts    (draft)
    block layer:  x += self_attn(input_layernorm(x), caches);  x += mlp(post_attention_layernorm(x))

The drafter is one network with two halves: appending context and drafting share a run. A step of prompt chunks alone
appends, and throws away an idle block on the null page. Context keys and values skip the layers: every layer projects
the same normed features. The taps are inputs by the names of the verifier's outputs (`tap.20`), so nothing is copied
between the two.

A layer with full attention keeps all context rows, in pages that the drafter shares with the verifier; one that slides
keeps its window, in a ring of pages that a sequence owns beside them and writes round and round.

A drafter that draws takes a temperature and a uniform number a draft, and returns the probs of each draft given those
before it. Temperature 0 is one-hot at the greedy draft, by the same layers, so one network serves both.

Legend: C context rows, M pages of a table, B blocks, R rows of a block, T = B * R, J drafts, Z = B * J, D hidden,
F columns of a projection, H heads, K key/value heads, E head size, V draft vocabulary, X pages of a cache,
P rows a page.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.configs.drafter_dialects import WINDOW_RELATIVE
from glmspec.models.layers.basic import MLP, Embedding, Linear, RMSNorm
from glmspec.models.layers.paged import RING, RING_START, RING_TABLE, WHOLE, CacheKind, WritePlan, append, cache_spec
from glmspec.models.layers.rotary import Rotary, rope_table_spec
from glmspec.models.network_model import NetworkModel
from glmspec.models.verifier import tap_name
from glmspec.network import ops
from glmspec.network.config import NetworkConfig
from glmspec.network.contract import TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.limits import EngineLimits
from glmspec.network.module import Module, Weight
from glmspec.plugins import argmax, block_attention, draft_probs, draw, margin, selector_walk

MASK_EMBEDDING = "mask_embedding"  # the mask token's row where the embedding's own is not meant
TEMPERATURE, UNIFORM = "draft_temperature", "draft_uniform"  # inputs of every drafter that draws

# Weights a drafter checkpoint may leave out, and the verifier's tensors that then stand in for them: decided by
# presence, not by sizes. (A head over a reduced vocabulary must be there.)
SHARED_WEIGHTS = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}


@dataclass(frozen=True)
class Pages:
    """Where layers of one kind find the context. start_B: position of the table's first column, None where it is 0."""

    plan: WritePlan
    page_table_BM: Tensor
    start_B: Tensor | None


@dataclass(frozen=True)
class Context:
    """Inputs that all layers of a drafting step read. Shapes: see the drafter's contract. pages: by kind of cache."""

    features_CD: Tensor
    context_rotary: Rotary
    block_rotary: Rotary
    anchor_positions_B: Tensor
    pages: dict[CacheKind, Pages]


@dataclass(frozen=True)
class Rows:
    """Tensors by which drafts are chosen: the block's normed hidden states (all rows, then those that draft), their
    logits and the anchors. noise: where drafts are drawn, `temperature` [B] and `uniform` [B, J]; else empty."""

    hidden_BRD: Tensor
    hidden_BJD: Tensor
    logits_BJV: Tensor
    anchor_ids_B: Tensor
    noise: dict[str, Tensor]

    @property
    def net(self) -> Network:
        """The network they are in."""
        return self.logits_BJV.net


class BlockAttention(Module):
    """Grouped-query attention of the block over its context and itself."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = Linear(config.hidden_size, heads * dim)
        self.k_proj = Linear(config.hidden_size, kv_heads * dim)
        self.v_proj = Linear(config.hidden_size, kv_heads * dim)
        self.o_proj = Linear(heads * dim, config.hidden_size)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(dim, config.rms_norm_eps)
        self.config, self.index = config, index
        self.sliding = config.layer_types[index] == "sliding_attention"
        self.kind = RING if self.sliding else WHOLE

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        """[T, D] -> [T, D]. Appends this layer's context rows first."""
        config, pages = self.config, context.pages[self.kind]
        keys_CKE = self._keys(context.features_CD, context.context_rotary)
        keys = append(key_cache(self.index), keys_CKE, pages.plan)
        values = append(value_cache(self.index), self._heads(self.v_proj(context.features_CD)), pages.plan)
        q_THE = context.block_rotary.turn(self.q_norm(self._heads(self.q_proj(x_TD))), interleaved=False)
        k_TKE = self._keys(x_TD, context.block_rotary)
        v_TKE = self._heads(self.v_proj(x_TD))
        out_BRHE = block_attention.native(
            q_BRHD=self._blocks(q_THE),
            k_BRJD=self._blocks(k_TKE),
            v_BRJD=self._blocks(v_TKE),
            k_cache_XJPD=keys,
            v_cache_XJPD=values,
            page_table_BM=pages.page_table_BM,
            anchor_B=context.anchor_positions_B,
            start_B=pages.start_B,
            scale=config.head_dim**-0.5,
            causal=self.sliding and not config.sliding_window_non_causal,
            window=(self.sliding and config.sliding_window) or 0,
            relative=config.window == WINDOW_RELATIVE,
        )
        return self.o_proj(ops.reshape(out_BRHE, (-1, config.num_attention_heads * config.head_dim)))

    def _keys(self, x_TD: Tensor, rotary: Rotary) -> Tensor:
        # Half-split rotary pairs, unlike the verifier's interleaved ones.
        return rotary.turn(self.k_norm(self._heads(self.k_proj(x_TD))), interleaved=False)

    def _blocks(self, x_THE: Tensor) -> Tensor:
        """[T, H, E] -> [B, R, H, E]."""
        return ops.reshape(x_THE, (-1, self.config.block_size, *x_THE.shape[1:]))

    def _heads(self, x_TF: Tensor) -> Tensor:
        return ops.reshape(x_TF, (0, -1, self.config.head_dim))


class BlockLayer(Module):
    """Attention and MLP, each normed before and added to the residual stream."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_TD: Tensor, context: Context) -> Tensor:
        """[T, D] -> [T, D]."""
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), context)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class DFlash(NetworkModel):
    """A drafter as a network. Kinds override `layer` and `propose`. sampled: drafts are drawn, and the probs they are
    drawn from are outputs too; at temperature 0 the drafts are the same as without.
    """

    layer: type[BlockLayer] = BlockLayer

    def __init__(self, config: DrafterConfig, *, sampled: bool = False) -> None:
        self.name, self.config, self.sampled = config.kind, config, sampled
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.mask_embedding = Weight(config.hidden_size) if config.mask_embedding else None
        self.fc = Linear(len(config.taps) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = [self.layer(config, index) for index in range(config.num_hidden_layers)]
        self.kinds = tuple(layer.self_attn.kind for layer in self.layers)  # of every layer's caches
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size)
        # Of a reduced vocabulary: target id = draft id + d2t[draft id].
        self.d2t = Weight(config.draft_vocab_size, dtype="int32") if config.reduced_vocabulary else None

    def input_specs(self, limits: EngineLimits, net_config: NetworkConfig) -> list[TensorSpec]:
        """Step inputs, rotary tables and caches. Drafters are plain, and whole on every rank."""
        config, compute = self.config, net_config.compute
        whole, ring = (kind in self.kinds for kind in (WHOLE, RING))
        return [
            *(TensorSpec(tap_name(tap), compute, ("N", config.hidden_size)) for tap in config.taps),
            TensorSpec("context_rows", "int32", ("C",)),  # rows of the taps to append
            TensorSpec("context_positions", "int32", ("C",)),
            *(WritePlan.specs("C") if whole else ()),
            *(WritePlan.specs("CR", RING) if ring else ()),
            TensorSpec("anchor_ids", "int32", ("B",)),
            TensorSpec("anchor_positions", "int32", ("B",)),
            *([TensorSpec("page_table", "int32", ("B", "M"))] if whole else ()),
            *(_ring_specs(limits.ring_pages(config.sliding_window)) if ring else ()),
            *(_noise_specs(config) if self.sampled else ()),
            rope_table_spec(limits.table_positions, config.head_dim, compute),
            *(
                cache_spec(name(index), config.num_key_value_heads, limits.page_size, config.head_dim, compute, kind)
                for index, kind in enumerate(self.kinds)
                for name in (key_cache, value_cache)
            ),
        ]

    def forward(self, net: Network, limits: EngineLimits) -> None:
        """Marks the outputs, see `propose`."""
        config, anchor_ids_B = self.config, net.inputs["anchor_ids"]
        ids_T, positions_T = self._block(anchor_ids_B, net.inputs["anchor_positions"])
        context = self._context(net, positions_T)
        x_TD = scaled(self._embedded(ids_T), config.scaling.embedding)
        for layer in self.layers:
            x_TD = layer(x_TD, context)
        hidden_BRD = ops.reshape(self.norm(x_TD), (-1, config.block_size, config.hidden_size))
        hidden_BJD = ops.narrow(hidden_BRD, 1, config.first_draft_row, config.num_drafts)
        logits_ZV = self.lm_head(ops.reshape(hidden_BJD, (-1, config.hidden_size)))
        # z-lab multiplies, then caps (`compute_logits` of its published model), and whatever follows sees the result.
        logits_ZV = scaled(logits_ZV, config.scaling.logits, config.scaling.cap)
        logits_BJV = ops.reshape(logits_ZV, (-1, config.num_drafts, config.draft_vocab_size))
        inputs = {"temperature": TEMPERATURE, "uniform": UNIFORM}
        noise = {name: net.inputs[input] for name, input in inputs.items() if self.sampled}
        for name, tensor in self.propose(Rows(hidden_BRD, hidden_BJD, logits_BJV, anchor_ids_B, noise)).items():
            net.output(tensor, TensorSpec(name, tensor.dtype, ("B", *tensor.shape[1:])))

    def propose(self, rows: Rows) -> dict[str, Tensor]:
        """Drafts from a block's rows: here each row's logits, on their own.

        `draft_ids` int32 [B, J], target ids; `scores` [B, J], the best score of each draft's row; `confidence` or,
        without such a head, `margin` (how far that best is ahead), float32 [B, J]: neither depends on the draft itself.
        Where drafts are drawn, `q` float32 [B, J, V]: their probs, over the tokens `q_ids` int32 [B, J, V] where they
        are not the verifier's whole vocabulary, in order.
        """
        drafts, vocab = self.config.num_drafts, self.config.draft_vocab_size
        flat_ZV = ops.reshape(rows.logits_BJV, (-1, vocab))
        ids_Z = argmax.native(flat_ZV)
        probs = {}
        if rows.noise:
            temperature_BJ = rows.noise["uniform"] * 0.0 + ops.reshape(rows.noise["temperature"], (0, 1))
            probs_ZV = draft_probs.native(flat_ZV, ids_Z, ops.reshape(temperature_BJ, (-1,)))
            ids_Z = draw.native(probs_ZV, ops.reshape(rows.noise["uniform"], (-1,)))
            probs = self.dense_probs(ops.reshape(probs_ZV, (-1, drafts, vocab)))
        if self.d2t:
            ids_Z = ids_Z + ops.gather(self.d2t.tensor, ids_Z)
        proposal = {
            "draft_ids": ops.reshape(ids_Z, (-1, drafts)),
            "scores": ops.reduce(rows.logits_BJV, "MAX", 2, keep=False),
        }
        if self.config.confidence is None:
            proposal["margin"] = ops.reshape(margin.native(flat_ZV), (-1, drafts))
        return proposal | probs

    @property
    def offset(self) -> Tensor | None:
        """d2t, int32 [V], of a reduced vocabulary."""
        return self.d2t.tensor if self.d2t else None

    def dense_probs(self, probs_BJV: Tensor) -> dict[str, Tensor]:
        """The outputs `q` and `q_ids`, given probs over the draft vocabulary."""
        if self.d2t is None:
            return {"q": probs_BJV}
        net, vocab = probs_BJV.net, self.config.draft_vocab_size
        ids_V = net.constant(list(range(vocab)), "int32") + self.d2t.tensor
        zero_BJ1 = ops.cast(ops.narrow(probs_BJV, 2, 0, 1), "int32") * 0
        return {"q": probs_BJV, "q_ids": zero_BJ1 + ops.reshape(ids_V, (1, 1, vocab))}

    def selected(self, walk: selector_walk.Walk) -> dict[str, Tensor]:
        """The proposal of a walk among each row's best logits; its probs are over those candidates."""
        proposal = {"draft_ids": walk.ids_BJ, "scores": walk.scores_BJ}
        if self.config.confidence is None:
            proposal["margin"] = walk.margins_BJ
        if walk.probs_BJK is not None and walk.candidates_BJK is not None:
            proposal |= {"q": walk.probs_BJK, "q_ids": walk.candidates_BJK}
        return proposal

    def _block(self, anchor_ids_B: Tensor, anchor_positions_B: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and positions of every row, int32 [T]: the anchor, then masks."""
        net, rows = anchor_ids_B.net, self.config.block_size
        row_1R = net.constant([list(range(rows))], "int32")
        ids_BR = ops.select(row_1R > 0, self.config.mask_token_id, ops.reshape(anchor_ids_B, (0, 1)))
        positions_BR = ops.reshape(anchor_positions_B, (0, 1)) + row_1R
        return ops.reshape(ids_BR, (-1,)), ops.reshape(positions_BR, (-1,))

    def _embedded(self, ids_T: Tensor) -> Tensor:
        """[T] -> [T, D]."""
        x_TD, mask = self.embed_tokens(ids_T), self.config.mask_token_id
        if self.mask_embedding is None:
            return x_TD
        masked_T1 = ops.reshape((ids_T > mask - 1) & (ids_T < mask + 1), (-1, 1))
        return ops.select(masked_T1, ops.reshape(self.mask_embedding.tensor, (1, -1)), x_TD)

    def _context(self, net: Network, block_positions_T: Tensor) -> Context:
        rows_C = net.inputs["context_rows"]
        taps = [ops.gather(net.inputs[tap_name(tap)], rows_C) for tap in self.config.taps]
        return Context(
            features_CD=self.hidden_norm(self.fc(ops.concat(taps, 1))),
            context_rotary=Rotary.at(net.inputs["context_positions"]),
            block_rotary=Rotary.at(block_positions_T),
            anchor_positions_B=net.inputs["anchor_positions"],
            pages={kind: _pages(net, kind) for kind in (WHOLE, RING) if kind in self.kinds},
        )


def _noise_specs(config: DrafterConfig) -> list[TensorSpec]:
    """Inputs by which drafts are drawn; at temperature 0 the best is taken. Uniform numbers are in [0, 1)."""
    return [TensorSpec(TEMPERATURE, "float32", ("B",)), TensorSpec(UNIFORM, "float32", ("B", config.num_drafts))]


def scaled(x: Tensor, factor: float, cap: float | None = None) -> Tensor:
    """x times a factor, kept within +- cap by a tanh; in float32, because bfloat16 would round the factor. x itself
    where neither changes it."""
    if factor == 1.0 and cap is None:
        return x
    wide = ops.cast(x, "float32") * factor
    return ops.cast(wide if cap is None else ops.tanh(wide / cap) * cap, x.dtype)


def _pages(net: Network, kind: CacheKind) -> Pages:
    table, start = (RING_TABLE, net.inputs[RING_START]) if kind is RING else ("page_table", None)
    return Pages(WritePlan.of(net, kind), net.inputs[table], start)


def _ring_specs(ring_pages: int) -> list[TensorSpec]:
    """Where a block finds the pages of its ring, in rising order of position, and where the first of them stands."""
    return [TensorSpec(RING_TABLE, "int32", ("B", ring_pages)), TensorSpec(RING_START, "int32", ("B",))]


def key_cache(layer: int) -> str:
    """Name of a layer's key cache."""
    return f"cache.layers.{layer}.key"


def value_cache(layer: int) -> str:
    """Name of a layer's value cache."""
    return f"cache.layers.{layer}.value"
