"""Stage "build": real ahead-of-time builds, with tensorrt_rtx as the compiler where the target's own is not here.

One static bucket of a generation step, for every member: the whole network, or groups of the verifier's layers, whose
time does not grow with the square of the depth. What compiled once is remembered by its content hash.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from glmspec.build.deployment import Deployment
from glmspec.build.member import Member
from glmspec.build.plan import build_plan
from glmspec.build.target import PROXY_CAPABILITY, PROXY_PACKAGE
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.compile_cache import CompileCache
from glmspec.build.validate.report import Fault
from glmspec.core.errors import NetworkError
from glmspec.models.layer_group import LayerGroup
from glmspec.network.graph import Network
from glmspec.network.limits import GENERATION
from glmspec.network.reader import read
from glmspec.network.trt import Backend, backend

_RECORD = {"plan_bytes", "sha256"}
_ADVICE = "Report it, with --json's output."


@dataclass(frozen=True)
class Unit:
    """One network to compile. name: as shown. layers: decoder layers in it."""

    name: str
    member: Member
    layers: range | None


def check(case: Case, options) -> StageResult:
    """Compile every unit."""
    proxy = backend(PROXY_PACKAGE)
    cache, faults, plan_bytes, layers = CompileCache(options.cache), [], 0, 0
    start = time.perf_counter()
    for unit in units(case.planned, options.group_layers):
        case.tick(f"compiling {unit.name}")
        net = author(case.planned, unit, proxy)
        content_hash = read(net.definition, proxy).content_hash()
        layers += net.definition.num_layers
        identity = f"{content_hash} {proxy.package} {proxy.version} {PROXY_CAPABILITY}"
        try:
            plan_bytes += cache.record(identity, _RECORD, partial(_compile, unit, net))["plan_bytes"]
        except NetworkError as error:
            faults.append(Fault(unit.name, str(error), _ADVICE))
    seconds = time.perf_counter() - start
    facts = (
        f"{PROXY_PACKAGE} {proxy.version} for {PROXY_CAPABILITY}: networks built {cache.num_compiled}, "
        f"known to build {cache.num_known}, in {seconds:.0f} s",
        f"{layers:,} layers, plans of {plan_bytes / 1e6:.0f} MB, "
        + _shown(bucket(case.planned, case.planned.verifier)),
    )
    numbers = {
        "tensorrt_rtx": proxy.version,
        "networks_built": cache.num_compiled,
        "networks_known": cache.num_known,
        "layers": layers,
        "plan_bytes": plan_bytes,
        "seconds": round(seconds, 2),
    }
    return StageResult(facts, tuple(faults), numbers)


def _compile(unit: Unit, net: Network) -> dict[str, Any]:
    plan = build_plan(net, {}, PROXY_CAPABILITY).plan
    return {"unit": unit.name, "plan_bytes": len(plan), "sha256": hashlib.sha256(plan).hexdigest()}


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


def author(deployment: Deployment, unit: Unit, proxy: Backend) -> Network:
    """A unit's network, every size fixed."""
    member, limits = unit.member, deployment.limits
    net_config = replace(deployment.net_config(member, GENERATION), sizes=bucket(deployment, member))
    model = member.model
    if unit.layers is not None:
        rows = member.index_topk(limits)
        model = LayerGroup(
            member.verifier_config, member.taps, unit.layers, rows, hidden=member.hidden, illegal=member.illegal
        )
    return model.author(limits, net_config, proxy)


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
