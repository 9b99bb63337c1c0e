"""Writes what `tests/test_frozen.py` and the compile tests of the plugins compare with, knowingly:

python tests/support/freeze.py [ptx]

ptx: also that of every kernel, which takes minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import compiled, frozen


def in_folders(one: Callable[[str, Path], Any], lines: Iterable[str]) -> dict[str, Any]:
    """What `one` makes of each line, in an empty folder each."""
    made = {}
    for line in lines:
        with tempfile.TemporaryDirectory() as home:
            made[line] = one(line, Path(home))
    return made


def main(with_ptx: bool) -> None:
    """Write the files."""
    values = {
        "commands": frozen.commands(),
        "mistakes": in_folders(frozen.mistake, frozen.MISTAKES),
        "checkpoints": in_folders(frozen.converted, frozen.CONVERSIONS),
        "networks": {name: frozen.networks(name) for name in frozen.NETWORKS},
    }
    frozen.FROZEN.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if with_ptx:
        digests = {one.name: compiled.compile_variant(one).sha256 for one in compiled.every_variant()}
        compiled.PTX.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main("ptx" in sys.argv[1:])
