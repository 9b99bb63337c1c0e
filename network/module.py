"""`Module` and `Weight`: a model as a tree whose leaves are the weights it needs.

The tree can be walked without TensorRT. The walk that declares a network's weight inputs is also the converter's
contract: a weight that no tensor supplies and a tensor that no weight takes are both errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from glmspec.network.config import NetworkConfig
from glmspec.network.contract import WEIGHT, TensorSpec
from glmspec.network.graph import Network, Tensor


class Weight:
    """A weight of the model. shape: dims of the whole, before ranks divide it. dtype: "float32" and so on, or None for
    the network's compute dtype."""

    def __init__(self, *shape: int, dtype: str | None = None) -> None:
        self.shape = shape
        self.dtype = dtype
        self.name = ""  # set by `Module.named`
        self.format: str | None = None  # number format in the network, None for a plain one
        self._fields: dict[str, Tensor] | None = None

    def whole(self, compute: str) -> TensorSpec:
        """The weight before division, in its plain dtype."""
        return TensorSpec(self.name, self.dtype or compute, self.shape, WEIGHT)

    def bind(self, net: Network) -> None:
        """Use this network's inputs for the weight."""
        specs = net.config.specs(self.whole(net.compute))
        self.format = net.config.format(self.name)
        self._fields = {suffix: net.inputs[spec.name] for suffix, spec in specs.items()}

    @property
    def fields(self) -> dict[str, Tensor]:
        """The network inputs that hold this rank's part, by field (see `formats.py`). Only there after `bind`."""
        if self._fields is None:
            raise RuntimeError(f"weight {self.name!r} is used before its network declared it")
        return self._fields

    @property
    def tensor(self) -> Tensor:
        """The network input of a plain weight."""
        if self.format is not None:
            raise RuntimeError(f"weight {self.name!r} is {self.format}: its layer does not dequantize it")
        return self.fields[""]


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
        """The weights before division, plain, which the converter must find. compute: dtype of those that name none."""
        return [weight.whole(compute) for weight in self.weights()]

    def weight_inputs(self, net_config: NetworkConfig) -> list[TensorSpec]:
        """The weights as inputs of a rank's network."""
        return [spec for whole in self.weight_specs(net_config.compute) for spec in net_config.specs(whole).values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward` with layers named after this module's path. Some argument knows the network."""
        net = next(arg.net for arg in args if hasattr(arg, "net"))
        with net.scope(self.path):
            return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Author this module's layers."""
        raise NotImplementedError(type(self).__name__)
