"""Functions that write an op as TensorRT layers, as regions of the network."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from glmspec.network.graph import Tensor

P = ParamSpec("P")
Out = TypeVar("Out", bound=Tensor | tuple[Tensor, ...])


def lowers(op: str) -> Callable[[Callable[P, Out]], Callable[P, Out]]:
    """Make what a function writes one region of the network, which is the op of this name. The function's positional
    parameters are the op's inputs (None: left out), its keyword-only ones the attributes, what it returns the outputs.
    It is not called where the op's plugins have taken its place."""

    def decorate(lower: Callable[P, Out]) -> Callable[P, Out]:
        signature = inspect.signature(lower)
        attributes_of = {
            name for name, parameter in signature.parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
        }

        @functools.wraps(lower)
        def region(*args: P.args, **kwargs: P.kwargs) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            attributes = {name: value for name, value in given.arguments.items() if name in attributes_of}
            inputs = [value for name, value in given.arguments.items() if name not in attributes and value is not None]
            with inputs[0].net.region(op, inputs, attributes) as outputs:
                if not outputs:
                    written: Any = lower(*args, **kwargs)
                    outputs += written if isinstance(written, tuple) else [written]
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return region

    return decorate
