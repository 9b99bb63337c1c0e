"""Every kernel gives what its reference gives, in Triton's interpreter, and compiles for every GPU within its limits.

The interpreter must be chosen before a kernel is imported, and an interpreted kernel cannot be compiled. So this file,
run as a program, interprets all the cases and leaves their results in a file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from glmspec.build.errors import MissingCapability, NetworkError
from glmspec.plugins import OPS
from glmspec.plugins.kernels import KERNELS, compiler
from glmspec.plugins.kernels.argmax import argmax_kernel
from glmspec.plugins.kernels.bfloat16 import to_bfloat16
from glmspec.plugins.kernels.rms_norm import rms_norm_kernel

ROOT = Path(__file__).resolve().parents[2]
SMS = ("SM90", "SM100", "SM103", "SM120")
PROGRAMS = 500  # that the interpreter may run in all
TILE = KERNELS["argmax"].constants["BLOCK"]
INF = float("inf")


@dataclass
class Case:
    """One launch: the kernel's tensors, and the attributes of the op."""

    kernel: str
    inputs: tuple[torch.Tensor, ...]
    attributes: dict[str, Any]

    @property
    def rows(self) -> int:
        return self.inputs[0].shape[:-1].numel()


def argmax_inputs(g: torch.Generator) -> dict[str, torch.Tensor]:
    made = {
        "random": torch.randn(7, 33, generator=g),
        "ties": torch.randn(20, 9, generator=g).round(),
        "equal rows": torch.full((3, 64), -2.5),
        "one column": torch.randn(2, 1, generator=g),
        "one row": torch.randn(1, 1000, generator=g),
        "rows of -inf": torch.full((3, 33), -INF),
        "zeros of both signs": torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, 0.0], [-1.0, -0.0, 0.0]]),
        "inf and the largest": torch.tensor([[3e38, INF, INF, -INF], [-3e38, -INF, -3e38, -INF]]),
        "a tile": torch.randn(2, TILE, generator=g),
        "a tile and one": torch.randn(2, TILE + 1, generator=g).clamp(max=-1),
        "ties across tiles": torch.randn(4, 2 * TILE + 77, generator=g).clamp(max=1),
        "whole vocabulary": torch.randn(2, 154_880, generator=g).clamp(max=4),
    }
    made["rows of -inf"][1, -1] = -3e38  # one of them has something else at its end
    made["a tile and one"][0, -1] = 0.0  # the maximum is alone in the last tile
    ties = made["ties across tiles"]
    ties[0, [TILE - 1, TILE]] = 5.0
    ties[1, [3, TILE + 2]] = 5.0  # the lower column in the higher lane
    ties[2, [1, TILE, 2 * TILE + 76]] = 5.0
    made["whole vocabulary"][0, [70_000, 154_879]] = 9.0
    return made


def rms_norm_inputs(g: torch.Generator) -> dict[str, tuple[torch.Tensor, float]]:
    rand = lambda *dims: torch.randn(*dims, generator=g)  # noqa: E731
    spread = rand(3, 64) * torch.logspace(-6, 6, 64)
    return {
        "random": (rand(9, 256) * 3, 1e-5),
        "over heads": (rand(5, 3, 16), 1e-6),
        "one row": (rand(1, 6144), 1e-5),
        "one column": (rand(4, 1), 1e-5),
        "odd width": (rand(6, 2049), 1e-6),
        "zeros": (torch.zeros(2, 33), 1e-5),
        "so small that eps counts": (rand(6, 192) * 1e-3, 1e-5),
        "so small that eps is all": (rand(6, 192) * 1e-9, 1e-6),
        "large": (rand(4, 128) * 1e15, 1e-5),
        "spread": (spread, 1e-5),
    }


def cases() -> dict[str, Case]:
    g = torch.Generator().manual_seed(0)
    made = {}
    for dtype in (torch.bfloat16, torch.float32):
        suffix = str(dtype).removeprefix("torch.")
        for name, x in argmax_inputs(g).items():
            made[f"argmax of {name}, {suffix}"] = Case("argmax", (x.to(dtype),), {})
        for name, (x, eps) in rms_norm_inputs(g).items():
            weight = torch.randn(x.shape[-1], generator=g)
            made[f"rms_norm of {name}, {suffix}"] = Case("rms_norm", (x.to(dtype), weight.to(dtype)), {"eps": eps})
    return made


CASES = cases()


