"""Stage "build": real ahead-of-time builds, with tensorrt_rtx as the compiler where the target's own is not here.

One static bucket of a generation step, as the target compiles it (see `cut.py`), for every member: the whole network,
or groups of the verifier's layers, whose time does not grow with the square of the depth. What compiled once is
remembered by its content hash.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from glmspec.build.deployment import Deployment
from glmspec.build.kernel_list import kernels_of
from glmspec.build.member import Member
from glmspec.build.plan import build_plan
from glmspec.build.target import PROXY_CAPABILITY, PROXY_PACKAGE
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.compile_cache import CompileCache
from glmspec.build.validate.cut import Cut
from glmspec.build.validate.kernel_summary import summary
from glmspec.build.validate.report import Fault
from glmspec.core.errors import NetworkError
from glmspec.models.layer_group import LayerGroup
from glmspec.network.contract import CACHE, WEIGHT
from glmspec.network.graph import Network
from glmspec.network.limits import GENERATION
from glmspec.network.reader import Graph, read
from glmspec.network.trt import Backend, backend

_SUMMARY = 1  # to be raised when what is kept of a compiled network changes
_RECORD = {"plan_bytes", "sha256", "products", "whole", "layers"}
_ADVICE = "Report it, with --json's output."


@dataclass(frozen=True)
class Unit:
    """One network to compile. name: as shown. layers: decoder layers in it. profile: of its steps."""

    name: str
    member: Member
    layers: range | None
    profile: str = GENERATION


def check(case: Case, options) -> StageResult:
    """Compile every unit."""
    results = compiled(case, options)
    faults = [Fault(unit.name, record, _ADVICE) for unit, record in results if isinstance(record, str)]
    plan_bytes = sum(record["plan_bytes"] for _, record in results if not isinstance(record, str))
    proxy, totals = backend(PROXY_PACKAGE), case.compiling
    facts = (
        f"{PROXY_PACKAGE} {proxy.version} for {PROXY_CAPABILITY}: networks built {totals['built']:.0f}, "
        f"known to build {totals['known']:.0f}, in {totals['seconds']:.0f} s",
        f"{totals['layers']:,.0f} layers, plans of {plan_bytes / 1e6:.0f} MB, "
        + _shown(bucket(case.planned, case.planned.verifier)),
    )
    numbers = {
        "tensorrt_rtx": proxy.version,
        "networks_built": int(totals["built"]),
        "networks_known": int(totals["known"]),
        "layers": int(totals["layers"]),
        "plan_bytes": plan_bytes,
        "seconds": round(totals["seconds"], 2),
    }
    return StageResult(facts, tuple(faults), numbers)


def compiled(case: Case, options) -> list[tuple[Unit, dict[str, Any] | str]]:
    """Every unit with its record, or with what TensorRT said when it did not compile; once a case."""
    if case.records is None:
        proxy, cache, start = backend(PROXY_PACKAGE), CompileCache(options.cache), time.perf_counter()
        case.records, layers = [], 0
        for unit in units(case.planned, options.group_layers):
            case.tick(f"compiling {unit.name}")
            net, cut = author(case.planned, unit, proxy)
            graph = read(net.definition, proxy)
            layers += net.definition.num_layers
            identity = f"{_SUMMARY} {graph.content_hash()} {proxy.package} {proxy.version} {PROXY_CAPABILITY}"
            try:
                case.records.append((unit, cache.record(identity, _RECORD, partial(_compile, unit, net, graph, cut))))
            except NetworkError as error:
                case.records.append((unit, str(error)))
        seconds = time.perf_counter() - start
        case.compiling.update(built=cache.num_compiled, known=cache.num_known, seconds=seconds, layers=layers)
    return case.records


def _compile(unit: Unit, net: Network, graph: Graph, cut: Cut) -> dict[str, Any]:
    weights, caches = ({spec.name for spec in net.contract().of_role(role)} for role in (WEIGHT, CACHE))
    plan, kernels = b"", []
    if net.definition.num_outputs:  # else all of it is plugins
        built = build_plan(net, {}, PROXY_CAPABILITY)
        plan, kernels = built.plan, kernels_of(built.kernels)
    record = {"unit": unit.name, "plan_bytes": len(plan), "sha256": hashlib.sha256(plan).hexdigest()}
    return record | summary(graph, weights, caches, kernels, cut.launches)


def units(deployment: Deployment, group_layers: int | None) -> Iterator[Unit]:
    """The networks to compile. group_layers: of the verifier's layers at a time, None for all."""
    for member in deployment.members:
        if group_layers is None or member is not deployment.verifier:
            yield Unit(member.name, member, None)
            continue
        count = member.config.num_hidden_layers
        for first in range(0, count, group_layers):
            span = range(first, min(first + group_layers, count))
            yield Unit(f"{member.name}, layers {span.start} to {span.stop - 1}", member, span)


def author(deployment: Deployment, unit: Unit, proxy: Backend) -> tuple[Network, Cut]:
    """A unit's network, every size fixed, without the regions that the target's plugins replace."""
    member, limits = unit.member, deployment.limits
    net_config = deployment.net_config(member, unit.profile, plugged=True)
    cut = Cut(net_config.plugins)
    model = member.model
    if unit.layers is not None:
        rows = member.index_topk(limits)
        model = LayerGroup(
            member.verifier_config, member.taps, unit.layers, rows, hidden=member.hidden, illegal=member.illegal
        )
    return model.author(limits, replace(net_config, sizes=bucket(deployment, member)), proxy, cut), cut


def bucket(deployment: Deployment, member: Member) -> dict[str, int]:
    """A step of about 16 rows, two blocks or more where sequences allow it, with the longest contexts."""
    limits = deployment.limits
    ranges = member.ranges(limits)[GENERATION]
    blocks = min(limits.max_num_seqs, max(2, 16 // limits.block_rows))
    rows = blocks * limits.block_rows
    pages = limits.pages_per_sequence + 1  # not the pool's, which depends on what else is deployed
    chosen = dict.fromkeys(("N", "R", "C", "CR", "E", "Z", "H"), rows) | {"G": blocks, "B": blocks}
    chosen |= {"S": limits.block_rows, "X": pages, "X+1": pages + 1}
    return {symbol: min(chosen.get(symbol, most), most) for symbol, (_, _, most) in ranges.items()}


def _shown(sizes: dict[str, int]) -> str:
    return "one bucket: " + ", ".join(f"{symbol} {size:,}" for symbol, size in sizes.items())
