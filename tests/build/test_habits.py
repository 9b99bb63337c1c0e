"""What people expect of a command line: short help, counts such as 128k, ids told from folders, quiet and loud runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from rich.table import Table
from support.cli import done, refused, run
from support.compiled import COMPILE
from support.models import ASSETS, GOLDENS, edit_checkpoint

from glmspec.build.cli import main
from glmspec.build.cli_base import COMMON, Count
from glmspec.core.progress import RichProgress
from glmspec.plugins import compiler
from glmspec.runtime.directory import EngineDirectory

CHECKPOINTS = GOLDENS / "checkpoints"
OPTIONS = [
    (name, one) for name, command in main.commands.items() for one in command.params if one.param_type_name == "option"
]


# -- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [(), *((name,) for name in main.commands)])
def test_h_is_help(command):
    shown = done(*command, "-h").stdout
    assert shown == done(*command, "--help").stdout and shown.startswith("Usage: ")


@pytest.mark.parametrize("name, titles", [
    ("engine", ["Model", "Target", "Sizes", "Drafting", "Output", COMMON]),
    ("generate", ["Prompts", "Output", "Sampling", "Drafting", COMMON]),
    ("convert", ["Model", "Output", COMMON]),
])  # fmt: skip
def test_options_are_shown_in_sections(name, titles):
    shown = done(name, "-h").stdout
    assert re.findall(r"^([A-Z][a-z ]+):$", shown, re.M) == titles
    for option in main.commands[name].params:
        if isinstance(option, click.Option) and not option.hidden:
            assert shown.count(f"  {option.opts[0]}") >= 1, option.opts


@pytest.mark.parametrize("command, option", OPTIONS, ids=[f"{name} {one.opts[0]}" for name, one in OPTIONS])
def test_every_default_is_told(command, option):
    """By click where there is a value, in words where leaving an option out means something."""
    inputs = {"source", "prompts", "verifier", "drafters", "target", "stop", "output", "json_file", "junit", "log_file"}
    if option.is_flag or option.required or option.name in inputs or isinstance(option.default, (int, str, float)):
        return
    assert "Default" in option.help


def test_no_option_has_a_value_that_always_fails():
    """`--kv-cache-dtype fp8` is refused by every target, so it is not offered."""
    assert "fp8" in refused(2, "engine", "--kv-cache-dtype", "fp8")
    assert "kv-cache-dtype" not in done("engine", "-h").stdout + done("validate", "-h").stdout


NAMES = {"--tp": "--tensor-parallel-size", "--ep": "--expert-parallel-size", "-o": "--output", "-q": "--quiet"}


@pytest.mark.parametrize("short", NAMES)
def test_an_option_has_the_same_names_in_every_command(short):
    found = [one.opts for _, one in OPTIONS if short in one.opts or NAMES[short] in one.opts]
    assert len(found) > 1 and all({short, NAMES[short]} <= set(opts) for opts in found)


@pytest.mark.parametrize(
    "arguments, near",
    [
        (["convret"], "'convert'"),
        (["validat"], "'validate'"),
        (["engine", "--max-model-length", 3], "'--max-model-len'"),
    ],
)
def test_a_slip_of_the_pen_names_the_near_one(arguments, near):
    message = refused(2, *arguments)
    assert "Did you mean" in message and near in message


# -- counts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, number", [
    ("4096", 4096), ("128k", 128_000), ("128K", 131_072), ("1m", 10**6), ("1M", 2**20), ("1.5k", 1500),
    ("0.5m", 500_000),
])  # fmt: skip
def test_counts_are_read_as_vllm_reads_them(text, number):
    assert Count().convert(text, None, None) == number


@pytest.mark.parametrize("text", ["1.5K", "128kb", "k", "", "1e5", "-1", "12 8", "128,000", "0", "0k"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(click.UsageError):
        Count().convert(text, None, None)


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_cached_tokens",
                                  "max_tokens", "min_tokens"])  # fmt: skip
def test_every_option_that_counts_tokens_takes_them(name):
    found = [one for _, one in OPTIONS if one.name == name]
    assert found and all(isinstance(one.type, Count) for one in found)


def test_a_count_reaches_the_engine(tmp_path):
    done("engine", "--verifier", CHECKPOINTS / "verifier", "--target", "cpu", "-o", tmp_path / "e", "--no-validate",
         "--max-model-len", "0.1k", "--max-num-batched-tokens", "1K", "--tensor-parallel-size", 1)  # fmt: skip
    limits = json.loads((tmp_path / "e" / "config.json").read_text())["limits"]
    assert (limits["max_model_len"], limits["max_num_batched_tokens"]) == (100, 1024)


# -- what is told early ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place", ["zai-org/GLM-5.3", "https://huggingface.co/zai-org/GLM-5.3", "z-lab/GLM-5.3-DFlash2"]
)
@pytest.mark.parametrize("command", [
    ["convert", "-o", "x"], ["inspect"], ["validate", "--target", "b200"],
    ["engine", "--target", "cpu", "-o", "x", "--verifier"], ["calibrate", "--input", __file__, "-o", "x"],
])  # fmt: skip
def test_a_hub_id_is_told_to_be_one(command, place):
    message = refused(2, *command, place)
    name = place.removeprefix("https://huggingface.co/")
    assert f"hf download {name} --local-dir {name.split('/')[1]}" in message


def test_a_folder_that_is_not_there_is_no_hub_id(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    for place in ("checkpoints/verifer", "/no/such", "a/b/c"):
        assert "hf download" not in refused(2, "inspect", place)


def test_the_cache_folder_of_a_hub_model_names_its_snapshot(tmp_path):
    snapshot = tmp_path / "models--zai-org--GLM-5.3" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert f"Give {snapshot}." in refused(1, "convert", tmp_path / "models--zai-org--GLM-5.3", "-o", tmp_path / "x")


@pytest.mark.parametrize("change, told", [
    ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    ({"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next"}, "glm5_next"),
    ({"num_attention_heads": "many"}, "num_attention_heads"),
])  # fmt: skip
def test_the_config_is_looked_at_before_missing_weights(tmp_path, change, told):
    values = json.loads((CHECKPOINTS / "verifier" / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    for command in (
        ["convert", "-o", tmp_path / "x"],
        ["engine", "--target", "cpu", "-o", tmp_path / "x", "--verifier"],
    ):
        message = refused(1, *command, tmp_path)
        assert told in message and "safetensors" not in message


@pytest.mark.parametrize("command", ["convert", "engine", "plugins"])
def test_a_wrong_config_is_told_without_torch(tmp_path, command):
    values = json.loads((CHECKPOINTS / "dspark" / "config.json").read_text()) | {"block_size": 0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    given = {
        "convert": ["convert", tmp_path, "-o", tmp_path / "x"],
        "engine": [
            "engine",
            "--verifier",
            CHECKPOINTS / "verifier",
            "--drafter",
            tmp_path,
            "--target",
            "cpu",
            "-o",
            "x",
        ],
        "plugins": ["plugins", "--verifier", CHECKPOINTS / "verifier", "--drafter", tmp_path, "--target", "b200"],
    }
    script = """
