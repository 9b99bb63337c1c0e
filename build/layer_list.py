"""The layers of a network as lines of JSON: what a build log is read beside."""

from __future__ import annotations

import json
from collections.abc import Iterator

from glmspec.network.reader import Graph, Value


def layer_lines(graph: Graph) -> Iterator[str]:
    """One object a layer, in order: name, kind, inputs and outputs with dtype and shape (-1: a run-time size)."""
    for node in graph.nodes:
        row = {
            "layer": node.name,
            "kind": node.kind,
            "inputs": [None if value is None else _shown(value) for value in node.inputs],
            "outputs": [_shown(value) for value in node.outputs],
        }
        if node.region and "op" in node.region:
            row["op"] = node.region["op"]
        yield json.dumps(row)


def _shown(value: Value) -> str:
    return f"{value.name} {value.dtype}{list(value.shape)}"
