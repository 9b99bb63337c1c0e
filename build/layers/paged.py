"""Paged caches on TensorRT's in-place KV update.

A cache is [X, J, P, D]: pages, heads, rows a page, columns. The step's rows are sorted by page
(`order`), then written page by page from `offset` on (see `ops.kv_update`). The same plan serves
every cache of a network.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.build.network import ops
from glmspec.build.network.contract import CACHE, TensorSpec
from glmspec.build.network.graph import Network, Tensor


@dataclass(frozen=True)
class WritePlan:
    """Where the step's rows go. order [N], offset [X], cumulative [X+1], all int32."""

    order_N: Tensor
    offset_X: Tensor
    cumulative_X1: Tensor

    @staticmethod
    def specs(rows: str) -> list[TensorSpec]:
        """The plan as step inputs. rows: the symbol of the row count."""
        return [
            TensorSpec("write_order", "int32", (rows,)),
            TensorSpec("write_offset", "int32", ("X",)),
            TensorSpec("write_cumulative", "int32", ("X+1",)),
        ]

    @classmethod
    def of(cls, net: Network) -> WritePlan:
        """The plan of a network that declared `specs`."""
        return cls(net.inputs["write_order"], net.inputs["write_offset"], net.inputs["write_cumulative"])


def cache_spec(name: str, heads: int, page_size: int, columns: int, dtype: str) -> TensorSpec:
    """A cache input; its output is called `name` + ".updated" and must be bound to the same memory."""
    return TensorSpec(name, dtype, ("X", heads, page_size, columns), CACHE)


def append(name: str, rows_NJD: Tensor, plan: WritePlan) -> Tensor:
    """The cache `name` with this step's rows written; marks the network's in-place output."""
    net = rows_NJD.net
    cache = net.inputs[name]
    updated = ops.kv_update(cache, ops.gather(rows_NJD, plan.order_N), plan.offset_X, plan.cumulative_X1)
    dims = ("X", *cache.shape[1:])
    net.output(updated, TensorSpec(f"{name}.updated", cache.dtype, dims, CACHE))
    return updated
