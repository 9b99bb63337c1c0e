"""Every command as a container runs it: another user, no home folder, an install that nobody can write to."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.models import ASSETS

from glmspec.build.cli import main

STRANGER = 12345  # a user that this machine has no name for
# Runs commands in order and says how each ended; a traceback ends the process.
SCRIPT = """
import json, sys
from click.testing import CliRunner
from glmspec.build.cli import main
for command in json.loads(sys.argv[1]):
    result = CliRunner(catch_exceptions=False).invoke(main, command)
    print(json.dumps([command[0], result.exit_code, result.output]), flush=True)
print(json.dumps(["numba", "numba" in sys.modules, ""]))
"""


def stranger(*command: object) -> list[str]:
    """The command as another user who may read whatever there is and write nothing; as ourselves when we are not
    root."""
    words = [str(word) for word in command]
    if os.geteuid() or not shutil.which("setpriv"):
        return words
    ids = [f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    return ["setpriv", *ids, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", *words]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that the stranger may write to, like a volume, with the tiny models in it (pytest's own temporary
    folders are for nobody else)."""
    made = Path(tempfile.mkdtemp(prefix="glmspec-volume-"))
    for name in ("tiny-verifier", "tiny-dspark"):
        shutil.copytree(ASSETS / name, made / name)
    (made / "prompts.jsonl").write_text('{"prompt": "1, 2, 3"}\n')
    if not os.geteuid():
        os.chown(made, STRANGER, STRANGER)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def environments(place) -> list[dict[str, str]]:
    """With a home that is not there, and without any: nobody's name is asked for then either."""
    base = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "NUMBA_", "HF_", "TRITON_"))}
    base.pop("HOME", None)
    return [base | {"HOME": "/nonexistent", "TMPDIR": str(place)}, base | {"TMPDIR": str(place)}]


def outcomes(commands: list[list[object]], environment: dict[str, str], place: Path) -> dict[str, tuple[int, str]]:
    given = json.dumps([[str(word) for word in command] for command in commands])
    command = stranger(sys.executable, "-B", "-c", SCRIPT, given)
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: (code, told) for name, code, told in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def ran(place, environments) -> dict[str, tuple[int, str]]:
    """Every command but `serve`, on the tiny models."""
    verifier, drafter = place / "tiny-verifier", place / "tiny-dspark"
    small = ("--max-model-len", 512, "--max-num-seqs", 2)
    commands = [
        ["convert", verifier, "-o", place / "v", "--quant", "nvfp4"],
        ["verify", place / "v"],
        ["calibrate", verifier, "--input", place / "prompts.jsonl", "-o", place / "amax.json"],
        ["validate", verifier, "--target", "b200", "--stage", "config", "--stage", "twin", *small],
        ["plugins", "--target", "b200", "--op", "argmax", "-o", place / "kernels"],
        ["engine", "--verifier", place / "v", "--drafter", drafter, "--target", "cpu", "-o", place / "e", *small],
        ["generate", place / "e", "--prompt", "1, 2, 3", "--max-tokens", "3", "--output", place / "out.jsonl"],
        ["repo", place / "e", "-o", place / "r"],
        ["inspect", place / "r"],
    ]
    return outcomes(commands, environments[0], place)


def test_every_command_works_without_a_home(ran):
    ran = {name: one for name, one in ran.items() if name != "numba"}
    allowed = {"calibrate": (0, 3), "plugins": (0, 3)}  # ModelOpt or Triton may be missing here
    wrong = {name: told for name, (code, told) in ran.items() if code not in allowed.get(name, (0,))}
    assert not wrong and {*ran, "serve"} == set(main.commands)


@pytest.mark.parametrize("at", [0, 1])
def test_inspect_and_plans_need_no_numba(ran, environments, place, at):
    """What reads configs and headers compiles nothing, with a home that is missing and without the word."""
    commands = [["inspect", place / "v"], ["convert", place / "tiny-verifier", "--dry-run"]]
    found = outcomes(commands, environments[at], place)
    assert [code for code, _ in found.values()] == [0, 0, False]


def test_serve_works_without_a_home(ran, environments, place):
    script = "from glmspec.build.cli import main; main()"
    ports = [word for kind in ("http", "grpc", "metrics") for word in (f"--{kind}-port", "0")]
    command = stranger(sys.executable, "-c", script, "serve", place / "r", *ports)
    server = subprocess.Popen(command, env=environments[0], cwd=place, stdout=subprocess.PIPE, text=True)
    try:
        assert re.match("Ready: gRPC ", server.stdout.readline())
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
