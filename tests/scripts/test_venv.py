"""`scripts/venv.sh` refuses what no package is for, before it installs anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "venv.sh"
MACHINES = {  # what a python says of itself and of its machine, and what is said of that
    "as here": ("", None),
    "glibc 2.35": ("platform.libc_ver = lambda: ('glibc', '2.35')", None),
    "Python 3.12": ("sys.version_info = (3, 12, 1)", None),
    "Python 3.10": ("sys.version_info = (3, 10, 2)", "glmspec needs Python 3.11 or 3.12 and"),
    "Python 3.13": ("sys.version_info = (3, 13, 0)", "Set PYTHON to another one."),
    "ARM": ("platform.machine = lambda: 'aarch64'", "needs Linux on x86-64 and this is Linux on aarch64."),
    "a Mac": ("platform.system = lambda: 'Darwin'", "needs Linux on x86-64 and this is Darwin"),
    "glibc 2.34": ("platform.libc_ver = lambda: ('glibc', '2.34')", "needs glibc 2.35 or newer"),
    "musl": ("platform.libc_ver = lambda *a: ('', '')", "here is another C library"),
}


@pytest.mark.parametrize(("change", "message"), MACHINES.values(), ids=MACHINES)
def test_what_cannot_work_is_refused(tmp_path, change, message):
    python = tmp_path / "python"
    program = f"import platform, sys; {change}\nexec(sys.stdin.read())"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{program}"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f'. "{SCRIPT}"; check_machine "{python}"; echo fine'], capture_output=True, text=True
    )
    if message is None:
        assert done.stdout == "fine\n", done.stderr
    else:
        assert done.returncode == 1 and message in done.stderr and not done.stdout
