"""What pip installs: every package folder, and nothing that is not there."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("build", "convert", "core", "models", "network", "plugins", "runtime", "triton_repo")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk() -> set[str]:
    """Every folder that holds Python files, as the package it becomes."""
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {"glmspec." + ".".join(path.parent.relative_to(ROOT).parts) for path in modules}


def test_every_package_folder_is_listed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk())


@pytest.mark.parametrize("package", sorted(packages_on_disk()))
def test_every_package_has_an_init_with_a_docstring(package):
    init = ROOT.joinpath(*package.split(".")[1:], "__init__.py")
    assert init.read_text().lstrip().startswith('"""')


def test_every_top_level_package_is_mapped_to_its_folder():
    assert SETUPTOOLS["package-dir"] == {f"glmspec.{folder}": folder for folder in FOLDERS}
