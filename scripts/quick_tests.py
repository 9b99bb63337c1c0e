"""The test files that a change reaches: what `scripts/test --quick` hands to pytest.

Changed is what differs from the commit where this branch left main, committed or not. A test file reaches the modules
that it imports, late or not, or that a text of it names ("glmspec.build.cli"), those that these import, and so on; and
of a conftest.py, if it names one of its fixtures. What is no Python is reached by whatever names it. Nearest first, as
many files as fit into the time; the others are told.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = "tests/durations.json"  # seconds of a test file (support/durations.py)
UNKNOWN, FILE_MAX, SUM_MAX = 0.5, 15.0, 80.0  # seconds: of a file not in it, of one file, of all on two processes
_MODULE = re.compile(r"\b(?:glmspec|support|tiny)(?:\.\w+)+")


def changed_files(root: Path) -> set[str]:
    """Paths from the repository's root, deleted ones among them."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.splitlines() if done.returncode == 0 else []

    main = next((name for name in ("origin/main", "main") if git("rev-parse", "--verify", "-q", name)), "HEAD")
    base = (git("merge-base", "HEAD", main) or ["HEAD"])[0]
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


class Imports:
    """Which file needs which, all of them by their path from the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = [path.relative_to(root) for top in root.iterdir() if top.name[0] != "." for path in top.rglob("*.py")]
        self.files = {str(path) for path in listed}
        self._modules = {_name(path): str(path) for path in listed}
        self.needs = cache(self._needs)

    def _needs(self, file: str) -> set[str]:
        """Files that a Python file imports or names."""
        text = (self.root / file).read_text(encoding="utf-8")
        tree, names = ast.parse(text), set(_MODULE.findall(text))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                here = ".".join(_name(Path(file)).split(".")[: -node.level or None]) if node.level else ""
                module = ".".join(filter(None, (here, node.module)))
                names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        parents = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
        needed = {self._modules[name] for name in parents if name in self._modules}
        if file.startswith("tests/"):
            words = set(re.findall(r"\w+", text))
            conftests = {str(Path(folder, "conftest.py")) for folder in Path(file).parents} & self.files
            needed |= {conftest for conftest in conftests if words & self._fixtures(conftest)}
        return needed - {file}

    def _fixtures(self, conftest: str) -> set[str]:
        """Fixtures that a test must name to get."""
        body = ast.parse((self.root / conftest).read_text(encoding="utf-8")).body
        decorated = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.decorator_list]
        return {node.name for node in decorated if "autouse" not in ast.unparse(node.decorator_list[0])}

    def reaching(self, changed: set[str]) -> dict[str, int]:
        """Files that reach a changed one, and over how many imports."""
        words = {Path(file).name for file in changed if not file.endswith(".py")}
        naming = {file for file in self.files if any(word in (self.root / file).read_text("utf-8") for word in words)}
        distance = dict.fromkeys(changed, 0) | dict.fromkeys(naming - changed, 1)
        below = [f"{Path(file).parent}/" for file in changed if file.endswith("conftest.py")]
        for folder in below:
            distance = {file: 1 for file in self.files if file.startswith(folder)} | distance
        front = set(distance)
        while front:
            front = {file for file in self.files - set(distance) if self.needs(file) & front}
            distance |= dict.fromkeys(front, max(distance.values()) + 1)
        return distance


def _name(path: Path) -> str:
    """What a file is imported as: a module of the package, or one below tests/ or scripts/."""
    parts = (path.parent if path.name == "__init__.py" else path.with_suffix("")).parts
    if parts[:1] in (("tests",), ("scripts",)):
        return ".".join(parts[1:]) or parts[0]
    return ".".join(("glmspec", *parts))


def chosen(distance: dict[str, int], durations: dict[str, float]) -> tuple[list[str], list[str]]:
    """Test files to run, nearest and quickest first, and those for which there is no time."""
    tests = [file for file in distance if re.match(r"tests/(.*/)?test_\w+\.py", file)]
    took, left, total = [], [], 0.0
    for file in sorted(tests, key=lambda file: (distance[file], durations.get(file, UNKNOWN))):
        seconds = durations.get(file, UNKNOWN)
        if fits := seconds <= FILE_MAX and total + seconds <= SUM_MAX:
            total += seconds
        (took if fits else left).append(file)
    return took, left


def main() -> None:
    """Print the files to run; what is left out goes to standard error."""
    changed = {file for file in changed_files(ROOT) if (ROOT / file).exists()}
    took, left = chosen(Imports(ROOT).reaching(changed), json.loads((ROOT / DURATIONS).read_text()))
    print(f"{len(changed)} changed files, {len(took)} test files that reach them", file=sys.stderr)
    if left:
        print(f"no time for {len(left)} more, run them before you hand in: {' '.join(left)}", file=sys.stderr)
    sys.stdout.writelines(f"{file}\n" for file in took)


if __name__ == "__main__":
    main()
