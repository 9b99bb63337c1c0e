"""Whatever decides an answer is under a digest: a byte that changes in any file that we write is found by `verify`, and
by the load of what uses the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.cli import refused
from support.models import ASSETS, GOLDENS, random_verifier
from support.records import flips, rewrite, rewrite_model

from glmspec.build import bundle
from glmspec.build import target as targets
from glmspec.build.compile_plugins import compile_plugins, full_model
from glmspec.build.engine import build_engines
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.build.verify import verify_folder
from glmspec.convert.checkpoint import read_checkpoint
from glmspec.convert.conversion import plan_conversion
from glmspec.convert.hf import write_hf
from glmspec.convert.writer import Run
from glmspec.core import files, sealed
from glmspec.core.errors import GlmspecError, MissingCapability
from glmspec.core.progress import Progress
from glmspec.core.sealed import seal_of
from glmspec.network.machine import Machine
from glmspec.runtime.cost_table import CostCurve, CostTable, MeasuredOn, load_costs, save_costs
from glmspec.runtime.engine import Engine
from glmspec.triton_repo.repository import open_repository, write_repository

VERIFIER, DRAFTER = GOLDENS / "checkpoints" / "verifier", GOLDENS / "checkpoints" / "dspark"
TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder of everything that is written, with weights of a tiny verifier that has a tokenizer."""
    made = tmp_path_factory.mktemp("all")
    source = made / "source"
    random_verifier(source, num_hidden_layers=2, indexer_types=["full", "shared"], vocab_size=96)
    for name in TEXTS:
        shutil.copy(ASSETS / "tiny-verifier" / name, source / name)
    return made


@pytest.fixture(scope="module")
def checkpoint(home) -> Path:
    return plan_conversion(home / "source").write(home / "checkpoint").folder


@pytest.fixture(scope="module")
def hf(home) -> Path:
    write_hf(plan_conversion(home / "source"), home / "hf", Run())
    return home / "hf"


@pytest.fixture(scope="module")
def engines(home) -> Path:
    """Built from a converted verifier, with a drafter, acceptance networks and a tokenizer."""
    drawn = BuildOptions(draft_sampling="probabilistic", max_num_seqs=2, max_model_len=64)
    source = home / "golden"
    shutil.copytree(VERIFIER, source)
    for name in TEXTS:
        shutil.copy(ASSETS / "tiny-verifier" / name, source / name)
    build_engines(source, [DRAFTER], TARGETS["cpu"], drawn, home / "engines", Progress(), check=False)
    return home / "engines"


@pytest.fixture(scope="module")
def repository(home, engines) -> Path:
    write_repository(engines, home / "repository", None, True)
    return home / "repository"


