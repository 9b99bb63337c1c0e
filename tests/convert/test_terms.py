"""Licences travel with what is made of a checkpoint, and the strictest of several is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.cli import done
from support.models import ASSETS, GOLDENS, edit_checkpoint

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert.beside import LICENCES, matching
from glmspec.convert.command import convert_folder
from glmspec.convert.conversion import AUTO, plan_conversion
from glmspec.convert.settings import ConvertSettings
from glmspec.convert.source import Source
from glmspec.convert.terms import CLASSES, Terms, read_terms, terms_lines
from glmspec.core.progress import Progress

ND = "changed copies may not be passed on"
NC_ND = "Attribution-NonCommercial-NoDerivatives 4.0 International\n\n======\n\nCreative Commons Corporation"
MIT = "MIT License\n\nCopyright (c) 2026 Somebody\n"


def terms(folder: Path, card: str = "", **files: str) -> Terms:
    folder.mkdir(exist_ok=True)
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    for name, text in files.items():
        (folder / name).write_text(text)
    return read_terms(folder, matching(folder, LICENCES))


@pytest.mark.parametrize(
    ("card", "name", "rank"),
    [
        ("---\nlicense: mit\n---\n# A\n", "mit", 0),
        ("\ufeff---\r\nlicense: Apache-2.0\r\n---\r\n", "Apache-2.0", 0),
        ("---\nlicense: cc-by-sa-4.0\n---", "cc-by-sa-4.0", 1),
        ("---\nlicense: other\nlicense_name: glm-5.3\nlicense_link: LICENSE\n---\n", "glm-5.3", 2),
        ("---\nlicense: other\nlicense_name: house-rules\n---\n", "other: house-rules", 2),
        ("---\nlicense: other\nlicense_name: cc-by-nc-nd-4.0\n---\n", "cc-by-nc-nd-4.0", 6),
        ("---\nlicense: cc-by-nc-nd-4.0\n---\n", "cc-by-nc-nd-4.0", 6),
        ("---\nlicense:\n- mit\n- cc-by-nc-4.0\n---\n", "cc-by-nc-4.0", 3),
        ("---\nlicense: something-new\n---\n", "something-new", -1),
        ("---\nlicense: [\n---\n", None, -1),
        ("# A card without front matter\nlicense: mit\n", None, -1),
    ],
)
def test_what_a_card_says(tmp_path, card, name, rank):
    found = terms(tmp_path / "a", card)
    assert (found.name, found.rank) == (name, rank)
    assert (found.warning is not None) == (rank >= 0 and not CLASSES[rank].copies)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (MIT, "mit"),
        ("                Apache License\n          Version 2.0, January 2004\n", "apache-2.0"),
        (NC_ND, "cc-by-nc-nd-4.0"),
        ("Attribution-NonCommercial 4.0 International\n", "cc-by-nc-4.0"),
        ("Modified MIT License\n", None),
        ("Terms of a House\n" + "x" * 500 + MIT, None),
    ],
)
def test_what_a_text_is(tmp_path, text, name):
    found = terms(tmp_path / "a", LICENSE=text)
    assert (found.name, found.files) == (name, ("LICENSE",))
    if name is None:
        assert found.says == "not recognized: read LICENSE"


def test_of_a_card_and_a_text_that_disagree_the_stricter_is_taken(tmp_path):
    found = terms(tmp_path / "a", "---\nlicense: mit\n---\n", LICENSE=NC_ND)
    assert (found.name, found.source) == ("cc-by-nc-nd-4.0", "LICENSE")
    assert "README.md says mit, LICENSE says cc-by-nc-nd-4.0" in found.notes[0]
    assert terms(tmp_path / "b", "---\nlicense: mit\n---\n", LICENSE=MIT).notes == ()


@pytest.mark.parametrize(
    ("link", "found"),
    [
        ("TERMS.md", ("TERMS.md",)),
        ("https://huggingface.co/org/name/blob/main/TERMS.md", ("TERMS.md",)),
        ("https://example.org/TERMS.md", ()),
        ("../TERMS.md", ()),
        ("MISSING.md", ()),
    ],
)
def test_a_text_that_the_card_names_travels(tmp_path, link, found):
    folder = edit_checkpoint(GOLDENS / "checkpoints" / "dspark", tmp_path / "hf")
    for place in (folder, tmp_path):
        (place / "TERMS.md").write_text("House rules")
    terms(folder, f"---\nlicense: other\nlicense_name: house\nlicense_link: {link}\n---\n")
    assert plan_conversion(folder).write(tmp_path / "ck").record["license"]["files"] == list(found)
    assert (tmp_path / "ck" / "TERMS.md").exists() == bool(found)


def test_the_strictest_of_several_and_what_is_not_known():
    record = {"licenses": {"verifier": {"name": "glm-5.3"}, "dflash2": {"name": "cc-by-nc-nd-4.0"}, "x": None}}
    *_, last = terms_lines("engines", record)
    assert last.startswith("the strictest licence: cc-by-nc-nd-4.0 (") and last.endswith("; not known: x")
    assert terms_lines("ck", {"license": {"name": "mit"}}) == ["licence of ck: mit (keep its notices)"]
    assert terms_lines("ck", {}) == []
    nothing = [f"licence of {name}: unknown (nothing in its folder says)" for name in "ab"]
    assert terms_lines("ck", {"licenses": {"a": {}, "b": {}}}) == nothing  # no strictest where none is known


def test_licences_travel_to_checkpoints_of_both_formats(tmp_path):
    folder = edit_checkpoint(GOLDENS / "checkpoints" / "verifier", tmp_path / "hf")
    terms(folder, "---\nlicense: mit\n---\n", **{"LICENSE.txt": MIT, "NOTICE": "n", "Third_Party_Notices.md": "t"})
    (folder / "LICENSES").mkdir()
    (folder / "LICENSES" / "extra.txt").write_text("e")
    files = ["LICENSE.txt", "LICENSES/extra.txt", "NOTICE", "Third_Party_Notices.md"]
    expected = {"name": "mit", "link": None, "files": files, "source": "README.md"}
    assert convert_folder(ConvertSettings(source=folder, output=None), tmp_path / "ck", AUTO, Progress()) == []
    convert_folder(ConvertSettings(source=folder, output=None, layout="hf"), tmp_path / "hf2", AUTO, Progress())
    for out, record in (("ck", "config.json"), ("hf2", "glmspec.json")):
        values = json.loads((tmp_path / out / record).read_text())
        assert values["license"] == expected
        assert set(files) <= values["files"].keys()
        assert all((tmp_path / out / name).read_bytes() == (folder / name).read_bytes() for name in files)
    again = Source(tmp_path / "hf2").terms  # what we wrote has no card, but a record
    assert (again.name, again.files) == ("mit", tuple(files))


def test_who_converts_is_told_that_copies_may_not_be_passed_on(tmp_path):
    folder = edit_checkpoint(GOLDENS / "checkpoints" / "dspark", tmp_path / "hf")
    terms(folder, "---\nlicense: cc-by-nd-4.0\n---\n")
    result = done("convert", folder, "-o", tmp_path / "ck")
    assert "note: licence cc-by-nd-4.0 (README.md): " + ND in result.stderr
    assert f"licence of hf: cc-by-nd-4.0 ({ND}" in done("inspect", folder).stdout
    assert json.loads(done("inspect", folder, "--json", "-").stdout)["license"]["name"] == "cc-by-nd-4.0"
    assert f"licence of ck: cc-by-nd-4.0 ({ND}" in done("inspect", tmp_path / "ck").stdout


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Path:
    """A permissive verifier that was converted before, a drafter that may not be passed on, one that says nothing."""
    home = tmp_path_factory.mktemp("terms")
    golden = GOLDENS / "checkpoints"
    verifier = edit_checkpoint(golden / "verifier", home / "verifier")
    terms(verifier, "---\nlicense: mit\n---\n", LICENSE=MIT)
    plan_conversion(verifier).write(home / "ck")
    drafter = edit_checkpoint(golden / "dflash2", home / "dflash2")
    terms(drafter, "---\nlicense: cc-by-nc-nd-4.0\n---\n", LICENSE=NC_ND)
    said: list[str] = []
    progress = Progress()
    progress.note = said.append
    drafters = [drafter, golden / "dspark"]
    build_engines(home / "ck", drafters, TARGETS["cpu"], BuildOptions(), home / "engines", progress, check=False)
    assert [text for text in said if "licence" in text] == [
        f"{drafter}: licence cc-by-nc-nd-4.0 (README.md): {CLASSES[6].says}"
    ]
    return home / "engines"


def test_engines_and_their_repository_hold_the_texts(engines, tmp_path):
    done("repo", engines, "-o", tmp_path / "repo")
    for folder in (engines, tmp_path / "repo"):
        record = json.loads((folder / "config.json").read_text())
        assert {name: one["name"] for name, one in record["licenses"].items()} == {
            "verifier": "mit",
            "dflash2": "cc-by-nc-nd-4.0",
            "dspark": None,
        }
        assert (folder / "licenses" / "verifier" / "LICENSE").read_text() == MIT
        assert (folder / "licenses" / "dflash2" / "LICENSE").read_text() == NC_ND
        shown = done("inspect", folder).stdout
        assert "licence of dspark: unknown" in shown and "the strictest licence: cc-by-nc-nd-4.0" in shown
    assert "licenses/dflash2/LICENSE" in json.loads((engines / "config.json").read_text())["files"]


def test_a_bundle_holds_the_texts(tmp_path, engines):
    verifier = shutil.copytree(ASSETS / "tiny-verifier", tmp_path / "hf")
    terms(verifier, "---\nlicense: other\nlicense_name: glm-5.3\n---\n", LICENSE="House rules")
    build_engines(verifier, [], TARGETS["b200"], BuildOptions(plugins="off"), tmp_path / "b", Progress(), check=False)
    record = json.loads((tmp_path / "b" / "config.json").read_text())
    assert record["licenses"]["verifier"]["name"] == "glm-5.3"
    assert (tmp_path / "b" / "licenses" / "verifier" / "LICENSE").read_text() == "House rules"
    assert "licenses/verifier/LICENSE" in record["files"]
    assert "licence of verifier: glm-5.3 (it has terms of its own" in done("inspect", tmp_path / "b").stdout
