"""What commands say in JSON, and what this version cannot serve."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.cli import done, refused, run
from support.compiled import COMPILE
from support.models import ASSETS, GOLDENS, edit_checkpoint

from glmspec.plugins import compiler
from glmspec.runtime.directory import EngineDirectory

CHECKPOINTS = GOLDENS / "checkpoints"


# -- JSON -----------------------------------------------------------------------------------------


def as_json(*arguments: object) -> dict:
    return json.loads(done(*arguments, "--json", "-").stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A converted verifier, engines, a repository."""
    home = tmp_path_factory.mktemp("made")
    done("convert", CHECKPOINTS / "verifier", "-o", home / "checkpoint", "--quant", "fp8")
    done("engine", "--verifier", home / "checkpoint", "--drafter", CHECKPOINTS / "dspark", "--target", "cpu",
         "-o", home / "engines", "--no-validate")  # fmt: skip
    done("repo", home / "engines", "-o", home / "repository")
    return home


def test_inspect_of_a_hugging_face_folder_says_what_convert_would_do(tmp_path):
    folder = CHECKPOINTS / "verifier"
    found = as_json("inspect", folder)
    values = json.loads((folder / "config.json").read_text())
    assert (found["architecture"], found["layers"]) == (values["architectures"][0], values["num_hidden_layers"])
    assert found["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    done("convert", folder, "-o", tmp_path / "ck")
    record = as_json("inspect", tmp_path / "ck")
    assert found["convert"]["accepted"] and found["convert"]["tensors"] == record["ranks"][0]["tensors"]
    assert found["convert"]["bytes"] == record["bytes"]
    shown = done("inspect", folder).stdout
    assert "Hugging Face checkpoint" in shown and "convert writes" in shown


def test_a_line_of_inspect_is_never_broken(made, tmp_path):
    """Its paths and commands are copied from it."""
    far = shutil.copytree(made, tmp_path / ("far" * 30))
    for name in ("checkpoint", "engines", "repository"):
        assert done("inspect", far / name).stdout.startswith(f"{far / name}: ")


def test_a_parameter_is_counted_once_in_every_format(tmp_path):
    """Two of NVFP4 are a byte."""
    folder = CHECKPOINTS / "verifier"
    done("convert", folder, "-o", tmp_path / "hf", "--format", "hf", "--quant", "nvfp4")
    assert as_json("inspect", tmp_path / "hf")["parameters"] == as_json("inspect", folder)["parameters"]


@pytest.mark.parametrize("name, dialect", [
    ("dspark", "speculators"), ("dflash2", "speculators"),
])  # fmt: skip
def test_inspect_tells_a_drafter_s_dialect(name, dialect):
    found = as_json("inspect", CHECKPOINTS / name)
    assert (found["model"], found["dialect"]) == (name, dialect) and found["convert"]["accepted"]


def test_inspect_says_why_convert_would_refuse(tmp_path):
    name = "model.layers.4.self_attn.q_b_proj.weight"
    broken = edit_checkpoint(CHECKPOINTS / "verifier", tmp_path / "broken", drop=[name])
    found = as_json("inspect", broken)
    assert not found["convert"]["accepted"] and name in found["convert"]["error"]
    assert name in done("inspect", broken).stdout
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((CHECKPOINTS / "dspark" / "config.json").read_text())
    assert "no weights" in as_json("inspect", tmp_path / "bare")["convert"]["error"]


def test_inspect_of_a_config_alone_shows_what_it_implies(tmp_path):
    (tmp_path / "config.json").write_text((CHECKPOINTS / "verifier" / "config.json").read_text())
    found = as_json("inspect", tmp_path)
    assert found["weights_here"] is False and found["parameters"] > 0 and found["convert"]["accepted"]
    assert as_json("inspect", tmp_path / "config.json") == found
    assert "`convert --dry-run`" in refused(1, "convert", tmp_path, "-o", tmp_path / "x")


def test_inspect_of_a_file_asks_for_a_folder(tmp_path):
    (tmp_path / "prompts.jsonl").touch()
    assert "expected a folder or its config.json" in refused(2, "inspect", tmp_path / "prompts.jsonl")


def test_inspect_shows_the_tensors_of_one_rank(tmp_path):
    done("convert", CHECKPOINTS / "verifier", "-o", tmp_path / "ck", "--tp", 2)
    shown = done("inspect", tmp_path / "ck").stdout
    assert shown.count("lm_head.weight") == 1 and "the same names, dtypes and shapes" in shown


@pytest.mark.parametrize("folder, kind", [("engines", "engine directory"), ("repository", "model repository")])
def test_a_folder_of_ours_in_a_checkpoint_s_place_is_told_to_be_one(made, tmp_path, folder, kind):
    told = f"found glmspec's {kind}, expected a checkpoint"
    assert told in refused(1, "convert", made / folder, "-o", tmp_path / "x")
    assert told in refused(1, "engine", "--verifier", made / folder, "--target", "cpu", "-o", tmp_path / "x")
    assert f"-o {made / 'checkpoint'}" not in refused(1, "repo", made / "checkpoint", "-o", tmp_path / "x")


def test_json_has_numbers_and_digests(made, tmp_path):
    checkpoint, engines = as_json("inspect", made / "checkpoint"), as_json("inspect", made / "engines")
    assert checkpoint["bytes"] == sum(path.stat().st_size for path in (made / "checkpoint").glob("*.safetensors"))
    (verifier,) = (one for one in engines["models"] if one["name"] == "verifier")
    assert verifier["weights"]["sha256"] == checkpoint["weights_sha256"] and len(checkpoint["weights_sha256"]) == 64
    assert engines["drafters"] == ["dspark"] and engines["num_illegal_ids"] == 0
    assert engines["limits"]["max_num_seqs"] == 8
    assert len(as_json("inspect", made / "repository")["engines"]["sha256"]) == 64
    done("inspect", made / "engines", "--json", tmp_path / "file.json")
    assert json.loads((tmp_path / "file.json").read_text()) == engines


def test_verify_in_json(made, tmp_path):
    found = as_json("verify", made / "checkpoint")
    assert found["ok"] and found["seconds"] >= 0 and found["bytes"] > 0
    done("convert", CHECKPOINTS / "dspark", "-o", tmp_path / "ck")
    path = tmp_path / "ck" / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    result = run("verify", tmp_path / "ck", "--json", tmp_path / "v.json")
    assert result.exit_code == 1 and not result.stdout
    found = json.loads((tmp_path / "v.json").read_text())
    assert not found["ok"] and "rank0.safetensors" in found["error"]


def test_plugins_in_json(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(compiler, "_compile", COMPILE)
    found = as_json("plugins", "--target", "b200", "--op", "argmax")
    assert found["compute_capability"] == "SM100" and found["seconds"] > 0
    for one in found["kernels"]:
        assert one["registers"] > 0 and one["stack_bytes"] == 0 and len(one["sha256"]) == 64


def test_validate_in_json_has_numbers_beside_the_words():
    common = ("--verifier", ASSETS / "tiny-verifier", "--target", "b200", "--max-model-len", "1K")
    stages = ("--stage", "config", "--stage", "weights", "--stage", "layers", "--stage", "memory")
    found = as_json("validate", *common, *stages)
    numbers = {one["stage"]: one["numbers"] for one in found["stages"]}
    assert found["ok"] and found["versions"]["torch"] and found["seconds"] > 0
    assert numbers["config"]["layers"] == 7 and numbers["config"]["max_model_len"] == 1024
    assert numbers["memory"]["cached_tokens"] >= 1024 and numbers["memory"]["weight_bytes"] > 10**6
    assert numbers["weights"]["tensors"] > 100 and numbers["layers"]["layers"] > 100


def test_statistics_have_tokens_time_versions_and_digests(made, tmp_path):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 4, 5]}\n{"prompt_token_ids": [9]}\n')
    done("generate", made / "engines", "--input", prompts, "-o", tmp_path / "out", "--stats", tmp_path / "stats",
         "--max-tokens", 4)  # fmt: skip
    found = json.loads((tmp_path / "stats").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    run = found["this_run"]
    assert (run["num_prompts"], run["num_prompt_tokens"]) == (2, 4)
    assert run["num_output_tokens"] == sum(len(line["output_token_ids"]) for line in lines)
    assert run["seconds"] > 0 and found["glmspec"] and len(found["engines_sha256"]) == 64


# -- what cannot be served ------------------------------------------------------------------------


def test_repo_and_serve_refuse_what_this_version_cannot_serve(made, tmp_path, monkeypatch):
    """As `generate` does; a repository may be of a version that could."""
    engines = tmp_path / "engines"
    done("engine", "--verifier", CHECKPOINTS / "verifier", "--target", "rtx-pro-6000", "-o", engines, "--no-validate",
         "--max-model-len", 64, "--max-num-seqs", 1)  # fmt: skip
    told = "built for rtx-pro-6000, and this version runs engines for the target cpu only"
    assert told in refused(3, "repo", engines, "-o", tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(EngineDirectory, "check_runs", lambda self: None)
        done("repo", engines, "-o", tmp_path / "repository")
    assert told in refused(3, "serve", tmp_path / "repository")
    assert not (tmp_path / "other").exists()


def test_repo_and_serve_refuse_bundles_and_engines_that_are_gone(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    done("engine", "--verifier", made / "checkpoint", "--target", "h200", "-o", tmp_path / "bundle", "--no-validate")
    told = "a bundle, not an engine directory yet"
    assert told in refused(1, "repo", tmp_path / "bundle", "-o", tmp_path / "other")
    assert "not a model repository" in refused(1, "serve", tmp_path / "bundle")
    shutil.copytree(made / "engines", tmp_path / "engines")
    done("repo", tmp_path / "engines", "-o", tmp_path / "repository")
    shutil.rmtree(tmp_path / "engines")
    assert str(tmp_path / "engines") in refused(1, "serve", tmp_path / "repository")
