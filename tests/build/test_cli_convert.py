"""`glmspec-build convert` and `verify` as a user meets them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.cli import done, refused
from support.models import DATA, GOLDENS, random_verifier

from glmspec.convert.implied import ImpliedSource

VERIFIER, DSPARK = GOLDENS / "checkpoints" / "verifier", GOLDENS / "checkpoints" / "dspark"


@pytest.fixture(scope="module")
def full_size(tmp_path_factory) -> Path:
    """GLM-5.3's config.json, and no weights. FP8, as the hub has it."""
    folder = tmp_path_factory.mktemp("full")
    config = json.loads((DATA / "glm-5.3-config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    return folder


def test_a_dry_run_of_the_real_size(full_size):
    """The published totals: 59,585 tensors with 59,044 scales, 753,329,940,480 parameters."""
    result = done("convert", full_size, "--dry-run", "--quant", "nvfp4", "--tp", 8)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    for text in ("59,585", "59,044", "753,329,940,480"):
        assert text in result.stderr, result.stderr
    assert "left out" not in result.stderr
    assert sum(line["bytes"] for line in lines) == 450_403_065_344
    by_rank = [[line for line in lines if line["rank"] == rank] for rank in range(8)]
    assert len({sum(line["bytes"] for line in rank) for rank in by_rank}) == 1
    experts = [line for line in by_rank[0] if line["tensor"] == "model.layers.77.mlp.experts.gate_up_proj"]
    assert experts == [{"rank": 0, "tensor": "model.layers.77.mlp.experts.gate_up_proj", "dtype": "U8",
                        "shape": [256, 512, 3072], "bytes": 256 * 512 * 3072}]  # fmt: skip
    module = {line["tensor"]: line for line in by_rank[7] if line["tensor"].startswith("model.layers.78.")}
    assert module["model.layers.78.mlp.experts.gate_up_proj"] | {"rank": 0} == experts[0] | {
        "tensor": "model.layers.78.mlp.experts.gate_up_proj"
    }
    projection = module["model.layers.78.eh_proj.weight"]
    assert (projection["dtype"], projection["shape"]) == ("BF16", [6144, 12288])  # whole on every rank
    assert not (full_size / "rank0.safetensors").exists()


def test_a_dry_run_lists_what_is_then_written(tmp_path):
    random_verifier(tmp_path / "hf")
    lines = [json.loads(line) for line in done("convert", tmp_path / "hf", "--dry-run", "--tp", 2).stdout.splitlines()]
    done("convert", tmp_path / "hf", "-o", tmp_path / "ck", "--tp", 2)
    for rank in (0, 1):
        held = load_file(tmp_path / "ck" / f"rank{rank}.safetensors")
        listed = {line["tensor"]: line["shape"] for line in lines if line["rank"] == rank}
        assert listed == {name: list(tensor.shape) for name, tensor in held.items()}


def test_a_dry_run_in_hugging_face_s_layout(full_size, tmp_path):
    config = json.loads((full_size / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    result = done("convert", tmp_path, "--dry-run", "--format", "hf")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    before = ImpliedSource(tmp_path).tensors  # as it was: auto keeps everything
    assert {line["tensor"]: line["shape"] for line in lines} == {name: list(one.shape) for name, one in before.items()}
    assert len(lines) == len(before) and "model.layers.8.eh_proj.weight" in before


def test_a_dry_run_refuses_what_the_run_would(tmp_path):
    done("convert", DSPARK, "-o", tmp_path / "ck")
    assert "already a converted checkpoint" in refused(1, "convert", tmp_path / "ck", "--dry-run")
    assert "nothing to write" in refused(1, "convert", DSPARK, "--dry-run", "--format", "hf")
    assert "not divided among ranks" in refused(1, "convert", VERIFIER, "--dry-run", "--format", "hf", "--tp", 2)


def test_the_expected_digest(tmp_path):
    """The seeds record the digest of a drafter's weights: any other is refused, before anything is written."""
    digest = sha256((DSPARK / "model.safetensors").read_bytes()).hexdigest()
    done("convert", DSPARK, "-o", tmp_path / "ck", "--expect-sha256", digest.upper())
    message = refused(1, "convert", DSPARK, "-o", tmp_path / "no", "--expect-sha256", "0" * 64)
    assert digest in message and "0" * 64 in message and not (tmp_path / "no").exists()


def test_options_reach_the_conversion(tmp_path):
    random_verifier(tmp_path / "hf")
    (tmp_path / "recipe.json").write_text('[{"modules": "*.mlp.experts.*", "format": "nvfp4"}]')
    modules = [
        f"model.layers.{n}.mlp.experts.{e}.{k}_proj"
        for n in range(2, 6)
        for e in range(6)
        for k in ("gate", "up", "down")
    ]
    (tmp_path / "amax.json").write_text(json.dumps(dict.fromkeys(modules, 3.0)))
    done("convert", tmp_path / "hf", "-o", tmp_path / "ck", "--recipe", tmp_path / "recipe.json", "--calibration",
         tmp_path / "amax.json", "--tp", 2, "--ep", 2, "--workers", 2)  # fmt: skip
    record = json.loads((tmp_path / "ck" / "config.json").read_text())
    assert record["quantization"]["recipe"] == "recipe.json" and record["quantization"]["quant_algo"] == "NVFP4"
    assert (record["mapping"]["tp_size"], record["mapping"]["moe_ep_size"]) == (2, 2)
    assert len(record["quantization"]["inputs"]) == 8
    engine = ("engine", "--verifier", tmp_path / "ck", "--target", "cpu", "-o", tmp_path / "e")
    for option, value, expected in (("--tp", 4, "expected 2"), ("--ep", 1, "expected 2"), ("--quant", "fp8", "recipe")):
        message = refused(1, *engine, option, value)
        assert option in message and expected in message and "convert again" in message
    done(*engine, "--max-model-len", 64)
    record = json.loads((tmp_path / "e" / "config.json").read_text())
    assert record["mapping"] == {"tp_size": 2, "moe_ep_size": 2}


def test_an_engine_of_a_quantized_checkpoint(tmp_path):
    random_verifier(tmp_path / "hf")
    done("convert", tmp_path / "hf", "-o", tmp_path / "ck", "--quant", "nvfp4")
    done("engine", "--verifier", tmp_path / "ck", "--target", "cpu", "-o", tmp_path / "engines", "--max-model-len", 64)
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [3, 5, 7]}\n')
    done("generate", tmp_path / "engines", "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl",
         "--max-tokens", 4)  # fmt: skip
    assert "as it was built" in done("verify", tmp_path / "engines").stdout


@pytest.mark.parametrize("layout", ["trtllm", "hf"])
def test_verify(tmp_path, layout):
    done("convert", VERIFIER, "-o", tmp_path / "ck", "--format", layout, "--quant", "fp8")
    assert "as they were written" in done("verify", tmp_path / "ck").stdout
    (path,) = (tmp_path / "ck").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    message = refused(1, "verify", tmp_path / "ck")
    assert path.name in message and "changed since it was written" in message
    path.unlink()
    message = refused(1, "verify", tmp_path / "ck")
    assert path.name in message and "missing" in message


@pytest.mark.parametrize("layout, name", [("trtllm", "generation_config.json"), ("hf", "config.json")])
def test_verify_looks_at_every_file(tmp_path, layout, name):
    done("convert", VERIFIER, "-o", tmp_path / "ck", "--format", layout)
    (tmp_path / "ck" / name).write_text("{}")
    message = refused(1, "verify", tmp_path / "ck")
    assert name in message and "changed since it was written" in message


def test_verify_of_something_else_is_exit_code_1():
    assert "not a converted checkpoint" in refused(1, "verify", VERIFIER)


def test_resume(tmp_path):
    assert "no interrupted run" in refused(1, "convert", VERIFIER, "-o", tmp_path / "ck", "--resume")
