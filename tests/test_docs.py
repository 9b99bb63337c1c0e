"""What the pages name is there: files, links, commands and their options."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from glmspec.build.cli import main

ROOT = Path(__file__).parents[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
FILES = {name for name in TRACKED if name and (ROOT / name).exists()}
HISTORY = {"CHANGELOG.md"}  # tells what was, by the names of then
PAGES = sorted(name for name in FILES if name.endswith(".md") and name not in HISTORY)
NAMED = re.compile(r"`([\w./-]+\.(?:py|md|sh|txt|json|toml|yml))`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
CALL = re.compile(r"glmspec-build ([a-z]+)((?: [^`#\n|]*)?)")


def missing_files(text: str, page: Path) -> Iterator[str]:
    """Files that a page names and that are not there: a path from the root, a link from the page, or a bare name of any
    file. Files that glmspec writes (`config.json`, say) have no path and no ending of ours."""
    for name in NAMED.findall(text):
        there = any(file == name or file.endswith(f"/{name}") for file in FILES)
        if name.endswith(".py") and "NAME" not in name and not there:
            yield name
    for name in LINK.findall(text):
        if not (page.parent / name).exists():
            yield name


def unknown_options(text: str) -> Iterator[str]:
    """Commands that there are not, and options that their command has not."""
    assert isinstance(main, click.Group)
    for name, rest in CALL.findall(text):
        command = main.commands.get(name)
        if command is None:
            yield f"glmspec-build {name}"
            continue
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", rest):
            if option not in known | {"--help", "-h"}:
                yield f"glmspec-build {name} {option}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = [*missing_files(text, ROOT / page), *unknown_options(text)]
    if wrong:
        pytest.fail(f"{page}: there is no {', no '.join(dict.fromkeys(wrong))}", pytrace=False)


def test_a_planted_mistake_is_found():
    text = "`build/errors.py` `core/errors.py` `errors.py` [a](docs/nothing.md) [b](README.md)"
    assert list(missing_files(text, ROOT / "README.md")) == ["build/errors.py", "docs/nothing.md"]
    text = "glmspec-build convert A -o B --quant nvfp4 --bits 4\nglmspec-build bake\n"
    assert list(unknown_options(text)) == ["glmspec-build convert --bits", "glmspec-build bake"]
