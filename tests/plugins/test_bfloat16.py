"""Rounding to bfloat16 by bits, in the interpreter, is torch's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from glmspec.plugins.bfloat16 import to_bfloat16


@triton.jit
def round_kernel(x_B, out_B, SIZE: tl.constexpr):
    index_B = tl.arange(0, SIZE)
    tl.store(out_B + index_B, to_bfloat16(tl.load(x_B + index_B)))


def rounding_input() -> torch.Tensor:
    """Every bfloat16 (finite, infinite, NaN), and what lies around half-way to the next one."""
    bits = (torch.arange(-(1 << 15), 1 << 15) << 16).int()
    return torch.cat([bits + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> torch.Tensor:
    path = tmp_path_factory.mktemp("interpreted") / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


def test_bfloat16_rounding_equals_torch(found):
    expected = rounding_input().to(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    there = ~expected.isnan()
    assert torch.equal(found.view(torch.int16)[there], expected.view(torch.int16)[there])


def main() -> None:
    """Run as a program: the interpreter must be chosen before the kernel is imported."""
    chunks = rounding_input().split(1 << 16)
    rounded = [torch.empty_like(chunk, dtype=torch.bfloat16) for chunk in chunks]
    for chunk, out in zip(chunks, rounded, strict=True):
        round_kernel[(1,)](chunk, out, len(chunk))
    torch.save(torch.cat(rounded), sys.argv[1])


if __name__ == "__main__":
    main()
