"""Numbers as people read them."""

from __future__ import annotations


def size_text(count: float) -> str:
    """Bytes in the unit that leaves few digits: "12 bytes", "34.5 kB", "6.7 MB", "1,510.0 GB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit * 0.99995:  # 999,960 would be 1000.0 kB
            return f"{count / unit:,.1f} {name}"
    return f"{count:.0f} bytes"
