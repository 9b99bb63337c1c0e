"""What is published as measured: pages are their numbers, sentences are their pages, counts are today's networks."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS, SCRIPTS = ROOT / "docs", ROOT / "scripts"
PAGES = {
    "cpu": "benchmark",
    "sampling": "benchmark_sampling",
    "adaptive": "benchmark_adaptive",
    "convert": "benchmark_convert",
    "validate": "benchmark_validate",
}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def result_of(page: str) -> dict:
    return json.loads((DOCS / "benchmarks" / f"{page}.json").read_text(encoding="utf-8"))


def plain(path: Path) -> str:
    """A page's text in one line."""
    return " ".join(path.read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_the_numbers_beside_it(script, page):
    assert (DOCS / "benchmarks" / f"{page}.md").read_text() == script(PAGES[page]).report(result_of(page))


def test_every_page_has_a_script():
    assert {path.stem for path in (DOCS / "benchmarks").iterdir()} == PAGES.keys()
    named = set(re.findall(r"(?<!tests/)scripts/\w+\.py", " ".join(plain(path) for path in DOCS.rglob("*.md"))))
    named |= set(
        re.findall(r"(?<!tests/)scripts/\w+\.py", " ".join(path.read_text() for path in (ROOT / "tests").rglob("*.py")))
    )
    assert not {name for name in named if not (ROOT / name).exists()}


def test_acceptance_is_of_every_kind_of_text(script):
    asked = script("measured").prompts()
    kinds = {one.kind for one in asked}
    assert len(kinds) == 4
    for name in ("dspark", "dflash2"):
        assert result_of("cpu")["speculation"][name]["length by kind"].keys() == kinds
    assert sum(result_of("cpu")["speculation"]["prompts"].values()) == len(asked)
    for page in ("sampling", "adaptive"):
        assert result_of(page)["config"]["prompts"] == len(asked)


def test_what_is_sampled_has_an_interval():
    """That holds the number itself; and what is said to be better than another is, as far as these prompts tell."""
    for one in [*result_of("sampling")["acceptance"], *result_of("sampling")["markov top k"]]:
        low, high = one["interval"]
        assert low < one["length"] < high
    gains = [one for one in result_of("sampling")["acceptance"] if one["drafting"] == "block less standard"]
    assert len(gains) == 9 and all(one["interval"][1] > 0 for one in gains)


def test_an_interval_is_as_wide_as_prompts_differ(script):
    measured = script("measured")
    same = np.array([(40.0, 10.0)] * 30)
    assert measured.interval(measured.length, same) == [5.0, 5.0]
    mixed = np.array([(20.0, 10.0), (60.0, 10.0)] * 200)
    low, high = measured.interval(measured.length, mixed)
    expected = 1.96 * 2.0 / np.sqrt(400)  # of a mean of numbers 2 away from it
    assert low == pytest.approx(5 - expected, abs=0.02) and high == pytest.approx(5 + expected, abs=0.02)


# -- quoted elsewhere ----------------------------------------------------------------------------------------------


def test_what_the_guide_to_speculation_quotes(script):
    said = plain(DOCS / "speculation.md")
    assert script("benchmark_sampling").top_k_sentence(result_of("sampling")) in said
    assert script("benchmark_adaptive").sentence(result_of("adaptive")) in said


def test_what_the_guide_to_validation_quotes(script, tmp_path):
    """Times are the page's; layers are those of networks authored now."""
    module, guide = script("benchmark_validate"), (DOCS / "validate.md").read_text(encoding="utf-8")
    assert module.quoted(guide, result_of("validate")) == guide
    (tmp_path / "config.json").write_bytes(module.CONFIG.read_bytes())
    counted = result_of("validate")["networks"]["layers"]
    assert counted == {quant: module.layer_counts(tmp_path, quant) for quant in ("fp8", "nvfp4")}
    told = re.findall(r"│ (\w+, \w+): ([\d,]+) layers authored", guide)
    assert {name: int(count.replace(",", "")) for name, count in told} == counted["nvfp4"]


def test_what_the_drafters_page_quotes(script, tmp_path):
    """assets/README.md against the report of the training."""
    numbers = json.loads((ROOT / "assets" / "training_report.json").read_text(encoding="utf-8"))
    topk = json.loads((ROOT / "assets" / "tiny-verifier" / "config.json").read_text())["index_topk"]
    script("tiny.report").write_readme(tmp_path / "README.md", numbers, topk)
    assert (tmp_path / "README.md").read_text() == (ROOT / "assets" / "README.md").read_text()


def test_a_quote_replaces_the_one_before(script, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nIt takes 5\nseconds, as measured. More.\n\n| a | takes |\n")
    script("measured").quote(page, "It takes", "7 seconds", ", as measured")
    assert page.read_text() == "# Title\n\nIt takes 7 seconds, as measured. More.\n\n| a | takes |\n"
