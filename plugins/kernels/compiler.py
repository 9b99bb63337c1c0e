"""Compiles the kernels ahead of time: Triton and the assembler it brings run on any machine, for any GPU.

What comes out is PTX, which the driver assembles when an engine is loaded. It is assembled here too, with the
assembler's defaults as the driver does, to know that it can be and what it uses.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmspec.build.errors import MissingCapability, NetworkError
from glmspec.convert.files import write_bytes, write_json
from glmspec.plugins.kernels import KERNELS, Kernel, Signature

LIMITS = Path(__file__).with_name("limits.json")
TRITON = "triton==3.9.0"
# Architecture, and the oldest PTX version that knows it: a driver reads no newer one than its own. (86 for SM103
# makes LLVM abort the process.)
_SM = {"SM90": (90, 84), "SM100": (100, 86), "SM103": (103, 88), "SM120": (120, 87)}
# Triton appends pointers to global scratch memory and to a profiler's: no kernel of ours uses them, and TensorRT
# would pass nothing there.
_HIDDEN = 2
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(\s*(.*?)\s*\)", re.DOTALL)


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    grid: how many programs (thread blocks).
    warps: of 32 threads each, in a program.
    """

    grid: str
    warps: int


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one signature and one SM.

    name: of the kernel.
    signature: of the kernel that this is.
    sm: the GPU, like "SM90".
    entry: the function's name in the PTX.
    ptx: the text; its parameters are the signature's.
    sha256: hex digest of the text.
    registers: of a thread.
    stack: bytes of a thread; spilled registers are there.
    shared_memory: bytes of a program that its launch must ask for.
    launch: how it is launched.
    """

    name: str
    signature: Signature
    sm: str
    entry: str
    ptx: str
    sha256: str
    registers: int
    stack: int
    shared_memory: int
    launch: Launch


def compile_kernel(kernel: Kernel, sm: str) -> list[Compiled]:
    """One kernel for one GPU ("SM90", "SM100", "SM103", "SM120"), once for each of its signatures.

    Not to be called by two threads at once: Triton's settings belong to the process. Raises `MissingCapability`
    without Triton, and `NetworkError` when a kernel does not compile or uses more than `limits.json` allows.
    """
    if sm not in _SM:
        raise NetworkError(f"kernel {kernel.name}: found {sm}; kernels are compiled for {', '.join(_SM)}.")
    limits = _limits(kernel, sm)
    function = _function(kernel)
    made = [_compile(kernel, function, signature, sm) for signature in kernel.signatures]
    for one in made:
        _check(one, limits)
    return made


def compile_all(sm: str) -> list[Compiled]:
    """Every kernel of the table for one GPU, in the table's order. Raises as `compile_kernel` does."""
    return [one for kernel in KERNELS.values() for one in compile_kernel(kernel, sm)]


def write_kernels(folder: Path, sm: str) -> list[Compiled]:
    """Compile every kernel for one GPU and write the PTX files and a manifest.json into a folder, which is made.

    Nothing is written when a kernel fails. Raises as `compile_kernel` does.
    """
    made = compile_all(sm)
    folder.mkdir(parents=True, exist_ok=True)
    for one in made:
        write_bytes(folder / _file(one), one.ptx.encode())
    kernels = [_manifest_row(one) for one in made]
    write_json(folder / "manifest.json", {"sm": sm, "triton": _triton().__version__, "kernels": kernels})
    return made


def strip_hidden(ptx: str, parameters: int) -> str:
    """PTX whose function has only the first `parameters` of its parameters.

    Raises `NetworkError` when there are not two more, or when something reads those.
    """
    entry = _ENTRY.search(ptx)
    declared = re.split(r",\s*", entry[2]) if entry else []
    if len(declared) != parameters + _HIDDEN:
        raise NetworkError(
            f"PTX with {len(declared)} parameters: expected {parameters} and {_HIDDEN} hidden ones. "
            f"Is this the Triton that glmspec knows ({TRITON})?"
        )
    before, after = ptx[: entry.start(2)], ptx[entry.end(2) :]
    for hidden in declared[parameters:]:
        name = hidden.split()[-1]
        if ".u64" not in hidden or re.search(rf"\b{name}\b", after):
            raise NetworkError(f"PTX of {entry[1]}: {name} should be an unused pointer to scratch memory and is not.")
    return before + ",\n\t".join(declared[:parameters]) + after


