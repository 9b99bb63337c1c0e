"""Kernels of the ops, compiled ahead of time: what each one is and how it is launched.

A kernel is named after its op and lives in the file of that name, as the Triton function
`<name>_kernel`. This table says all that must be known without Triton, which is an optional
dependency: importing this package doesn't import it, `compiler` does when it compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_POINTERS = {"bfloat16": "*bf16", "float32": "*fp32"}


@dataclass(frozen=True)
class Signature:
    """One way to compile a kernel.

    name: of the signature, unique in its kernel.
    types: every launch parameter and its Triton type, in order: inputs, int32 scalars, outputs.
    multiples_of_16: int32 scalars that must be multiples of 16; the rows can be read 16 bytes at a time then.
    """

    name: str
    types: Mapping[str, str]
    multiples_of_16: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    name: of the op, of the file and, with "_kernel" behind it, of the Triton function.
    signatures: each is compiled.
    constants: the compile-time parameters.
    warps: of 32 threads each, in a program.
    grid: how many programs are launched.
    """

    name: str
    signatures: tuple[Signature, ...]
    constants: Mapping[str, int]
    warps: int
    grid: str


def _by_dtype(parameters: Mapping[str, str]) -> tuple[Signature, ...]:
    """bfloat16 and float32, for rows of any width and for those whose width is a multiple of 16. "*" stands for a
    pointer to that dtype."""
    made = []
    for dtype, pointer in _POINTERS.items():
        types = {name: pointer if kind == "*" else kind for name, kind in parameters.items()}
        made += [Signature(dtype, types), Signature(f"{dtype}_by16", types, ("width",))]
    return tuple(made)


_ROWS = "x = rows (all dimensions of the input but its last, multiplied), y = 1, z = 1"

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="argmax",
            signatures=_by_dtype({"x_NV": "*", "width": "i32", "out_N": "*i32"}),
            constants={"BLOCK": 8192},  # twice that spills on SM100
            warps=16,
            grid=_ROWS,
        ),
        Kernel(
            name="rms_norm",
            signatures=_by_dtype({"x_ND": "*", "weight_D": "*", "width": "i32", "eps_bits": "i32", "out_ND": "*"}),
            constants={"BLOCK": 2048},  # 8 numbers a thread: one load of 16 bytes in bfloat16
            warps=8,
            grid=_ROWS,
        ),
    )
}
