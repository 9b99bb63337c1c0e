"""The whole engine with every op's kernels in Triton's interpreter: the same tokens.

This file, run as a program, answers with the kernels: the interpreter must be chosen before they are imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_checks.launch import Launcher
from support.faces import remember_builtins
from support.models import ASSETS, edit_checkpoint

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.progress import Progress
from glmspec.plugins import OPS
from glmspec.plugins.spec import NoPlugin
from glmspec.runtime.engine import Engine
from glmspec.runtime.executor import executor
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling

TESTS = Path(__file__).resolve().parents[1]
INDEX_TOPK = 16
LONG = tuple(b"The river was wide, and")  # longer than that
DRAWN = Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=3)
DRAFTERS = {  # what each is asked; a long prompt once, because the interpreter is slow
    "dflash2": [Request(prompt_ids=LONG, max_tokens=3, sampling=DRAWN), Request(prompt_ids=LONG[:8], max_tokens=6)],
    "dspark": [Request(prompt_ids=LONG[:8], max_tokens=6, sampling=DRAWN)],
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Path:
    """Both drafters, whose drafts are drawn, and a verifier that chooses few rows: the interpreter takes its time for
    every row of a prompt that is longer."""
    home = tmp_path_factory.mktemp("kernels")
    out = home / "engines"
    verifier = edit_checkpoint(ASSETS / "tiny-verifier", home / "verifier", config={"index_topk": INDEX_TOPK})
    folders = tuple(ASSETS / f"tiny-{name}" for name in DRAFTERS)
    options = BuildOptions(max_num_seqs=2, max_model_len=128, draft_sampling="probabilistic")
    build_engines(verifier, folders, TARGETS["cpu"], options, out, Progress(), check=False)
    return out


def answers(engines: Path, drafter: str) -> list[list[int]]:
    """Tokens, and drafts accepted, of every answer."""
    engine = Engine(engines, drafter, verification="block")
    made = [engine.answer(request) for request in DRAFTERS[drafter]]
    return [[*answer.tokens, stats.num_accepted] for answer, stats in made]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_kernels_answer_as_the_references_do(engines, tmp_path, drafter):
    expected = answers(engines, drafter)
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "scripts")]),
    }
    command = [sys.executable, __file__, str(engines), drafter, str(tmp_path / "found.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["answers"] == expected
    used = {"argmax", "sparse_mla", "index_topk", "block_attention", "reject"}  # the executor appends itself
    used |= {"dflash2": {"accept", "grouped_conv", "selector_walk"}, "dspark": {"markov_walk"}}[drafter]
    assert set(found["ran"]) >= used, found["kept"]


def main(engines: str, drafter: str, out: str) -> None:
    """Answer with kernels, and write which ops ran by them."""
    torch.set_num_threads(1)
    remember_builtins()
    ran, kept = set(), set()

    def through(op):
        def run(*inputs: torch.Tensor, **attributes):
            try:
                outputs = op.plugged(Launcher(), *(x.contiguous() for x in inputs), **attributes)
            except NoPlugin as reason:
                kept.add(str(reason))
                return op.reference(*inputs, **attributes)
            ran.add(op.name)
            return outputs[0] if len(outputs) == 1 else tuple(outputs)

        return replace(op, reference=run)

    executor.OPS = {name: through(op) if op.plugged else op for name, op in OPS.items()}
    found = answers(Path(engines), drafter)
    Path(out).write_text(json.dumps({"answers": found, "ran": sorted(ran), "kept": sorted(kept)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