import sys
from glmspec.build.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(end.code, sorted({"torch", "numpy", "numba", "tensorrt_rtx"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script, *map(str, given[command])], capture_output=True, text=True)
    assert done.stdout == "1 []\n" and "block_size" in done.stderr


# -- quiet, loud, and in a file -------------------------------------------------------------------


def test_quiet_says_nothing_but_the_result(tmp_path):
    result = done("convert", CHECKPOINTS / "dspark", "-o", tmp_path / "ck", "-q")
    assert (result.stdout, result.stderr) == (f"{tmp_path / 'ck'}\n", "")
    (tmp_path / "ck" / "rank0.safetensors").unlink()
    assert "rank0.safetensors" in refused(1, "verify", tmp_path / "ck", "--quiet")


def test_quiet_shows_no_table(capsys, tmp_path):
    """Its log does."""
    table = Table("acceptance")
    table.add_row("a row")
    for quiet in (False, True):
        progress = RichProgress(quiet=quiet, log=tmp_path / str(quiet))
        progress.show(table)
        progress.close()
        assert ("a row" in capsys.readouterr().err) != quiet
        assert "a row" in (tmp_path / str(quiet)).read_text()


def test_verbose_says_versions_and_what_it_took(tmp_path):
    result = done("convert", CHECKPOINTS / "dspark", "-o", tmp_path / "ck", "-v")
    assert re.search(r"python 3\.\d+.*, glmspec .*, torch 2\.", result.stderr)
    assert re.search(r"CPU \d+\.\d s, at most \d+\.\d\d GB of memory", result.stderr)
    assert result.stdout == f"{tmp_path / 'ck'}\n"
    assert "exclude each other" in refused(2, "convert", CHECKPOINTS / "dspark", "-o", tmp_path / "x", "-q", "-v")


def test_a_log_file_has_it_all_with_the_time_and_is_appended_to(tmp_path):
    log = tmp_path / "log"
    for quiet in ((), ("-q",)):
        out = tmp_path / f"ck{len(quiet)}"
        done("convert", CHECKPOINTS / "dspark", "-o", out, "--log-file", log, *quiet)
    refused(1, "inspect", tmp_path, "--log-file", log)
    lines = log.read_text().splitlines()
    assert all(re.match(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in lines)
    text = log.read_text()
    for part in ("$ glmspec-build", "Converting dspark: begins", str(tmp_path / "ck"), "GB of memory"):
        assert text.count(part) >= 2
    assert f"ConfigError: {tmp_path}/config.json: no such file" in text
    assert "--log-file" in refused(1, "inspect", tmp_path, "--log-file", tmp_path / "no" / "log")
    assert "/dev/full: No space left" in refused(1, "inspect", tmp_path, "--log-file", "/dev/full")


def test_a_long_stage_says_now_and_then_that_it_goes_on(capsys):
    """Without a terminal; what is busy and how far it is."""
    progress = RichProgress(every=0.02)
    with progress.steps("Packing", 3) as advance:
        advance("one")
        progress.doing("two[a]")
        heard = ""
        while "so far" not in heard:
            heard += capsys.readouterr().err
    with progress.bytes("Copying", 4 * 10**9) as moved:
        moved(10**9)
        while "Copying" not in heard:
            heard += capsys.readouterr().err
    heard += capsys.readouterr().err
    assert "Packing: two[a]: 1 of 3, 0 s so far\n" in heard
    assert "Copying: 1.00 of 4.00 GB, 0 s so far\n" in heard
    assert re.search(r"^Packing 0\.\d s$", heard, re.M)


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
