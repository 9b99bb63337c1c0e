"""Plugins compiled for every GPU at the full model's sizes, and what any of them must hold."""

from __future__ import annotations

import json
import os
import pickle
import re
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest

from glmspec.plugins import OPS, compiler
from glmspec.plugins.compiler import SMS, Compiled, Variant, compile_variant
from glmspec.plugins.variants import real_variants

ROOT = Path(__file__).resolve().parents[2]
PTX = ROOT / "tests" / "data" / "ptx.json"  # SHA-256 of each variant's PTX, by the variant's name: see `freeze.py`
COMPILE = compiler._compile  # what `keep_compiled` replaces, for tests of how long it takes
_WIDTHS = {"*": ".u64", "i": ".u32"}
_NARROW = ("block_attention", "moe_nvfp4", "sparse_mla")  # in float32 not all of their kernels take the full size


def variants_of(op: str) -> list[Variant]:
    """bfloat16 for every SM, float32 for one (where it is taken at full size)."""
    variants = [one for sm in SMS for one in real_variants(OPS[op], sm)]
    variants += real_variants(OPS[op], "SM100", "float32") if op not in _NARROW else []
    return list(dict.fromkeys(variants))


def every_variant() -> list[Variant]:
    """Those of all ops, each once: some ops share a plugin."""
    return list(dict.fromkeys(variant for op, one in OPS.items() if one.plugins for variant in variants_of(op)))


def assert_compiles(op: str) -> None:
    """No spill, little shared memory, PTX of the variant's parameters, the PTX that it was."""
    variants = variants_of(op)
    assert {one.plugin.id for one in variants} == {plugin.id for plugin in OPS[op].plugins}
    compiled = [compile_variant(variant) for variant in variants]
    for one in compiled:
        assert_sound(one)
    assert_frozen(compiled)


def assert_frozen(compiled: list[Compiled]) -> None:
    """PTX has no line and no path of its source, so it is the same text wherever a kernel's file lies. It is another
    Triton's right to write another; constraints.txt has the one whose text is kept."""
    pinned = re.search(r"^triton==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    if version("triton") != pinned:
        pytest.skip(f"PTX is compared with that of Triton {pinned}, and Triton {version('triton')} is installed")
    kept = json.loads(PTX.read_text())
    for one in compiled:
        assert one.sha256 == kept[one.variant.name], f"{one.variant.name} on {one.variant.sm}: other PTX than it was"


def assert_sound(one: Compiled) -> None:
    """What the compiler does not check itself."""
    assert one.stack == 0
    assert one.registers * 32 * one.warps <= 65536  # or it could not be launched
    assert one.shared_memory <= 48 * 1024
    assert f".target sm_{one.variant.sm.removeprefix('SM')}a" in one.ptx
    declared = re.search(rf"\.entry {one.entry}\((.*?)\n\)", one.ptx, re.DOTALL)[1].split(",\n")
    assert [line.split()[1] for line in declared] == [_WIDTHS[kind[0]] for kind in one.variant.parameters.values()]
    assert f"{one.entry}_param_{len(declared)}" not in one.ptx
    assert f".reqntid {32 * one.warps}" in one.ptx
    assert one.sha256 == sha256(one.ptx.encode()).hexdigest()
    assert one.cubin.startswith(b"\x7fELF")
    for trace in (".loc", ".file", ".section", str(ROOT)):
        assert trace not in one.ptx


def keep_compiled(home: Path, patch: pytest.MonkeyPatch) -> None:
    """What was compiled is kept in `home` and read from there when the same kernel, with all that it calls, is to be
    compiled for the same GPU, numbers, types and warps by the same code. What is checked afterwards, is each time."""
    home = home / "compiled"
    home.mkdir(parents=True, exist_ok=True)
    code = sha256(Path(compiler.__file__).read_bytes()).hexdigest()

    def compile_or_read(variant: Variant, warps: int, stages: int) -> Compiled:
        kernel = compiler.kernel_of(variant.plugin)
        if not hasattr(kernel, "cache_key"):  # interpreted, which is refused
            return COMPILE(variant, warps, stages)
        what = (
            code,
            compiler.triton().__version__,
            kernel.cache_key,
            variant.plugin.id,
            variant.sm,
            variant.constants,
            [*variant.parameters.items()],
        )
        path = home / f"{sha256(repr((*what, warps, stages)).encode()).hexdigest()}.compiled"
        if path.exists():
            return Compiled(variant=variant, **pickle.loads(path.read_bytes()))
        made = COMPILE(variant, warps, stages)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps({name: value for name, value in vars(made).items() if name != "variant"}))
        part.rename(path)
        return made

    patch.setattr(compiler, "_compile", compile_or_read)
