"""Multi-head latent attention with DSA: the attention half of a verifier layer.

    x -> kv_a_proj_with_mqa -> [rotary key | kv_a_layernorm(compressed)] -> latent cache
    x -> q_a_proj -> q_a_layernorm -> q_b_proj -> [rotary | nope W_uk] queries -> sparse attention -> W_uv -> o_proj
         the indexer scores all rows of the context, and the K best are those that the queries attend to

A latent row is [rotary key | compressed K/V]: TensorRT's rotary layer turns the leading columns and passes
the rest, so latent rows and absorbed queries go through it whole.

Legend: N tokens, D hidden, A query rank, H heads (of this rank), E rotary columns, C compressed K/V, L = E + C latent
row, F columns of a head before absorption, V columns of a head's value, J index heads, I index head size, K rows
attended to, X pages, P rows a page, G segments, S rows of the largest segment, M pages of a table, Z = G * S places of
the segments.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.core.errors import NetworkError
from glmspec.models.configs.verifier import LATENT_NORM_EPS, VerifierConfig
from glmspec.models.layers.basic import LayerNorm, Linear, RMSNorm
from glmspec.models.layers.paged import WritePlan, append
from glmspec.models.layers.rotary import Rotary
from glmspec.models.layers.tiles import in_tiles, tile_rows
from glmspec.network import ops
from glmspec.network.contract import TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.network.module import Module, Weight
from glmspec.plugins import index_topk, sparse_mla


@dataclass(frozen=True)
class SelectedRows:
    """The cache rows each token attends to: rows int32 [N, K], and whether each is visible, int32 [N, K]."""

    rows_NK: Tensor
    visible_NK: Tensor


@dataclass(frozen=True)
class Segments:
    """Runs of rows of one sequence, whose index keys are gathered once: the rows of each, the segment and place of a
    row, and the pages of a segment's sequence. All int32."""

    rows_GS: Tensor
    row_slot_N2: Tensor
    page_table_GM: Tensor

    @staticmethod
    def specs() -> list[TensorSpec]:
        """The segments as step inputs."""
        return [
            TensorSpec("segment_rows", "int32", ("G", "S")),
            TensorSpec("row_slot", "int32", ("N", 2)),
            TensorSpec("page_table", "int32", ("G", "M")),
        ]

    @classmethod
    def of(cls, net: Network) -> Segments:
        """The segments of a network that declared `specs`."""
        return cls(*(net.inputs[name] for name in ("segment_rows", "row_slot", "page_table")))

    def size(self) -> Tensor:
        """S, int32 [1]."""
        return ops.reduce(ops.arange_like(self.rows_GS, 1), "MAX", 0) + 1


@dataclass(frozen=True)
class Step:
    """Inputs that all layers of a verifier step read. Shapes: see the verifier's contract. segments: None where no
    layer has an indexer."""

    net: Network
    positions_N: Tensor
    segments: Segments | None
    rotary: Rotary
    plan: WritePlan
    index_topk: int
    index_tiles: int  # of the segments, scored one after the other
    index_heads: int  # heads of the indexer scored at once
    attention_tiles: int  # of the rows, attending one after the other
    expert_tiles: int  # of the rows, through the experts one after the other
    expert_prompts: int  # 1 where an expert may have many rows, of chunks of prompts


@dataclass(frozen=True)
class SegmentTile:
    """Some of a step's segments, as a step of their own whose rows are the Z places of the segments. rows_Z: of the
    step, positions_Z: their positions. The last tile repeats the last segment."""

    rows_Z: Tensor
    positions_Z: Tensor
    segments: Segments


def segment_tiles(step: Step, segments: Segments) -> list[SegmentTile]:
    """The step's segments in tiles, which all layers share."""
    shared, key = step.net.shared, ("segment tiles", segments.rows_GS.trt.name)
    if key not in shared:
        shared[key] = [_segment_tile(step, segments, index) for index in range(step.index_tiles)]
    return shared[key]


