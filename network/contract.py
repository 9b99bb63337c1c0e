"""The inputs and outputs of a network: names, dtypes, dimensions, roles.

Dimensions are integers or symbols. A symbol is a run-time size with a range from the
engine's limits; the same symbol always means the same number within one step.

| symbol | run-time size, in every contract and in the shape suffixes of the model files |
|---|---|
| N | tokens of a step, packed: prefill chunks and verify blocks of any mix of sequences |
| R | rows whose logits are asked for |
| H | rows of hidden states that the MTP module may go on from |
| G | segments: runs of rows of one sequence |
| S | rows of the largest segment |
| M | pages in the longest page table of the step |
| X, X+1 | pages of the caches, page 0 being the null page; pages and one |
| C | rows appended to the drafter's context |
| CR | those of them that are written to the rings |
| XR, XR+1 | pages of the rings, in which sliding layers keep their window, page 0 being the null page; pages and one |
| B | blocks being drafted, or verified |
| E | logits that are adjusted before sampling |
| Z | drafts whose probs are known |
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from glmspec.core.errors import NetworkError

Dims = tuple["int | str", ...]

STEP, CACHE, TABLE, WEIGHT = "step", "cache", "table", "weight"


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. role: "step" (fed every step), "cache" (updated in place),
    "table" (computed once from the config) or "weight" (from the checkpoint)."""

    name: str
    dtype: str
    dims: Dims
    role: str = STEP

    @property
    def sizes(self) -> tuple[int, ...]:
        """The dimensions of a tensor that has no run-time size. Raises `NetworkError` where one is a symbol."""
        sizes = tuple(dim for dim in self.dims if isinstance(dim, int))
        if len(sizes) < len(self.dims):
            raise NetworkError(f"{self}: found a symbol among the dimensions, expected numbers alone")
        return sizes

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(str(dim) for dim in self.dims)}]"


@dataclass(frozen=True)
class Contract:
    """The whole interface of one network, in binding order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def of_role(self, role: str) -> tuple[TensorSpec, ...]:
        """The inputs of one role."""
        return tuple(spec for spec in self.inputs if spec.role == role)

    def to_json(self) -> dict:
        """Plain lists and dicts for config.json."""
        return {
            "inputs": [asdict(spec) for spec in self.inputs],
            "outputs": [asdict(spec) for spec in self.outputs],
        }

    @classmethod
    def from_json(cls, value: dict) -> Contract:
        """The inverse of `to_json`."""
        specs = {
            side: tuple(TensorSpec(**{**spec, "dims": tuple(spec["dims"])}) for spec in specs)
            for side, specs in value.items()
        }
        return cls(specs["inputs"], specs["outputs"])
