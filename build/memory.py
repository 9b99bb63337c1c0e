"""What one GPU must hold: weights, caches and the tensors of a step; and the tokens that fit.

Sizes of weights and caches are exact: they are the network's inputs. The tensors of a step are an upper estimate: the
largest sum of layer outputs alive at once in the greatest step, as if TensorRT fused nothing.

Sequences share the pool of pages, and the pool is what fits: its pages are planned from the GPU's memory, the weights
and the greatest step's tensors. No cache gets more elements than 32-bit offsets reach, and at least one sequence of
full length must fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from glmspec.build.deployment import Deployment
from glmspec.build.member import Member
from glmspec.core.dtypes import DTYPES
from glmspec.core.errors import ConfigError
from glmspec.core.units import size_text
from glmspec.models.layers.paged import RING, WHOLE, CacheKind
from glmspec.network.contract import CACHE, TABLE, WEIGHT, TensorSpec
from glmspec.network.limits import CONTEXT
from glmspec.network.reader import Graph, read
from glmspec.network.trt import Backend
from glmspec.network.trt_limits import FP4_CAPABILITIES, MAX_ELEMENTS

# Layers whose output is their input seen differently, or written in place.
_VIEWS = ("SHUFFLE", "KV_CACHE_UPDATE", "IDENTITY", "CONSTANT")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one GPU. per_token: of all caches that grow with the tokens held. rings: of those that do not.
    pool_pages: pages to allocate. available: None for the host's."""

    weights: int
    step: int
    per_token: int
    rings: int
    pool_pages: int
    page_size: int
    available: int | None

    @property
    def caches(self) -> int:
        """Bytes of the caches, rings and null pages included."""
        return (self.pool_pages + 1) * self.page_size * self.per_token + self.rings

    @property
    def tokens(self) -> int:
        """Tokens that the caches hold."""
        return self.pool_pages * self.page_size


def plan_memory(deployment: Deployment, graphs: Sequence[Graph]) -> MemoryPlan:
    """Choose the pages of the pool: what was asked for, else what the limits can use and the GPU has room for.

    graphs: of every member's static network for the greatest step (see `greatest_steps`). Raises `ConfigError` when not
    even one sequence of full length fits, with all the numbers."""
    limits = deployment.limits
    weights = sum(DTYPES[spec.dtype].size(math.prod(spec.sizes)) for spec in _bound_once(deployment))
    per_token = sum(_per_token(deployment, member) for member in deployment.members)
    rings = sum(_rings(deployment, member) for member in deployment.members)
    step = max(peak(graph) for graph in graphs)
    addressable = _addressable(deployment)
    pool = limits.pool_pages or 0
    if pool > addressable:
        raise ConfigError(
            f"--max-cached-tokens: found {pool * limits.page_size:,}, expected at most "
            f"{addressable * limits.page_size:,}: a cache may have {MAX_ELEMENTS:,} elements."
        )
    wanted = pool or min(limits.num_pages - 1, addressable)
    plan = MemoryPlan(weights, step, per_token, rings, wanted, limits.page_size, deployment.target.usable_memory)
    if plan.available is None:
        return plan
    room = (plan.available - weights - step - rings) // (per_token * limits.page_size) - 1
    needed = wanted if limits.pool_pages else limits.pages_per_sequence
    if room < needed:
        raise ConfigError(_too_small(deployment, plan, plan.available, needed, room))
    return replace(plan, pool_pages=min(wanted, room))


def with_pool(deployment: Deployment, plan: MemoryPlan) -> Deployment:
    """The deployment with the pool that was planned; unchanged where every sequence fits at its longest."""
    if plan.pool_pages >= deployment.limits.num_pages - 1:
        return deployment
    return replace(deployment, limits=replace(deployment.limits, pool_pages=plan.pool_pages))


def greatest_steps(deployment: Deployment, backend: Backend) -> list[Graph]:
    """Every member's network for the greatest step, all sizes fixed."""
    nets = [deployment.author(member, CONTEXT, backend, static=True) for member in deployment.members]
    return [read(net.definition, net.backend) for net in nets]


def peak(graph: Graph) -> int:
    """Largest sum of bytes of layer outputs alive at once. Every size of the graph must be fixed."""
    owner: dict[str, str] = {}  # a view -> the tensor whose memory it is
    sizes: dict[str, int] = {}
    last: dict[str, int] = {}
    inputs = {value.name for value in graph.inputs}
    for at, node in enumerate(graph.nodes):
        for value in node.inputs:
            if value is not None:
                last[owner.get(value.name, value.name)] = at
        for value in node.outputs:
            if node.kind in _VIEWS:
                first = next((source for source in node.inputs if source), value).name
                owner[value.name] = owner.get(first, first)
            elif value.name not in inputs:
                sizes[value.name] = DTYPES[value.dtype].size(math.prod(value.shape))
                last[value.name] = at  # an output that nobody reads dies at once
    for value in graph.outputs:
        last[owner.get(value.name, value.name)] = len(graph.nodes)
    ends: dict[int, list[str]] = {}
    for name, at in last.items():
        ends.setdefault(at, []).append(name)
    alive = most = 0
    for at, node in enumerate(graph.nodes):
        alive += sum(sizes.get(value.name, 0) for value in node.outputs)
        most = max(most, alive)
        alive -= sum(sizes.get(name, 0) for name in ends.get(at, ()))
    return most


