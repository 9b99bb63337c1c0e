"""NVFP4 in torch operations, for a GPU: the same bytes as `quantize.py`, which is for CPUs.

The wider a GPU's memory is, the less this costs; over a slow disk it changes nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from glmspec.core.errors import MissingCapability
from glmspec.network.formats import FP4_MAX, FP8_MAX, GROUP

_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring codes; at the odd ones a tie goes up


def require(device: str) -> None:
    """Raise `MissingCapability` when this machine lacks the device."""
    if device != "cpu" and not torch.cuda.is_available():
        raise MissingCapability(f"--device {device}: this machine has no CUDA GPU that torch can use.")


def to_nvfp4(values: torch.Tensor, scale_2: np.float32, device: str) -> tuple[np.ndarray, np.ndarray]:
    """float32 or bfloat16 [R, C] -> packed codes uint8 [R, C/2] and group scales e4m3 [R, C/16]."""
    groups = values.to(device).float().unflatten(1, (-1, GROUP))
    second = torch.tensor(scale_2, device=device)
    scale = groups.abs().amax(-1) / (FP4_MAX * second)
    scale = torch.where(scale == 0, 1.0, scale).clamp(2**-9, FP8_MAX).to(torch.float8_e4m3fn)
    ratio = groups / (scale.float() * second).unsqueeze(-1)
    size = ratio.abs()
    code = sum((size >= bound if at % 2 else size > bound).to(torch.uint8) for at, bound in enumerate(_BOUNDS))
    code = (code | ((ratio < 0).to(torch.uint8) << 3)).flatten(1)
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    return packed.cpu().numpy(), scale.view(torch.uint8).cpu().numpy()