@pytest.fixture(scope="module")
def prepared(home) -> Path:
    """A bundle: what is built where TensorRT is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "this_machine", lambda package: Machine(None, None))
        options = BuildOptions(max_num_seqs=2, max_model_len=64, plugins="off")
        left = build_engines(home / "source", (), TARGETS["b200"], options, home / "bundle", Progress(), check=False)
        assert "a bundle" in left
    return home / "bundle"


@pytest.fixture(scope="module")
def kernels(home) -> Path:
    compile_plugins(full_model(TARGETS["b200"], ["argmax"])[:1], TARGETS["b200"], home / "kernels", Progress())
    return home / "kernels"


def found_by(check: Callable[[Path], object], folder: Path, files: list[Path], count: int) -> None:
    """Every flipped byte of these files is refused by `check`, by name; the folder as it was passes."""
    check(folder)
    for path in files:
        whole = path.read_bytes()
        try:
            for at, changed in flips(path, count):
                path.write_bytes(changed)
                try:
                    check(folder)
                except GlmspecError as error:
                    assert str(error)
                else:
                    pytest.fail(f"{path.relative_to(folder)}: byte {at}: {whole[at - 9 : at + 9]!r} changed unseen")
        finally:
            path.write_bytes(whole)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["checkpoint", "hf", "engines", "repository", "prepared", "kernels"])
def test_verify_finds_a_changed_byte_of_every_file(request, kind):
    folder = request.getfixturevalue(kind)
    found_by(lambda place: verify_folder(place, Progress()), folder, files_of(folder), 2)


def test_the_load_of_engines_finds_a_changed_byte_of_every_file(engines):
    found_by(Engine, engines, files_of(engines), 2)


def test_a_bundle_is_finished_only_as_it_was_prepared(prepared):
    def check(folder: Path) -> None:
        with pytest.raises(MissingCapability):  # all is well up to the compiler, which is not here
            bundle.finish(folder, folder.parent / "finished", Progress())

    found_by(check, prepared, files_of(prepared), 2)


def test_a_repository_serves_only_what_it_was_made_of(repository):
    found_by(open_repository, repository, files_of(repository), 9)


def test_our_hugging_face_checkpoint_is_converted_only_as_it_was_written(hf):
    small = [path for path in files_of(hf) if path.suffix != ".safetensors"]  # what a source's tensors hold is its own
    found_by(plan_conversion, hf, small, 3)


def test_a_cost_table_is_read_only_as_it_was_measured(tmp_path):
    made, path = MeasuredOn("ab" * 32, "dspark"), tmp_path / "costs.json"
    save_costs(path, CostTable(CostCurve((1, 4), (1.25, 1.5)), CostCurve((2, 8), (2.5, 3.125), 8)), made)
    found_by(lambda _: load_costs(path, made), tmp_path, [path], 60)


# -- records that glmspec could have written, and did not --------------------------------------------


@pytest.fixture
def copied(engines, tmp_path) -> Path:
    return Path(shutil.copytree(engines, tmp_path / "engines"))


EDITS = {
    "rope_theta": lambda values: values["hf_config"]["rope_parameters"].update(rope_theta=90000.0),
    "routed_scaling_factor": lambda values: values["hf_config"].update(routed_scaling_factor=9.5),
    "rms_norm_eps": lambda values: values["hf_config"].update(rms_norm_eps=1e-3),
    "num_experts_per_tok": lambda values: values["hf_config"].update(num_experts_per_tok=1),
    "eos_token_ids": lambda values: values.update(eos_token_ids=[2]),
}


@pytest.mark.parametrize("key", EDITS)
def test_a_checkpoint_sealed_again_is_not_the_one_engines_were_built_for(copied, key):
    place = copied / "checkpoints" / "verifier"
    rewrite(place / "config.json", EDITS[key])
    verify_folder(place, Progress())  # by itself it is whole
    for check in (Engine, lambda folder: verify_folder(folder, Progress())):
        with pytest.raises(GlmspecError, match=r"not the checkpoint .*verifier was made for.*Build the engine"):
            check(copied)


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_checkpoint_is_refused_by_itself(checkpoint, tmp_path, key):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "ck"))
    values = json.loads((folder / "config.json").read_text())
    EDITS[key](values)
    (folder / "config.json").write_text(json.dumps(values))
    assert "config.json: changed since it was written" in refused(1, "verify", folder)
    assert "changed since" in refused(1, "engine", "--verifier", folder, "--target", "cpu", "-o", tmp_path / "out")


def test_a_drafter_s_checkpoint_sealed_again_is_refused_too(copied):
    rewrite(copied / "checkpoints" / "dspark" / "config.json", lambda values: values["hf_config"].update(_note="x"))
    with pytest.raises(GlmspecError, match=r"not the checkpoint .*dspark was made for"):
        Engine(copied)
    Engine(copied, speculate=False)


def drop(*keys: str) -> Callable[[dict], None]:
    """Takes one key out, however deep."""

    def change(values: dict) -> None:
        for key in keys[:-1]:
            values = values[key]
        del values[keys[-1]]

    return change


def swap(values: dict) -> None:
    """One weight's format under another's number."""
    formats = values["quantization"]["formats"]
    formats["model.layers.7.input_layernorm.weight"] = formats.pop("model.layers.1.input_layernorm.weight")


BROKEN = {
    "checkpoint": [
        (swap, "formats: model.layers.1.input_layernorm.weight: found no such key, expected"),
        (drop("parts"), "parts: found no such key, expected an object"),
        (drop("parts", "rank0.safetensors", "size"), "rank0.safetensors: size: found no such key"),
        (drop("mapping", "moe_ep_size"), "mapping: moe_ep_size"),
        (lambda values: values["quantization"]["inputs"].append(7), "inputs: found"),
        (lambda values: values["ranks"].append(["rank1.safetensors"]), "ranks: found"),
        (lambda values: values["quantization"]["formats"].update({"norm.weight": "int3"}), "formats: norm.weight"),
        (lambda values: values["quantization"]["formats"].update({"lm_head.weight": "int3"}), "lm_head.weight: found"),
        (lambda values: values.update(mtp=0), "mtp: found 0, expected true or false"),
    ],
    "engines": [
        (drop("limits", "max_num_seqs"), "limits"),
        (drop("drafters"), "drafters: found no such key, expected a list"),
        (drop("drafters", 0, "source"), "source: found no such key, expected a text"),
        (lambda values: values["acceptance"].append(3), "acceptance: found"),
        (drop("compute_capability"), "compute_capability"),
    ],
    "prepared": [(drop("finish"), "finish"), (drop("drafters"), "drafters: found no such key")],
    "repository": [(drop("engines", "sha256"), "sha256"), (drop("files"), "files")],
    "kernels": [(drop("files"), "files"), (drop("kernels_for"), "kernels_for")],
}  # fmt: skip


@pytest.mark.parametrize("kind, at", [(kind, at) for kind, cases in BROKEN.items() for at in range(len(cases))])
def test_a_key_that_is_not_as_we_write_it_is_named(request, tmp_path, kind, at):
    change, message = BROKEN[kind][at]
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "broken"))
    rewrite(folder / "config.json", change)
    assert message in refused(1, "verify", folder)
    if kind == "checkpoint":
        assert message in refused(1, "engine", "--verifier", folder, "--target", "cpu", "-o", tmp_path / "out")


@pytest.mark.parametrize("kind", ["engines", "prepared"])
def test_a_key_of_a_model_s_record_is_named(request, tmp_path, kind):
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "broken"))
    rewrite_model(folder, "verifier", drop("weights", "sha256"))
    assert "weights: sha256" in refused(1, "verify", folder)


@pytest.mark.parametrize("kind", ["checkpoint", "engines", "prepared", "repository", "kernels"])
def test_a_folder_of_an_earlier_version_is_refused_with_what_to_do(request, tmp_path, kind):
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "old"))
    values = json.loads((folder / "config.json").read_text())
    del values["sha256"]
    (folder / "config.json").write_text(json.dumps(values))
    for command in ("verify", "inspect"):
        message = refused(1, command, folder)
        assert "earlier version of glmspec" in message and " again" in message


@pytest.mark.parametrize("kind, file", [("repository", "glmspec/config.pbtxt"), ("kernels", "manifest.json")])
def test_inspect_shows_nothing_that_changed(request, tmp_path, kind, file):
    folder = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "changed"))
    (folder / file).write_bytes((folder / file).read_bytes() + b"\n")
    for options in ((), ("--json", "-")):
        assert "changed since it was written" in refused(1, "inspect", folder, *options)


def test_white_space_is_no_change(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "ck"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values, indent=None))
    assert read_checkpoint(folder).record["sha256"] == seal_of(values)


# -- files that nobody wrote, engines that are others ------------------------------------------------


@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json"])
def test_a_file_that_decides_text_cannot_be_slipped_in(checkpoint, engines, tmp_path, name):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "ck"))
    record = json.loads((folder / "config.json").read_text())
    if name in record["files"]:
        rewrite(folder / "config.json", drop("files", name))
    else:
        (folder / name).write_text("{}")
    for command in (("verify", folder), ("engine", "--verifier", folder, "--target", "cpu", "-o", tmp_path / "out")):
        assert f"{name}: found beside the weights" in refused(1, *command)
    (folder / name).unlink()
    (folder / "notes.txt").write_text("mine")  # decides nothing
    whole = Path(shutil.copytree(engines, tmp_path / "engines"))
    (whole / "tokenizer" / "added_tokens.json").write_text("{}")
    with pytest.raises(GlmspecError, match=r"added_tokens\.json: found in the tokenizer's folder"):
        Engine(whole)


def test_a_repository_of_other_engines_is_refused(engines, tmp_path):
    served = Path(shutil.copytree(engines, tmp_path / "engines"))
    write_repository(served, tmp_path / "repository", None, True)
    rewrite(served / "config.json", lambda values: values["drafters"][0].update(source="renamed"))
    assert "It is not what" in refused(1, "verify", tmp_path / "repository")


def test_a_repository_is_verified_with_what_it_serves(engines, tmp_path):
    served = Path(shutil.copytree(engines, tmp_path / "engines"))
    write_repository(served, tmp_path / "repository", None, True)
    path = served / "checkpoints" / "verifier" / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert str(path) in refused(1, "verify", tmp_path / "repository")


def test_weights_too_large_to_hash_are_loaded_only_at_their_size(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("glmspec.core.sealed.HASHED_AT_LOAD", 0)
    folder = Path(shutil.copytree(checkpoint, tmp_path / "ck"))
    read_checkpoint(folder).check_loaded()
    path = folder / "rank0.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(GlmspecError, match=r"rank0.safetensors: changed since it was written: found [\d,]+ bytes"):
        read_checkpoint(folder).check_loaded()


# -- how far it is -----------------------------------------------------------------------------------


class Bars(Progress):
    """Keeps, of every piece of work over bytes, how many there are and what was told of them."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[int, list[int]]] = {}

    @contextmanager
    def bytes(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        self.seen[title] = (total, [])
        yield self.seen[title][1].append


@pytest.mark.parametrize("kind", ["checkpoint", "hf", "engine"])
def test_the_bar_moves_inside_a_part(request, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(files, "_CHUNK", 1 << 12)
    bars, folder = Bars(), request.getfixturevalue("hf" if kind == "hf" else "checkpoint")
    if kind == "engine":
        small = BuildOptions(max_num_seqs=2, max_model_len=64)
        build_engines(folder, (), TARGETS["cpu"], small, tmp_path / "out", bars, check=False)
    else:
        verify_folder(folder, bars)
    parts = list(folder.glob("*.safetensors"))
    ((total, told),) = bars.seen.values()
    assert sum(told) == total == sum(path.stat().st_size for path in parts) and len(told) > 10 * len(parts)


# -- once a command ----------------------------------------------------------------------------------


def test_every_checkpoint_is_hashed_once_and_named_once(engines, checkpoint, tmp_path, monkeypatch):
    """Also where several models of an engine directory use one."""
    read: list[Path] = []
    real = sealed.sha256
    monkeypatch.setattr(sealed, "sha256", lambda path, *rest: read.append(path) or real(path, *rest))
    lines = verify_folder(engines, Progress()).splitlines()
    assert [line.split(":")[0].rpartition("/")[2] for line in lines] == ["engines", "verifier", "dspark"]
    assert len(read) == len(set(read))
    read.clear()
    out = tmp_path / "out"
    small = BuildOptions(max_num_seqs=2, max_model_len=64)
    build_engines(checkpoint, (), TARGETS["cpu"], small, out, Progress(), check=False)
    assert read.count(checkpoint / "rank0.safetensors") == 1
