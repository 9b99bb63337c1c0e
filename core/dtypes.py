"""The dtypes that tensors have anywhere, and what each is called by those who must be told of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """name: torch's, and ours in contracts and records. bits: of an element. header: safetensors' name. raw: numpy's
    dtype of the same size that holds its bits (numpy has no name for some). data_type: of TensorRT's `DataType`.
    plugin: `tensorrt.plugin`'s spelling. pointer: of a kernel's parameter, as Triton writes it. Empty: it is not used
    there."""

    name: str
    bits: int
    header: str = ""
    raw: str = ""
    data_type: str = ""
    plugin: str = ""
    pointer: str = ""

    @property
    def bytes(self) -> int:
        """Of an element that is no part of a byte."""
        return self.bits // 8

    def size(self, elements: int) -> int:
        """Bytes of so many elements."""
        return elements * self.bits // 8


FP4, FP8 = "float4_e2m1fn", "float8_e4m3fn"
DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float32", 32, "F32", "float32", "FLOAT", "FP32", "*fp32"),
        Dtype("bfloat16", 16, "BF16", "uint16", "BF16", "BF16", "*bf16"),
        Dtype("float16", 16, "F16", "uint16", "HALF", "FP16", "*fp16"),
        Dtype("int32", 32, "I32", "int32", "INT32", "INT32", "*i32"),
        Dtype("int64", 64, "I64", "int64", "INT64"),
        Dtype("bool", 8, "BOOL", "uint8", "BOOL", "BOOL", "*i1"),
        Dtype(FP8, 8, "F8_E4M3", "uint8", "FP8", "FP8", "*fp8e4nv"),
        Dtype("float8_e8m0fnu", 8, "F8_E8M0", "uint8"),
        Dtype(FP4, 4, data_type="FP4"),  # in files two a byte, as uint8
        Dtype("uint8", 8, "U8", "uint8"),
        Dtype("int8", 8, data_type="INT8", plugin="INT8", pointer="*i8"),  # NVFP4 codes as plugins read them
    )
}
HEADERS = {dtype.header: dtype for dtype in DTYPES.values() if dtype.header}
