"""What the pages name is there: files, links, commands and their options."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from fnmatch import filter as matching
from pathlib import Path

import pytest

from glmspec.build.cli import main

ROOT = Path(__file__).parents[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
PATHS = {path.as_posix() for name in TRACKED if (ROOT / name).exists() for path in (Path(name), *Path(name).parents)}
NAMES = {path.rpartition("/")[2] for path in PATHS}
TOPS = {path for path in PATHS if "/" not in path}
HISTORY = {"CHANGELOG.md"}  # tells what was, by the names of then
PAGES = sorted(path for path in PATHS - HISTORY if path.endswith(".md"))
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")
OPTIONS = {
    name: {"-h", "--help"} | {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
    for name, command in main.commands.items()
}
SCRIPTS = [path for path in sorted((ROOT / "scripts").rglob("*")) if path.is_file() and path.suffix in ("", ".py")]
# What an option that stands without its command may be: one of any command, of a script, of pip or of hf.
KNOWN = {"--version", "--extra-index-url", "--local-dir"}.union(
    *OPTIONS.values(), *(OPTION.findall(path.read_text(encoding="utf-8")) for path in SCRIPTS)
)


def code_of(text: str) -> Iterator[str]:
    """What stands between backticks, and indented lines without their comments, continued ones as one."""
    yield from re.findall(r"`([^`]+)`", text)
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.startswith("    ") and "`" not in line:
            yield line.partition("#")[0]


def missing_files(text: str, page: Path) -> Iterator[str]:
    """Files and folders that a page names and that are not there: links from the page; in code, paths from the root or
    the page, and bare names of any Python file. Other bare names (`config.json`, say) are what glmspec writes."""
    folder = page.parent.relative_to(ROOT).as_posix()
    for name in (name.rstrip("/.,:") for code in code_of(text) for name in re.findall(r"[\w.*/-]+", code)):
        if "NAME" in name:  # a reader's own
            continue
        if "/" in name and (name.split("/")[0] in TOPS or name.endswith(".py")):
            if not matching(PATHS, name) and not matching(PATHS, f"{folder}/{name}"):
                yield name
        elif "/" not in name and name.endswith(".py") and not matching(NAMES, name):
            yield name
    yield from (link for link in LINK.findall(text) if not (page.parent / link).exists())


def unknown_options(text: str) -> Iterator[str]:
    """Commands that there are not, options that their command has not, and options that nothing has."""
    for code in code_of(text):
        _, called, rest = code.rpartition("glmspec-build ")
        name = (rest.split() or [""])[0]
        if called and re.match(r"[a-z]", name) and name not in OPTIONS:
            yield f"glmspec-build {name}"
        elif name in OPTIONS:  # `engine --tp` is a call, too
            yield from (f"{name} {option}" for option in OPTION.findall(rest) if option not in OPTIONS[name])
        else:
            yield from (option for option in OPTION.findall(code) if option[:2] == "--" and option not in KNOWN)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_what_is_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = [*missing_files(text, ROOT / page), *unknown_options(text)]
    if wrong:
        pytest.fail(f"{page}: there is no {', no '.join(dict.fromkeys(wrong))}", pytrace=False)


@pytest.mark.parametrize("text, expected", [
    ("`build/errors.py` `core/errors.py` `errors.py` `nowhere.py`", ["build/errors.py", "nowhere.py"]),
    ("[a](docs/nothing.md) [b](README.md) [c](docs/convert.md#x) [d](https://example.com/e.md)", ["docs/nothing.md"]),
    ("`models/nothing` `models/` `plugins/NAME/__init__.py` `OUT/config.json`", ["models/nothing"]),
    ("`tests/plugins/test_*.py` `tests/plugins/untested_*.py`", ["tests/plugins/untested_*.py"]),
    ("    python scripts/lost.py --json FILE  # other/lost.py", ["scripts/lost.py"]),
])  # fmt: skip
def test_a_file_that_is_not_there_is_found(text, expected):
    assert list(missing_files(text, ROOT / "README.md")) == expected


@pytest.mark.parametrize("text, expected", [
    ("    glmspec-build convert A -o B --quant nvfp4 --bits 4", ["convert --bits"]),
    ("    glmspec-build bake\n", ["glmspec-build bake"]),
    ("`glmspec-build validate DIR --lost`, `glmspec-build`, `glmspec-build -h`", ["validate --lost"]),
    ("    glmspec-build validate DIR --tp 8 \\\n        --lost 3   # --other", ["validate --lost"]),
    ("`engine --tp`, `--quant`, `engine --keep`, `scripts/test --quick`, `--lost`", ["engine --keep", "--lost"]),
    ("    pip install --extra-index-url PLACE", []),
])  # fmt: skip
def test_a_command_or_option_that_is_not_there_is_found(text, expected):
    assert list(unknown_options(text)) == expected