def _bound_once(deployment: Deployment) -> list[TensorSpec]:
    """Weights and tables, each as often as it lies in memory: what models share counts once. (A drafter needs the
    verifier's embedding and head whole, so on several ranks it has copies.)"""
    bound: dict[tuple[int, str], TensorSpec] = {}
    for member in deployment.members:
        net_config = deployment.net_config(member, CONTEXT)
        shared = member.weights.shared if deployment.mapping.tp == 1 else {}
        for spec in [*member.model.input_specs(deployment.limits, net_config), *member.model.weight_inputs(net_config)]:
            if spec.role in (WEIGHT, TABLE) and spec.name not in shared:
                bound[(id(member.weights), spec.name)] = spec
    return list(bound.values())


def _caches(deployment: Deployment, member: Member, kind: CacheKind) -> list[TensorSpec]:
    specs = member.model.input_specs(deployment.limits, deployment.net_config(member, CONTEXT))
    return [spec for spec in specs if spec.role == CACHE and spec.dims[0] == kind.pages]


def _per_token(deployment: Deployment, member: Member) -> int:
    caches = _caches(deployment, member, WHOLE)
    return sum(DTYPES[spec.dtype].size(_page(spec) // deployment.limits.page_size) for spec in caches)


def _rings(deployment: Deployment, member: Member) -> int:
    """Bytes of a drafter's rings. Raises `ConfigError` when one has more elements than kernels can count."""
    limits, total = deployment.limits, 0
    pages = limits.num_ring_pages(limits.ring_pages(member.sliding_window))
    for spec in _caches(deployment, member, RING):
        page = _page(spec)
        elements = pages * page
        if elements > MAX_ELEMENTS:
            most = (MAX_ELEMENTS // page - 1) // limits.ring_pages(member.sliding_window)
            raise ConfigError(
                f"--max-num-seqs: found {limits.max_num_seqs:,}, expected at most {most:,} with a sliding window of "
                f"{member.sliding_window:,} tokens ({member.name}): a cache may have {MAX_ELEMENTS:,} elements."
            )
        total += DTYPES[spec.dtype].size(elements)
    return total


def _addressable(deployment: Deployment) -> int:
    """Pages up to which no cache has more elements than kernels can count."""
    limits = deployment.limits
    widest = max(_page(cache) for member in deployment.members for cache in _caches(deployment, member, WHOLE))
    pages = MAX_ELEMENTS // widest - 1
    if pages < limits.pages_per_sequence:
        raise ConfigError(
            f"--max-model-len: found {limits.max_model_len:,}, expected at most {pages * limits.page_size:,}: a cache "
            f"may have {MAX_ELEMENTS:,} elements."
        )
    return pages


def _page(cache: TensorSpec) -> int:
    """Elements of a page of a cache [X, J, P, D]."""
    return math.prod(dim for dim in cache.dims[1:] if isinstance(dim, int))


def _too_small(deployment: Deployment, plan: MemoryPlan, available: int, needed: int, room: int) -> str:
    limits, target = deployment.limits, deployment.target
    fits = max(room, 0) * limits.page_size
    pooled = limits.pool_pages and room >= limits.pages_per_sequence
    lower = f"{'--max-cached-tokens' if pooled else '--max-model-len'} to {fits:,}" if fits else ""
    lower += "" if pooled else (" or " if lower else "") + "--max-num-batched-tokens"
    narrower = target.compute_capability in FP4_CAPABILITIES and "nvfp4" not in deployment.kinds
    smaller = ", smaller weights (--quant nvfp4)" if narrower else ""
    advice = f"Lower {lower}, or use" if plan.weights + plan.step + plan.rings < available else "Use"
    rings = f"sliding windows {size_text(plan.rings)}, " if plan.rings else ""
    return (
        f"memory of one {target.name} ({size_text(available)} usable): {rings}weights "
        f"{size_text(plan.weights)} and a step's tensors {size_text(plan.step)} leave room for {fits:,} cached tokens "
        f"of {plan.per_token:,} bytes, expected at least {needed * limits.page_size:,}. "
        f"{advice} more ranks (--tp){smaller}."
    )
