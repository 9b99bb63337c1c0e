"""Plugins compiled for every GPU at the full model's sizes, and what any of them must hold."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

from glmspec.plugins import OPS
from glmspec.plugins.compiler import SMS, Compiled, compile_variant
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
