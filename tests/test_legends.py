"""Every file that names tensors by their shapes says what each letter of those shapes counts.

A name with a shape ends in an underscore and a character a dimension (`q_NHD`, `row_BQ`, `cache_X1PD`): capital letters
are symbols, digits are sizes. Names in capitals (`PAGE_SIZE`) are constants, and a small letter (`lane_b`, in kernels)
can't be told from a word. Strings count as names when they are nothing else: plugins declare their tensors by them.

The legend is the part of the module's docstring between "Legend:" and the next empty line. It has an entry for a letter
where that stands alone before a word or an equals sign: "N tokens, H heads, G = H / J queries of a head".
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = sorted(PYPROJECT["tool"]["setuptools"]["package-dir"].values())
NAMED_BY = {ast.Name: "id", ast.arg: "arg", ast.keyword: "arg", ast.Attribute: "attr", ast.Constant: "value"}
SHAPED = re.compile(r"_*[a-z][a-z0-9_]*_([A-Z0-9]*[A-Z][A-Z0-9]*)")
ENTRY = re.compile(r"(?<![*/=+.-] )\b([A-Z]) (?:=[^,;]*|[A-Za-z])")


def shaped_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Every name with a shape, and its shape."""
    for node in ast.walk(tree):
        field = NAMED_BY.get(type(node))
        text = getattr(node, field) if field else None
        if isinstance(text, str) and (match := SHAPED.fullmatch(text)):
            yield text, match[1]


def entries(docstring: str) -> set[str]:
    """The letters that a docstring's legend explains."""
    legend = re.search(r"Legend:(.*?)(?:\n *\n|$)", docstring, re.S)
    return set(ENTRY.findall(" ".join(legend[1].split()))) if legend else set()


def missing(source: str) -> dict[str, str]:
    """Letters without an entry, each with a name that uses it."""
    tree = ast.parse(source)
    explained = entries(ast.get_docstring(tree) or "")
    names = sorted(shaped_names(tree), reverse=True)
    return {letter: name for name, shape in names for letter in shape if letter.isalpha() and letter not in explained}


@pytest.mark.parametrize("folder", FOLDERS)
def test_legends_are_complete(folder):
    found: list[str] = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        lacking = missing(path.read_text())
        found += [f"{path.relative_to(ROOT)}: {x} of {name} has no entry" for x, name in sorted(lacking.items())]
    if found:
        pytest.fail("\n".join(found), pytrace=False)


@pytest.mark.parametrize("source, expected", [
    ("row_BQ = 1", {"B": "row_BQ", "Q": "row_BQ"}),
    ('"""Legend: B blocks, Q = B * R rows."""\ndef f(row_BQ): x.y_R2', {"R": "y_R2"}),
    ('"""Legend: B blocks,\nQ rows."""\nPlugin(inputs={"row_BQ": "T"}, other_1Z=2)', {"Z": "other_1Z"}),
    ('"""B blocks.\n\nLegend: Q rows.\n\nB blocks."""\nrow_BQ', {"B": "row_BQ"}),
    ('"""Nothing."""\nPAGE_SIZE, _T, MAX_X, lane_b, Some_Name, x_2', {}),
])  # fmt: skip
def test_a_planted_gap_is_found(source, expected):
    assert missing(source) == expected
