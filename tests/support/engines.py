"""Engines of a test process load a network once."""

from __future__ import annotations

from typing import Any

import pytest

from glmspec.runtime import engine, model


class _Tree:
    """A tree of modules that is authored once."""

    def __init__(self, tree: Any, net: Any) -> None:
        self._tree, self.net = tree, net

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)

    def author(self, *arguments: Any) -> Any:
        """The network."""
        self.net = self.net or self._tree.author(*arguments)
        return self.net


def keep_networks(kept: dict[str, tuple[Any, Any]], patch: pytest.MonkeyPatch) -> None:
    """A network that an engine directory names by its digest is authored, read back and compared with that digest when
    it is first loaded; later engines get what was read. Each has its own weights, caches and executor."""
    read_now, load = model.read, model.Model

    def read(definition: Any, backend: Any) -> Any:
        graph = next((graph for net, graph in kept.values() if net.definition is definition), None)
        return graph or read_now(definition, backend)

    def load_or_find(network: Any, *arguments: Any, network_sha256: str, **options: Any) -> Any:
        once = _Tree(network, kept.get(network_sha256, [None])[0])
        made = load(once, *arguments, network_sha256=network_sha256, **options)
        kept[network_sha256] = (once.net, made.executor.graph)
        return made

    patch.setattr(model, "read", read)
    patch.setattr(engine, "Model", load_or_find)
