"""The training script of the shipped models: its drafters are the published ones, and its output is a checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.models import ASSETS, GOLDENS

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.progress import Progress
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Request

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_trained_drafters_are_the_published_ones():
    """Context K/V, hidden states, logits and drafts of the training code against the golden tensors."""
    assert run("-m", "tiny.golden_check", str(GOLDENS)).count("agrees") == 2


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("smoke")
    run("train_tiny.py", "--out", str(out), "--smoke", "--threads", "1")
    return out


def test_a_smoke_run_makes_everything_that_is_shipped(smoke):
    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    assert files(smoke) == files(ASSETS)
    assert (smoke / "prompts.jsonl").read_text() == (ASSETS / "prompts.jsonl").read_text()
    for name in ("tiny-verifier", "tiny-dspark", "tiny-dflash2"):
        assert (smoke / name / "config.json").read_text() == (ASSETS / name / "config.json").read_text()


def test_a_smoke_run_is_checked_against_transformers(smoke):
    parity = json.loads((smoke / "training_report.json").read_text())["parity"]
    assert parity["relative_logit_difference"] < 1e-4
    assert parity["argmax_agreement"] == 1.0


def test_a_smoke_run_can_be_built_and_run(smoke, tmp_path):
    drafters = [smoke / "tiny-dspark", smoke / "tiny-dflash2"]
    build_engines(smoke / "tiny-verifier", drafters, TARGETS["cpu"], BuildOptions(), tmp_path / "engines", Progress())
    engine = Engine(tmp_path / "engines", "dflash2")
    answer, _ = engine.answer(Request(prompt_ids=tuple(engine.tokenizer.encode("Count: ")), max_tokens=5))
    assert 1 <= len(answer.tokens) <= 5
