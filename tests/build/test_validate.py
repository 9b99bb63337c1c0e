"""`validate`: sound builds pass, and the command."""

from __future__ import annotations

import json
import shutil
from typing import Any
from xml.etree import ElementTree

import pytest
from support.cli import done, refused, run
from support.models import ASSETS, GOLDENS
from support.validation import FULL, STATIC, check, failed, told

from glmspec.build.validate.run import NAMES
from glmspec.network import limits

# -- sound builds pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant, tp, ep", [("fp8", 8, 1), ("nvfp4", 8, 8), ("bf16", 8, 1)])
def test_glm_5_3_on_eight_gpus(full, quant, tp, ep):
    target = "b300" if quant == "bf16" else "b200"
    options = dict(quant=quant, tp=tp, ep=ep, config_only=True, mtp=True, target=target)
    report = check(full / "config.json", *STATIC, **options)
    assert report.ok, told(report)
    facts = {one.stage: " ".join(one.facts) for one in report.outcomes}
    assert "78 layers (75 of experts, 21 with an indexer)" in facts["config"]
    assert "all-reduces 157, all-gathers 1" in facts["ranks"]  # two a layer and the embedding's; the logits'
    assert "cached tokens fit" in facts["memory"]


def test_glm_5_3_with_a_million_tokens(shallow):
    """64 rows of context a page, 16,384 pages a sequence: keys are gathered in pieces."""
    options = dict(quant="nvfp4", tp=8, config_only=True, max_model_len=1 << 20, target="b300")
    report = check(shallow, *STATIC, **options)
    assert report.ok, told(report)


def test_glm_5_3_with_the_steps_of_the_seed(shallow):
    """Index scores, gathered keys and latents, and experts would each be more than 2^31 elements."""
    sizes = dict(max_num_seqs=128, max_num_batched_tokens=16384, max_model_len=131_072)
    report = check(
        shallow, "config", "layers", "ranks", "memory", "limits", **sizes, quant="nvfp4", tp=8, config_only=True
    )
    assert report.ok, told(report)


def test_glm_5_3_compiles_layer_by_layer(shallow, tmp_path):
    """A rank's layers, really compiled ahead of time: two groups of eight, and the last."""
    options = dict(quant="nvfp4", tp=8, config_only=True, wanted=dict(group_layers=8, cache=tmp_path / "cache"))
    report = check(shallow, "config", "build", **options)
    assert report.ok, told(report)
    assert "networks built 6," in report.outcomes[-1].facts[0]
    assert len(list((tmp_path / "cache").iterdir())) == 6


def test_what_compiled_once_is_remembered(folder, tmp_path):
    options = dict(target="rtx-pro-6000", max_num_seqs=2, wanted=dict(group_layers=3, cache=tmp_path / "cache"))

    def facts(**changes: Any) -> str:
        return check(folder, "config", "build", **{**options, **changes}).outcomes[-1].facts[0]

    assert "networks built 5," in facts()
    assert "networks built 0," in facts() and "known to build 5," in facts()
    assert "networks built 2," in facts(tp=2)  # other networks; acceptance is the same
    one = sorted((tmp_path / "cache").iterdir())[0]
    one.write_text("{")  # a damaged record is not believed
    assert "networks built 1," in facts() + facts(tp=2)


@pytest.mark.parametrize("quant, tp, ep", [("auto", 1, 1), ("fp8", 2, 1), ("nvfp4", 2, 2)])
def test_a_small_verifier_passes_every_stage(folder, quant, tp, ep):
    report = check(folder, quant=quant, tp=tp, ep=ep, target="rtx-pro-6000", max_num_seqs=2)
    assert report.ok, told(report)
    assert [one.stage for one in report.outcomes] == list(NAMES)
    assert {one.status for one in report.outcomes} == {"passed"}


def test_the_shipped_models_pass_every_stage():
    """Their config is one that transformers saved: with keys that the twin must not take."""
    drafters = (ASSETS / "tiny-dspark", ASSETS / "tiny-dflash2")
    report = check(ASSETS / "tiny-verifier", drafters=drafters, tp=2, quant="nvfp4", mtp=True)
    assert report.ok and report.exit_code == 0, told(report)
    assert {one.status for one in report.outcomes} == {"passed"}
    assert report.subject["models"] == "verifier, mtp, dspark, dflash2, accept, sample, logprobs"


def test_drafters_are_validated_too():
    checkpoints = GOLDENS / "checkpoints"
    drafters = (checkpoints / "dspark", checkpoints / "dflash2")
    stages = (*STATIC, "build")
    report = check(checkpoints / "verifier", *stages, drafters=drafters, target="rtx-pro-6000", max_num_seqs=2)
    assert report.ok, told(report)
    assert "drafters: dspark, dflash2" in report.outcomes[0].facts[0]
    assert "networks built 6," in report.outcomes[-1].facts[0]
    by_config = check(checkpoints / "verifier", *STATIC, drafters=drafters, config_only=True)
    assert by_config.ok, told(by_config)


def test_a_profile_too_tight_for_a_drafter_s_rings_is_caught(monkeypatch):
    ranges = limits.EngineLimits._ring_ranges

    def tight(self, window, rows):
        made = ranges(self, window, rows)
        return made | {"CR": (1, 1, made["CR"][2] - 1)} if made else made

    monkeypatch.setattr(limits.EngineLimits, "_ring_ranges", tight)
    checkpoints = GOLDENS / "checkpoints"
    report = check(checkpoints / "verifier", "config", "profiles", drafters=(checkpoints / "dflash2",), max_num_seqs=2)
    assert failed(report) == ["profiles"] and "ring_write_order: CR is" in told(report)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_reports_and_says_how_it_went(tmp_path):
    place = tmp_path / "a[/b]c"  # which rich would take for markup
    place.mkdir(parents=True)
    shutil.copyfile(FULL, place / "config.json")
    common = ("validate", place, "--config-only", "--target", "b200", "--tp", 8, "--stage", "config")
    shown = done(*common, "--json", tmp_path / "r.json", "--junit", tmp_path / "r.xml").stdout
    assert "a[/b]c" in shown and "1 passed" in shown
    subject = json.loads((tmp_path / "r.json").read_text())["subject"]
    assert subject["weights"] == "plain" and subject["max_model_len"] == 131_072
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    assert suite.get("name") == "glmspec validate b200 8 plain"
    (tmp_path / "link.json").symlink_to(tmp_path / "r.json")
    done(*common, "--json", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert "--json" in refused(1, *common, "--json", tmp_path / "no" / "r.json")
    assert "--cache" in refused(1, *common, "--cache", tmp_path / "r.json" / "x")
    assert "--stage 'twins'" in refused(2, *common, "--stage", "twins")
    assert "expected a divisor" in run(*common, "--ep", 3).output
    assert run(*common, "--ep", 3).exit_code == 1
