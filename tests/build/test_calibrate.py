"""Calibration on a live model, against inputs recorded here."""

from __future__ import annotations

import json

import pytest
import torch
from support.cli import done, refused
from support.models import ASSETS, GOLDENS, random_verifier, reference_verifier

from glmspec.convert.calibration import read_calibration

PROMPTS = [[3, 5, 7, 11, 13, 17, 19, 23], list(range(2, 40))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple:
    home = tmp_path_factory.mktemp("calibrate")
    random_verifier(home / "hf", seed=8)
    lines = "\n".join(json.dumps({"prompt_token_ids": ids}) for ids in PROMPTS)
    (home / "in.jsonl").write_text(lines + "\n\n")
    out = done("calibrate", home / "hf", "--input", home / "in.jsonl", "-o", home / "amax.json").stdout
    return home, out


def test_amax_is_the_largest_input_of_every_module(measured):
    home, _ = measured
    found = read_calibration(home / "amax.json").amax
    model, seen = reference_verifier(home / "hf"), {}

    def note(name: str):
        def hook(module, inputs) -> None:
            seen[name] = max(seen.get(name, 0.0), float(inputs[0].abs().max()))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(note(name))
    for ids in PROMPTS:
        with torch.no_grad():
            model(torch.tensor([ids]))
    linears = {name for name in found if ".mlp.experts." not in name}
    assert len(linears) == 6 * 4 + 3 * 2 + 2 * 3 + 4 * 3  # attention, indexers, dense MLPs, shared experts
    for name in linears:
        assert found[name] == pytest.approx(seen[name], rel=1e-5), name
    # Experts see what the shared expert sees, and share one amax.
    for layer in range(2, 6):
        gates = {found[f"model.layers.{layer}.mlp.experts.{e}.gate_proj"] for e in range(6)}
        assert gates == {found[f"model.layers.{layer}.mlp.shared_experts.gate_proj"]}


def test_a_calibrated_conversion(measured):
    home, out = measured
    assert "modules" in out
    done("convert", home / "hf", "-o", home / "ck", "--quant", "nvfp4", "--calibration", home / "amax.json")
    record = json.loads((home / "ck" / "config.json").read_text())
    assert len(record["quantization"]["inputs"]) == 8 and record["notes"] == []


def test_text_prompts(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "Count: 1, 2, 3"}\n')
    done("calibrate", ASSETS / "tiny-verifier", "--input", tmp_path / "in.jsonl", "-o", tmp_path / "amax.json")
    assert len(json.loads((tmp_path / "amax.json").read_text())) == 177


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": "no tokenizer here"}', '{"prompt_token_ids": []}',
                                  '{"prompt_token_ids": [99]}', '{"prompt_token_ids": [1.5]}'])  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line):
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1]}\n' + line + "\n")
    folder = GOLDENS / "checkpoints" / "verifier"
    message = refused(1, "calibrate", folder, "--input", tmp_path / "in.jsonl", "-o", tmp_path / "amax.json")
    assert "line 2" in message and not (tmp_path / "amax.json").exists()


def test_a_quantized_checkpoint_is_not_calibrated(measured, tmp_path):
    home, _ = measured
    done("convert", home / "hf", "-o", tmp_path / "hf", "--format", "hf", "--quant", "nvfp4")
    arguments = ("calibrate", tmp_path / "hf", "--input", home / "in.jsonl", "-o", tmp_path / "amax.json")
    assert "calibrate the checkpoint that they were made from" in refused(1, *arguments)


def test_what_calibrate_checks_first(measured, tmp_path):
    home, _ = measured
    (tmp_path / "empty.jsonl").write_text("\n")
    arguments = ("calibrate", home / "hf", "--input", tmp_path / "empty.jsonl", "-o", tmp_path / "amax.json")
    assert "found no prompts" in refused(1, *arguments)
    arguments = ("calibrate", home / "hf", "--input", home / "in.jsonl", "-o", tmp_path / "no" / "amax.json")
    assert "is not a folder" in refused(1, *arguments)


def test_a_calibration_that_is_not_used_is_said(measured, tmp_path):
    home, _ = measured
    shown = done("convert", home / "hf", "-o", tmp_path / "ck", "--quant", "fp8", "--calibration", home / "amax.json")
    assert "the calibration is not used" in shown.stderr
    drafter = GOLDENS / "checkpoints" / "dspark"
    arguments = ("convert", drafter, "-o", tmp_path / "d", "--calibration", home / "amax.json")
    assert "drafters are not quantized" in refused(1, *arguments)
