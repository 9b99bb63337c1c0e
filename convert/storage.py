"""How a weight lies in a checkpoint.

`stored(source, name)` recognizes a plain weight, FP8 with 128x128 block scales, with one scale or with one a row
(`weight_scale_inv` or `weight_scale`), ModelOpt NVFP4 (`weight_scale`, `weight_scale_2`) and compressed-tensors NVFP4
(`weight_packed`, `weight_global_scale`, reciprocal). The tensors decide, and `declared.py` what they leave open; lists
in configs misname modules.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import torch

from glmspec.convert.formats import TORCH, Matrix, plain, to_float32
from glmspec.convert.scheme import CACHED
from glmspec.convert.source import Source
from glmspec.core.errors import CheckpointError
from glmspec.network.formats import BLOCK, FORMATS, GROUP

_PLAIN = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = ("I32", "I64")
_NUMBERS = (*_PLAIN, "F8_E8M0")  # dtypes of FP8's scales; E8M0 are powers of two, float32 holds each exactly
_MX_GROUP = 32  # columns that share a scale in the MX formats
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
# Tensors that are no weights and that nothing here needs, by the reason why.
NO_WEIGHTS = {
    "K/V scale of a cache format that is not used": re.compile(
        r"(?:.*\.)?(?:(?:[qkv]|kv|qkv|prob|[kv]_cache|kv_cache)_(?:(?:global_)?scale|scaling_factor|zero_point)(?:_inv)?"
        rf"|prob_output_scale|{CACHED}\.(?:output_(?:scale|zero_point)|[kv]_bias))"
    ),
    "rotary frequencies, computed from the config": re.compile(r"(?:.*\.)?inv_freq"),
}
# How tensors of formats that are not read are called, by what they are.
_FOREIGN = {
    "INT4 (GPTQ or AWQ)": r"\.(?:qweight|qzeros)$",
    "a permutation of columns (g_idx, activation order)": r"\.(?:weight_)?g_idx$",
    "quantization with zero points": r"\.(?:weight|input)_zero_point$",
    "quantization by bitsandbytes": r"\.(?:(?:nested_)?(?:absmax|quant_map)|SCB|quant_state\..*)$",
    "MXFP4": r"\.(?:gate_up_proj|down_proj)_blocks$",
    "a scale of a module's inputs (AWQ, SmoothQuant)": r"[._]pre_quant_scale$",
    "SVDQuant": r"\.svdquant_lora_[ab]$",
    "sparse storage": r"\.(?:bitmask|compressed|row_offsets)$",
    "a rotation of activations": r"_proj\.\w+_(?:input|output|q_attn|k_cache)\.(?:weight|perm)$",
}
_ANY_FOREIGN = re.compile("|".join(_FOREIGN.values()))
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredWeight:
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

    def part(self, first: int, rows: int) -> StoredWeight:
        """Some of its rows."""
        return replace(self, first=self.first + first, rows=rows)

    def read(self) -> Matrix:
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
                columns = field.size(1, self.columns)[1]
                fields[suffix] = self.source.rows(name, begin // field.rows, rows, columns)
            if field.dtype == "F32" and fields[suffix].dtype != np.float32:  # scales in half precision, or exponents
                dtype = self.source.tensors[name].dtype
                narrow = TORCH["F8_E8M0" if dtype == "U8" else dtype]
                fields[suffix] = torch.from_numpy(fields[suffix]).view(narrow).float().numpy()
        if self.reciprocal:
            fields["scale_2"] = np.float32(1) / fields["scale_2"]
        if self.format == "int32":
            fields[""] = fields[""].astype(np.int32)
        matrix = Matrix(self.format, fields)
        return plain_rows(matrix, inside) if inside else matrix

    def input_scale(self) -> float | None:
        """The recorded activation scale, the largest of several. Raises for one that is no positive number."""
        if not self.inputs:
            return None
        values = self.source.read(self.inputs[0]).float()
        value = float(values.min() if self.reciprocal else values.max())
        if not 0 < value < math.inf:
            raise CheckpointError(f"{self.source.folder}: tensor {self.inputs[0]}: found {value}, expected above 0.")
        return 1 / value if self.reciprocal else value


def plain_rows(matrix: Matrix, first: int) -> Matrix:
    """The rows of a matrix from `first` on, as float32."""
    return plain("float32", torch.from_numpy(to_float32(matrix)[first:]))


def field_of(source: Source, name: str) -> str | None:
    """The weight that a tensor is a scale of, or None."""
    stem, _, suffix = name.rpartition(".")
    if suffix in _SCALES:
        return next((base for kind in ("weight", "weight_packed") if (base := f"{stem}.{kind}") in source), None)
    for suffix in ("_scale_inv", "_scale_2", "_input_scale", "_scale"):  # of a fused weight
        if name.endswith(suffix) and name.removesuffix(suffix) in source:
            return name.removesuffix(suffix)
    return None


def no_weight(name: str) -> str | None:
    """Why a tensor that is no weight is not needed, None for any other."""
    return next((why for why, pattern in NO_WEIGHTS.items() if pattern.fullmatch(name)), None)


def check_formats(source: Source) -> None:
    """Raise `ConfigError` for a format that is declared and not read, `CheckpointError` for a tensor of one, by the
    format's name."""
    _ = source.declared
    for name in filter(_ANY_FOREIGN.search, source.tensors):
        _unsupported(source, name, next(what for what, pattern in _FOREIGN.items() if re.search(pattern, name)))


