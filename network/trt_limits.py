"""Limits of TensorRT 11 and TensorRT-RTX 1.7, as data: measured with their builders, or, where marked, documented.

`validate` holds every network against this table; the rest of glmspec stays within it.
"""

from __future__ import annotations

MAX_TOPK = 3840  # K of a TopK layer
MAX_ELEMENTS = 2**31 - 1  # of one tensor of a step, as kernels count them
MAX_AXES = 8  # of one tensor
KV_CACHE_DTYPES = ("float32", "float16", "bfloat16")  # of an in-place cache update: FP8 and INT8 are refused
# Layers that float8 and float4 tensors may feed. (Everything else wants them dequantized.)
QUANTIZED_READERS = ("DEQUANTIZE", "CONCATENATION", "SHUFFLE", "SHAPE", "IDENTITY", "PLUGIN", "PLUGIN_V2", "PLUGIN_V3")
FP4_CAPABILITIES = ("SM100", "SM103", "SM120")  # GPUs whose tensor cores multiply FP4 (documented)