def interpret(case: Case) -> torch.Tensor:
    """Run one case, with the table's constants."""
    x, constants = case.inputs[0], KERNELS[case.kernel].constants
    if case.kernel == "argmax":
        out = torch.full(x.shape[:-1], -1, dtype=torch.int32)
        argmax_kernel[(case.rows,)](x, x.shape[-1], out, **constants)
    else:
        out = torch.full_like(x, 77)
        bits = torch.tensor(case.attributes["eps"]).view(torch.int32).item()
        rms_norm_kernel[(case.rows,)](x, case.inputs[1], x.shape[-1], bits, out, **constants)
    return out


@triton.jit
def round_kernel(x_B, out_B, SIZE: tl.constexpr):
    index_B = tl.arange(0, SIZE)
    tl.store(out_B + index_B, to_bfloat16(tl.load(x_B + index_B)))


NAN_ROWS = torch.tensor([[float("nan"), 1.0, 2.0, float("nan")], [float("nan")] * 4])


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict[str, torch.Tensor]:
    path = tmp_path_factory.mktemp("interpreted") / "results.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(path)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[compiler.Compiled]]:
    return {sm: compiler.compile_all(sm) for sm in SMS}


def bfloat16_steps(x: torch.Tensor) -> torch.Tensor:
    """Neighbours differ by one; zeros of both signs are the same."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def test_every_kernel_is_an_op_and_has_cases():
    assert set(KERNELS) <= set(OPS)
    assert {case.kernel for case in CASES.values()} == set(KERNELS)
    assert sum(case.rows for case in CASES.values()) < PROGRAMS


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(interpreted, name):
    case, found = CASES[name], interpreted[name]
    expected = OPS[case.kernel](*case.inputs, **case.attributes)
    assert found.dtype == expected.dtype
    if case.kernel == "argmax":
        assert found.tolist() == expected.tolist()
    elif found.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
    else:  # sums in another order flip a rounding here and there
        steps = (bfloat16_steps(found) - bfloat16_steps(expected)).abs()
        assert steps.max() <= 2  # the weight may make two of one
        assert (steps > 0).float().mean() < 0.005


def test_a_nan_never_wins(interpreted):
    assert interpreted["NaN"].tolist() == [2, 0]


def test_bfloat16_rounding_equals_torch(interpreted):
    x, found = rounding_input(), interpreted["rounding"]
    expected = x.to(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    there = ~expected.isnan()
    assert torch.equal(found.view(torch.int16)[there], expected.view(torch.int16)[there])


def rounding_input() -> torch.Tensor:
    """Every bfloat16 (finite, infinite, NaN), and what lies around half-way to the next one."""
    bits = (torch.arange(-(1 << 15), 1 << 15) << 16).int()
    return torch.cat([bits + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)


@pytest.mark.parametrize("sm", SMS)
def test_kernels_compile_within_their_limits(compiled, sm):
    limits = json.loads(compiler.LIMITS.read_text())[sm]
    assert limits["stack"] == 0
    assert limits["shared_memory"] == 48 * 1024
    assert set(limits["registers"]) == set(KERNELS)
    names = [(one.name, one.signature.name) for one in compiled[sm]]
    assert names == [(name, s.name) for name, kernel in KERNELS.items() for s in kernel.signatures]
    for one in compiled[sm]:
        assert one.sm == sm
        assert one.stack == 0
        assert 0 < one.registers <= limits["registers"][one.name]
        assert one.registers * 32 * one.launch.warps <= 65536  # or it could not be launched
        assert one.shared_memory <= 48 * 1024


@pytest.mark.parametrize("sm", SMS)
def test_ptx_is_the_signatures_and_names_nothing_of_this_machine(compiled, sm):
    widths = {"*": ".u64", "i": ".u32"}
    for one in compiled[sm]:
        assert f".target sm_{sm.removeprefix('SM')}a" in one.ptx
        declared = re.search(rf"\.entry {one.entry}\((.*?)\)", one.ptx, re.DOTALL)[1].split(",")
        assert [line.split()[1] for line in declared] == [widths[kind[0]] for kind in one.signature.types.values()]
        assert f"{one.entry}_param_{len(declared)}" not in one.ptx
        assert f".reqntid {32 * one.launch.warps}" in one.ptx
        assert one.sha256 == sha256(one.ptx.encode()).hexdigest()
        for trace in (".loc", ".file", ".section", str(ROOT), "/"):
            assert trace not in re.sub(r"//.*", "", one.ptx)
        assert ".ftz" not in one.ptx  # denormals keep their order
        assert ".fma" not in one.ptx and "fma." not in one.ptx
        assert "mul.lo.s64" in one.ptx  # rows x columns
        assert ("ld.global.v4" in one.ptx) == bool(one.signature.multiples_of_16)


def test_compiling_again_gives_the_same_ptx(compiled):
    again = [one.sha256 for one in compiler.compile_all("SM100")]
    assert again == [one.sha256 for one in compiled["SM100"]]
    assert len({one.sha256 for made in compiled.values() for one in made}) == sum(map(len, compiled.values()))


def test_the_environment_is_as_before():
    from triton import knobs

    before = dict(os.environ), knobs.cache.dir, knobs.compilation.disable_line_info
    compiler.compile_kernel(KERNELS["argmax"], "SM90")
    assert (dict(os.environ), knobs.cache.dir, knobs.compilation.disable_line_info) == before


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [
        ("registers", {"argmax": 20}, "kernel argmax (bfloat16) on SM103: registers: found 98, limit 20."),
        ("shared_memory", 16, "kernel argmax (bfloat16) on SM103: shared memory: found 64 bytes, limit 16 bytes."),
        ("registers", {}, "kernel argmax: limits.json has no limit of its registers for SM103."),
    ],
    ids=["registers", "shared memory", "no limit"],
)
def test_a_kernel_beyond_a_limit_is_refused(monkeypatch, tmp_path, limit, value, message):
    limits = json.loads(compiler.LIMITS.read_text())
    limits["SM103"][limit] = value
    path = tmp_path / "limits.json"
    path.write_text(json.dumps(limits))
    monkeypatch.setattr(compiler, "LIMITS", path)
    with pytest.raises(NetworkError, match=re.escape(message)):
        compiler.write_kernels(tmp_path / "kernels", "SM103")
    assert not (tmp_path / "kernels").exists()


def test_a_kernel_that_spills_is_refused():
    """A tile so large that its registers can't hold it."""
    kernel = replace(KERNELS["argmax"], constants={"BLOCK": 4 * TILE}, warps=32)
    with pytest.raises(NetworkError, match=r"kernel argmax \(\w+\) on SM100: stack: found \d+ bytes, limit 0 bytes"):
        compiler.compile_kernel(kernel, "SM100")


