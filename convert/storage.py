"""How a weight lies in a checkpoint.

`stored(source, name)` recognizes a plain weight, FP8 with 128x128 block scales (`weight_scale_inv`), FP8 with one
scale or one a row (`weight_scale`), ModelOpt NVFP4 (`weight_scale`, `weight_scale_2`) and compressed-tensors NVFP4
(`weight_packed`, `weight_global_scale`, reciprocal). The tensors decide; lists in configs misname modules.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from glmspec.build.errors import CheckpointError
from glmspec.build.network.formats import BLOCK, FORMATS, GROUP
from glmspec.convert.formats import TORCH, Block, plain, to_float32
from glmspec.convert.source import Source

_PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = ("I32", "I64")
_SCALES = (
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
)
# Experts as one tensor: its name, and the matrices of an expert that it stacks, in order.
FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
EXPERT_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
NO_WEIGHTS = ("k_scale", "v_scale", "inv_freq")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A weight as a checkpoint holds it, or some rows of it.

    shape: once read. fields: by `FORMATS`, the tensor of each. inputs: names of its activation scale.
    first, rows: the rows of the matrix [product of the leading dimensions, columns] it stands for.
    """

    source: Source
    name: str
    format: str
    shape: Shape
    fields: dict[str, str]
    inputs: tuple[str, ...] = ()
    reciprocal: bool = False  # compressed-tensors writes 1 / scale_2
    first: int = 0
    rows: int = -1

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor it is made of."""
        return (*self.fields.values(), *self.inputs)

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return self.shape[-1] if self.shape else 1

    @property
    def count(self) -> int:
        """Rows of the matrix."""
        return math.prod(self.shape[:-1]) if self.rows < 0 else self.rows

    def part(self, first: int, rows: int) -> Stored:
        """Some of its rows."""
        return replace(self, first=self.first + first, rows=rows)

    def read(self) -> Block:
        """The matrix [rows, columns]. FP8 rows that begin inside a scale's block are read as float32."""
        inside = self.first % BLOCK if self.format == "fp8_block" else 0
        begin = self.first - inside
        count = self.count + inside
        fields = {}
        for suffix, name in self.fields.items():
            field = FORMATS[self.format][suffix]
            rows = field.size(count, 1)[0]
            if not field.rows:
                fields[suffix] = self.source.rows(name).reshape(1, 1)
            else:
                columns = None if field.columns else 1
                fields[suffix] = self.source.rows(name, begin // field.rows, rows, columns)
            if field.dtype == "F32" and fields[suffix].dtype == np.uint16:  # scales in half precision
                half = torch.from_numpy(fields[suffix]).view(TORCH[self.source.tensors[name].dtype])
                fields[suffix] = half.float().numpy()
        if self.reciprocal:
            fields["scale_2"] = np.float32(1) / fields["scale_2"]
        if self.format == "int32":
            fields[""] = fields[""].astype(np.int32)
        block = Block(self.format, fields)
        return plain_rows(block, inside) if inside else block

    def input_scale(self) -> float | None:
        """The recorded activation scale. Raises for one that is no positive number."""
        if not self.inputs:
            return None
        value = float(self.source.read(self.inputs[0]).float().max())
        if not 0 < value < math.inf:
            raise CheckpointError(f"{self.source.folder}: tensor {self.inputs[0]}: found {value}, expected above 0.")
        return 1 / value if self.reciprocal else value


def plain_rows(block: Block, first: int) -> Block:
    """The rows of a block from `first` on, as float32."""
    return plain("float32", torch.from_numpy(to_float32(block)[first:]))


def field_of(source: Source, name: str) -> str | None:
    """The weight that a tensor is a scale of, or None."""
    stem, _, suffix = name.rpartition(".")
    if suffix in _SCALES:
        return next((base for kind in ("weight", "weight_packed") if (base := f"{stem}.{kind}") in source), None)
    for suffix in ("_scale_inv", "_scale_2", "_input_scale", "_scale"):  # of a fused weight
        if name.endswith(suffix) and name.removesuffix(suffix) in source:
            return name.removesuffix(suffix)
    return None


def find(source: Source, name: str) -> Stored | None:
    """How the weight `name` is stored, None for one that is not there."""
    return stored(source, name) if name in source or f"{name}_packed" in source else None


def weights_of(source: Source) -> dict[str, Stored]:
    """Every weight of a verifier's checkpoint by its Hugging Face name; fused experts one by one."""
    found: dict[str, Stored] = {}
    for name in sorted(source.tensors, key=_natural):
        if field_of(source, name) or name.endswith(NO_WEIGHTS):
            continue
        if fused := FUSED_EXPERTS.fullmatch(name):
            whole, kinds = stored(source, name), EXPERT_MATRICES[fused[2]]
            rows = whole.shape[1] // len(kinds)
            for at in range(whole.shape[0] * len(kinds)):
                expert, kind = divmod(at, len(kinds))
                found[f"{fused[1]}.{expert}.{kinds[kind]}.weight"] = whole.part(at * rows, rows)
        else:
            weight = name.removesuffix("_packed")
            found[weight] = stored(source, weight)
    return found


def _natural(name: str) -> list[Any]:
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", name)]


def stored(source: Source, name: str) -> Stored:
    """How `name` is stored. Raises `CheckpointError` for a missing tensor or scales that do not fit it."""
    stem = name.removesuffix("weight")
    if f"{stem}weight_packed" in source and stem != name:
        return _compressed(source, name, stem)
    info = _info(source, name)
    if info.dtype in _PLAIN:
        return Stored(source, name, _PLAIN[info.dtype], info.shape, {"": name})
    suffixes = ("scale_inv", "scale", "scale_2")
    block, single, second = (n if (n := f"{name}_{suffix}") in source else None for suffix in suffixes)
    inputs = (f"{stem}input_scale",) if f"{stem}input_scale" in source and stem != name else ()
    if info.dtype == "F8_E4M3" and block:
        _check_blocks(source, info.shape, block)
        return Stored(source, name, "fp8_block", info.shape, {"": name, "scale_inv": block}, inputs)
    if info.dtype == "F8_E4M3" and single:
        rows = info.shape[:-1]
        _expect(source, single, (), (1,), rows, (*rows, 1))
        format = "fp8" if math.prod(source.tensors[single].shape) == 1 else "fp8_rows"
        return Stored(source, name, format, info.shape, {"": name, "scale": single}, inputs)
    if info.dtype == "U8" and single and second:
        fields = {"": name, "scale": single, "scale_2": second}
        return _grouped(source, name, fields, inputs)
    raise CheckpointError(
        f"{source.folder}: tensor {name}: found {info.dtype} with scales {[s for s in (block, single, second) if s]}, "
        "expected BF16, F16, F32, FP8 with weight_scale_inv or weight_scale, "
        "or NVFP4 with weight_scale and weight_scale_2."
    )


def stored_integers(source: Source, name: str) -> Stored:
    """A table of ids. Raises `CheckpointError` for a missing tensor or one that is not of integers."""
    info = _info(source, name)
    if info.dtype not in _INTEGERS:
        raise CheckpointError(f"{source.folder}: tensor {name}: found {info.dtype}, expected {' or '.join(_INTEGERS)}.")
    return Stored(source, name, "int32", info.shape, {"": name})


def _info(source: Source, name: str):
    if name not in source:
        raise CheckpointError(f"{source.folder}: tensor {name}: missing.")
    return source.tensors[name]


def _compressed(source: Source, name: str, stem: str) -> Stored:
    for suffix in ("weight_scale", "weight_global_scale"):
        _info(source, stem + suffix)
    fields = {
        "": f"{stem}weight_packed",
        "scale": f"{stem}weight_scale",
        "scale_2": f"{stem}weight_global_scale",
    }
    inputs = (f"{stem}input_global_scale",) if f"{stem}input_global_scale" in source else ()
    return replace(_grouped(source, name, fields, inputs), reciprocal=True)


def _grouped(source: Source, name: str, fields: dict[str, str], inputs: tuple[str, ...]) -> Stored:
    packed = source.tensors[fields[""]]
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    if packed.dtype != "U8" or len(shape) != 2 or shape[-1] % GROUP:
        raise CheckpointError(
            f"{source.folder}: tensor {fields['']}: found {packed.dtype}{list(packed.shape)}, expected a U8 matrix "
            f"of NVFP4 codes whose columns are a multiple of {GROUP // 2}."
        )
    _expect(source, fields["scale"], (*shape[:-1], shape[-1] // GROUP), dtypes=("F8_E4M3",))
    _expect(source, fields["scale_2"], (), (1,))
    return Stored(source, name, "nvfp4", shape, fields, inputs)


def _check_blocks(source: Source, shape: Shape, scale: str) -> None:
    field = FORMATS["fp8_block"]["scale_inv"]
    if len(shape) not in (2, 3):
        raise CheckpointError(f"{source.folder}: tensor {scale}: scales a weight {list(shape)}, expected a matrix.")
    if len(shape) == 3 and shape[1] % BLOCK:
        raise CheckpointError(
            f"{source.folder}: tensor {scale}: scales a weight {list(shape)}, expected rows in multiples of {BLOCK}."
        )
    _expect(source, scale, (*shape[:-2], *field.size(*shape[-2:])))


def _expect(source: Source, name: str, *shapes: Shape, dtypes: tuple[str, ...] = tuple(_PLAIN)) -> None:
    """A field of these shapes and dtypes."""
    if source.tensors[name].dtype not in dtypes:
        raise CheckpointError(
            f"{source.folder}: tensor {name}: found {source.tensors[name].dtype}, expected {' or '.join(dtypes)}."
        )
    found = source.tensors[name].shape
    if found not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{source.folder}: tensor {name}: found shape {list(found)}, expected {wanted}.")
