"""The launch that attention divided among programs ends with: what splits of the rows found becomes one softmax.

Legend: N tokens, S splits, H heads, V value columns, D query columns.
"""

from __future__ import annotations

from glmspec.plugins.spec import Plugin, cdiv, pow2

# A part is the sum of a split's values, not divided by their mass; peak is the largest score (times log2 e), -inf for a
# split that sees no row. q only tells the dtype of what comes out, which is 0 where no split sees a row.
MERGE = Plugin(
    name="attention_merge",
    op="attention_merge",
    function="merge_kernel",
    inputs={"part_NSHV": "float32", "peak_NSH": "float32", "mass_NSH": "float32", "q_NHD": "T"},
    outputs={"out_NHV": "T"},
    sizes={"VP": lambda V: max(16, pow2(V)), "HEADS": lambda VP: max(1, min(8, 512 // VP))},
    scalars=("S",),
    grid=("N", lambda H, HEADS: cdiv(H, HEADS)),
    tiles={"": {"SPLITS": 8, "WARPS": 4}},
)
