"""Paged caches, updated in place (`glmspec.plugins.kv_append`).

A cache is [X, J, P, D]. The step's rows are sorted by page (`order`), then written page by page from `offset` on:
`IKVCacheUpdateLayer` with one "sequence" a page, so paged caches need no plugin. The verifier and the drafter share
page ids and one pool. Page 0 is the null page that pads page tables. Caches start as zeros, because a masked NaN still
poisons a sum. One plan serves every cache of its kind. Kinds are two: caches of whole contexts, and rings.

Sliding layers keep a ring. With a window W, `ceil(W / P) + 1` pages of P rows a sequence hold whatever window there is;
page ordinal o lies in ring page o mod their number, and a sequence owns its ring as long as it runs. Rings have pages
([XR, J, P, D]), a plan, a table in order of position and its first position of their own, so their size and a block's
gathers of them do not grow with the context. Attention masks by absolute position, which also hides the old rows of a
page used again; of a chunk longer than the ring only the last rows are written. A drafter's contract has these inputs
only where a layer slides, and those of whole contexts only where one does not.

Legend: N rows of the step, X pages, J heads, P rows a page, D columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.network.contract import CACHE, TensorSpec
from glmspec.network.graph import Network, Tensor
from glmspec.plugins import kv_append


@dataclass(frozen=True)
class CacheKind:
    """A kind of cache. prefix: of its inputs' names. pages: the symbol of its page count."""

    prefix: str
    pages: str


WHOLE, RING = CacheKind("", "X"), CacheKind("ring_", "XR")
RING_TABLE, RING_START = "ring_page_table", "ring_start"  # inputs of a network that has rings


@dataclass(frozen=True)
class WritePlan:
    """Where the step's rows go: order [rows], offset [X], cumulative [X+1], all int32. Rows may be left out of `order`;
    they are not written."""

    kind: CacheKind
    order_N: Tensor
    offset_X: Tensor
    cumulative_X1: Tensor

    @staticmethod
    def specs(rows: str, kind: CacheKind = WHOLE) -> list[TensorSpec]:
        """The plan as step inputs. rows: the symbol of the row count."""
        return [
            TensorSpec(f"{kind.prefix}write_order", "int32", (rows,)),
            TensorSpec(f"{kind.prefix}write_offset", "int32", (kind.pages,)),
            TensorSpec(f"{kind.prefix}write_cumulative", "int32", (f"{kind.pages}+1",)),
        ]

    @classmethod
    def of(cls, net: Network, kind: CacheKind = WHOLE) -> WritePlan:
        """The plan of a network that declared `specs`."""
        return cls(kind, *(net.inputs[f"{kind.prefix}write_{name}"] for name in ("order", "offset", "cumulative")))


def cache_spec(name: str, heads: int, page_size: int, columns: int, dtype: str, kind: CacheKind = WHOLE) -> TensorSpec:
    """A cache input; its output is called `name` + ".updated" and must be bound to the same memory."""
    return TensorSpec(name, dtype, (kind.pages, heads, page_size, columns), CACHE)


def append(name: str, rows_NJD: Tensor, plan: WritePlan) -> Tensor:
    """The cache `name` with this step's rows written; marks the network's in-place output."""
    net = rows_NJD.net
    cache = net.inputs[name]
    updated = kv_append.native(cache, rows_NJD, plan.order_N, plan.offset_X, plan.cumulative_X1)
    dims = (plan.kind.pages, *cache.shape[1:])
    net.output(updated, TensorSpec(f"{name}.updated", cache.dtype, dims, CACHE))
    return updated