def _triton() -> Any:
    try:
        return importlib.import_module("triton")
    except ImportError as error:
        raise MissingCapability(
            f"Compiling plugin kernels needs Triton, which cannot be imported ({error}). pip install {TRITON}"
        ) from None


def _function(kernel: Kernel) -> Any:
    """The Triton function of a kernel."""
    triton = _triton()
    function = getattr(importlib.import_module(f"glmspec.plugins.kernels.{kernel.name}"), f"{kernel.name}_kernel")
    if not isinstance(function, triton.JITFunction):
        raise NetworkError(f"kernel {kernel.name}: is interpreted, and cannot be compiled. Unset TRITON_INTERPRET.")
    return function


@contextmanager
def _settings() -> Iterator[None]:
    """Nothing of this machine in the PTX (line info holds paths), and nothing read from or left in a cache."""
    from triton import knobs

    with knobs.cache.scope(), knobs.compilation.scope(), tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        knobs.compilation.disable_line_info = True
        yield


def _compile(kernel: Kernel, function: Any, signature: Signature, sm: str) -> Compiled:
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    arch, ptx_version = _SM[sm]
    aligned = [["tt.divisibility", 16]]  # TensorRT's buffers are
    attributes = {
        (index,): aligned
        for index, (name, kind) in enumerate(signature.types.items())
        if kind.startswith("*") or name in signature.multiples_of_16
    }
    types = {**signature.types, **dict.fromkeys(kernel.constants, "constexpr")}
    source = ASTSource(function, types, dict(kernel.constants), attributes)
    # No fused multiply-add: then the PTX says how each operation rounds, and no assembler may fuse.
    options = {"num_warps": kernel.warps, "ptx_version": ptx_version, "enable_fp_fusion": False, "debug": False}
    where = f"kernel {kernel.name} ({signature.name}) on {sm}"
    try:
        with _settings():
            built = triton_compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except TritonError as error:
        raise NetworkError(f"{where}: does not compile.\n{error}") from error
    ptx = strip_hidden(built.asm["ptx"], len(signature.types))
    registers, stack = _assemble(ptx, arch, where)
    return Compiled(
        name=kernel.name,
        signature=signature,
        sm=sm,
        entry=built.metadata.name,
        ptx=ptx,
        sha256=hashlib.sha256(ptx.encode()).hexdigest(),
        registers=registers,
        stack=stack,
        shared_memory=built.metadata.shared,
        launch=Launch(kernel.grid, kernel.warps),
    )


def _assemble(ptx: str, arch: int, where: str) -> tuple[int, int]:
    """Registers and stack bytes of PTX, from the assembler that Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        done = subprocess.run([*command, str(source), "-o", f"{source}.cubin"], capture_output=True, text=True)
    log = done.stdout + done.stderr
    if done.returncode:
        raise NetworkError(f"{where}: its PTX does not assemble.\n{log}")
    stack = sum(int(found) for found in re.findall(r"(\d+) bytes stack frame", log))
    return int(re.search(r"Used (\d+) registers", log)[1]), stack


def _limits(kernel: Kernel, sm: str) -> dict[str, int]:
    """What one kernel may use on one GPU."""
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))[sm]
    if kernel.name not in limits["registers"]:
        raise NetworkError(f"kernel {kernel.name}: {LIMITS.name} has no limit of its registers for {sm}. Add one.")
    return {**limits, "registers": limits["registers"][kernel.name]}


def _check(one: Compiled, limits: dict[str, int]) -> None:
    for what, unit in (("registers", ""), ("stack", " bytes"), ("shared_memory", " bytes")):
        found, limit = getattr(one, what), limits[what]
        if found > limit:
            raise NetworkError(
                f"kernel {one.name} ({one.signature.name}) on {one.sm}: {what.replace('_', ' ')}: found {found}{unit}, "
                f"limit {limit}{unit}. Make its tile smaller, or change the limit in {LIMITS.name}."
            )


def _file(one: Compiled) -> str:
    return f"{one.name}.{one.signature.name}.ptx"


def _manifest_row(one: Compiled) -> dict[str, Any]:
    return {
        "name": one.name,
        "signature": one.signature.name,
        "file": _file(one),
        "sha256": one.sha256,
        "sm": one.sm,
        "entry": one.entry,
        "parameters": dict(one.signature.types),
        "multiples_of_16": list(one.signature.multiples_of_16),
        "registers": one.registers,
        "stack": one.stack,
        "shared_memory": one.shared_memory,
        "launch": {"grid": one.launch.grid, "warps": one.launch.warps},
    }
