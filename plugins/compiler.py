"""Compiles plugins ahead of time: Triton and the assembler it brings run on any machine, for any GPU.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glmspec.core.dtypes import DTYPES
from glmspec.core.errors import MissingCapability, NetworkError
from glmspec.core.files import write_bytes, write_json
from glmspec.plugins.spec import Plugin, text

HERE = Path(__file__).parent
LIMITS = "limits.json"  # beside each kernel
TRITON = "triton==3.7.1"  # as torch 2.13 asks for: see pyproject.toml
SHARED_MEMORY = 48 * 1024  # bytes of a program; whether TensorRT raises the driver's limit is not known
# Architecture, and the oldest PTX version that knows it: a driver reads no newer one than its own. (86 for SM103
# makes LLVM abort the process.) A plugin whose instructions need a newer one names it among its tiles' numbers: PTX.
SMS = {"SM90": (90, 84), "SM100": (100, 86), "SM103": (103, 88)}
_POINTERS = {name: dtype.pointer for name, dtype in DTYPES.items() if dtype.pointer}
# Triton appends pointers to global scratch memory and to a profiler's: no kernel of ours uses them, and TensorRT
# would pass nothing there.
_HIDDEN = 2
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(\s*(.*?)\s*\)", re.DOTALL)


@dataclass(frozen=True)
class Variant:
    """What is compiled: a plugin for one SM, compute dtype and set of compile-time numbers.

    constants: the kernel's compile-time parameters, in the kernel's order.
    """

    plugin: Plugin
    sm: str
    compute: str
    constants: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """Readable, and different for different variants."""
        key = json.dumps([self.plugin.id, self.sm, self.compute, self.constants])
        return f"{self.plugin.id}.{self.compute}.{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    @property
    def parameters(self) -> dict[str, str]:
        """Every launch parameter and its Triton type, in order: inputs, int32 scalars, outputs."""
        plugin, count = self.plugin, len(self.plugin.inputs)
        pointers = [_POINTERS[dtype] for dtype in plugin.dtypes(self.compute)]
        return (
            dict(zip(plugin.inputs, pointers[:count], strict=True))
            | dict.fromkeys(plugin.scalars, "i32")
            | dict(zip(plugin.outputs, pointers[count:], strict=True))
        )


@dataclass(frozen=True)
class Compiled:
    """One variant, compiled.

    entry: the function's name in the PTX.
    ptx: the text; its parameters are the variant's.
    cubin: the same, assembled.
    sha256: hex digest of the text.
    registers: of a thread.
    stack: bytes of a thread; spilled registers are there.
    shared_memory: bytes of a program that its launch must ask for.
    warps: of 32 threads each, in a program.
    """

    variant: Variant
    entry: str
    ptx: str
    cubin: bytes
    sha256: str
    registers: int
    stack: int
    shared_memory: int
    warps: int


def variant_of(plugin: Plugin, sm: str, compute: str, symbols: Mapping[str, Any]) -> Variant:
    """The variant for these symbols, of which the kernel's compile-time parameters must be plain numbers. Raises
    `NetworkError` when one is not, or when the kernel's parameters are not the plugin's."""
    if sm not in SMS:
        raise NetworkError(f"plugin {plugin.id}: found {sm}; kernels are compiled for {', '.join(SMS)}.")
    function = kernel_of(plugin)
    parameters = _parameters(function)
    runtime = [name for name, constant in parameters.items() if not constant and name not in plugin.absent]
    expected = [*plugin.inputs, *plugin.scalars, *plugin.outputs]
    if runtime != expected:
        raise NetworkError(f"kernel {plugin.function}: parameters {runtime}, expected the plugin's, {expected}")
    constants = {}
    for name, constant in parameters.items():
        if name in plugin.absent:
            constants[name] = None
        elif constant:
            number = symbols.get(name)
            if not isinstance(number, (int, float, str)) or number == -1:
                raise NetworkError(f"plugin {plugin.id}: {name}: found {number}, expected a number known at build time")
            constants[name] = number
    return Variant(plugin, sm, compute, tuple(constants.items()))


def compile_variant(variant: Variant) -> Compiled:
    """Compile one variant and compare it with its limits.

    Not to be called by two threads at once: Triton's settings belong to the process. Raises `MissingCapability`
    without Triton, and `NetworkError` when a kernel does not compile or uses more than its `limits.json` allows.
    """
    limits = _limits(variant.plugin, variant.sm)
    first, *others = _ways(variant.plugin.tile(variant.sm))
    kernel = _compile(variant, *first)
    for way in others:
        if not kernel.stack:
            break
        kernel = _compile(variant, *way)
    _check(kernel, limits)
    return kernel


def compile_all(variants: Iterable[Variant], tick: Callable[[Variant], None] = lambda variant: None) -> list[Compiled]:
    """Compile variants. tick: called before each. Raises `NetworkError` with all that is wrong with any of them."""
    kernels, wrong = [], []
    for variant in variants:
        tick(variant)
        try:
            kernels.append(compile_variant(variant))
        except NetworkError as error:
            wrong.append(str(error))
    if wrong:
        raise NetworkError("\n".join(wrong))
    return kernels


def _ways(tile: Mapping[str, int]) -> list[tuple[int, int]]:
    """Warps and stages to try, the intended ones first: now and then the assembler keeps to a round number of registers
    and leaves a few bytes on the stack; with others it does not."""
    warps, stages = tile["WARPS"], tile.get("STAGES", 2)
    ways = [(warps, stages), (warps, stages + 1), (2 * warps, stages), (warps // 2, stages)]
    return [(count, depth) for count, depth in ways if 1 <= count <= 32]


def write_compiled(folder: Path, sm: str, kernels: Iterable[Compiled]) -> None:
    """Write PTX, cubins and a manifest.json into a folder, which is made."""
    kernels = sorted(kernels, key=lambda kernel: kernel.variant.name)
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in kernels:
        write_bytes(folder / f"{kernel.variant.name}.ptx", kernel.ptx.encode())
        write_bytes(folder / f"{kernel.variant.name}.cubin", kernel.cubin)
    manifest = {"sm": sm, "triton": triton().__version__, "plugins": [_manifest_row(kernel) for kernel in kernels]}
    write_json(folder / "manifest.json", manifest)


def strip_hidden(ptx: str, parameters: int) -> str:
    """PTX whose function has only the first `parameters` of its parameters.

    Raises `NetworkError` when there are not two more, or when something reads those.
    """
    entry = _ENTRY.search(ptx)
    declared = re.split(r",\s*", entry[2]) if entry else []
    if entry is None or len(declared) != parameters + _HIDDEN:
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


def sources_digest() -> str:
    """Of every file that decides what a variant compiles to, and its limits: hex."""
    digest = hashlib.sha256()
    for path in sorted((*HERE.rglob("*.py"), *HERE.rglob(LIMITS))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def triton() -> Any:
    """The Triton package. Raises `MissingCapability` without it."""
    try:
        return importlib.import_module("triton")
    except ImportError as error:
        raise MissingCapability(
            f"Compiling plugin kernels needs Triton, which cannot be imported ({error}). pip install {TRITON}"
        ) from None


def kernel_of(plugin: Plugin) -> Any:
    """The Triton function of a plugin; an interpreted one under TRITON_INTERPRET."""
    triton()
    return getattr(importlib.import_module(f"glmspec.plugins.{plugin.op}.kernel"), plugin.function)


def _parameters(function: Any) -> dict[str, bool]:
    """Names of a Triton function's parameters, and whether each is a compile-time number."""
    from triton import JITFunction

    if isinstance(function, JITFunction):
        return {parameter.name: parameter.is_constexpr for parameter in function.params}
    annotations = function.fn.__annotations__  # an interpreted one
    return {name: "constexpr" in str(annotations.get(name, "")) for name in function.arg_names}