def find(source: Source, name: str) -> StoredWeight | None:
    """How the weight `name` is stored, None for one that is not there."""
    return stored(source, name) if name in source or f"{name}_packed" in source else None


def weights_of(source: Source) -> dict[str, StoredWeight]:
    """Every weight of a verifier's checkpoint by its Hugging Face name; fused experts one by one."""
    weights: dict[str, StoredWeight] = {}
    for name in sorted(source.tensors, key=_natural):
        if field_of(source, name) or no_weight(name):
            continue
        if fused := FUSED_EXPERTS.fullmatch(name):
            whole, kinds = stored(source, name), EXPERT_MATRICES[fused[2]]
            rows = whole.shape[1] // len(kinds)
            for at in range(whole.shape[0] * len(kinds)):
                expert, kind = divmod(at, len(kinds))
                weights[f"{fused[1]}.{expert}.{kinds[kind]}.weight"] = whole.part(at * rows, rows)
        else:
            plain_name = name.removesuffix("_packed")
            weights[plain_name] = stored(source, plain_name)
    return weights


def _natural(name: str) -> list[Any]:
    return [int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", name)]


def stored(source: Source, name: str) -> StoredWeight:
    """How `name` is stored. Raises `CheckpointError` for a missing tensor, scales that do not fit it, or a format that
    is not supported."""
    stem = name.removesuffix("weight")
    if f"{stem}weight_packed" in source and stem != name:
        return _compressed(source, name, stem)
    info = _info(source, name)
    if info.dtype in _PLAIN:
        return StoredWeight(source, name, _PLAIN[info.dtype], info.shape, {"": name})
    scales = [n for suffix in ("scale_inv", "scale") if (n := f"{name}_{suffix}") in source]
    input_scale = f"{stem}input_scale" if stem != name else f"{name}_input_scale"
    inputs = (input_scale,) if input_scale in source else ()
    second = f"{name}_scale_2"
    if info.dtype == "F8_E4M3" and len(scales) == 1 and second not in source:
        format = _role(source, name, scales[0])
        fields = {"": name, "scale_inv" if format == "fp8_block" else "scale": scales[0]}
        return StoredWeight(source, name, format, info.shape, fields, inputs)
    if info.dtype == "U8" and scales == [f"{name}_scale"] and second in source:
        return _grouped(source, name, {"": name, "scale": scales[0], "scale_2": second}, inputs)
    if foreign := _foreign_codes(source, name, scales):
        _unsupported(source, name, foreign)
    raise CheckpointError(
        f"{source.folder}: tensor {name}: found {info.dtype} with scales {scales + [second] * (second in source)}, "
        "expected BF16, F16, F32, FP8 with weight_scale_inv or weight_scale, "
        "or NVFP4 with weight_scale and weight_scale_2."
    )


def _role(source: Source, name: str, scale: str) -> str:
    """The format of FP8 codes with a scale: what its shape fits. One number fits a small weight both as its one scale
    and as that of its one block: the declaration decides. Without one, a matrix of one number is a block's, and
    `weight_scale_inv` is of blocks."""
    shape, info = source.tensors[name].shape, source.tensors[scale]
    if info.dtype in ("U8", "F8_E8M0") and info.shape == (*shape[:-1], -(-shape[-1] // _MX_GROUP)) != _grid(shape):
        _unsupported(source, name, f"MXFP8 (a scale for {_MX_GROUP} columns)")
    declared, inverse = source.declared.formats(name.removesuffix(".weight")), scale.endswith("_inv")
    shapes: dict[str, list[Shape]] = {"fp8_block": []}
    if grid := _grid(shape):
        shapes["fp8_block"] = [grid, (*grid[:-1], 1, grid[-1], 1)]
    if declared or not inverse:
        shapes |= {"fp8": [(), (1,)], "fp8_rows": [shape[:-1], (*shape[:-1], 1)]}
        if math.prod(info.shape) == 1:
            shapes |= {"fp8": [info.shape], "fp8_rows": []}
    fitting = [format for format, legal in shapes.items() if info.shape in legal]
    if not fitting and inverse and len(shape) == 3 and shape[1] % BLOCK:
        raise CheckpointError(
            f"{source.folder}: tensor {scale}: scales a weight {list(shape)}, expected rows in multiples of {BLOCK}."
        )
    if not any(shapes.values()):
        raise CheckpointError(f"{source.folder}: tensor {scale}: scales a weight {list(shape)}, expected a matrix.")
    dtypes = (*_NUMBERS, "U8") if source.declared.exponents else _NUMBERS
    _expect(source, scale, *itertools.chain(*shapes.values()), dtypes=dtypes)
    return next((format for format in fitting if format in declared), fitting[0])


def _grid(shape: Shape) -> Shape | None:
    """The shape of a weight's block scales, None for one that can have none: experts that share a block."""
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[1] % BLOCK):
        return None
    return (*shape[:-2], *FORMATS["fp8_block"]["scale_inv"].size(*shape[-2:]))


def _foreign_codes(source: Source, name: str, scales: list[str]) -> str | None:
    """The name of a format that is not supported, by the dtypes of codes and scale; None for one without a name."""
    codes = source.tensors[name].dtype
    scale = source.tensors[scales[0]].dtype if scales else None
    if codes in ("I8", "F8_E5M2"):
        return "INT8" if codes == "I8" else "FP8 in e5m2"
    if codes in ("U8", "F4") and scale in ("U8", "F8_E8M0"):
        return "MXFP4"
    if codes == "I32" and scales:
        return "INT4 (pack-quantized)"
    return "INT4" if codes == "U8" and scale in _PLAIN and f"{name}_scale_2" not in source else None


def _unsupported(source: Source, name: str, what: str) -> NoReturn:
    raise CheckpointError(
        f"{source.folder}: tensor {name}: {what} is not supported. "
        "Supported are BF16, F16, F32, FP8 (128x128 blocks, one scale, one a row) and NVFP4."
    )


def stored_integers(source: Source, name: str) -> StoredWeight:
    """A table of ids. Raises `CheckpointError` for a missing tensor or one that is not of integers."""
    info = _info(source, name)
    if info.dtype not in _INTEGERS:
        raise CheckpointError(f"{source.folder}: tensor {name}: found {info.dtype}, expected {' or '.join(_INTEGERS)}.")
    return StoredWeight(source, name, "int32", info.shape, {"": name})


def _info(source: Source, name: str):
    if name not in source:
        raise CheckpointError(f"{source.folder}: tensor {name}: missing.")
    return source.tensors[name]


def _compressed(source: Source, name: str, stem: str) -> StoredWeight:
    scales = [n] if (n := f"{stem}weight_scale") in source else []
    if foreign := _foreign_codes(source, f"{stem}weight_packed", scales):
        _unsupported(source, name, foreign)
    for suffix in ("weight_scale", "weight_global_scale"):
        _info(source, stem + suffix)
    fields = {
        "": f"{stem}weight_packed",
        "scale": f"{stem}weight_scale",
        "scale_2": f"{stem}weight_global_scale",
    }
    inputs = (f"{stem}input_global_scale",) if f"{stem}input_global_scale" in source else ()
    return replace(_grouped(source, name, fields, inputs), reciprocal=True)


def _grouped(source: Source, name: str, fields: dict[str, str], inputs: tuple[str, ...]) -> StoredWeight:
    packed = source.tensors[fields[""]]
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    if packed.dtype != "U8" or len(shape) != 2 or shape[-1] % GROUP:
        raise CheckpointError(
            f"{source.folder}: tensor {fields['']}: found {packed.dtype}{list(packed.shape)}, expected a U8 matrix "
            f"of NVFP4 codes whose columns are a multiple of {GROUP // 2}."
        )
    _expect(source, fields["scale"], (*shape[:-1], shape[-1] // GROUP), dtypes=("F8_E4M3",))
    _expect(source, fields["scale_2"], (), (1,))
    return StoredWeight(source, name, "nvfp4", shape, fields, inputs)


def _expect(source: Source, name: str, *shapes: Shape, dtypes: tuple[str, ...] = tuple(_PLAIN)) -> None:
    """A field of these shapes and dtypes."""
    if source.tensors[name].dtype not in dtypes:
        raise CheckpointError(
            f"{source.folder}: tensor {name}: found {source.tensors[name].dtype}, expected {' or '.join(dtypes)}."
        )
    actual = source.tensors[name].shape
    if actual not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(f"{source.folder}: tensor {name}: found shape {list(actual)}, expected {wanted}.")
