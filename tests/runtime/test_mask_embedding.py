"""A mask embedding beside a drafter is used: drafts stand as if the verifier's embedding held it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import ASSETS, GOLDENS, edit_checkpoint

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert.conversion import plan_conversion
from glmspec.core.errors import CheckpointError
from glmspec.core.progress import Progress
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Request

EMBEDDING = "model.embed_tokens.weight"
MASK = 257
PROMPTS = ["1, 2, 3, 4, 5, ", "def add(a, b):\n"]


@pytest.fixture(scope="module")
def row() -> torch.Tensor:
    return load_file(ASSETS / "tiny-verifier" / "model.safetensors")[EMBEDDING][MASK].clone()


@pytest.fixture(scope="module")
def engines(tmp_path_factory, row) -> Path:
    """A verifier that has lost its row of the mask token; drafters with the file, without, and with their own
    embedding and the file."""
    home = tmp_path_factory.mktemp("mask")
    table = load_file(ASSETS / "tiny-verifier" / "model.safetensors")[EMBEDDING]
    table[MASK] = 0
    verifier = edit_checkpoint(ASSETS / "tiny-verifier", home / "verifier", add={EMBEDDING: table})
    drafters = []
    for base in ("tiny-dflash2", "tiny-dspark"):
        with_file = edit_checkpoint(ASSETS / base, home / f"{base}-file")
        torch.save({"embedding": row, "mask_token_id": MASK}, with_file / "mask_embedding.pt")
        own = edit_checkpoint(ASSETS / base, home / f"{base}-own", add={"embed_tokens.weight": table})
        save_file({"embedding": row.reshape(1, -1)}, own / "mask_embedding.safetensors")
        drafters += [with_file, edit_checkpoint(ASSETS / base, home / f"{base}-bare"), own]
    build_engines(verifier, drafters, TARGETS["cpu"], BuildOptions(), home / "engines", Progress(), check=False)
    return home / "engines"


@pytest.fixture(scope="module")
def sought(tiny_engines):
    """Answers and acceptance histograms of the drafters as they were trained."""
    return {kind: answers(tiny_engines, kind) for kind in ("dflash2", "dspark")}


def answers(folder: Path, drafter: str) -> list[tuple[list[int], list[int]]]:
    engine, made = Engine(folder, drafter), []
    for text in PROMPTS:
        answer, stats = engine.answer(Request(prompt_ids=tuple(text.encode()), max_tokens=40))
        made.append((answer.tokens, list(stats.acceptance_histogram)))
    return made


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("which", ["file", "own"])
def test_drafts_stand_as_with_the_row_in_the_embedding(engines, sought, kind, which):
    assert answers(engines, f"tiny-{kind}-{which}") == sought[kind]


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_without_the_file_fewer_stand_and_the_tokens_are_the_same(engines, sought, kind):
    bare = answers(engines, f"tiny-{kind}-bare")
    assert [tokens for tokens, _ in bare] == [tokens for tokens, _ in sought[kind]]
    steps, trained = (sum(sum(histogram) for _, histogram in one) for one in (bare, sought[kind]))
    assert steps > trained


def test_the_file_is_part_of_what_was_converted(tmp_path, row):
    folder = edit_checkpoint(ASSETS / "tiny-dspark", tmp_path / "hf")
    torch.save(row, folder / "mask_embedding.pt")
    checkpoint = plan_conversion(folder).write(tmp_path / "ck")
    assert torch.equal(checkpoint.load()["mask_embedding"], row)
    assert checkpoint.config.mask_embedding and checkpoint.record["source"]["files"].keys() == {
        "mask_embedding.pt",
        "model.safetensors",
    }
    checkpoint.check()
    bare = plan_conversion(ASSETS / "tiny-dspark").write(tmp_path / "bare")
    assert not bare.config.mask_embedding and bare.weights_sha256 != checkpoint.weights_sha256


def test_half_precision_and_a_state_dict_are_read(tmp_path, row):
    folder = edit_checkpoint(ASSETS / "tiny-dspark", tmp_path / "hf")
    torch.save({"weight": row.half().unsqueeze(0)}, folder / "mask_embedding.pt")
    loaded = plan_conversion(folder).write(tmp_path / "ck").load()
    assert torch.equal(loaded["mask_embedding"].float(), row.half().float())


class Opened:
    """A pickle that would run code."""

    def __reduce__(self):
        return (Path.touch, (Path(self.place),))

    place = ""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"embedding": torch.zeros(128), "mask_token_id": 5}, "mask_token_id: found 5, expected 257"),
        (torch.zeros(64), r"found shape \[64\], expected \[128\]"),
        (torch.zeros(128, 1), r"found shape \[128, 1\], expected \[128\]"),
        ({"a": torch.zeros(128), "b": torch.zeros(128)}, "found an object of a, b"),
        ({"embedding": [0.0] * 128}, "found a list"),
        (torch.full((128,), float("nan")), "not finite"),
        (b"no zip at all", "not a mask embedding that can be read without running code"),
        (Opened(), "not a mask embedding that can be read without running code"),
    ],
)
def test_what_is_no_such_row_is_refused(tmp_path, value, words):
    folder = edit_checkpoint(ASSETS / "tiny-dflash2", tmp_path / "hf")
    path = folder / "mask_embedding.pt"
    if isinstance(value, Opened):
        Opened.place = str(tmp_path / "ran")
        path.write_bytes(pickle.dumps(value))
    elif isinstance(value, bytes):
        path.write_bytes(value)
    else:
        torch.save(value, path)
    with pytest.raises(CheckpointError, match=words) as caught:
        plan_conversion(folder)
    assert str(path) in str(caught.value) and not (tmp_path / "ran").exists()


def test_two_files_that_differ_are_refused(tmp_path, row):
    folder = edit_checkpoint(ASSETS / "tiny-dflash2", tmp_path / "hf")
    torch.save(row, folder / "mask_embedding.pt")
    save_file({"mask_embedding": row}, folder / "mask_embedding.safetensors")
    plan_conversion(folder)
    save_file({"mask_embedding": row + 1}, folder / "mask_embedding.safetensors")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt and mask_embedding\.safetensors differ"):
        plan_conversion(folder)


def test_beside_a_verifier_it_is_noted(tmp_path, row):
    folder = edit_checkpoint(GOLDENS / "checkpoints" / "verifier", tmp_path / "hf")
    torch.save(row, folder / "mask_embedding.pt")
    conversion = plan_conversion(folder)
    assert any("mask_embedding.pt" in note and "drafter" in note for note in conversion.source.notes)
    assert "mask_embedding" not in json.dumps(sorted(conversion.rank_tensors(0)))