def test_a_kernel_that_does_not_compile_is_refused():
    kernel = replace(KERNELS["argmax"], constants={"BLOCK": 33})
    with pytest.raises(NetworkError, match=r"kernel argmax \(bfloat16\) on SM90: does not compile"):
        compiler.compile_kernel(kernel, "SM90")


def test_an_unknown_gpu_is_refused():
    with pytest.raises(NetworkError, match="found SM80; kernels are compiled for SM90, SM100, SM103, SM120"):
        compiler.compile_all("SM80")


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


def test_write_kernels(compiled, tmp_path):
    folder = tmp_path / "a" / "kernels"
    made = compiler.write_kernels(folder, "SM90")
    assert made == compiled["SM90"]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["sm"], manifest["triton"]) == ("SM90", compiler.TRITON.split("==")[1])
    assert {path.name for path in folder.iterdir()} == {row["file"] for row in manifest["kernels"]} | {"manifest.json"}
    for row, one in zip(manifest["kernels"], made, strict=True):
        assert sha256((folder / row["file"]).read_bytes()).hexdigest() == row["sha256"] == one.sha256
        assert (row["registers"], row["stack"], row["shared_memory"]) == (one.registers, 0, one.shared_memory)
        assert row["launch"] == {"grid": one.launch.grid, "warps": one.launch.warps}
        assert list(row["parameters"].items()) == list(one.signature.types.items())


def test_without_triton_there_is_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingCapability, match=re.escape("pip install triton==3.9.0")):
        compiler.compile_all("SM90")


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_ops_and_the_table_does_not_import_triton():
    program = "import sys, glmspec.plugins, glmspec.plugins.kernels.compiler; print('triton' in sys.modules)"
    assert python(program) == "False"


def test_interpreted_kernels_are_not_compiled():
    program = (
        "from glmspec.plugins.kernels import compiler\n"
        "try: compiler.compile_all('SM90')\n"
        "except compiler.NetworkError as error: print(error)"
    )
    assert "Unset TRITON_INTERPRET" in python(program, TRITON_INTERPRET="1")


def main() -> None:
    """Interpret every case, and what the cases can't say."""
    results = {name: interpret(case) for name, case in CASES.items()}
    results["NaN"] = interpret(Case("argmax", (NAN_ROWS,), {}))
    chunks = rounding_input().split(1 << 16)
    rounded = [torch.empty_like(chunk, dtype=torch.bfloat16) for chunk in chunks]
    for chunk, out in zip(chunks, rounded, strict=True):
        round_kernel[(1,)](chunk, out, len(chunk))
    results["rounding"] = torch.cat(rounded)
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
