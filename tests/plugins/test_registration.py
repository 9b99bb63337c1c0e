"""Every plugin, registered with the real `tensorrt.plugin` and built as TensorRT would: what it is told."""

from __future__ import annotations

import re

import pytest
from support.tensorrt_stand_in import Builder, Expr, Tensor, build, tensorrt  # noqa: F401

from glmspec.plugins import OPS, registration
from glmspec.plugins.compiler import variant_of
from glmspec.plugins.registration import compiled, register
from glmspec.plugins.spec import cdiv, text, value
from glmspec.plugins.variants import Launch, Recorder, shaped

SM = "SM100"


def launches() -> dict[str, tuple[Launch, Launch]]:
    """One launch of every plugin, from the full model's uses: its inputs with sizes known and not known."""
    made = {}
    for op in OPS.values():
        for use in op.uses.values() if op.plugged else ():
            sizes, noted = op.sizes(4, use), []
            for run_time in ("", op.run_time):
                run = Recorder(SM)
                op.plugged(run, *shaped(op, use, sizes, "bfloat16", run_time), **use.attributes)
                noted.append(run.launches)
            for known, unknown in zip(*noted, strict=True):
                made.setdefault(known.plugin.id, (known, unknown))
    return made


LAUNCHES = launches()
_DTYPES = {"float32": "FLOAT", "bfloat16": "BF16", "int32": "INT32", "bool": "BOOL", "int8": "INT8"}
_DTYPES |= {"float8_e4m3fn": "FP8"}


def test_every_plugin_of_every_op_is_here():
    assert set(LAUNCHES) == {plugin.id for op in OPS.values() for plugin in op.plugins}


@pytest.mark.parametrize("name", LAUNCHES)
def test_what_tensorrt_is_told(tensorrt, name):  # noqa: F811
    launch, at_run_time = LAUNCHES[name]
    plugin, known, attributes, unknown = launch.plugin, launch.inputs, launch.attributes, at_run_time.inputs
    dtypes = [getattr(tensorrt.DataType, _DTYPES[one.dtype]) for one in known]
    shapes = [tuple(f"s{at}{axis}" if size == -1 else size for axis, size in enumerate(one.shape))
              for at, one in enumerate(unknown)]  # fmt: skip
    sizes = {f"s{at}{axis}": size for at, one in enumerate(known) for axis, size in enumerate(one.shape)}
    tensors = [Tensor(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
    call = getattr(register(plugin, "tensorrt").op.glmspec, plugin.id)
    given = {key: of(attributes[key]) for key, of in plugin.attributes.items()}
    layer = build(tensorrt, call(*tensors, **given, sm=SM), shapes)

    symbols = launch.symbols
    made = compiled(variant_of(plugin, SM, launch.compute, symbols))
    told = [getattr(tensorrt.DataType, _DTYPES[one]) for one in plugin.dtypes("bfloat16")]
    assert layer.dtypes == told[len(known) :]
    assert [tuple(one.at(sizes) for one in shape) for shape in layer.shapes] == plugin.output_shapes(symbols)
    assert layer.combinations == [(one, tensorrt.TensorFormat.LINEAR) for one in told]
    inputs = [*plugin.inputs]
    assert layer.aliases == [
        inputs.index(plugin.aliased[one]) if one in plugin.aliased else -1 for one in plugin.outputs
    ]
    grid = [value(rule, symbols) for rule in plugin.grid]
    assert [one.at(sizes) for one in layer.grid] == grid + [1] * (3 - len(grid))
    assert [one.at(sizes) for one in layer.block] == [32 * made.warps, 1, 1]
    assert [one.expr.at(sizes) for one in layer.scalars] == [symbols[one] for one in plugin.scalars]
    assert {one.dtype for one in layer.scalars} <= {tensorrt.PluginArgDataType.INT32}

    entry, ptx = layer.kernel
    declared = re.search(rf"\.entry {entry}\((.*?)\n\)", ptx.decode(), re.DOTALL)[1].split(",\n")
    widths = [".u64"] * len(known) + [".u32"] * len(plugin.scalars) + [".u64"] * len(plugin.outputs)
    assert [line.split()[1] for line in declared] == widths
    assert ".target sm_100a" in ptx.decode()
    assert layer.shared_memory.at(sizes) == made.shared_memory


RULES = (
    lambda N: N + 7,
    lambda N: 7 + N,
    lambda N: N - 7,
    lambda N: N * 3,
    lambda N: 3 * N,
    lambda N: N // 3,
    lambda N: cdiv(N, 8),
    lambda N: N * N + 1,
)


@pytest.mark.parametrize("rule", RULES, ids=text)
def test_rules_are_the_same_on_run_time_sizes(tensorrt, rule):  # noqa: F811
    trtp = tensorrt.plugin
    symbolic = trtp._tensor.SymIntExpr
    symbolic._exprBuilder = Builder()
    try:
        made = value(rule, {"N": registration._Size(trtp, trtp.ShapeExpr(Expr("size", "N")))})
        assert made.expression._expr.at({"N": 29}) == value(rule, {"N": 29})
    finally:
        symbolic._exprBuilder = None
