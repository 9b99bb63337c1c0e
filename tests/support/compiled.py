"""Plugins compiled for every GPU at the full model's sizes, and what any of them must hold."""

from __future__ import annotations

import os
import pickle
import re
from hashlib import sha256
from pathlib import Path

import pytest

from glmspec.plugins import OPS, compiler
from glmspec.plugins.compiler import SMS, Compiled, Variant, compile_variant
from glmspec.plugins.variants import real_variants

ROOT = Path(__file__).resolve().parents[2]
_WIDTHS = {"*": ".u64", "i": ".u32"}


def assert_compiles(op: str, wide: bool = True) -> None:
    """bfloat16 for every SM, float32 for one (where it is taken at full size: `wide`): no spill, little shared memory,
    PTX of the variant's parameters."""
    variants = [one for sm in SMS for one in real_variants(OPS[op], sm)]
    variants += real_variants(OPS[op], "SM100", "float32") if wide else []
    assert {one.plugin.id for one in variants} == {plugin.id for plugin in OPS[op].plugins}
    for variant in dict.fromkeys(variants):
        assert_sound(compile_variant(variant))


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
    compiled for the same GPU, numbers, types and warps. What the compiler checks afterwards, it checks each time."""
    compile_now = compiler._compile

    def compile_or_read(variant: Variant, warps: int, stages: int) -> Compiled:
        kernel = compiler.kernel_of(variant.plugin)
        if not hasattr(kernel, "cache_key"):  # interpreted, which is refused
            return compile_now(variant, warps, stages)
        what = (kernel.cache_key, variant.plugin.id, variant.sm, variant.constants, [*variant.parameters.items()])
        path = home / f"{sha256(repr((*what, warps, stages)).encode()).hexdigest()}.compiled"
        if path.exists():
            return Compiled(variant=variant, **pickle.loads(path.read_bytes()))
        made = compile_now(variant, warps, stages)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps({name: value for name, value in vars(made).items() if name != "variant"}))
        part.rename(path)
        return made

    patch.setattr(compiler, "_compile", compile_or_read)
