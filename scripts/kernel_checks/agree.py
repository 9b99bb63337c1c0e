"""Whether what an op's plugins gave is what its reference gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from glmspec.plugins.spec import Op


def disagreement(
    op: Op,
    outputs: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    *,
    compute: str = "float32",
    share: float = 0.0,
) -> str:
    """The first output that differs, and how; empty when none does. Whole numbers must be equal, others lie within the
    op's tolerance of the largest. compute: dtype of the inputs; results in float32 of coarser ones differ as those do.
    share: of the entries of the first dimension (rounded up) that may have other whole numbers; what they hold besides
    is not compared, as a walk that takes another token goes on from there."""
    if len(outputs) != len(expected):
        return f"{len(outputs)} outputs, expected {len(expected)}"
    if share:
        outputs, expected = _without_others(outputs, expected, share)
    for name, mine, theirs in zip(_names(op, len(expected)), outputs, expected, strict=True):
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return f"{name}: {mine.dtype}{list(mine.shape)}, expected {theirs.dtype}{list(theirs.shape)}"
        if theirs.dtype.is_floating_point:
            own = str(theirs.dtype).removeprefix("torch.")
            difference = _floats(mine, theirs, max(op.tolerance[own], op.tolerance.get(compute, 0.0)))
        else:
            difference = _whole(mine, theirs)
        if difference:
            return f"{name}: {difference}"
    return ""


def _names(op: Op, count: int) -> list[str]:
    """Some outputs are there in some uses only."""
    names = list(op.outputs)
    return names + [f"output {at}" for at in range(len(names), count)] if count > len(names) else names[:count]


def _without_others(
    outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], share: float
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Both without the entries whose whole numbers differ, where those are few; as they are where not."""
    pairs = list(zip(outputs, expected, strict=True))
    if any(mine.shape != theirs.shape or len(theirs) != len(expected[0]) for mine, theirs in pairs):
        return outputs, expected
    others = [(mine != theirs).flatten(1).any(1) if theirs.ndim > 1 else mine != theirs
              for mine, theirs in pairs if not theirs.dtype.is_floating_point]  # fmt: skip
    kept = ~torch.stack(others).any(0) if others else torch.ones(len(expected[0]), dtype=torch.bool)
    lost = len(kept) - int(kept.sum())
    if not 0 < lost <= math.ceil(share * len(kept)) or lost == len(kept):
        return outputs, expected
    return [x[kept] for x in outputs], [x[kept] for x in expected]


def _whole(mine: torch.Tensor, theirs: torch.Tensor) -> str:
    differ = (mine != theirs).nonzero()
    if not len(differ):
        return ""
    at = tuple(differ[0].tolist())
    return f"{len(differ)} of {theirs.numel()} differ, the first at {list(at)}: {mine[at]}, expected {theirs[at]}"


def _floats(mine: torch.Tensor, theirs: torch.Tensor, allowed: float) -> str:
    mine, theirs = mine.float(), theirs.float()
    finite = theirs.isfinite()
    if not torch.equal(mine[~finite].nan_to_num(7.0), theirs[~finite].nan_to_num(7.0)):
        return "other infinities or NaNs"
    if not bool(finite.any()):
        return ""
    bound = allowed * theirs[finite].abs().max()
    worst = (mine[finite] - theirs[finite]).abs().max()  # NaN is no number within the bound
    return "" if bool(worst <= bound) else f"off by {worst:.3g}, allowed {bound:.3g}"
