"""Compilation ahead of time: limits, hidden parameters, manifests, and what must not leak into a kernel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest
from support.cli import done, refused
from support.models import ASSETS

from glmspec.core.errors import MissingCapability, NetworkError
from glmspec.plugins import OPS, compiler
from glmspec.plugins.accept import ACCEPT
from glmspec.plugins.argmax import ARGMAX_SPLIT
from glmspec.plugins.compiler import LIMITS, compile_all, compile_variant, variant_of, write_compiled
from glmspec.plugins.spec import Plugin, text
from glmspec.plugins.variants import real_variants

SIZES = {"N": 9, "V": 154_880}


@pytest.fixture(autouse=True, scope="module")
def compiled_once() -> None:
    """Not here, where the compiler is what is tested."""


def variant(plugin: Plugin = ARGMAX_SPLIT, sm: str = "SM100", **sizes: int) -> compiler.Variant:
    return variant_of(plugin, sm, "bfloat16", {**SIZES, **plugin.tile(sm), **sizes})


def tiled(sm: str = "SM100", warps: int = 16, **tile: int) -> compiler.Variant:
    """Argmax with other tile sizes."""
    return variant(replace(ARGMAX_SPLIT, tiles={"": {**ARGMAX_SPLIT.tile(sm), "WARPS": warps, **tile}}), sm)


def test_every_op_says_why_or_has_limits():
    """An op without plugins says why TensorRT's layers are enough; every plugin has a limit for every GPU."""
    for op in OPS.values():
        assert bool(op.native) != bool(op.plugged), op.name
        assert bool(op.plugins) == bool(op.plugged), op.name
        for plugin in op.plugins:
            limits = json.loads((compiler.HERE / plugin.op / LIMITS).read_text())
            assert set(limits[plugin.name]) == set(compiler.SMS), plugin.name


def test_names_of_plugins_are_unique():
    plugins = {plugin for op in OPS.values() for plugin in op.plugins}
    assert len({plugin.id for plugin in plugins}) == len(plugins)


def test_other_variants_have_other_names():
    """Their files lie in one folder, and what is known to compile is kept by name."""
    symbols = {**SIZES, **ARGMAX_SPLIT.tile("SM100")}
    others = [variant(), variant(V=1000), variant(sm="SM90"), variant_of(ARGMAX_SPLIT, "SM100", "float32", symbols)]
    assert len({one.name for one in others}) == len(others)


def test_sources_and_limits_are_digested(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "HERE", tmp_path)
    (tmp_path / "argmax").mkdir()
    digests = set()
    for name in ("kernel.py", LIMITS):
        for content in ("1", "2"):
            (tmp_path / "argmax" / name).write_text(content)
            digests.add(compiler.sources_digest())
    assert len(digests) == 4


def test_an_sm_may_have_its_own_tiles():
    plugin = replace(ARGMAX_SPLIT, tiles={"": {"BLOCK": 8, "WARPS": 4}, "SM90": {"BLOCK": 16}})
    assert plugin.tile("SM90") == {"BLOCK": 16, "WARPS": 4} and plugin.tile("SM100") == {"BLOCK": 8, "WARPS": 4}


def test_compiling_again_gives_the_same_bytes():
    one, other = compile_variant(variant()), compile_variant(variant())
    assert (one.ptx, one.cubin, one.sha256) == (other.ptx, other.cubin, other.sha256)
    assert compile_variant(variant(sm="SM90")).sha256 != one.sha256


def test_operations_round_as_they_are_written():
    """Denormals keep their order; rows are read 16 bytes at a time."""
    ptx = compile_variant(variant()).ptx
    assert ".ftz" not in ptx
    assert "ld.global.v4" in ptx
    assert re.search(r"(mul|mad)\.(lo\.s64|wide)", ptx)  # rows x columns may pass 2^31


def test_no_multiplication_is_fused_with_an_addition():
    variants = real_variants(OPS["grouped_conv"], "SM100")
    ptx = compile_variant(variants[0]).ptx
    assert "mul." in ptx and "add." in ptx and "fma." not in ptx


