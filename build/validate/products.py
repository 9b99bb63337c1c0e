"""Stage "products": what the compiled kernels multiply, read and write.

A layer that says "quantize, dequantize, multiply" may compile to a BF16 product of a weight that is written out whole
each step, and nothing but the kernels tells. So from every network that stage "build" compiles: each product of a
weight whose activations are quantized too has FP8 or FP4 operands, and no kernel writes as much as such a weight.
Products of other quantized weights multiply in the compute dtype; what that costs is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.compile import Unit, compiled
from glmspec.build.validate.report import Fault
from glmspec.core.units import size_text
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.network.config import NetworkConfig

_LOW = ("fp4 x fp4", "fp8 x fp8")
_ADVICE = "Report it, with --json's output."


def check(case: Case, options) -> StageResult:
    """Every compiled network's summary: faults, and a line for every kind of layer."""
    if case.deployment.target.package is None:
        return StageResult((f"{case.deployment.target.name}: no kernels, the executor runs the networks",))
    faults: list[Fault] = []
    operands: Counter[str] = Counter()
    dequantized: Counter[str] = Counter()  # bytes by format
    rows: dict[str, Counter[str]] = {}
    for unit, record in compiled(case, options):
        if isinstance(record, str):  # stage "build" says so
            continue
        operands.update(types for _, types in record["products"].values())
        net_config = case.deployment.net_config(unit.member, unit.profile)
        faults += _faults(record, net_config)
        dequantized.update(_dequantized(record, net_config))
        for layer, counted in record["layers"].items():
            row = rows.setdefault(_kind(unit, layer), Counter())
            row["layers"] += 1
            for key, number in counted.items():
                row[key] = max(row[key], number)
    total = ", ".join(f"{types} {count}" for types, count in operands.most_common()) or "none"
    facts = [f"products of quantized weights that TensorRT compiles: {total}"]
    facts += [_row_text(kind, row) for kind, row in rows.items()]
    facts += [_dequantized_text(format, size, case.deployment.target.bandwidth) for format, size in dequantized.items()]
    numbers: dict[str, int | float | str] = {f"products {types}": count for types, count in operands.items()}
    numbers |= {f"{kind}: {key}": number for kind, row in rows.items() for key, number in row.items()}
    return StageResult(tuple(facts), tuple(faults), numbers)


def _faults(record: Mapping[str, Any], net_config: NetworkConfig) -> list[Fault]:
    """Products that are not as their weights' scales of activations let them be."""
    faults, written = [], {weight: (kernel, size) for kernel, weight, size in record["whole"]}
    for layer, (weight, types) in record["products"].items():
        if weight not in net_config.scaled:
            continue
        if types not in _LOW:
            faults.append(Fault(layer, f"multiplies {types}, expected {' or '.join(_LOW)}.", _ADVICE))
        elif weight in written:
            kernel, size = written[weight]
            why = f"the kernel {kernel} writes {size_text(size)}, as much as the weight {weight}."
            faults.append(Fault(layer, why, _ADVICE))
    return faults


def _dequantized(record: Mapping[str, Any], net_config: NetworkConfig) -> Counter[str]:
    """Bytes a step by which weights are written out and read again, by their format."""
    costs: Counter[str] = Counter()
    for _, weight, size in record["whole"]:
        if weight not in net_config.scaled:
            costs[str(net_config.format(weight))] += 2 * size
    return costs


def _kind(unit: Unit, layer: str) -> str:
    """What kind of layer it is: of the verifier's, those of a kind have the same kernels."""
    config, number = unit.member.config, layer.rpartition(".")[2]
    if not isinstance(config, VerifierConfig) or not number.isdigit() or int(number) >= config.num_hidden_layers:
        return f"{unit.member.name}, {'a layer' if number.isdigit() else layer}"
    return f"{unit.member.name}, {config.mlp_layer_types[int(number)]}, {config.indexer_types[int(number)]} indexer"


def _row_text(kind: str, row: Mapping[str, int]) -> str:
    plugins = f" ({row['plugins']} of plugins)" if row.get("plugins") else ""
    times = f" x {row['layers']}" if row["layers"] > 1 else ""
    return (
        f"{kind}{times}: {row['kernels']} kernels{plugins}, {size_text(row['read'])} read by TensorRT's, "
        f"{size_text(row['written'])} written"
    )


def _dequantized_text(format: str, size: int, bandwidth: float) -> str:
    least = f", at least {1e3 * size / bandwidth:.1f} ms a step" if bandwidth else ""
    return (
        f"{format}: products in the compute dtype: weights are dequantized each step, {size_text(size)} written and "
        f"read again{least}. Weights with scales of activations (nvfp4 or fp8, calibrated) are not"
    )
