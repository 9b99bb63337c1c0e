"""A token drawn for every row from its probs: logits, temperature, top-k, top-p, min-p and a uniform number to a token.

The probs are `target_probs`'s and the draw is `draw`'s.

`sample` and `reject` begin at the logits, so that no kernel writes p. One launch finds the least logit that stays of
every row (rows that nothing narrows end at once), one reads the logits once and leaves a maximum and a sum for each
split of the vocabulary, and what draws looks into one split. A residual of `reject` needs no pass where q has
candidates: p sums to one, so its mass is 1 less the candidates' shares. A dense q costs one more pass, over the columns
of its drafts.

Legend: R rows, V vocabulary, S splits of it.
"""

from __future__ import annotations

import torch

from glmspec.network.graph import Tensor
from glmspec.plugins import draw, target_probs
from glmspec.plugins.lowering import lowers
from glmspec.plugins.spec import Compute, Float32, Int32, NoPlugin, Op, Plugin, Runs, cdiv, inputs_of, pow2


def reference(
    logits_RV: Compute,
    temperature_R: Float32,
    top_k_R: Int32,
    top_p_R: Float32,
    min_p_R: Float32,
    u_R: Float32,
) -> torch.Tensor:
    """int32 [R]. temperature, top_p, min_p: float32 [R]; top_k: int32 [R], see `target_probs`. u: float32 in [0, 1)."""
    return draw.reference(target_probs.reference(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R), u_R)


@lowers("sample")
def native(
    logits_RV: Tensor, temperature_R: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor, u_R: Tensor
) -> Tensor:
    """int32 [R]: see `reference`."""
    return draw.native(target_probs.native(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R), u_R)


def plugged(run: Runs, logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, u_R) -> tuple:
    """Three launches: see `reference`. Raises `NoPlugin`."""
    stats = probs(run, logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return run(DRAW_ROW, logits_RV, temperature_R, *stats, u_R)


def probs(run: Runs, logits_RV, temperature_R, top_k_R, top_p_R, min_p_R) -> tuple:
    """Two launches, of which `reject` begins with too: the least logit that stays of every row, and the statistics of
    its splits. Raises `NoPlugin` for a vocabulary of more splits than a program may hold."""
    vocabulary = run.shape(logits_RV)[1]
    if vocabulary > MAX_SPLITS * SPLIT:
        raise NoPlugin(f"sample, reject: a vocabulary of {vocabulary}, expected at most {MAX_SPLITS * SPLIT}")
    (bound_R,) = run(LEAST_LOGIT, logits_RV, temperature_R, top_k_R, top_p_R, min_p_R)
    return bound_R, *run(ROW_STATS, logits_RV, temperature_R, bound_R)


SPLIT = 4096  # columns that one program reads at once: 16 bytes a load, four or eight loads a thread under way
MAX_SPLITS = 64
PROBS = inputs_of(target_probs.reference, "logits_RV", "temperature_R") | {"bound_R": "float32"}
STATS = {"largest_RS": "float32", "sum_RS": "float32", "first_RS": "int32"}
LEAST_LOGIT = Plugin(
    name="least_logit",
    op="sample",
    function="least_logit_kernel",
    inputs=inputs_of(target_probs.reference),
    outputs={"bound_R": "float32"},
    grid=("R",),
    tiles={"": {"BLOCK": 2048, "WARPS": 16}},
)
ROW_STATS = Plugin(
    name="row_stats",
    op="sample",
    function="row_stats_kernel",
    inputs=PROBS,
    outputs=STATS,
    sizes={"S": lambda V, SPLIT: cdiv(V, SPLIT)},
    grid=("S", "R"),
    tiles={"": {"SPLIT": SPLIT, "WARPS": 4}},
)
DRAW_ROW = Plugin(
    name="draw_row",
    op="sample",
    function="draw_row_kernel",
    inputs=PROBS | STATS | inputs_of(reference, "u_R"),
    outputs={"token_R": "int32"},
    sizes={"SP": lambda S: pow2(S)},
    grid=("R",),
    tiles={"": {"SPLIT": SPLIT, "WARPS": 4}},
)
OP = Op(
    name="sample",
    outputs={"token_R": "int32"},
    reference=reference,
    plugged=plugged,
    plugins=(LEAST_LOGIT, ROW_STATS, DRAW_ROW),
    real={"R": lambda batch: 9 * batch, "V": 154_880},
    run_time="R",
)
