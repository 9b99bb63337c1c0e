"""What people expect of a command line: short help, counts such as 128k, ids told from folders, quiet and loud runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import click
import pytest
from rich.table import Table
from support.cli import done, refused
from support.models import GOLDENS

from glmspec.build.cli import main
from glmspec.build.cli_base import COMMON, Count
from glmspec.core.progress import RichProgress

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
