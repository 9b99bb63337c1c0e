"""What kernels must move and compute: the least bytes and flops of ops, those of their plugins' launches.

Rules are functions of sizes by symbol (see `glmspec.plugins.spec`); `t` is the size of a number in the compute dtype,
`z` of a cached one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from glmspec.core.dtypes import DTYPES
from glmspec.plugins.spec import Op, Rule, cdiv, value
from glmspec.plugins.variants import Launch


@dataclass(frozen=True)
class Cost:
    """bytes: moved. flops: computed."""

    bytes: Rule
    flops: Rule = 0


def op_cost(op: Op, sizes: Mapping[str, int], compute: str) -> tuple[int, int]:
    """The least bytes and flops of an op at these sizes, however it is done."""
    return _of(OP_COSTS[op.name], {**sizes, "t": DTYPES[compute].bytes})


def launch_cost(launch: Launch) -> tuple[int, int]:
    """Bytes and flops of one launch whose sizes are all known."""
    return _of(
        PLUGIN_COSTS[launch.plugin.name.replace("_reduced", "").removesuffix("_long")],
        {**launch.symbols, "t": DTYPES[launch.compute].bytes},
    )


def _of(cost: Cost, symbols: Mapping[str, int]) -> tuple[int, int]:
    return value(cost.bytes, symbols), value(cost.flops, symbols)


def hit(pairs: int, experts: int) -> float:
    """How many experts so many pairs of tokens and experts reach, if they are spread evenly."""
    return experts * (1 - (1 - 1 / experts) ** pairs)


def _experts(bytes_of: Callable[[int], float]) -> Cost:
    """Of an op of experts whose weights take so many bytes a number, given those of the compute dtype."""
    return Cost(
        lambda t, N, A, E, D, G: int(hit(N * A, E) * 3 * G * D * bytes_of(t)) + 2 * t * N * D + 8 * N * A,
        lambda N, A, D, G: 6 * N * A * D * G,
    )


def _product(bytes_of: Callable[[int], float], rows: int, hidden: Callable[[int], float]) -> Cost:
    """Of one product of experts. rows: of a weight, in widths of an expert. hidden: bytes of a number between both."""
    return Cost(
        lambda t, P, E, D, G: int(hit(P, E) * rows * G * D * bytes_of(t) + P * (t * D + hidden(t) * G)),
        lambda P, D, G: 2 * rows * P * D * G,
    )


OP_COSTS: dict[str, Cost] = {
    "accept": Cost(lambda B, Q: 4 * (4 * B * Q + 2 * B)),
    "argmax": Cost(lambda t, N, V: t * N * V + 4 * N),
    "block_attention": Cost(
        lambda t, B, J, W, R, D, H: 2 * t * B * J * (W + R) * D + 2 * t * B * R * H * D,
        lambda B, R, H, W, D: 4 * B * R * H * (W + R) * D,
    ),
    "block_product": Cost(lambda t, N, C, R: R * C + (1 + t) * N * C + t * N * R, lambda N, C, R: 2 * N * C * R),
    "grouped_conv": Cost(
        lambda t, S, B, R, D, T, U: t * (S * B * R * D + T * D + B * R * T * U), lambda B, R, T, D: 3 * B * R * T * D
    ),
    "index_topk": Cost(
        lambda t, G, M, P, N, H, D, S, K: t * (G * M * P + N * H) * D + 4 * (N * H + G * M + G * S + 3 * N + 2 * N * K),
        lambda N, M, P, H, D: 2 * N * M * P * H * D,
    ),
    "kv_append": Cost(lambda t, z, L, J, D: (t + z) * L * J * D + 4 * L),
    "lowest_topk": Cost(lambda N, L, K: 4 * N * (L + K)),
    "markov_walk": Cost(
        lambda J, t, V, A, B: J * t * (V * A + B * V + 2 * B * A) + B * J * 8, lambda B, J, V, A: 2 * B * J * V * A
    ),
    "moe": _experts(lambda t: t),
    "moe_fp8": _experts(lambda t: 1),
    "moe_fp8_block": _experts(lambda t: 1),
    "moe_nvfp4": _experts(lambda t: 9 / 16),
    "quantize_blocks": Cost(lambda t, N, D: (t + 1) * N * D + 4 * N * cdiv(D, 128)),
    "reject": Cost(lambda t, R, V, Z, K: t * R * V + 4 * Z * K + 60 * R, lambda R, V: 4 * R * V),
    "sample": Cost(lambda t, R, V: t * R * V + 24 * R, lambda R, V: 4 * R * V),
    "selector_walk": Cost(
        lambda t, B, J, V, A, K: t * B * J * (V + 2 * A + K * A + 1) + 8 * B * J, lambda B, J, K, A: 2 * B * J * K * A
    ),
    "sparse_mla": Cost(
        lambda N, K, z, D, t, H, V: N * K * (8 + z * D) + t * N * H * (D + V),
        lambda N, H, K, D, V: 2 * N * H * K * (D + V),
    ),
}
PLUGIN_COSTS: dict[str, Cost] = {  # a reduced vocabulary costs a launch no more
    "accept": Cost(lambda B, Q: 4 * (4 * B * Q + 2 * B)),
    "argmax_split": Cost(lambda t, N, V, Z: t * N * V + 8 * N * Z),
    "argmax_merge": Cost(lambda N, Z: 8 * N * Z + 4 * N),
    "block_attention_split": Cost(
        lambda t, B, J, W, R, D, H, S: 2 * t * B * J * (W + R) * D + t * B * R * H * D + 4 * B * S * R * H * (D + 2),
        lambda B, R, H, W, D: 4 * B * R * H * (W + R) * D,
    ),
    "block_attention_split_ring": Cost(
        lambda t, B, J, W, R, D, H, S: 2 * t * B * J * (W + R) * D + t * B * R * H * D + 4 * B * S * R * H * (D + 2),
        lambda B, R, H, W, D: 4 * B * R * H * (W + R) * D,
    ),
    "attention_merge": Cost(
        lambda N, S, H, V, t: 4 * N * S * H * (V + 2) + t * N * H * V, lambda N, S, H, V: 2 * N * S * H * V
    ),
    "block_product": Cost(lambda t, N, C, R: R * C + N * C + t * N * R, lambda N, C, R: 2 * N * C * R),
    "block_product_split": Cost(lambda N, C, R, S: R * C + N * C + 4 * S * N * R, lambda N, C, R: 2 * N * C * R),
    "block_product_sum": Cost(lambda t, N, R, S: 4 * S * N * R + t * N * R),
    "grouped_conv": Cost(
        lambda t, B, R, D, T, U: t * (2 * B * R * D + T * D + B * R * T * U), lambda B, R, T, D: 3 * B * R * T * D
    ),
    "grouped_conv_added": Cost(
        lambda t, B, R, D, T, U: t * (3 * B * R * D + T * D + B * R * T * U), lambda B, R, T, D: 3 * B * R * T * D
    ),
    "experts_route": Cost(lambda P, E: 8 * P + 8 * E),
    "experts_sum": Cost(lambda t, P, D, N: t * (P + N) * D + 4 * P),
    "experts_quantize_fp8": Cost(lambda t, N, D: (t + 1) * N * D),
    "experts_gate_up": _product(lambda t: t, 2, lambda t: t),
    "experts_gate_up_w8": _product(lambda t: 1, 2, lambda t: t),
    "experts_gate_up_fp8": _product(lambda t: 1, 2, lambda t: 1),
    "experts_gate_up_blocks": _product(lambda t: 1, 2, lambda t: 1),
    "experts_nvfp4_quantize": Cost(lambda t, N, D: t * N * D + 9 * N * D // 16),
    "experts_nvfp4_gate_up": _product(lambda t: 9 / 16, 2, lambda t: 9 / 16),
    "experts_nvfp4_gate_up_16": _product(lambda t: 9 / 16, 2, lambda t: t),
    "experts_nvfp4_down": _product(lambda t: 9 / 16, 1, lambda t: 9 / 16),
    "experts_nvfp4_down_16": _product(lambda t: 9 / 16, 1, lambda t: t),
    "experts_down": _product(lambda t: t, 1, lambda t: t),
    "experts_down_w8": _product(lambda t: 1, 1, lambda t: t),
    "experts_down_fp8": _product(lambda t: 1, 1, lambda t: 1),
    "experts_down_blocks": _product(lambda t: 1, 1, lambda t: 1),
    "index_scores": Cost(
        lambda t, G, M, P, N, H, D, S: t * (G * M * P + N * H) * D + 4 * (N * H + N * M * P + G * M + G * S + 3 * N),
        lambda N, M, P, H, D: 2 * N * M * P * H * D,
    ),
    "index_split": Cost(lambda N, M, P, Z, K: 4 * N * (M * P + 2 * Z * K + Z)),
    "topk_merge": Cost(lambda N, Z, K, Y: 4 * N * (Z * K + Z + 3 * Y * K + Y)),
    "index_rows": Cost(lambda N, Y, K: 4 * N * (Y * K + Y + 3 * K)),
    "kv_append": Cost(lambda t, L, J, D: 2 * t * L * J * D + 4 * L),
    "kv_append_fp8": Cost(lambda t, L, J, D: (t + 1) * L * J * D + 4 * L),
    "topk_short": Cost(lambda N, L, K: 4 * N * (L + K)),
    "topk_split": Cost(lambda N, M, P, Z, K: 4 * N * (M * P + 2 * Z * K + Z)),
    "topk_last": Cost(lambda N, Y, K: 4 * N * (Y * K + Y + 2 * K)),
    "markov_begin": Cost(lambda B, t, A: B * (4 + 3 * t * A)),
    "markov_gated": Cost(lambda t, B, A: t * (3 * B * A + A * A), lambda B, A: 2 * B * A * A),
    "markov_rnn": Cost(lambda t, B, A, F, H: t * (4 * B * A + B * F + F * H), lambda B, F, H: 2 * B * F * H),
    "markov_step": Cost(lambda t, V, A, B, S: t * (V * A + B * A + B * V) + 12 * B * S, lambda B, V, A: 2 * B * V * A),
    "markov_step_drawn": Cost(
        lambda t, V, A, B, S: t * (V * A + B * A + 2 * B * V) + 16 * B * S, lambda B, V, A: 2 * B * V * A
    ),
    "markov_finish": Cost(lambda B, S, t, A, J, SPLIT: B * (12 * S + t * A * (2 * J + 1) + 2 * J * (8 + t))),
    "markov_finish_drawn": Cost(
        lambda B, S, t, A, J, SPLIT: B * (12 * S + t * A * (2 * J + 1) + 2 * J * (8 + t) + (4 * S + t * SPLIT + 16 * J))
    ),
    "markov_law": Cost(lambda t, B, J, V: (t + 4) * B * J * V),
    "quantize_blocks": Cost(lambda t, N, D, Z: (t + 1) * N * D + 4 * N * Z),
    "least_logit": Cost(
        lambda R: 20 * R
    ),  # narrowed rows: their logits too, six times, of which five are in the L2 cache
    "row_stats": Cost(lambda t, R, V, S: t * R * V + 12 * R * S, lambda R, V: 4 * R * V),
    "chances": Cost(lambda B, Q, S: 12 * B * Q * S + 52 * B * Q),
    "masses": Cost(  # every draft's, as block verification needs them
        lambda B, Q, V, t, S: B * (Q - 1) * V * (t + 4) + 4 * B * Q * S, lambda B, Q, V: 6 * B * (Q - 1) * V
    ),
    "resample": Cost(lambda B, t, SPLIT, Q, S, K: B * (t * SPLIT + 12 * Q * S + Q * K * (t + 8) + 40 * Q)),
    "resample_whole": Cost(lambda B, t, SPLIT, Q, S: B * ((t + 4) * SPLIT + 16 * Q * S + 40 * Q)),
    "draw_row": Cost(lambda R, t, SPLIT, S: R * (t * SPLIT + 12 * S + 16)),
    "selector_maxima": Cost(lambda t, N, V, G: t * N * (V + G)),
    "selector_candidates": Cost(
        lambda N, t, G, K, FAN, WIDTH: N * (t * (G + K * FAN + K * WIDTH) + K * (4 + t)),
        lambda N, TOP, KP, FAN, WIDTH, PART: (
            N * (TOP * TOP + KP * KP * (FAN * FAN + (WIDTH // PART) * (WIDTH // PART) + PART * PART))
        ),
    ),
    "selector_walk": Cost(
        lambda B, J, K, t, A: B * J * (K * (6 + t * (A + 1)) + 2 * t * A + 8 + t), lambda B, J, K, A: 2 * B * J * K * A
    ),
    "selector_walk_drawn": Cost(
        lambda B, J, K, t, A: B * J * (K * (18 + t * (A + 1)) + 2 * t * A + 8 + t), lambda B, J, K, A: 2 * B * J * K * A
    ),
    "sparse_mla_split": Cost(
        lambda N, K, t, D, H, S, V: N * K * (8 + t * D) + t * N * H * D + 4 * N * S * H * (V + 2),
        lambda N, H, K, D, V: 2 * N * H * K * (D + V),
    ),
    "sparse_mla_split_fp8": Cost(
        lambda N, K, D, t, H, S, V: N * K * (8 + 1 * D) + t * N * H * D + 4 * N * S * H * (V + 2),
        lambda N, H, K, D, V: 2 * N * H * K * (D + V),
    ),
}
SMALL: dict[str, Mapping[str, Rule]] = {  # sizes over an op's own, that the interpreter can do in seconds
    "argmax": {"V": 9000},
    "block_attention": {"H": 4, "J": 2, "D": 32, "P": 16, "M": 8},
    "block_product": {"N": 5, "C": 300, "R": 200},
    "grouped_conv": {"D": 512, "U": 32},
    "index_topk": {"H": 4, "D": 32, "M": 40, "N": lambda batch: 3 * batch, "S": 3},
    "kv_append": {"X": lambda batch: 1 + 8 * batch, "P": 16},
    "lowest_topk": {"N": 2},
    "markov_walk": {"V": 500, "C": 500, "A": 32},
    "moe": {"N": 3, "A": 2, "E": 6, "D": 128, "G": 64},
    "moe_fp8": {"N": 3, "A": 2, "E": 6, "D": 128, "G": 64},
    "moe_nvfp4": {"N": 3, "A": 2, "E": 6, "D": 128, "G": 64},
    "moe_fp8_block": {"N": 3, "A": 2, "E": 6, "D": 192, "G": 144},
    "quantize_blocks": {"N": 4},
    "reject": {"V": 9000},
    "sample": {"V": 9000},
    "selector_walk": {"V": 2000, "C": 2000, "A": 32},
    "sparse_mla": {"H": 4, "D": 96, "V": 32, "K": 64, "P": 16, "X": lambda batch: 1 + 8 * batch},
}
