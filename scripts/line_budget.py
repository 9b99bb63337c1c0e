"""Count the packages' lines of code, and fail above the number in line_budget.txt.

A line counts when it holds code: no blank line, no comment, no docstring. scripts/ and tests/ do not count.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = Path(__file__).with_suffix(".txt")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """How many lines of Python source hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def lines_by_folder() -> Counter[str]:
    """Lines of code of the package folders' tracked files, by folder and, inside one, by subfolder."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"].values()
    command = ["git", "ls-files", "-z", "--", *(f"{folder}/*.py" for folder in folders)]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    lines: Counter[str] = Counter()
    for path in (Path(name) for name in names if name and (ROOT / name).exists()):
        lines["/".join(path.parts[:-1][:2])] += code_lines((ROOT / path).read_text())
    return lines


def main() -> None:
    """Print a table, then the total; exit code 1 when it is above the budget."""
    lines = lines_by_folder()
    budget = next(int(line) for line in BUDGET.read_text().splitlines() if not line.startswith("#"))
    for folder, count in sorted(lines.items()):
        print(f"{count:6} {folder}")
    print(f"{lines.total()} lines of code, at most {budget} are allowed")
    if lines.total() > budget:
        sys.exit(f"Remove {lines.total() - budget}, or raise {BUDGET.relative_to(ROOT)} in a commit that says why.")


if __name__ == "__main__":
    main()
