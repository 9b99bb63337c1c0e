"""Switches of TensorRT's compiler that networks on Blackwell need (`IBuilderConfig.build_route`, TensorRT 11.1 on).

Each is public: NVIDIA's own builders for TensorRT 11 set them, and why is said there or in reports. None has been tried
here. tensorrt_rtx has no such switches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_SMALLEST = 100  # compute capability of the GPUs they are for: SM100 and later


@dataclass(frozen=True)
class Switch:
    """One setting. after: for TensorRT versions above this one. why: what goes wrong without it."""

    text: str
    after: tuple[int, int]
    why: str


SWITCHES = (
    Switch("-peep:match_dual_gemm=off", (10, 99), "gate and up as FP8 products of one input do not compile"),
    Switch("-kgen:codegen:cuda_tile=0", (11, 0), "NaN for blocks of zeros that are quantized"),
    Switch("-mlir:collective:fp4=off", (10, 99), "wrong sums over ranks"),
)


def set_build_route(config: Any, compute_capability: str, version: str) -> str:
    """Set those that this TensorRT has, for this GPU; what was set. config: a TensorRT builder's."""
    if not hasattr(config, "build_route") or int(compute_capability.removeprefix("SM")) < _SMALLEST:
        return ""
    major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
    known = getattr(config, "all_build_routes", None)  # those that a public wheel lets one set, as text
    chosen = [
        switch.text
        for switch in SWITCHES
        if (major, minor) > switch.after and (known is None or switch.text.split("=")[0] in str(known))
    ]
    if chosen:
        config.build_route = " ".join(chosen)
    return " ".join(chosen)
