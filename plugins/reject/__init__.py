"""Speculative rejection sampling: drafts drawn from q become tokens drawn from p, whatever q is.

Two ways to verify a block of drafts x_1 .. x_n, with p_i and q_i the probs at the place of x_i:

    standard   x_i stands, after all before it, with chance min(1, p_i(x_i) / q_i(x_i))
    block      c_i = min(c_{i-1} p_i(x_i) / q_i(x_i), 1), c_0 = 1; the largest i with u_i < h_i stands, where
               h_i = m_i / (m_i + 1 - c_i), m_i = sum of max(c_i p_{i+1} - q_{i+1}, 0), and h_n = c_n
               (Sun et al., Block Verification Accelerates Speculative Decoding, 2024)

After t accepted drafts one token is drawn from max(w p_{t+1} - q_{t+1}, 0), w = 1 (standard) or c_t (block), or from
p_{t+1} when t = n. q is given by candidates: K tokens a draft and their chances, all others 0; or whole.

The probs p are those of `target_probs`, from logits and four settings a row.

Legend: R rows, V vocabulary, B blocks, Q most rows of a block (the anchor's and its drafts'), Z rows of q, K
candidates, S splits of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glmspec.network import ops
from glmspec.network.graph import Tensor
from glmspec.plugins import accept, draw, sample, target_probs
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, NoPlugin, Op, Plugin, Runs, Use, cdiv, inputs_of, pow2

_TINY = 2.0**-126  # the least normal float32


def reference(
    logits_RV: Compute,
    temperature_R: Float32,
    top_k_R: Int32,
    top_p_R: Float32,
    min_p_R: Float32,
    draft_R: Int32,
    q_row_R: Int32,
    row_BQ: Int32,
    count_B: Int32,
    accept_R: Float32,
    last_B: Float32,
    block_B: Int32,
    q_ZK: Float32,
    q_ids_ZK: Int32 | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts accepted, int32 [B], and tokens, int32 [B, Q], of which accepted + 1 are the block's.

    logits, temperature, top_k, top_p, min_p: the probs after each row, see `target_probs`. The others: see
    `accepted`."""
    p_RV = target_probs.reference(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return accepted(p_RV, draft_R, q_row_R, row_BQ, count_B, accept_R, last_B, block_B, q_ZK, q_ids_ZK)


def accepted(
    p_RV: torch.Tensor,
    draft_R: torch.Tensor,
    q_row_R: torch.Tensor,
    row_BQ: torch.Tensor,
    count_B: torch.Tensor,
    accept_R: torch.Tensor,
    last_B: torch.Tensor,
    block_B: torch.Tensor,
    q_ZK: torch.Tensor,
    q_ids_ZK: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reference` gives, from probs p.

    p: float32 [R, V], the probs after each row. draft: int32, the draft after each row. q_row: where its q is. row: the
    rows of each block; beyond its drafts any of its own. count: its drafts. accept, last: uniforms float32 [0, 1) for
    every draft and for every block's last token. block: int32, 1 verifies as a block. q: float32; q_ids: int32, token
    ids of its columns, all different (None: all tokens in order)."""
    row_BQ = row_BQ.long()
    p_BQV, draft_BQ = p_RV[row_BQ], draft_R[row_BQ].long()
    q_BQK, q_row_BQ = q_ZK[q_row_R[row_BQ].long()], q_row_R[row_BQ].long()
    q_BQV = q_BQK
    if q_ids_ZK is not None:
        q_BQV = torch.zeros_like(p_BQV).scatter_(2, q_ids_ZK[q_row_BQ].long(), q_BQK)
    here_BQ = torch.arange(row_BQ.shape[1]) < count_B.unsqueeze(1)  # a draft follows
    q_BQV = q_BQV * here_BQ.unsqueeze(2)
    px_BQ, qx_BQ = (probs.gather(2, draft_BQ.unsqueeze(2)).squeeze(2) for probs in (p_BQV, q_BQV))
    ratio_BQ = px_BQ / qx_BQ.clamp(min=_TINY)
    u_BQ = accept_R[row_BQ]
    accepted_B = ((u_BQ < ratio_BQ) & here_BQ).int().cumprod(1).sum(1)
    weight_B = torch.ones_like(last_B)
    if bool(block_B.any()):
        tau_B, chance_B = _block(p_BQV, q_BQV, ratio_BQ, u_BQ, count_B)
        accepted_B = torch.where(block_B > 0, tau_B, accepted_B)
        weight_B = torch.where(block_B > 0, chance_B, weight_B)
    at = torch.arange(len(row_BQ)), accepted_B
    rest_BV = (weight_B.unsqueeze(1) * p_BQV[at] - q_BQV[at]).clamp(min=0)
    whole_B1 = (accepted_B >= count_B).unsqueeze(1) | (rest_BV.sum(1, keepdim=True) <= 0)
    token_B = draw.reference(torch.where(whole_B1, p_BQV[at], rest_BV), last_B)
    tokens_BQ = draft_R[row_BQ]
    tokens_BQ[at] = token_B
    return accepted_B.to(torch.int32), tokens_BQ.to(torch.int32)


def _block(p_BQV, q_BQV, ratio_BQ, u_BQ, count_B) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted drafts, and c there. What column j tells is whether j drafts may stand."""
    chance_B = torch.ones_like(ratio_BQ[:, 0])
    tau_B, tau_chance_B = torch.zeros_like(count_B).long(), chance_B
    for j in range(1, ratio_BQ.shape[1]):
        chance_B = (chance_B * ratio_BQ[:, j - 1]).clamp(max=1)
        mass_B = (chance_B[:, None] * p_BQV[:, j] - q_BQV[:, j]).clamp(min=0).sum(1)
        stands_B = torch.where(count_B == j, chance_B, mass_B / (mass_B + 1 - chance_B).clamp(min=_TINY))
        taken_B = (u_BQ[:, j - 1] < stands_B) & (j <= count_B)
        tau_B, tau_chance_B = torch.where(taken_B, j, tau_B), torch.where(taken_B, chance_B, tau_chance_B)
    return tau_B, tau_chance_B


@lowers("reject")
def native(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    draft_R: Tensor,
    q_row_R: Tensor,
    row_BQ: Tensor,
    count_B: Tensor,
    accept_R: Tensor,
    last_B: Tensor,
    block_B: Tensor,
    q_ZK: Tensor,
    q_ids_ZK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Drafts accepted, int32 [B], and tokens, int32 [B, Q]: see `reference`."""
    p_RV = target_probs.native(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    all_probs = _BothProbs(p_RV, q_ZK, q_ids_ZK, q_row_R)
    return _native_accepted(all_probs, draft_R, row_BQ, count_B, accept_R, last_B, block_B)


def _native_accepted(
    all_probs: _BothProbs,
    draft_R: Tensor,
    row_BQ: Tensor,
    count_B: Tensor,
    accept_R: Tensor,
    last_B: Tensor,
    block_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `accepted`."""
    rows = row_BQ.shape[1]
    ratio_BQ, u_BQ = ops.gather(all_probs.ratio(draft_R), row_BQ), ops.gather(accept_R, row_BQ)
    here_BQ = accept.verified(count_B, rows)
    standard_B = accept.leading((ratio_BQ > u_BQ) & here_BQ)
    tau_B, chance_B = _native_block(all_probs, row_BQ, count_B, ratio_BQ, u_BQ)
    block_B = block_B > 0
    accepted_B = ops.select(block_B, tau_B, standard_B)
    weight_B1 = ops.reshape(ops.select(block_B, chance_B, 1.0), (0, 1))
    row_B1 = ops.gather_elements(row_BQ, ops.reshape(accepted_B, (0, 1)), 1)
    row_B = ops.reshape(row_B1, (-1,))
    p_BV, rest_BV = all_probs.p(row_B), ops.relu(weight_B1 * all_probs.p(row_B) - all_probs.q(row_B))
    some_B1 = ops.reduce(rest_BV, "SUM", 1) > 0.0
    rest_B1 = some_B1 & ops.reshape(count_B > accepted_B, (0, 1))
    token_B = draw.native(ops.select(rest_B1, rest_BV, p_BV), last_B)
    column_1Q = row_BQ.net.constant([list(range(rows))], "int32")
    last_BQ = column_1Q.equals(ops.reshape(accepted_B, (0, 1)))
    tokens_BQ = ops.select(last_BQ, ops.reshape(token_B, (0, 1)), ops.gather(draft_R, row_BQ))
    return accepted_B, tokens_BQ


class _BothProbs:
    """p and q of rows, dense."""

    def __init__(self, p_RV: Tensor, q_ZK: Tensor, q_ids_ZK: Tensor | None, q_row_R: Tensor) -> None:
        self.p_RV, self.q_ZK, self.q_ids_ZK, self.q_row_R = p_RV, q_ZK, q_ids_ZK, q_row_R

    def p(self, row_B: Tensor) -> Tensor:
        """[B, V]."""
        return ops.gather(self.p_RV, row_B)

    def q(self, row_B: Tensor) -> Tensor:
        """[B, V]."""
        q_row_B = ops.gather(self.q_row_R, row_B)
        q_BK = ops.gather(self.q_ZK, q_row_B)
        if self.q_ids_ZK is None:
            return q_BK
        return ops.scatter_elements(self.p(row_B) * 0.0, ops.gather(self.q_ids_ZK, q_row_B), q_BK, 1)

    def ratio(self, draft_R: Tensor) -> Tensor:
        """p / q of every row's draft, [R]."""
        draft_R1 = ops.reshape(draft_R, (0, 1))
        p_R1, q_RK = ops.gather_elements(self.p_RV, draft_R1, 1), ops.gather(self.q_ZK, self.q_row_R)
        if self.q_ids_ZK is None:
            q_R1 = ops.gather_elements(q_RK, draft_R1, 1)
        else:
            mine_RK = ops.gather(self.q_ids_ZK, self.q_row_R).equals(draft_R1)
            q_R1 = ops.reduce(ops.select(mine_RK, q_RK, 0.0), "SUM", 1)
        return ops.reshape(p_R1 / ops.maximum(q_R1, _TINY), (-1,))


def _native_block(
    all_probs: _BothProbs, row_BQ: Tensor, count_B: Tensor, ratio_BQ: Tensor, u_BQ: Tensor
) -> tuple[Tensor, Tensor]:
    """See `_block`."""
    columns: Sequence[int] = range(row_BQ.shape[1])
    row, ratio, u = ([ops.column(x_BQ, j) for j in columns] for x_BQ in (row_BQ, ratio_BQ, u_BQ))
    chance_B = ratio[0] * 0.0 + 1.0
    tau_B, tau_chance_B = count_B * 0, chance_B
    for j in columns[1:]:
        chance_B = ops.minimum(chance_B * ratio[j - 1], 1.0)
        p_BV, q_BV = all_probs.p(row[j]), all_probs.q(row[j])
        rest_BV = ops.relu(ops.reshape(chance_B, (0, 1)) * p_BV - q_BV)
        mass_B = ops.reduce(rest_BV, "SUM", 1, keep=False)
        share_B = mass_B / ops.maximum(mass_B + 1.0 - chance_B, _TINY)
        stands_B = ops.select(count_B.equals(j), chance_B, share_B)
        taken_B = (stands_B > u[j - 1]) & (count_B > (j - 1))
        tau_B, tau_chance_B = ops.select(taken_B, j, tau_B), ops.select(taken_B, chance_B, tau_chance_B)
    return tau_B, tau_chance_B


def plugged(
    run: Runs,
    logits_RV,
    temperature_R,
    top_k_R,
    top_p_R,
    min_p_R,
    draft_R,
    q_row_R,
    row_BQ,
    count_B,
    accept_R,
    last_B,
    block_B,
    q_ZK,
    q_ids_ZK=None,
) -> tuple:
    """Three launches, or five where q is whole: see `reference`. Raises `NoPlugin`."""
    columns, candidates = run.shape(row_BQ)[1], run.shape(q_ZK)[1]
    if columns > MAX_ROWS:
        raise NoPlugin(f"reject: blocks of {columns} rows, expected at most {MAX_ROWS}")
    if q_ids_ZK is not None and candidates > MAX_CANDIDATES:
        raise NoPlugin(f"reject: {candidates} candidates, expected at most {MAX_CANDIDATES}")
    bound_R, *stats = sample.probs(run, logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    probs = (logits_RV, temperature_R, bound_R)
    blocks = (draft_R, q_row_R, row_BQ, count_B, accept_R)
    if q_ids_ZK is not None:
        return run(RESAMPLE, *probs, *stats, *blocks, last_B, block_B, q_ZK, q_ids_ZK)
    chances = run(CHANCES, *probs, *stats, *blocks, block_B, q_ZK)
    (mass_BQS,) = run(MASSES, *probs, q_row_R, row_BQ, q_ZK, *chances)
    return run(RESAMPLE_WHOLE, *probs, *stats, *blocks, last_B, block_B, q_ZK, mass_BQS)


MAX_ROWS, MAX_CANDIDATES = 16, 64  # of a block: more would spill
_BLOCKS = sample.PROBS | sample.STATS | inputs_of(reference, "draft_R", "q_row_R", "row_BQ", "count_B", "accept_R")
_LAST = inputs_of(reference, "last_B", "block_B", "q_ZK")
_CHANCES = {"weight_BQ": "float32", "largest_BQ": "float32", "total_BQ": "float32", "first_BQ": "int32"}
_OUTPUTS = {"accepted_B": "int32", "tokens_BQ": "int32"}
_PADDED = {"SP": lambda S: pow2(S), "QP": lambda Q: pow2(Q)}
CHANCES = Plugin(
    name="chances",
    op="reject",
    function="chances_kernel",
    inputs=_BLOCKS | inputs_of(reference, "block_B", "q_ZK"),
    outputs=_CHANCES,
    sizes=_PADDED,
    grid=("B",),
    tiles={"": {"WARPS": 4}},
)
MASSES = Plugin(
    name="masses",
    op="reject",
    function="masses_kernel",
    inputs=sample.PROBS | inputs_of(reference, "q_row_R", "row_BQ", "q_ZK") | _CHANCES,
    outputs={"mass_BQS": "float32"},
    sizes={"S": lambda V, SPLIT: cdiv(V, SPLIT)},
    grid=("S", "Q", "B"),
    tiles={"": {"SPLIT": sample.SPLIT, "WARPS": 8}},
)
_RESAMPLE: dict[str, Any] = dict(
    op="reject",
    function="resample_kernel",
    outputs=_OUTPUTS,
    grid=("B",),
    tiles={"": {"SPLIT": sample.SPLIT, "WARPS": 4}},
)
RESAMPLE = Plugin(
    name="resample",
    inputs=_BLOCKS | _LAST | inputs_of(reference, "q_ids_ZK"),
    sizes={**_PADDED, "KP": lambda K: pow2(K)},
    absent=("mass_BQS",),
    **_RESAMPLE,
)
RESAMPLE_WHOLE = Plugin(
    name="resample_whole",
    inputs=_BLOCKS | _LAST | {"mass_BQS": "float32"},
    sizes={**_PADDED, "KP": 1},
    absent=("q_ids_ZK",),
    **_RESAMPLE,
)
OP = Op(
    name="reject",
    outputs=_OUTPUTS,
    reference=reference,
    plugged=plugged,
    plugins=(sample.LEAST_LOGIT, sample.ROW_STATS, CHANCES, MASSES, RESAMPLE, RESAMPLE_WHOLE),
    real={"B": "batch", "Q": 9, "R": lambda batch: 9 * batch, "V": 154_880, "Z": lambda batch: 8 * batch, "K": "V"},
    uses={"": Use(optional=("q_ids_ZK",), sizes={"K": 16}), "whole": Use()},
    run_time="BRZ",
)
