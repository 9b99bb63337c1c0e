"""`glmspec-build` as a user meets it: its options, exit codes, messages and output lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from support.cli import done, refused
from support.models import GOLDENS, edit_checkpoint
from support.records import rewrite

from glmspec.build.cli import main

CHECKPOINTS = GOLDENS / "checkpoints"
PROMPTS = [[3, 4, 5], [9], list(range(2, 42))]
MOST = 12


# -- the surface --------------------------------------------------------------------------------


def test_every_command_and_option_has_help():
    for command in main.commands.values():
        assert command.help
        assert all(p.help for p in command.params if isinstance(p, click.Option))


def test_help_imports_nothing_heavy():
    script = """
import sys
from glmspec.build.cli import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
heavy = {"torch", "tensorrt", "tensorrt_rtx", "transformers", "safetensors", "numpy", "tritonclient"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stderr.strip() == "[]"
    assert all(f"  {command} " in result.stdout for command in main.commands)


def test_help_lists_the_commands_in_the_order_of_the_work():
    lines = done("--help").stdout.splitlines()
    assert [line.split()[0] for line in lines[lines.index("Commands:") + 1 :]] == list(main.commands)


# -- exit codes -----------------------------------------------------------------------------------


def test_no_command_is_exit_code_2():
    """Other wrong usage: tests/test_frozen.py."""
    assert "Usage" in refused(2)


def test_a_bundle_is_a_success_and_its_end_without_tensorrt_is_exit_code_3(tmp_path, monkeypatch):
    """For a GPU machine's targets a bundle is written, and the command that finishes it told."""
    monkeypatch.setitem(sys.modules, "tensorrt", None)  # as on a machine without it
    out = tmp_path / "e"
    made = done("engine", "--verifier", CHECKPOINTS / "verifier", "--target", "b200", "-o", out, "--no-validate")
    assert made.stdout == f"{out}\n" and f"glmspec-build engine --from-bundle {out} -o" in made.stderr
    assert json.loads((out / "config.json").read_text())["producer"]["kind"] == "engine bundle"
    assert "not installed" in refused(3, "engine", "--from-bundle", out)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_a_broken_checkpoint_is_exit_code_1(tmp_path):
    name = "model.layers.4.self_attn.q_b_proj.weight"
    broken = edit_checkpoint(CHECKPOINTS / "verifier", tmp_path / "broken", drop=[name])
    assert name in refused(1, "convert", broken, "-o", tmp_path / "ck")
    assert name in refused(1, "engine", "--verifier", broken, "--target", "cpu", "-o", tmp_path / "e")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def test_a_refusal_in_a_real_process_is_one_message(tmp_path):
    other = edit_checkpoint(CHECKPOINTS / "verifier", tmp_path / "v", config={"architectures": ["LlamaForCausalLM"]})
    script = "from glmspec.build.cli import main; main()"
    command = [sys.executable, "-c", script, "convert", str(other), "-o", str(tmp_path / "ck")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"glmspec-build: {other}/config.json: architectures: found ['LlamaForCausalLM']")
    assert len(result.stderr.splitlines()) == 1


def test_foreign_output_is_exit_code_1(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "not a folder that glmspec wrote" in refused(1, "convert", CHECKPOINTS / "dspark", "-o", tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_converted_checkpoint_is_not_converted_again(tmp_path):
    done("convert", CHECKPOINTS / "dspark", "-o", tmp_path / "ck")
    assert "already a converted checkpoint" in refused(1, "convert", tmp_path / "ck", "-o", tmp_path / "ck2")


# -- the whole way --------------------------------------------------------------------------------


def write_prompts(path: Path, prompts=PROMPTS) -> Path:
    path.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts))
    return path


def answers(engines: Path, home: Path, *options: object, most: int = MOST, prompts=PROMPTS) -> list[dict]:
    source = write_prompts(home / "prompts.jsonl", prompts)
    done("generate", engines, "--input", source, "--output", home / "out.jsonl", "--max-tokens", most, *options)
    return [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]


def ids(lines: list[dict]) -> list[list[int]]:
    return [line["output_token_ids"] for line in lines]


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Path:
    """convert, then engine, as commands: a verifier and two drafters of a kind."""
    home = tmp_path_factory.mktemp("cli")
    result = done("convert", CHECKPOINTS / "verifier", "-o", home / "verifier")
    assert result.stdout == f"{home / 'verifier'}\n"
    drafters = ("--drafter", CHECKPOINTS / "dspark", "--drafter", CHECKPOINTS / "dspark_redvocab")
    result = done("engine", "--verifier", home / "verifier", *drafters, "--target", "cpu", "-o", home / "engines")
    assert result.stdout == f"{home / 'engines'}\n"
    return home / "engines"


@pytest.fixture(scope="module")
def plain(engines, tmp_path_factory) -> list[dict]:
    return answers(engines, tmp_path_factory.mktemp("plain"), "--no-speculation")


def test_options_reach_the_engine(tmp_path):
    done("engine", "--verifier", CHECKPOINTS / "verifier", "--target", "cpu", "-o", tmp_path / "e", "--dtype",
         "bfloat16", "--max-model-len", 96, "--max-num-seqs", 2, "--max-num-batched-tokens", 20, "--tp", 1)  # fmt: skip
    values = json.loads((tmp_path / "e" / "config.json").read_text())
    assert values["compute"] == "bfloat16"
    assert {"max_model_len": 96, "max_num_seqs": 2, "max_num_batched_tokens": 20}.items() <= values["limits"].items()


def test_an_output_line(engines, tmp_path):
    lines = answers(engines, tmp_path)
    assert len(lines) == len(PROMPTS)
    for line in lines:
        assert list(line) == ["output_token_ids", "finish_reason", "speculative_decoding"]  # no text: no tokenizer
        assert all(isinstance(token, int) and 0 <= token < 96 for token in line["output_token_ids"])
        ended = line["output_token_ids"][-1] == 1  # the checkpoint's end token
        assert line["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(line["output_token_ids"]) == MOST


def test_speculative_decoding_adds_up(engines, tmp_path):
    for line in answers(engines, tmp_path, "--drafter", "dspark"):
        stats = line["speculative_decoding"]
        assert set(stats) == {
            "num_spec_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
            "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram",
        }  # fmt: skip
        histogram = stats["acceptance_histogram"]
        accepted = sum(count * steps for count, steps in enumerate(histogram))
        assert stats["num_spec_tokens"] == 8 and len(histogram) == 9
        assert stats["num_spec_steps"] == sum(histogram) > 0
        assert stats["num_accepted_draft_tokens"] == accepted <= stats["num_draft_tokens"]
        assert stats["mean_acceptance_length"] == pytest.approx(1 + accepted / sum(histogram))
        assert stats["draft_acceptance_rate"] == pytest.approx(accepted / stats["num_draft_tokens"])


@pytest.mark.parametrize(
    "options, drafts",
    [((), 8), (("--drafter", "dspark"), 8), (("--drafter", "dspark-2"), 3), (("--drafter", "dspark_redvocab"), 3)],
)
def test_speculation_changes_no_token(engines, tmp_path, plain, options, drafts):
    """With the first drafter, one by name, and one by the name of the folder it came from."""
    lines = answers(engines, tmp_path, *options)
    assert ids(lines) == ids(plain)
    assert [line["finish_reason"] for line in lines] == [line["finish_reason"] for line in plain]
    assert {line["speculative_decoding"]["num_spec_tokens"] for line in lines} == {drafts}


def test_without_speculation_there_are_no_counts(plain):
    assert all(line["speculative_decoding"] is None for line in plain)


def test_a_prompt_s_answer_does_not_depend_on_its_company(engines, tmp_path, plain):
    alone = [answers(engines, tmp_path, prompts=[prompt])[0] for prompt in PROMPTS]
    assert ids(alone) == ids(plain)


def test_fewer_tokens_are_a_prefix(engines, tmp_path, plain):
    lines = answers(engines, tmp_path, most=1)
    assert ids(lines) == [tokens[:1] for tokens in ids(plain)]


def test_an_end_token_ends_an_answer(engines, tmp_path, plain):
    """The fourth token of the first answer, made an end token, is its last."""
    tokens = ids(plain)[0]
    ended = edit_checkpoint(CHECKPOINTS / "verifier", tmp_path / "v", config={"eos_token_id": [tokens[3]]})
    drafter = CHECKPOINTS / "dspark_redvocab"
    done("engine", "--verifier", ended, "--drafter", drafter, "--target", "cpu", "-o", tmp_path / "e")
    line = answers(tmp_path / "e", tmp_path, prompts=PROMPTS[:1])[0]
    assert line["output_token_ids"] == tokens[: tokens.index(tokens[3]) + 1]
    assert line["finish_reason"] == "stop"


def test_an_answer_ends_at_the_engine_s_length(tmp_path):
    done("engine", "--verifier", CHECKPOINTS / "verifier", "--drafter", CHECKPOINTS / "dspark_redvocab",
         "--target", "cpu", "-o", tmp_path / "e", "--max-model-len", 20)  # fmt: skip
    (line,) = answers(tmp_path / "e", tmp_path, most=100, prompts=[list(range(2, 17))])
    assert len(line["output_token_ids"]) == 5 and line["finish_reason"] == "length"


def test_blank_lines_are_skipped(engines, tmp_path, plain):
    source = tmp_path / "in"
    source.write_text('\n{"prompt_token_ids": [3, 4, 5]}\n\n   \n{"prompt_token_ids": [9]}')
    done("generate", engines, "--input", source, "--output", tmp_path / "out", "--max-tokens", MOST)
    assert ids([json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]) == ids(plain)[:2]


BAD_LINES = {
    "both": ('{"prompt": "a", "prompt_token_ids": [2]}', "either prompt or prompt_token_ids"),
    "neither": ('{"kind": "code"}', "either prompt or prompt_token_ids"),
    "no conversation": ('{"messages": []}', "messages: expected a JSON list"),
    "a list": ("[2, 3]", "either prompt or prompt_token_ids"),
    "not JSON": ("{'prompt_token_ids': [2]}", "not JSON"),
    "cut short": ('{"prompt_token_ids": [2', "not JSON"),
    "id too large": ('{"prompt_token_ids": [2, 96]}', "found token id 96, expected ids from 0 to 95"),
    "id negative": ('{"prompt_token_ids": [-1]}', "found token id -1"),
    "no ids": ('{"prompt_token_ids": []}', "at least one"),
    "fractions": ('{"prompt_token_ids": [2.0]}', "a list of integers"),
    "truth values": ('{"prompt_token_ids": [true]}', "a list of integers"),
    "text for ids": ('{"prompt_token_ids": "2 3"}', "a list of integers"),
    "too long": (json.dumps({"prompt_token_ids": [2] * 512}), "found 512 tokens, expected fewer than 512"),
    "text without tokenizer": ('{"prompt": "hello"}', "no tokenizer"),
    "no text": ('{"prompt": 5}', "found 5, expected a text"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_by_number(engines, tmp_path, case):
    line, expected = BAD_LINES[case]
    source = tmp_path / "in"
    source.write_text(f'{{"prompt_token_ids": [3]}}\n\n{line}\n{{"prompt_token_ids": [3]}}\n')
    arguments = ("generate", engines, "--input", source, "--output", tmp_path / "out", "--max-tokens", 3)
    message = refused(1, *arguments, "--no-speculation")
    assert f"{source}: line 3: " in message and expected in message
    assert not (tmp_path / "out").exists()


def test_an_unknown_drafter_is_exit_code_1(engines, tmp_path):
    source = write_prompts(tmp_path / "in")
    arguments = ("--input", source, "--output", tmp_path / "out", "--max-tokens", 3, "--drafter", "eagle")
    message = refused(1, "generate", engines, *arguments)
    assert "'eagle'" in message and "dspark, dspark-2" in message


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_line_ends_at_a_newline_only(engines, tmp_path, mark):
    source = tmp_path / "in"
    source.write_text(json.dumps({"prompt_token_ids": [3], "id": f"a{mark}b"}, ensure_ascii=False), encoding="utf-8")
    done("generate", engines, "--input", source, "--output", tmp_path / "out", "--max-tokens", 2, "--no-speculation")


def test_input_that_is_not_utf8_is_named(engines, tmp_path):
    source = tmp_path / "in"
    source.write_bytes(b'{"prompt_token_ids": [3], "id": "\xff"}\n')
    arguments = ("--input", source, "--output", tmp_path / "out", "--max-tokens", 2, "--no-speculation")
    assert str(source) in refused(1, "generate", engines, *arguments)


def test_an_output_folder_that_is_not_there_is_named_first(engines, tmp_path):
    output = tmp_path / "no" / "such" / "out"
    arguments = ("--input", write_prompts(tmp_path / "in"), "--output", output, "--max-tokens", 2, "--no-speculation")
    assert str(output) in refused(1, "generate", engines, *arguments)


@pytest.mark.parametrize("key, value", [("n", 2), ("max_completion_tokens", 3), ("stop", ["x"])])
def test_a_key_that_is_not_served_is_refused(engines, tmp_path, key, value):
    source = tmp_path / "in"
    source.write_text(json.dumps({"prompt_token_ids": [3], key: value}))
    arguments = ("--input", source, "--output", tmp_path / "out", "--max-tokens", 5, "--no-speculation")
    assert key in refused(1, "generate", engines, *arguments)


# -- text, with the shipped tiny models (whatever they were trained to) -----------------------------


def test_text_in_and_text_out(tiny_engines, tmp_path):
    source = tmp_path / "in"
    source.write_text('{"prompt": "def add("}\n')
    done("generate", tiny_engines, "--input", source, "--output", tmp_path / "out", "--max-tokens", 4)
    line = json.loads((tmp_path / "out").read_text())
    assert list(line) == ["output_token_ids", "text", "finish_reason", "speculative_decoding"]
    assert isinstance(line["text"], str)
    assert 1 <= len(line["output_token_ids"]) <= 4


def test_a_text_that_is_no_unicode_is_named(tiny_engines, tmp_path):
    source = tmp_path / "in"
    source.write_text('{"prompt": "a\\ud800b"}\n')
    arguments = ("--input", source, "--output", tmp_path / "out", "--max-tokens", 2)
    assert "line 1" in refused(1, "generate", tiny_engines, *arguments)


# -- convert and inspect --------------------------------------------------------------------------


def test_convert_says_what_it_leaves_out(tmp_path):
    extra = {"model.layers.7.eh_proj.weight": torch.ones(64), "model.layers.3.self_attn.k_proj.k_scale": torch.ones(1)}
    folder = edit_checkpoint(
        CHECKPOINTS / "verifier", tmp_path / "v", config={"num_nextn_predict_layers": 2}, add=extra
    )
    result = done("convert", folder, "-o", tmp_path / "ck")
    for text in ("left out 1 tensors: multi-token-prediction", "note: no multi-token-prediction module"):
        assert text in result.stderr
        assert text in inspect(tmp_path / "ck", "200")
    assert "left out 1 tensors: K/V scale" in result.stderr


def inspect(folder: Path, columns: str) -> str:
    result = CliRunner(env={"COLUMNS": columns}).invoke(main, ["inspect", str(folder)])
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(shown: str) -> list[list[str]]:
    """The cells of every table line."""
    return [[cell.strip() for cell in line.strip("│┃").split("│")] for line in shown.splitlines() if "│" in line]


def test_inspect_shows_models_limits_and_contract(engines):
    shown = rows(inspect(engines, "220"))
    for name, architecture in (
        ("verifier", "GlmMoeDsaForCausalLM"),
        ("dspark", "DSparkDraftModel"),
        ("dspark-2", "DSparkDraftModel"),
    ):
        values = json.loads((engines / name / "config.json").read_text())
        network, weights = values["networks"]["context"], values["weights"]
        layers = f"{network['layers']:,}"
        assert [name, architecture, "context", layers, "authored at load", weights["folder"]] in shown
        assert [name, "context", network["sha256"][:16], "-", weights["sha256"][:16]] in shown
        for direction, specs in (("in", values["contract"]["inputs"]), ("out", values["contract"]["outputs"])):
            for spec in specs:
                row = [direction, spec["name"], spec["dtype"], ", ".join(map(str, spec["dims"]))]
                assert (row in shown) == (spec["role"] == "step")
    values = json.loads((engines / "config.json").read_text())
    limits = {name: "all" if value is None else f"{value:,}" for name, value in values["limits"].items()}
    assert all([limit, value] in shown for limit, value in limits.items())
    assert "engines for cpu, compute float32" in inspect(engines, "220")


@pytest.mark.parametrize("columns", ["80", "60"])
def test_inspect_cuts_nothing_off(engines, columns):
    """80 columns is a pipe's width too."""
    shown = inspect(engines, columns)
    digest = json.loads((engines / "verifier" / "config.json").read_text())["networks"]["context"]["sha256"]
    assert "…" not in shown
    for text in ("max_num_batched_tokens", "write_cumulative", digest[:12]):
        assert text in shown


def test_adaptive_verification_from_the_command_line(engines, tmp_path):
    """The same text; the table is measured into its file and read from it again; refused where it does not fit."""
    table, temperatures = tmp_path / "costs.json", tmp_path / "temperatures.json"
    temperatures.write_text(json.dumps({"temperatures": [1.5] * 8}))
    plain = ids(answers(engines, tmp_path, "--no-speculation"))
    options = ("--cost-table", table, "--confidence-temperatures", temperatures, "--adaptive-threshold", 0.2)
    for switch in ("--adaptive-verification", "--enable-adaptive-verification"):
        assert ids(answers(engines, tmp_path, switch, *options)) == plain
    rewrite(table, lambda values: values.update(engines_sha256="0" * 64))
    arguments = ("generate", engines, "--input", tmp_path / "prompts.jsonl", "--output", tmp_path / "out.jsonl")
    arguments = (*arguments, "--max-tokens", 2, "--adaptive-verification")
    assert "engines_sha256: found '000000000000'" in refused(1, *arguments, *options)
    temperatures.write_text(json.dumps({"temperatures": [1.5]}))
    assert "found 1, expected 8" in refused(1, *arguments, "--confidence-temperatures", temperatures)
    out = tmp_path / "repository"
    done("repo", engines, "-o", out, "--adaptive-verification", "--adaptive-threshold", 0.2)
    shown = " ".join(inspect(out, "160").split())
    assert "adaptive_verification" in shown and "adaptive_threshold" in shown


def test_inspect_shows_a_model_repository(engines, tmp_path):
    done("repo", engines, "-o", tmp_path / "repository")
    shown = inspect(tmp_path / "repository", "160")
    assert "Triton model repository" in shown
    assert any(row[:2] == ["in", "text_input"] for row in rows(shown))


def test_inspect_shows_a_checkpoint_s_tensors(engines, tmp_path):
    shown = inspect(engines / "checkpoints" / "dspark", "120")
    assert ["fc.weight", "F32", "64, 192"] in rows(shown)
    assert "lm_head.weight is taken from the verifier's lm_head.weight" in shown
    assert ["model.layers.1.mlp.experts.gate_up_proj", "F32", "4, 64, 64"] in rows(
        inspect(engines.parent / "verifier", "120")
    )


def test_inspect_of_a_checkpoint_without_its_weights_is_exit_code_1(tmp_path):
    done("convert", CHECKPOINTS / "dspark", "-o", tmp_path / "ck")
    (tmp_path / "ck" / "rank0.safetensors").unlink()
    assert "rank0.safetensors" in refused(1, "inspect", tmp_path / "ck")


def test_inspect_shows_names_as_they_are(tmp_path):
    done("convert", CHECKPOINTS / "dspark", "-o", tmp_path / "a[red]b")
    assert "a[red]b" in inspect(tmp_path / "a[red]b", "200")


def test_inspect_of_something_else_is_exit_code_1(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "llama"}')
    assert "not a checkpoint, engine directory" in refused(1, "inspect", tmp_path / "mine")
    assert "no such file" in refused(1, "inspect", tmp_path)
