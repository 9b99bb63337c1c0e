"""What a stranger's pip would find: `constraints.txt` and every extra, resolved against the public index.

The machine's own settings (index, find-links, constraints) are switched off; what leads to the network (proxies,
certificates) stays.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from glmspec.plugins.compiler import TRITON

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = sorted(PROJECT["optional-dependencies"])
PYTHONS = ("3.11", "3.12")
OLDEST_LIBC = "x86_64-manylinux_2_35"  # nvidia-pytriton's wheel is for no older glibc
# NVIDIA publishes these without wheels: what they install are wheels of other names.
SOURCES = ("tensorrt", "tensorrt-cu13", "tensorrt-cu13-libs", "tensorrt-rtx", "tensorrt-rtx-cu13")
UNREACHABLE = ("Failed to fetch", "error sending request", "dns error", "Could not connect", "client error (Connect)")


def pins() -> dict[str, str]:
    """Versions by normalized name."""
    lines = (ROOT / "constraints.txt").read_text().split()
    return {normalized(name): version for name, version in (line.split("==") for line in lines)}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Index:
    """The public index, and what was fetched from it."""

    cache: Path

    def resolve(self, python: str, *options: str, **settings: str) -> tuple[dict[str, str], str]:
        """Versions by name (none where no set of them agrees) and what uv said, of this project for one Python.

        settings: of the environment, in addition to the machine's."""
        of_pip_or_uv = re.compile("(PIP|UV)_")
        clean = {name: x for name, x in {**os.environ, **settings}.items() if not of_pip_or_uv.match(name)}
        command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--no-config", "--no-header"]
        command += [
            "--no-annotate",
            "--cache-dir",
            str(self.cache),
            "--python",
            sys.executable,
            "--only-binary",
            ":all:",
        ]
        command += ["--python-version", python, "--python-platform", OLDEST_LIBC]
        command += [word for name in SOURCES for word in ("--no-binary", name)]
        done = subprocess.run([*command, *options], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300)
        return dict(line.split("==") for line in done.stdout.split()), done.stderr

    def resolved(self, python: str, *options: str, **settings: str) -> dict[str, str]:
        """The versions. Fails where there are none."""
        found, said = self.resolve(python, *options, **settings)
        assert found, said
        return found


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Index:
    """Without a network tests are skipped, but fail in CI."""
    index = Index(tmp_path_factory.mktemp("uv"))
    found, said = index.resolve(PYTHONS[0])
    if not found and any(words in said for words in UNREACHABLE) and not os.environ.get("CI"):
        pytest.skip(f"not run, the public index cannot be reached: {said.splitlines()[0]}")
    return index


def extra_options(*extras: str) -> list[str]:
    return [word for extra in extras for word in ("--extra", extra)]


@pytest.mark.parametrize("extras", [[], *([one] for one in EXTRAS), EXTRAS], ids=lambda one: "+".join(one) or "none")
@pytest.mark.parametrize("python", PYTHONS)
def test_extras_resolve_to_what_is_pinned(index, python, extras):
    found, pinned = index.resolved(python, *extra_options(*extras), "-c", "constraints.txt"), pins()
    assert found["torch"] == pinned["torch"]
    assert {name: version for name, version in found.items() if pinned.get(name, version) != version} == {}


@pytest.mark.parametrize("python", PYTHONS)
def test_without_constraints_bounds_keep_what_was_tested(index, python):
    """Every package that pyproject.toml names is the pinned one, to the minor version; patches may be newer."""
    found, pinned = index.resolved(python, *extra_options(*EXTRAS)), pins()
    named = {normalized(re.split(r"[\[<>=]", one)[0]) for one in requirements()} & pinned.keys()
    major = {name: version.split(".")[0] for name, version in found.items() if name in named}
    assert major == {name: pinned[name].split(".")[0] for name in named}
    for name in ("torch", "triton", "numpy", "transformers", "tensorrt-rtx", "nvidia-modelopt", "numba"):
        assert found[name].split(".")[:2] == pinned[name].split(".")[:2], name


def test_scripts_install_nothing_that_is_not_pinned(index):
    found = index.resolved(PYTHONS[0], *extra_options("local", "quant", "dev", "plugins"), "-c", "constraints.txt")
    assert found.keys() - pins().keys() <= {"setuptools"}


def requirements() -> list[str]:
    return [*PROJECT["dependencies"], *(one for extra in EXTRAS for one in PROJECT["optional-dependencies"][extra])]


def test_every_requirement_has_an_upper_bound():
    assert [one for one in requirements() if "<" not in one and "==" not in one] == []


def test_the_triton_that_is_named_is_the_one_that_is_pinned():
    assert f"triton=={pins()['triton']}" == TRITON and TRITON in PROJECT["optional-dependencies"]["plugins"]


def test_a_pair_that_does_not_exist_is_refused(index, tmp_path):
    """What issue 12 saw: torch of PyPI asks for another Triton than the pinned one."""
    wrong = tmp_path / "constraints.txt"
    wrong.write_text((ROOT / "constraints.txt").read_text().replace(TRITON, "triton==3.9.0"))
    found, said = index.resolve(PYTHONS[0], "-c", str(wrong))
    assert not found and "torch==2.13.0 depends on triton" in " ".join(said.split())


def test_settings_of_the_machine_do_not_count(index, tmp_path):
    """An index that does not exist and a constraint that nothing meets, set as pip's and uv's users set them."""
    (tmp_path / "pip.conf").write_text("[global]\nno-index = true\n")
    (tmp_path / "none.txt").write_text("torch==0.0.1\n")
    settings = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "UV_CONSTRAINT": str(tmp_path / "none.txt")}
    assert index.resolved(PYTHONS[0], **settings, PIP_NO_INDEX="1", UV_NO_INDEX="1")