@contextmanager
def _settings() -> Iterator[None]:
    """Nothing of this machine in the PTX (line info holds paths), nothing read from or left in a cache, and no work
    after the PTX: it is assembled without its hidden parameters."""
    from triton import knobs

    with knobs.cache.scope(), knobs.compilation.scope(), knobs.runtime.scope(), tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache
        knobs.compilation.disable_line_info = True
        setattr(knobs.runtime, "add_stages_inspection_hook", _no_assembler)  # noqa: B010  (which is typed as None)
        yield


def _no_assembler(backend: Any = None, stages: dict[str, Callable] | None = None, *_: Any) -> tuple[str, str] | None:
    """Triton asks for a part of its cache's key first, then shows the stages."""
    if stages is None:
        return "", ""
    stages["cubin"] = lambda ptx, metadata: b""
    return None


def _compile(variant: Variant, warps: int, stages: int) -> Compiled:
    from triton import JITFunction
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    function = kernel_of(variant.plugin)
    where = f"plugin {variant.name} on {variant.sm}"
    if not isinstance(function, JITFunction):
        raise MissingCapability("Triton interprets kernels here and cannot compile them. Unset TRITON_INTERPRET.")
    arch, ptx_version = SMS[variant.sm]
    constants, parameters = dict(variant.constants), variant.parameters
    kinds = {name: "constexpr" if name in constants else parameters[name] for name in function.arg_names}
    aligned = [["tt.divisibility", 16]]  # TensorRT's buffers are
    attributes = {(at,): aligned for at, kind in enumerate(kinds.values()) if kind.startswith("*")}
    # No fused multiply-add: then the PTX says how each operation rounds, and no assembler may fuse.
    options = {
        "num_warps": warps,
        "num_stages": stages,
        "ptx_version": variant.plugin.tile(variant.sm).get("PTX", ptx_version),
        "enable_fp_fusion": False,
        "debug": False,
    }
    try:
        with _settings():
            source = ASTSource(function, kinds, constants, attributes)
            built = triton_compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except TritonError as error:
        raise NetworkError(f"{where}: does not compile.\n{error}") from error
    ptx = strip_hidden(built.asm["ptx"], len(parameters))
    registers, stack, cubin = _assemble(ptx, arch, where)
    return Compiled(
        variant=variant,
        entry=built.metadata.name,
        ptx=ptx,
        cubin=cubin,
        sha256=hashlib.sha256(ptx.encode()).hexdigest(),
        registers=registers,
        stack=stack,
        shared_memory=built.metadata.shared,
        warps=warps,
    )


