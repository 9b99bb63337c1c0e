"""`Module` and `Weight`: a model as a tree whose leaves are the weights it needs.

The tree can be walked without TensorRT: the same walk that declares a network's weight
inputs is the converter's contract.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from glmspec.build.network.contract import WEIGHT, TensorSpec
from glmspec.build.network.graph import Network, Tensor


class Weight:
    """A tensor of the checkpoint. shape: dims. dtype: "float32" and so on, or None for the network's compute dtype."""

    def __init__(self, *shape: int, dtype: str | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.name = ""  # set by `Module.named`
        self._tensor: Tensor | None = None

    def bind(self, net: Network) -> None:
        """Use this network's input of the same name."""
        self._tensor = net.inputs[self.name]

    @property
    def tensor(self) -> Tensor:
        """The network input. Only there after `bind`."""
        if self._tensor is None:
            raise RuntimeError(f"weight {self.name!r} is used before its network declared it")
        return self._tensor


class Module:
    """A part of a model. Attributes that are weights, modules or lists of modules are its children;
    their attribute names make the path, which matches the checkpoint's spelling."""

    path = ""

    def named(self, path: str = "") -> Module:
        """Give this tree its paths; returns self. Called once, on the root."""
        self.path = path
        for name, child in self._children():
            where = f"{path}.{name}" if path else name
            if isinstance(child, Weight):
                child.name = where
            else:
                child.named(where)
        return self

    def _children(self) -> Iterator[tuple[str, Module | Weight]]:
        for name, value in vars(self).items():
            if isinstance(value, (Module, Weight)):
                yield name, value
            elif isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{index}", item

    def weights(self) -> Iterator[Weight]:
        """Every weight below, in the order of declaration."""
        for _, child in self._children():
            if isinstance(child, Weight):
                yield child
            else:
                yield from child.weights()

    def weight_specs(self, compute: str) -> list[TensorSpec]:
        """The weights as network inputs. compute: dtype of those that name none."""
        return [TensorSpec(w.name, w.dtype or compute, w.shape, WEIGHT) for w in self.weights()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with layers named after this module's path."""
        net = next(arg.net for arg in args if isinstance(arg, Tensor))
        with net.scope(self.path):
            return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Author this module's layers."""
        raise NotImplementedError(type(self).__name__)
