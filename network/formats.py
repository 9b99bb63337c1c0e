"""The number formats of weights, as data: the tensors that each is made of, and what shares a scale.

| format | fields |
|---|---|
| float32, bfloat16, float16, int32 | the matrix |
| fp8_block | e4m3 codes, float32 `scale_inv` for every 128 x 128 block, the last of an axis partial |
| fp8 | e4m3 codes, one float32 `scale` |
| fp8_rows | e4m3 codes, one float32 `scale` a row (read, never written) |
| nvfp4 | two codes a byte, e4m3 `scale` for every 16 columns, one float32 `scale_2` |

The converter fills these tensors (`convert/formats.py`), the networks take them as inputs (`config.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 128  # rows and columns that share a scale in FP8 with block scales
GROUP = 16  # columns that share a scale in NVFP4
FP4_MAX, FP8_MAX = 6.0, 448.0  # largest magnitudes of e2m1 and e4m3


@dataclass(frozen=True)
class Field:
    """One tensor of a format. dtype: safetensors' name. rows, columns: of the matrix, that share an element;
    0 when one element is shared by all."""

    dtype: str
    rows: int = 1
    columns: int = 1

    def size(self, rows: int, columns: int) -> tuple[int, int]:
        """The field's own rows and columns for a matrix [rows, columns]."""
        return -(-rows // self.rows) if self.rows else 1, -(-columns // self.columns) if self.columns else 1


FORMATS: dict[str, dict[str, Field]] = {
    "float32": {"": Field("F32")},
    "bfloat16": {"": Field("BF16")},
    "float16": {"": Field("F16")},
    "int32": {"": Field("I32")},
    "fp8_block": {"": Field("F8_E4M3"), "scale_inv": Field("F32", BLOCK, BLOCK)},
    "fp8": {"": Field("F8_E4M3"), "scale": Field("F32", 0, 0)},
    "fp8_rows": {"": Field("F8_E4M3"), "scale": Field("F32", 1, 0)},
    "nvfp4": {"": Field("U8", 1, 2), "scale": Field("F8_E4M3", 1, GROUP), "scale_2": Field("F32", 0, 0)},
}
QUANTIZED = ("fp8_block", "fp8", "fp8_rows", "nvfp4")


def whole_tiles(hidden: int, width: int) -> bool:
    """Whether plugins multiply NVFP4 experts of these sizes: whole tiles only."""
    return hidden % 128 == 0 and width % 64 == 0