def test_the_environment_is_as_before():
    from triton import knobs

    before = dict(os.environ), knobs.cache.dir, knobs.compilation.disable_line_info
    compile_variant(variant())
    assert (dict(os.environ), knobs.cache.dir, knobs.compilation.disable_line_info) == before


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"argmax_split": {"SM103": 20}},
            r"plugin argmax_split_v1\.bfloat16\.\w+ on SM103: registers: found \d+, limit 20\.",
        ),
        ({}, r"plugin argmax_split_v1: argmax/limits.json has no limit of its registers for SM103\. Add one\."),
    ],
    ids=["registers", "no limit"],
)
def test_a_kernel_beyond_a_limit_is_refused(monkeypatch, tmp_path, limits, message):
    (tmp_path / "argmax").mkdir()
    (tmp_path / "argmax" / LIMITS).write_text(json.dumps(limits))
    monkeypatch.setattr(compiler, "HERE", tmp_path)
    with pytest.raises(NetworkError, match=message):
        compile_variant(variant(sm="SM103"))


def test_too_much_shared_memory_is_refused(monkeypatch):
    monkeypatch.setattr(compiler, "SHARED_MEMORY", 16)
    with pytest.raises(NetworkError, match=r"shared memory: found \d+ bytes, limit 16 bytes"):
        compile_variant(variant())


@pytest.fixture
def tight() -> compiler.Variant:
    """Where the assembler keeps to a round number of registers and leaves a few bytes on the stack."""
    return next(one for one in real_variants(OPS["selector_walk"], "SM90") if one.plugin.name == "selector_walk")


@pytest.fixture
def one_way(monkeypatch):
    """Nothing else is tried where a kernel spills."""
    monkeypatch.setattr(compiler, "_ways", lambda tile: [(tile["WARPS"], tile.get("STAGES", 2))])


def test_a_kernel_that_spills_is_refused(tight, one_way):
    with pytest.raises(NetworkError, match=r"on SM90: stack: found \d+ bytes, limit 0 bytes"):
        compile_variant(tight)


def test_other_warps_are_tried_before_that(tight):
    assert compile_variant(tight).stack == 0


def test_all_that_is_wrong_is_told(tight, one_way):
    with pytest.raises(NetworkError) as told:
        compile_all([tight, variant(), tiled(BLOCK=33)])
    first, *others = str(told.value).splitlines()
    assert "stack: found" in first and "does not compile" in others[0]


def test_an_unknown_gpu_is_refused():
    with pytest.raises(NetworkError, match="found SM80; kernels are compiled for SM90, SM100, SM103"):
        variant(sm="SM80")


def test_a_size_that_is_not_known_is_refused():
    with pytest.raises(
        NetworkError, match="plugin argmax_split_v1: V: found -1, expected a number known at build time"
    ):
        variant(V=-1)


def test_parameters_must_be_the_plugins():
    wrong = replace(ARGMAX_SPLIT, inputs={"y_NV": "T"})
    with pytest.raises(
        NetworkError,
        match=re.escape("['x_NV', 'best_NZ', 'index_NZ'], expected the plugin's, ['y_NV', 'best_NZ', 'index_NZ']"),
    ):
        variant(wrong)


HIDDEN_PTX = """.visible .entry f(
\t.param .u32 f_param_0,
\t.param .u64 .ptr .global .align 1 f_param_1,
\t.param .u64 .ptr .global .align 1 f_param_2
)
{
\tld.param.b32 %r1, [f_param_0];
}
"""


def test_hidden_parameters_are_stripped_only_when_nothing_reads_them():
    stripped = compiler.strip_hidden(HIDDEN_PTX, 1)
    assert stripped == ".visible .entry f(\n\t.param .u32 f_param_0\n)\n{\n\tld.param.b32 %r1, [f_param_0];\n}\n"
    with pytest.raises(NetworkError, match="f_param_2 should be an unused pointer"):
        compiler.strip_hidden(HIDDEN_PTX.replace("[f_param_0]", "[f_param_2]"), 1)
    with pytest.raises(NetworkError, match="3 parameters: expected 2 and 2 hidden"):
        compiler.strip_hidden(HIDDEN_PTX, 2)
    with pytest.raises(NetworkError, match="f_param_1 should be"):
        compiler.strip_hidden(HIDDEN_PTX.replace("u64", "u32"), 1)