def _segment_tile(step: Step, segments: Segments, index: int) -> SegmentTile:
    rows_GS = segments.rows_GS
    size_1, segment_G = segments.size(), tile_rows(rows_GS, step.index_tiles, index)
    own_G = ops.arange_like(rows_GS, 0, step.index_tiles)
    rows_Z = ops.reshape(ops.gather(rows_GS, segment_G), (-1,))
    numbers_GS = ops.reshape(own_G * size_1, (-1, 1)) + ops.reshape(ops.arange_like(rows_GS, 1), (1, -1))
    number_Z = ops.arange_like(rows_Z, 0)
    segment_Z = number_Z // size_1
    place_Z = number_Z - segment_Z * size_1
    slot_Z2 = ops.concat([ops.reshape(segment_Z, (-1, 1)), ops.reshape(place_Z, (-1, 1))], 1)
    positions_Z, page_table_GM = ops.gather(step.positions_N, rows_Z), ops.gather(segments.page_table_GM, segment_G)
    return SegmentTile(rows_Z, positions_Z, Segments(numbers_GS, slot_Z2, page_table_GM))


class Indexer(Module):
    """Scores the context cheaply and picks the K rows the layer (and its sharers) attend to."""

    def __init__(self, config: VerifierConfig, cache: str) -> None:
        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * dim)
        self.wk = Linear(config.hidden_size, dim)
        self.k_norm = LayerNorm(dim, LATENT_NORM_EPS)
        self.weights_proj = Linear(config.hidden_size, heads, dtype="float32")
        self.heads, self.dim = heads, dim
        self.interleaved = config.indexer_rope_interleave
        self.cache = cache

    def forward(self, x_ND: Tensor, q_latent_NA: Tensor, step: Step) -> SelectedRows:
        """Appends this step's index keys, then picks rows."""
        if step.segments is None:
            raise NetworkError(f"{self.path}: an indexer in a network that declares no segments")
        q_NJI = ops.reshape(self.wq_b(q_latent_NA), (0, self.heads, self.dim))
        q_NJI = step.rotary.turn(q_NJI, interleaved=self.interleaved)
        key_N1I = ops.reshape(self.k_norm(self.wk(x_ND)), (0, 1, self.dim))
        key_N1I = step.rotary.turn(key_N1I, interleaved=self.interleaved)
        keys_X1PI = append(self.cache, key_N1I, step.plan)
        weight_NJ = self.weights_proj(x_ND) * (self.heads**-0.5 * self.dim**-0.5)
        return select_rows(q_NJI, weight_NJ, keys_X1PI, step, step.segments)