def _assemble(ptx: str, arch: int, where: str) -> tuple[int, int, bytes]:
    """Registers, stack bytes and the cubin of PTX, from the assembler that Triton brings."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}"]
        done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
        log = done.stdout + done.stderr
        if done.returncode:
            raise NetworkError(f"{where}: its PTX does not assemble.\n{log}")
        assembled = cubin.read_bytes()
    stack = sum(int(size) for size in re.findall(r"(\d+) bytes stack frame", log))
    if (used := re.search(r"Used (\d+) registers", log)) is None:
        raise NetworkError(f"{where}: the assembler does not say how many registers it uses.\n{log}")
    return int(used[1]), stack, assembled


def _limits(plugin: Plugin, sm: str) -> dict[str, int]:
    """What one plugin may use on one GPU: registers by its file, no stack, the shared memory that any GPU gives."""
    path = HERE / plugin.op / LIMITS
    limits = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    registers = limits.get(plugin.name, {}).get(sm)
    if registers is None:
        raise NetworkError(f"plugin {plugin.id}: {plugin.op}/{LIMITS} has no limit of its registers for {sm}. Add one.")
    return {"registers": registers, "stack": 0, "shared_memory": SHARED_MEMORY}


def _check(kernel: Compiled, limits: Mapping[str, int]) -> None:
    for what, unit in (("registers", ""), ("stack", " bytes"), ("shared_memory", " bytes")):
        size, limit = getattr(kernel, what), limits[what]
        if size > limit:
            where, op = f"plugin {kernel.variant.name} on {kernel.variant.sm}", kernel.variant.plugin.op
            raise NetworkError(
                f"{where}: {what.replace('_', ' ')}: found {size}{unit}, limit {limit}{unit}. Make its tile smaller, "
                f"or change the limit in {op}/{LIMITS}."
            )


def _manifest_row(kernel: Compiled) -> dict[str, Any]:
    variant, plugin = kernel.variant, kernel.variant.plugin
    return {
        "name": plugin.id,
        "op": plugin.op,
        "compute": variant.compute,
        "constants": dict(variant.constants),
        "parameters": variant.parameters,
        "file": f"{variant.name}.ptx",
        "sha256": kernel.sha256,
        "cubin": f"{variant.name}.cubin",
        "cubin_sha256": hashlib.sha256(kernel.cubin).hexdigest(),
        "entry": kernel.entry,
        "registers": kernel.registers,
        "stack": kernel.stack,
        "shared_memory": kernel.shared_memory,
        "launch": {
            "grid": [text(rule) for rule in plugin.grid],
            "sizes": {name: text(rule) for name, rule in plugin.sizes.items()},
            "warps": kernel.warps,
        },
    }