def test_a_folder_of_kernels(tmp_path):
    made = compile_all([*real_variants(OPS["argmax"], "SM90"), *real_variants(OPS["accept"], "SM90")])
    write_compiled(tmp_path / "a" / "kernels", "SM90", made)
    folder = tmp_path / "a" / "kernels"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["sm"], manifest["triton"]) == ("SM90", compiler.TRITON.split("==")[1])
    rows = {row["sha256"]: row for row in manifest["plugins"]}
    assert {path.name for path in folder.iterdir()} == {"manifest.json"} | {
        row[key] for row in rows.values() for key in ("file", "cubin")
    }
    for one in made:
        row = rows[one.sha256]
        assert sha256((folder / row["file"]).read_bytes()).hexdigest() == one.sha256
        assert sha256((folder / row["cubin"]).read_bytes()).hexdigest() == row["cubin_sha256"]
        assert (row["registers"], row["stack"], row["shared_memory"]) == (one.registers, 0, one.shared_memory)
        assert row["launch"]["grid"] == [text(rule) for rule in one.variant.plugin.grid]
        assert row["launch"]["warps"] == one.warps
        assert list(row["parameters"].items()) == list(one.variant.parameters.items())
        assert row["constants"] == dict(one.variant.constants)


def test_the_command(tmp_path):
    out = tmp_path / "kernels"
    said = done("plugins", "--target", "b300", "--op", "accept", "-o", out).output
    assert ACCEPT.id in said and "SM103" in said
    assert json.loads((out / "manifest.json").read_text())["sm"] == "SM103"
    assert "1 kernels as they were compiled" in done("verify", out).output
    assert ACCEPT.id in done("inspect", out).output
    (cubin,) = out.glob("*.cubin")
    cubin.write_bytes(b"no kernel")
    assert cubin.name in refused(1, "verify", out)


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (
            1,
            ("--target", "cpu", "--verifier", ASSETS / "tiny-verifier"),
            "found cpu, which has no plugins, expected one",
        ),
        (1, ("--target", "cpu"), "found cpu, which has no plugins, expected one of b200, b300, h200"),
        (1, ("--target", "b200", "--op", "margin"), "--op: found margin, expected one of accept, argmax"),
        (2, ("--target", "b200", "--tp", "8"), "--tp: of use with --verifier only"),
        (2, (), "--target"),
    ],
    ids=[
        "no plugins there for a verifier",
        "no plugins there",
        "no plugin of that op",
        "sizes of nothing",
        "no target",
    ],
)
def test_the_command_refuses(code, arguments, message):
    assert message in refused(code, "plugins", *arguments)


def test_the_command_writes_nothing_when_a_kernel_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "SHARED_MEMORY", 16)
    out = tmp_path / "kernels"
    assert "shared memory" in refused(1, "plugins", "--target", "b200", "--op", "argmax", "-o", out)
    assert not out.exists()


def test_without_triton_there_is_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingCapability, match=re.escape("pip install triton==3.7.1")):
        variant()


def python(program: str, **environment: str) -> str:
    told = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_importing_the_ops_does_not_import_triton():
    program = "import sys, glmspec.plugins, glmspec.plugins.compiler; print('triton' in sys.modules)"
    assert python(program) == "False"


def test_interpreted_kernels_are_not_compiled():
    program = (
        "from glmspec.plugins import OPS, compiler, variants\n"
        "try: compiler.compile_all(variants.real_variants(OPS['accept'], 'SM90'))\n"
        "except compiler.MissingCapability as error: print(error)"
    )
    assert "Unset TRITON_INTERPRET" in python(program, TRITON_INTERPRET="1")