def select_rows(q_NJI: Tensor, weight_NJ: Tensor, keys_X1PI: Tensor, step: Step, segments: Segments) -> SelectedRows:
    """`index_topk` of the step's rows: of all segments at once, or tile by tile."""

    def topk(q_NJI: Tensor, weight_NJ: Tensor, segments: Segments, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        tables = (segments.page_table_GM, segments.rows_GS, segments.row_slot_N2)
        return index_topk.native(
            q_NJI, weight_NJ, keys_X1PI, *tables, positions_N, k=step.index_topk, at_once=step.index_heads
        )

    if step.index_tiles == 1:
        return SelectedRows(*topk(q_NJI, weight_NJ, segments, step.positions_N))
    selected = [
        topk(ops.gather(q_NJI, tile.rows_Z), ops.gather(weight_NJ, tile.rows_Z), tile.segments, tile.positions_Z)
        for tile in segment_tiles(step, segments)
    ]
    segment_N, place_N = ops.column(segments.row_slot_N2, 0), ops.column(segments.row_slot_N2, 1)
    slot_N = segment_N * segments.size() + place_N
    return SelectedRows(*(ops.gather(ops.concat(parts, 0), slot_N) for parts in zip(*selected, strict=True)))


class LatentAttention(Module):
    """Absorbed MLA: queries move into the latent space, so only latents are cached and read."""

    def __init__(self, config: VerifierConfig, indexer: bool, latent_cache: str, index_cache: str) -> None:
        heads, rank = config.num_attention_heads, config.q_lora_rank
        self.q_a_proj = Linear(config.hidden_size, rank)
        self.q_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS)
        self.q_b_proj = Linear(rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.latent_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, LATENT_NORM_EPS)
        # kv_b_proj, split per head by the converter: keys are absorbed into the query, values into the output.
        self.w_uk = Weight(heads, config.qk_nope_head_dim, config.kv_lora_rank)
        self.w_uv = Weight(heads, config.kv_lora_rank, config.v_head_dim)
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size)
        self.indexer = Indexer(config, index_cache) if indexer else None
        self.config = config
        self.cache = latent_cache

    def forward(self, x_ND: Tensor, step: Step, selected: SelectedRows | None) -> tuple[Tensor, SelectedRows]:
        """x [N, D] -> ([N, D] of the rank's heads, the rows attended to). selected: the rows that a layer without
        indexer reuses."""
        config = self.config
        q_latent_NA = self.q_a_layernorm(self.q_a_proj(x_ND))
        selected = self.indexer(x_ND, q_latent_NA, step) if self.indexer else selected
        if selected is None:
            raise NetworkError(f"{self.path}: no layer before one without an indexer has selected rows")
        latents_X1PL = append(self.cache, self._latent(x_ND, step), step.plan)
        scale, value_start = config.softmax_scale, config.qk_rope_head_dim

        def attend(q_NHL: Tensor, rows_NK: Tensor, visible_NK: Tensor) -> Tensor:
            return sparse_mla.native(q_NHL, latents_X1PL, rows_NK, visible_NK, scale=scale, value_start=value_start)

        q_NHL = self._query(q_latent_NA, step)
        out_NHC = in_tiles(attend, step.attention_tiles, q_NHL, selected.rows_NK, selected.visible_NK)
        value_HNV = ops.matmul(ops.transpose(out_NHC, (1, 0, 2)), self.w_uv.tensor)
        value_NF = ops.reshape(ops.transpose(value_HNV, (1, 0, 2)), (-1, self._heads() * config.v_head_dim))
        return self.o_proj(value_NF), selected

    def _heads(self) -> int:
        """Heads of this rank."""
        return self.w_uk.tensor.shape[0]

    def _query(self, q_latent_NA: Tensor, step: Step) -> Tensor:
        """[N, H, L]: the rotary part, beside the nope part moved into the latent space."""
        config = self.config
        nope, rotary = config.qk_nope_head_dim, config.qk_rope_head_dim
        q_NHF = ops.reshape(self.q_b_proj(q_latent_NA), (0, self._heads(), nope + rotary))
        nope_HNF = ops.transpose(ops.narrow(q_NHF, 2, 0, nope), (1, 0, 2))
        absorbed_NHC = ops.transpose(ops.matmul(nope_HNF, self.w_uk.tensor), (1, 0, 2))
        q_NHL = ops.concat([ops.narrow(q_NHF, 2, nope, rotary), absorbed_NHC], 2)
        return step.rotary.turn(q_NHL, interleaved=config.rope_interleave)

    def _latent(self, x_ND: Tensor, step: Step) -> Tensor:
        """[N, 1, L]: the row to cache."""
        config = self.config
        compressed, rotary = config.kv_lora_rank, config.qk_rope_head_dim
        row_NF = self.kv_a_proj_with_mqa(x_ND)
        kv_NC = self.kv_a_layernorm(ops.narrow(row_NF, 1, 0, compressed))
        row_NL = ops.concat([ops.narrow(row_NF, 1, compressed, rotary), kv_NC], 1)
        row_N1L = ops.reshape(row_NL, (0, 1, rotary + compressed))
        return step.rotary.turn(row_N1L, interleaved=config.rope_interleave)
