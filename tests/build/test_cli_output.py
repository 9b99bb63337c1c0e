"""What the operating system refuses is one message with the file and what to do, exit code 1 and no traceback."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.cli import done, refused, run
from support.models import ASSETS

from glmspec.core import files as files_of
from glmspec.plugins import compiler

VERIFIER = ASSETS / "tiny-verifier"
COMMAND = [sys.executable, "-c", "from glmspec.build.cli import main; main()"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    return path


@pytest.fixture
def full(monkeypatch):
    """A disk that takes no more bytes of our files."""

    def write(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files_of.os, "write", write)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data))


def commands(engines: Path, prompts: Path, home: Path) -> dict[str, tuple]:
    answers = ("generate", engines, "--input", prompts, "--max-tokens", 2)
    adaptive = ("--adaptive-verification", "--cost-table", home / "out")
    check = ("validate", VERIFIER, "--target", "cpu", "--stage", "config")
    return {
        "convert": ("convert", VERIFIER, "-o", home / "out"),
        "engine": ("engine", "--verifier", VERIFIER, "--target", "cpu", "--no-validate", "-o", home / "out"),
        "repo": ("repo", engines, "-o", home / "out"),
        "plugins": ("plugins", "--target", "b200", "--op", "argmax", "-o", home / "out"),
        "generate --output": (*answers, "--output", home / "out"),
        "generate --stats": (*answers, "--output", prompts.with_name("answers"), "--stats", home / "out"),
        "generate --cost-table": (*answers, "--output", prompts.with_name("answers"), *adaptive),
        "validate --json": (*check, "--json", home / "out"),
        "validate --junit": (*check, "--junit", home / "out"),
    }


NAMES = commands(Path("x"), Path("x"), Path("x"))


@pytest.fixture
def command(request, tiny_engines, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr("glmspec.build.compile_plugins.compile_all", lambda *_: [])
    monkeypatch.setattr(compiler, "write_compiled", lambda *_: None)
    return commands(tiny_engines, prompts, tmp_path)[request.param]


@pytest.mark.parametrize("command", [name for name in NAMES if name != "generate --stats"], indirect=True)
def test_a_full_disk(command, tmp_path, full):
    result = run(*command)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit)
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("glmspec-build: ")]
    assert str(tmp_path / "out") in result.stderr and "No space left on device" in result.stderr
    assert message.startswith("glmspec-build: ") and not (tmp_path / "out").exists()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", NAMES, indirect=True)
def test_an_output_below_what_may_not_be_written_is_refused_before_any_work(command, tmp_path, monkeypatch):
    """Nothing is loaded, measured, validated or compiled."""
    open_, mkdir = os.open, os.mkdir

    def refuse(real):
        def do(path, *rest, **options):
            made = real is mkdir or (rest and rest[0] & (os.O_CREAT | os.O_TMPFILE) & ~os.O_DIRECTORY)
            if made and tmp_path in (Path(path).parent, Path(path)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(path, *rest, **options)

        return do

    for place in (
        "glmspec.runtime.engine.Engine.add", "glmspec.runtime.profile.measure_costs",
        "glmspec.build.validate.command.validate_source", "glmspec.build.engine.greatest_steps",
        "glmspec.convert.conversion.write_parts", "glmspec.build.compile_plugins._compile",
        "glmspec.triton_repo.repository.model_config",
    ):  # fmt: skip
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("worked"))
    monkeypatch.setattr(os, "open", refuse(open_))
    monkeypatch.setattr(os, "mkdir", refuse(mkdir))
    said = refused(1, *command)
    assert "cannot be written" in said and "Read-only file system" in said and str(tmp_path / "out") in said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("one, other", [("--input", "--output"), ("--output", "--stats"), ("--log-file", "--input")])
def test_a_file_that_two_options_name_is_refused(one, other, prompts, tmp_path):
    """An input stays what it was, and answers are not replaced by their statistics."""
    link, before = tmp_path / "link", prompts.read_text()
    link.symlink_to(prompts)
    told = refused(2, "generate", tmp_path, "--prompt", "a", "--max-tokens", 1, one, prompts, other, link)
    assert one in told and other in told and "name one file" in told and prompts.read_text() == before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "rank0.safetensors"])
def test_no_output_takes_the_place_of_a_file_of_ours(name, tmp_path):
    """Neither of the record nor of what it lists; another file beside them may be written again."""
    done("convert", VERIFIER, "-o", tmp_path / "ck")
    before = (tmp_path / "ck" / name).read_bytes()
    assert "glmspec wrote" in refused(2, "inspect", VERIFIER, "--json", tmp_path / "ck" / name)
    assert (tmp_path / "ck" / name).read_bytes() == before
    for _ in range(2):
        done("inspect", VERIFIER, "--json", tmp_path / "ck" / "notes.txt")


def test_one_device_may_be_named_twice():
    done("inspect", VERIFIER, "--json", os.devnull, "--log-file", os.devnull)


def test_standard_output_that_takes_no_more(tmp_path, tiny_engines, prompts):
    """Full, or closed by its reader; not a word more than needed, also when Python ends."""
    done("convert", VERIFIER, "-o", tmp_path / "ck")
    answers = ["generate", str(tiny_engines), "--input", str(prompts), "--max-tokens", "2"]
    for arguments in (["inspect", str(tmp_path / "ck")], answers):
        with open("/dev/full", "w") as full:
            found = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
        assert found.returncode == 1
        assert "No space left on device" in found.stderr and "Traceback" not in found.stderr
        assert found.stderr.count("glmspec-build: ") == 1 and "Exception ignored" not in found.stderr
        read, write = os.pipe()
        os.close(read)
        found = subprocess.run([*COMMAND, *arguments], stdout=write, stderr=subprocess.PIPE, text=True)
        os.close(write)
        assert found.returncode and "glmspec-build: " not in found.stderr
        assert "Traceback" not in found.stderr and "Exception ignored" not in found.stderr


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "Permission denied", "/x/y"), OSError("no place")])
def test_any_other_error_of_the_system_is_a_message(monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr("glmspec.build.inspect.show", fail)
    said = refused(1, "inspect", VERIFIER)
    assert ("/x/y: Permission denied. Choose another place" in said) if error.errno else ("no place" in said)


def test_an_interrupt_is_130(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt("OUT: 2 of 3 answers are kept")

    monkeypatch.setattr("glmspec.build.inspect.show", stop)
    log = tmp_path / "log"
    said = refused(130, "inspect", VERIFIER, "--log-file", log)
    assert said == "glmspec-build: interrupted: OUT: 2 of 3 answers are kept\n"
    assert "KeyboardInterrupt: OUT: 2 of 3 answers are kept" in log.read_text()
