"""The floors of the house, and the habits that keep it: editors' links, licence, Makefile, line budget."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FLOORS = ["core", "network", "plugins", "models", "convert", "runtime", "triton_repo", "build"]  # the lowest first
LINKS = ROOT / ".editor" / "glmspec"

# -- floors ---------------------------------------------------------------------------------------


def imports(source: str) -> Iterator[tuple[str, str]]:
    """Every module of ours that Python source imports, with " (late)" for one that is not at the top of the file."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):  # a relative one has no package name: no floor allows it
            whole = "." * node.level + (node.module or "")
            names = [f"{whole}.{name.name}" for name in node.names] if whole == "glmspec" else [whole]
        yield from ((name, "" if node in tree.body else " (late)") for name in names if re.match(r"glmspec\b|\.", name))


def breaches(floor: str, source: str) -> list[str]:
    """What source on a floor imports from a higher one, or from no floor."""
    allowed = {f"glmspec.{lower}" for lower in FLOORS[: FLOORS.index(floor) + 1]}
    return [name + late for name, late in imports(source) if ".".join(name.split(".")[:2]) not in allowed]


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_itself_and_lower_ones(floor):
    """Late imports too, and those for type checkers only. Move the code down, or hand the value in from above."""
    sources = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / floor).rglob("*.py"))}
    found = [f"{path} imports {name}" for path, source in sources.items() for name in breaches(floor, source)]
    assert sources
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize("source, expected", [
    ("import glmspec.runtime.engine", ["glmspec.runtime.engine"]),
    ("from glmspec import core, runtime", ["glmspec.runtime"]),
    ("def f():\n    from glmspec.build.cli import main", ["glmspec.build.cli (late)"]),
    ("if TYPE_CHECKING:\n    from glmspec.runtime.engine import Engine", ["glmspec.runtime.engine (late)"]),
    ("from . import names", ["."]),
    ("import torch\nfrom glmspec.core.errors import GlmspecError\nfrom glmspec.convert import names", []),
])  # fmt: skip
def test_a_planted_breach_is_found(source, expected):
    assert breaches("convert", source) == expected


def files_of(source: str, files: Set[str]) -> set[str]:
    """Those of the files that Python source imports: `from glmspec.a import b` is a/b.py, or else what a is."""
    choices: list[list[str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            choices += [[name.name] for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            choices += [[f"{node.module}.{name.name}", f"{node.module}"] for name in node.names]
    paths = [[name.removeprefix("glmspec.").replace(".", "/") for name in names] for names in choices]
    places = [[file for path in one for file in (f"{path}.py", f"{path}/__init__.py")] for one in paths]
    return {next(file for file in one if file in files) for one in places if files & set(one)}


def circle(sources: dict[str, str]) -> list[str]:
    """Files that import each other in a circle, the first again at the end; none if there is no circle."""
    imported = {file: files_of(source, sources.keys()) - {file} for file, source in sources.items()}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    """What both need lies below both, or is handed in."""
    paths = [path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    assert circle({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}) == []


def test_a_planted_circle_is_found():
    late = {"core/a.py": "def f():\n    from glmspec.core import b", "core/b.py": "import glmspec.core.a"}
    assert set(circle(late)) == {"core/a.py", "core/b.py"}
    assert circle(late | {"core/b.py": "from glmspec.core.errors import a"}) == []


def test_every_package_is_on_a_floor():
    assert set(SETUPTOOLS["package-dir"].values()) == set(FLOORS)
    assert PYPROJECT["tool"]["pyright"]["include"] == [*FLOORS, "scripts"]


# -- editors --------------------------------------------------------------------------------------


def test_an_editor_finds_every_package():
    """glmspec/FOLDER in pyright's extra path is a relative link to the package's folder."""
    assert PYPROJECT["tool"]["pyright"]["extraPaths"] == [LINKS.parent.name]
    assert {path.name: str(path.readlink()) for path in LINKS.iterdir()} == {
        package.removeprefix("glmspec."): f"../../{folder}" for package, folder in SETUPTOOLS["package-dir"].items()
    }
    for package in SETUPTOOLS["packages"]:
        assert (LINKS.parent.joinpath(*package.split(".")) / "__init__.py").is_file(), package


def test_type_checkers_of_others_may_read_our_types():
    assert [folder for folder in FLOORS if not (ROOT / folder / "py.typed").is_file()] == []
    assert "py.typed" in SETUPTOOLS["package-data"]["*"]


# -- habits ---------------------------------------------------------------------------------------


def test_the_licence_goes_with_the_package():
    assert PYPROJECT["project"]["license"] == "Apache-2.0" and PYPROJECT["project"]["license-files"] == ["LICENSE"]
    assert "Apache License\n                           Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


def test_make_has_the_commands_that_people_type():
    """`make help` shows what stands behind ##; no command is a file's name."""
    text = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^(\w+): ## \w", text, re.M)
    assert commands == ["help", "setup", "test", "quick", "check", "quickstart"]
    assert re.findall(r"^\.PHONY: (.*)$", text, re.M) == [" ".join(commands)]


def test_github_runs_what_lands_a_change():
    landing = re.findall(r"^scripts/.*$", (ROOT / ".ci" / "run").read_text(), re.M)
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if step.get("run", "").startswith("scripts/")] == landing


def test_code_above_the_line_budget_fails(tmp_path):
    """A repository of one file with five lines of code."""
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "line_budget.py"
    script.write_text((ROOT / "scripts" / "line_budget.py").read_text())
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools.package-dir]\n"glmspec.core" = "core"\n')
    (tmp_path / "core").mkdir()
    code = '"""Two\nlines."""\n\n# why\nx = """a\n\nb"""\n\n\ndef f():\n    """What."""\n    return x  # here\n'
    (tmp_path / "core" / "x.py").write_text(code)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for budget, status in (("5", 0), ("4", 1)):
        script.with_suffix(".txt").write_text(f"# Why.\n{budget}\n")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (
            status,
            f"5 lines of code, at most {budget} are allowed",
        )
