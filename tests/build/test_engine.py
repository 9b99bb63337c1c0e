"""Engine directories: what is written, what is refused before anything is written, what is refused at load."""

from __future__ import annotations

import json
import math
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.models import GOLDENS, edit_checkpoint
from support.records import rewrite as rewrite_file

from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.convert.checkpoint import read_checkpoint
from glmspec.convert.conversion import plan_conversion
from glmspec.core.errors import GlmspecError
from glmspec.core.progress import Progress
from glmspec.core.sealed import seal_of
from glmspec.models.acceptance import NETWORKS
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.network.reader import read
from glmspec.network.trt import backend
from glmspec.runtime.engine import Engine
from glmspec.runtime.request import Request

CHECKPOINTS = GOLDENS / "checkpoints"

VERIFIER, SMALL = CHECKPOINTS / "verifier", CHECKPOINTS / "dspark_redvocab"


def build(out: Path, verifier: Path = VERIFIER, drafters=(SMALL,), target: str = "cpu", **options) -> Path:
    build_engines(verifier, drafters, TARGETS[target], BuildOptions(**options), out, Progress())
    return out


def record(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The golden verifier and one drafter."""
    return build(tmp_path_factory.mktemp("small") / "engines")


@pytest.fixture
def copied(small, tmp_path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(small, tmp_path / "engines"))


def assert_refused(home: Path, verifier: Path, drafters, expected: list[str], **options) -> None:
    """Named, and not a file left beside the inputs."""
    before = sorted(home.rglob("*"))
    with pytest.raises(GlmspecError) as caught:
        build(home / "out" / "engines", verifier, drafters, **options)
    for text in expected:
        assert text in str(caught.value)
    assert sorted(home.rglob("*")) == before


def refused_at_load(folder: Path, *expected: str, **options) -> None:
    with pytest.raises(GlmspecError) as caught:
        Engine(folder, **options)
    for text in expected:
        assert text in str(caught.value)


def rewrite(folder: Path, change) -> None:
    """Edit a record as if it had been written so."""
    rewrite_file(folder / "config.json", change)


# -- what is written ----------------------------------------------------------------------------


def test_layout(golden_engines):
    files = {str(path.relative_to(golden_engines)) for path in golden_engines.rglob("*") if path.is_file()}
    names = ("verifier", "dspark", "dflash2", "dspark-2")
    assert files == {
        "config.json",
        "validation.json",
        *(f"{name}/{file}" for name in (*names, *NETWORKS) for file in ("config.json", "context.layers.jsonl")),
        *(f"checkpoints/{name}/{file}" for name in names for file in ("config.json", "rank0.safetensors")),
        "checkpoints/verifier/generation_config.json",
    }


def test_directory_record(golden_engines):
    values = record(golden_engines)
    assert (values["target"], values["compute"], values["verifier"]) == ("cpu", "float32", "verifier")
    assert values["tensorrt"] == {"package": backend().package, "version": backend().version}
    assert values["producer"]["name"] == "glmspec"
    assert (values["tokenizer"], values["eos_token_ids"]) == (None, [1])
    assert values["drafters"] == [
        {"name": "dspark", "kind": "dspark", "source": "dspark"},
        {"name": "dflash2", "kind": "dflash2", "source": "dflash2"},
        {"name": "dspark-2", "kind": "dspark", "source": "dspark_redvocab"},
    ]
    target = TARGETS["cpu"]
    assert values["limits"] == {
        "max_model_len": 512,  # the verifier's, below the target's 4,096
        "max_num_seqs": target.max_num_seqs,
        "max_num_batched_tokens": target.max_num_batched_tokens,
        "page_size": target.page_size,
        "segment_rows": target.segment_rows,
        "block_rows": 9,  # the longest drafter's 8 drafts and the anchor
        "pool_pages": None,  # every sequence at its longest
    }


def test_recorded_hashes_are_those_of_the_files(golden_engines):
    values = record(golden_engines)
    names = ["verifier", *(drafter["name"] for drafter in values["drafters"])]
    beside = {path.relative_to(golden_engines) for path in golden_engines.rglob("*") if path.is_file()}
    listed = sorted(str(path) for path in beside if path.parts[0] != "checkpoints" and str(path) != "config.json")
    assert values["files"] == {name: digest(golden_engines / name) for name in listed}
    for name, source in zip(names, ("verifier", "dspark", "dflash2", "dspark_redvocab"), strict=True):
        model, checkpoint = record(golden_engines / name), golden_engines / "checkpoints" / name
        found = read_checkpoint(checkpoint)
        assert found.identity == {"sha256": found.weights_sha256, "config_sha256": seal_of(record(checkpoint))}
        assert model["weights"] == {"folder": f"../checkpoints/{name}", **found.identity}
        assert model["pretrained_config"] == record(checkpoint)
        parts = model["pretrained_config"]["parts"]
        assert {part: one["sha256"] for part, one in parts.items()} == {
            "rank0.safetensors": digest(checkpoint / "rank0.safetensors")
        }
        assert model["pretrained_config"]["source"]["files"] == {
            "model.safetensors": digest(CHECKPOINTS / source / "model.safetensors")
        }


def test_model_records(golden_engines):
    limits = EngineLimits(**record(golden_engines)["limits"])
    for name, source in (("verifier", "verifier"), ("dspark", "dspark"), ("dspark-2", "dspark_redvocab")):
        values = record(golden_engines / name)
        taps = tuple(values["build_config"]["taps"])
        net = model_of(plan_conversion(CHECKPOINTS / source).config, taps).author(
            limits, NetworkConfig(compute="float32"), backend()
        )
        assert values["contract"] == json.loads(json.dumps(net.contract().to_json()))
        digest = read(net.definition, net.backend).content_hash()
        assert values["networks"] == {"context": {"sha256": digest, "layers": net.definition.num_layers}}
        assert values["plans"] == {}
        layers = (golden_engines / name / "context.layers.jsonl").read_text().splitlines()
        assert len(layers) == net.definition.num_layers
        assert json.loads(layers[-1])["layer"] == net.definition.get_layer(net.definition.num_layers - 1).name
    assert record(golden_engines / "verifier")["build_config"]["taps"] == [1, 2, 3, 4, 5]  # all the drafters' together


def test_converted_input_gives_the_same_networks(small, tmp_path):
    """From a converted checkpoint the engine refers to it instead of copying it."""
    verifier = plan_conversion(VERIFIER).write(tmp_path / "ck" / "verifier").folder
    out = build(tmp_path / "engines", verifier, (plan_conversion(SMALL).write(tmp_path / "ck" / "d").folder,))
    for name in ("verifier", "dspark"):
        assert record(out / name)["networks"] == record(small / name)["networks"]
        assert record(out / name)["weights"]["sha256"] == record(small / name)["weights"]["sha256"]
    assert not (out / "checkpoints").exists()
    assert (out / "verifier" / record(out / "verifier")["weights"]["folder"]).resolve() == verifier.resolve()
    Engine(out)


def test_a_directory_can_be_moved(small, tmp_path):
    moved = Path(shutil.copytree(small, tmp_path / "else" / "where"))
    Engine(moved)


def test_options_are_recorded(tmp_path):
    out = build(
        tmp_path / "e", max_model_len=100, max_num_seqs=3, max_num_batched_tokens=50, compute="bfloat16", drafters=()
    )
    values = record(out)
    assert (values["compute"], values["drafters"]) == ("bfloat16", [])
    assert {k: values["limits"][k] for k in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")} == {
        "max_model_len": 100, "max_num_seqs": 3, "max_num_batched_tokens": 50,
    }  # fmt: skip
    assert values["limits"]["block_rows"] == 1
    assert record(out / "verifier")["build_config"]["compute"] == "bfloat16"


def test_an_older_directory_of_ours_is_replaced(tmp_path):
    out = build(tmp_path / "e")
    build(out, drafters=())
    assert record(out)["drafters"] == [] and not (out / "dspark").exists()


def test_an_ahead_of_time_target_writes_plans(tmp_path):
    """As the verifier, a cut of two layers; the drafter as it is."""
    tensors = [name for name in load_file(VERIFIER / "model.safetensors") if "layers." in name]
    surplus = [name for name in tensors if int(name.split(".")[2]) >= 2]
    changes = {"num_hidden_layers": 2, "mlp_layer_types": None, "indexer_types": None}
    verifier = edit_checkpoint(VERIFIER, tmp_path / "v", config=changes, drop=surplus)
    out = build(tmp_path / "e", verifier, target="rtx-pro-6000", max_num_seqs=2, max_num_batched_tokens=64)
    values = record(out)
    assert (values["target"], values["compute"], values["tensorrt"]["package"]) == (
        "rtx-pro-6000", "bfloat16", "tensorrt_rtx",
    )  # fmt: skip
    for name in ("verifier", "dspark"):
        plans = {profile: out / name / f"{profile}.engine" for profile in ("generation", "context")}
        assert all(plan.stat().st_size > 100_000 for plan in plans.values())
        assert record(out / name)["plans"] == {
            profile: {"file": plan.name, "sha256": digest(plan)} for profile, plan in plans.items()
        }
        assert record(out / name)["networks"].keys() == plans.keys()
        assert "generation: INFO" in (out / name / "build.log").read_text()
    assert values["compute_capability"] == "SM120"


# -- more that is refused before anything is written ------------------------------------------------


@pytest.mark.parametrize("spoil", ["cut short", "another model's", "edited"])
def test_a_broken_converted_checkpoint_is_refused(tmp_path, spoil):
    folder = plan_conversion(VERIFIER).write(tmp_path / "ck").folder
    path = folder / "rank0.safetensors"
    if spoil == "cut short":
        path.write_bytes(path.read_bytes()[:1000])
    elif spoil == "another model's":
        shutil.copy(plan_conversion(SMALL).write(tmp_path / "other").folder / path.name, path)
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert_refused(tmp_path, folder, (), ["rank0.safetensors"])


def test_no_tensor_of_a_step_and_no_cache_passes_32_bit_counting(tmp_path):
    """Case D35: a million tokens. Caches get fewer pages, large steps are made in pieces, and what cannot be is refused
    with what can."""
    values = {"max_position_embeddings": 1 << 28}
    wide = edit_checkpoint(VERIFIER, tmp_path / "wide", config=values)
    out = build(tmp_path / "out", wide, (), max_model_len=1 << 20, max_num_seqs=60, max_num_batched_tokens=60)
    limits = record(out)["limits"]
    widest = max(
        math.prod(spec["dims"][1:])
        for spec in record(out / "verifier")["contract"]["inputs"]
        if spec["role"] == "cache"
    )
    assert limits["pool_pages"] * limits["page_size"] >= 1 << 20  # one sequence fits
    assert limits["pool_pages"] < 60 * (1 << 20) // limits["page_size"]
    assert (limits["pool_pages"] + 1) * widest <= 2**31 - 1
    pieces = EngineLimits(
        **record(build(tmp_path / "more", wide, (), max_model_len=1 << 20, max_num_seqs=64))["limits"]
    )
    assert pieces.index_tiles(1, "context") > 1
    with pytest.raises(GlmspecError, match=r"--max-model-len: found 268,435,456, expected at most [\d,]+"):
        build(tmp_path / "most", wide, (), max_model_len=1 << 28, max_num_seqs=1, max_num_batched_tokens=1)
    assert not (tmp_path / "most").exists()


def test_a_drafter_s_folder_name_that_fits_two_is_refused(tmp_path):
    folders = []
    for parent in ("x", "y"):
        (tmp_path / parent).mkdir()
        folders.append(Path(shutil.copytree(SMALL, tmp_path / parent / "ck")))
    engines = build(tmp_path / "out", VERIFIER, folders)
    assert Engine(engines, "dspark-2").drafter_name == "dspark-2"
    refused_at_load(engines, "'ck'", "dspark and dspark-2", drafter="ck")


def test_the_profile_is_recorded(small):
    build_config = json.loads((small / "verifier" / "config.json").read_text())["build_config"]
    limits = EngineLimits(**build_config["limits"])
    assert build_config["index_topk"] == limits.index_topk(256)
    wanted = limits.profiles(build_config["index_topk"])
    assert build_config["profiles"] == bounded(wanted, vocab_size=96)


def bounded(profiles: dict, vocab_size: int) -> dict:
    """As a record has them: no more adjusted logits than rows have tokens."""
    made = json.loads(json.dumps(profiles))
    for ranges in made.values():
        assert ranges["E"][2] > ranges["R"][2] * vocab_size
        ranges["E"][2] = ranges["R"][2] * vocab_size
    return made


@pytest.mark.parametrize("name, window", [("dspark", 12), ("dflash2", 12), ("dspark-2", 0)])
def test_a_drafter_s_profile_has_its_rings(golden_engines, name, window):
    build_config = json.loads((golden_engines / name / "config.json").read_text())["build_config"]
    wanted = EngineLimits(**build_config["limits"]).profiles(0, window)
    assert build_config["profiles"] == bounded(wanted, vocab_size=96)
    assert ("XR" in build_config["profiles"]["context"]) == (window > 0)


def test_an_engine_directory_of_another_version_is_refused(copied):
    rewrite(copied, lambda values: values.pop("mtp"))
    refused_at_load(copied, "mtp: found no such key")


# -- what may be chosen for drafters --------------------------------------------------------------


def test_fewer_drafts_and_the_other_window_are_built_and_loaded(tmp_path):
    """Both come back at load, by the record: the network's hash would not fit otherwise."""
    drafters = (CHECKPOINTS / "dflash2", CHECKPOINTS / "dspark")
    out = build(tmp_path / "e", drafters=drafters, num_speculative_tokens=2, drafter_window="relative")
    assert record(out)["limits"]["block_rows"] == 3
    for name, rows in (("dflash2", 3), ("dspark", 2)):
        assert record(out / name)["build_config"]["drafter_window"] == "relative"
        assert record(out / name)["build_config"]["num_speculative_tokens"] == 2
        engine = Engine(out, name)
        config = engine.drafter.model.config
        assert (config.window, config.num_drafts, config.block_size) == ("relative", 2, rows)
        assert engine.answer(Request(prompt_ids=(5, 6, 7), max_tokens=6, ignore_eos=True))[1].num_spec_tokens == 2
    network = record(out / "dflash2")["networks"]
    assert record(build(tmp_path / "f", drafters=drafters, num_speculative_tokens=2) / "dflash2")["networks"] != network


@pytest.mark.parametrize("drafter, drafts, most", [("dflash2", 8, 7), ("dspark_redvocab", 4, 3), ("dspark", 0, 8)])
def test_more_drafts_than_a_checkpoint_allows_are_refused(tmp_path, drafter, drafts, most):
    expected = [drafter, f"--num-speculative-tokens: found {drafts}", f"1 to {most}"]
    assert_refused(tmp_path, VERIFIER, (CHECKPOINTS / drafter,), expected, num_speculative_tokens=drafts)


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 3}, {"drafter_window": "anchored"}])
def test_what_concerns_drafters_needs_one(tmp_path, options):
    (name,) = options
    assert_refused(tmp_path, VERIFIER, (), [f"--{name.replace('_', '-')}", "no drafter"], **options)


# -- what is legal and surprising is said ---------------------------------------------------------


class Notes(Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def test_notes_of_a_build(tmp_path):
    """A drafter that knows fewer positions than the engine allows; a verifier without an end token."""
    short = edit_checkpoint(SMALL, tmp_path / "short")
    values = record(short)
    values["transformer_layer_config"]["max_position_embeddings"] = 100
    (short / "config.json").write_text(json.dumps(values))
    endless = edit_checkpoint(VERIFIER, tmp_path / "endless", config={"eos_token_id": None})
    notes = Notes()
    build_engines(endless, [short], TARGETS["cpu"], BuildOptions(), tmp_path / "out", notes)
    assert len(notes.said) == 2
    assert "dspark knows 100 positions and max_model_len is 512" in notes.said[0]
    assert "no end token" in notes.said[1]
    quiet = Notes()
    build_engines(VERIFIER, [SMALL], TARGETS["cpu"], BuildOptions(), tmp_path / "out", quiet)
    assert quiet.said == []
