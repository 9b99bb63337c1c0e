"""Runs plugins on torch tensors: on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).

The kernels, their compile-time numbers and grids are those that engines get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from glmspec.core.errors import NetworkError
from glmspec.plugins.compiler import kernel_of, variant_of
from glmspec.plugins.spec import Plugin, value

GUARD = 64  # numbers behind an output that no kernel may write


class Launcher:
    """`Runs` on torch tensors.

    sm: whose tile sizes are used.
    poison: what outputs hold before a launch, and what lies behind them then, so that a place which a kernel forgets is
    seen, and one that it must not write.
    launches, programs: so far.
    """

    def __init__(self, sm: str = "SM90", poison: float | None = None) -> None:
        self.sm = sm
        self.poison = poison
        self._guard = 0 if poison is None else GUARD
        self._guards: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # an output, what lies behind it, and did
        self.launches = 0
        self.programs = 0

    def __call__(self, plugin: Plugin, *inputs: torch.Tensor, **attributes: Any) -> tuple[torch.Tensor, ...]:
        """One launch. Raises `NetworkError` for inputs that are not the plugin's."""
        compute = plugin.compute([self.dtype(x) for x in inputs])
        for name, x in zip(plugin.inputs, inputs, strict=True):
            if not x.is_contiguous():
                raise NetworkError(f"plugin {plugin.id}: {name}: found strides {x.stride()}, expected it contiguous")
        symbols = plugin.bind([tuple(x.shape) for x in inputs], attributes, self.sm)
        variant = variant_of(plugin, self.sm, compute, symbols)
        outputs = self._outputs(plugin, symbols, compute, dict(zip(plugin.inputs, inputs, strict=True)))
        grid = tuple(value(rule, symbols) for rule in plugin.grid)
        self.launches += 1
        self.programs += math.prod(grid)
        if math.prod(grid):
            tile = plugin.tile(self.sm)
            arguments = dict(zip(plugin.inputs, inputs, strict=True))
            arguments |= {name: symbols[name] for name in plugin.scalars}
            arguments |= dict(zip(plugin.outputs, outputs, strict=True))
            options = {"num_warps": tile["WARPS"], "num_stages": tile.get("STAGES", 2), "enable_fp_fusion": False}
            kernel_of(plugin)[grid](**arguments, **dict(variant.constants), **options)
        self._check_guards(plugin)
        return tuple(outputs)

    def reshape(self, x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """A view."""
        return x.view([x.shape[at] if dim == 0 else dim for at, dim in enumerate(dims)])

    def shape(self, x: torch.Tensor) -> tuple[int, ...]:
        """Sizes."""
        return tuple(x.shape)

    def dtype(self, x: torch.Tensor) -> str:
        """Torch-style name."""
        return str(x.dtype).removeprefix("torch.")

    def _outputs(
        self, plugin: Plugin, symbols: dict[str, Any], compute: str, inputs: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        shapes = plugin.output_shapes(symbols)
        dtypes = plugin.dtypes(compute)[len(inputs) :]
        device = next(iter(inputs.values())).device
        outputs = []
        for name, shape, dtype in zip(plugin.outputs, shapes, dtypes, strict=True):
            if name in plugin.aliased:
                outputs.append(inputs[plugin.aliased[name]])
                continue
            size = math.prod(shape)
            memory = torch.empty(size + self._guard, dtype=getattr(torch, dtype), device=device)
            if self.poison is not None:
                numbers = memory.view(torch.uint8) if memory.dtype == torch.bool else memory
                guard = numbers.fill_(self.poison)[size:].view(torch.uint8)
                self._guards.append((name, guard, guard.clone()))
            outputs.append(memory[:size].view(shape))
        return outputs

    def _check_guards(self, plugin: Plugin) -> None:
        """Nothing may be written behind an output."""
        guards, self._guards = self._guards, []
        for name, guard, before in guards:
            if not torch.equal(guard, before):
                raise NetworkError(f"plugin {plugin.id}: {name}: the kernel writes behind its end")
