"""Routed experts, what all their number formats share: which rows each expert has, and the sum over a token's experts.

A step has N * A pairs of a token and an expert that it picked. ROUTE sorts them by expert; the kernels of a format
(`experts_nvfp4`, `experts_fp8`) multiply tiles of one expert's rows, as `kernel.tile_of` tells, so that weights of
experts without tokens are not read (a launch has cdiv(P, TILE) + E programs along x, which is enough for any routing;
the surplus leaves at once); SUM adds a token's picks. An id outside 0 .. E-1 is another rank's expert, or a
pad's: such a pair is skipped, and adds nothing.

Legend: N tokens, A experts a token, P = N * A pairs, E experts of this rank, D hidden.
"""

from __future__ import annotations

from typing import Any

from glmspec.plugins.spec import Plugin, Runs, cdiv, pow2


def route(run: Runs, expert_NA, *, experts: int) -> tuple:
    """Ids int32 -> order_P, pairs n * A + a by expert, then in rising order, -1 behind the last that is not skipped;
    range_E2, an expert's first place in it and how many it has."""
    return run(ROUTE, expert_NA, experts=experts)


def summed(run: Runs, out_PD, expert_NA, *, experts: int) -> tuple:
    """The weighted results of pairs -> [N, D]: in float32, in the order of A. What a skipped pair holds is not read."""
    return run(SUM, out_PD, expert_NA, experts=experts)


_EXPERTS: dict[str, Any] = dict(op="experts", attributes={"experts": int})
ROUTE = Plugin(
    name="experts_route",
    function="route_kernel",
    inputs={"expert_NA": "int32"},
    outputs={"order_P": "int32", "range_E2": "int32"},
    sizes={"E": "experts", "P": lambda N, A: N * A},
    scalars=("P",),
    grid=("E",),
    tiles={"": {"CHUNK": 2048, "WARPS": 8}},
    **_EXPERTS,
)
SUM = Plugin(
    name="experts_sum",
    function="sum_kernel",
    inputs={"out_PD": "T", "expert_NA": "int32"},
    outputs={"out_ND": "T"},
    sizes={"E": "experts", "BLOCK": lambda D, TILE: min(TILE, pow2(D)), "ROWS": lambda TILE, BLOCK: TILE // BLOCK},
    scalars=("N",),
    grid=(lambda N, ROWS: cdiv(N, ROWS), lambda D, BLOCK: cdiv(D, BLOCK)),
    tiles={"": {"TILE": 1024, "WARPS": 4}},
    **_EXPERTS,
)
PLUGINS = (ROUTE, SUM)
