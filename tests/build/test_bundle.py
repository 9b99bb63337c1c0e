"""Bundles: prepared without a GPU, finished by the target's TensorRT, here a stand-in that records what it is asked."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tensorrt_rtx
import torch
from support.cli import done, refused
from support.hashed import Hashed, assert_once
from support.models import ASSETS, random_verifier
from support.records import rewrite, rewrite_model
from support.tensorrt_stand_in import PluginLayer, networks_with_plugins

from glmspec.build import bundle
from glmspec.build import target as targets
from glmspec.build.engine import build_engines
from glmspec.build.member import Member
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.build.verify import verify_folder
from glmspec.convert.conversion import plan_conversion
from glmspec.core.errors import EngineError, GlmspecError, MissingCapability
from glmspec.core.progress import Progress
from glmspec.models.acceptance import DraftProbs
from glmspec.network.machine import Machine, this_machine
from glmspec.network.trt import Backend
from glmspec.runtime.directory import EngineDirectory
from glmspec.runtime.engine import Engine

SIZES = dict(num_hidden_layers=2, indexer_types=["full", "shared"], first_k_dense_replace=1, n_routed_experts=4)
VERSION = "11.1.0"


class Recorder:
    """TensorRT's builder and its config: networks are authored for real, everything else is written down."""

    def __init__(self, logger: Any) -> None:
        self._real = tensorrt_rtx.Builder(logger)
        self.calls: list[tuple] = []

    def create_network(self, flags: int) -> Any:
        return self._real.create_network(flags)

    def create_optimization_profile(self) -> Any:
        return self._real.create_optimization_profile()

    def create_builder_config(self) -> Any:
        calls = self.calls

        class Config:
            """What TensorRT for a GPU machine offers: no compute capability to choose, a real timing cache, switches of
            its compiler."""

            build_route = ""
            all_build_routes = "-peep:match_dual_gemm -kgen:codegen:cuda_tile -mlir:collective:fp4"

            def create_timing_cache(self, data: bytes) -> str:
                calls.append(("create_timing_cache", data))
                return "cache"

            def set_timing_cache(self, cache: str, ignore: bool) -> None:
                calls.append(("set_timing_cache", cache, ignore))

            def get_timing_cache(self) -> Any:
                return SimpleNamespace(serialize=lambda: b"timings")

            def set_preview_feature(self, feature: str, on: bool) -> None:
                calls.append(("set_preview_feature", feature, on))

            def add_optimization_profile(self, profile: Any) -> int:
                calls.append(("profile", tuple(profile.get_shape("token_ids"))))
                return 0

        return Config()

    def build_serialized_network(self, network: Any, config: Any) -> bytes:
        kinds = [network.get_layer(at).type for at in range(network.num_layers)]
        sums = kinds.count(tensorrt_rtx.LayerType.DIST_COLLECTIVE)
        self.calls.append(("build", network.name, sums))
        return f"plan of {network.name} {len(self.calls)}".encode()


@pytest.fixture
def tensorrt(monkeypatch):
    """A stand-in for `tensorrt` on a machine with a B200; the builders it made, in order."""
    made: list[Recorder] = []
    module = ModuleType("tensorrt")
    module.__dict__.update({name: value for name, value in vars(tensorrt_rtx).items() if not name.startswith("__")})
    module.__version__ = VERSION
    module.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased")  # as 11.4 has
    module.Builder = lambda logger: made.append(Recorder(logger)) or made[-1]
    stand_in = Backend(module)
    real = targets.backend
    monkeypatch.setattr(targets, "backend", lambda package: stand_in if package == "tensorrt" else real(package))
    monkeypatch.setattr(targets, "this_machine", lambda package: Machine("SM100", VERSION))
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("bundle")
    random_verifier(home / "hf", seed=2, **SIZES)
    return home / "hf"


def prepared(source: Path, out: Path, check: bool = False, target: str = "b200", **options: Any) -> Path:
    """A bundle, and the message that says how it is finished."""
    limits = dict(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64, plugins="off")
    left = build_engines(
        source, (), TARGETS[target], BuildOptions(**{**limits, **options}), out, Progress(), check=check
    )
    assert f"glmspec-build engine --from-bundle {out} -o" in left
    return out


@pytest.fixture
def without_tensorrt(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)


def record(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_a_bundle_holds_all_that_needs_no_gpu(source, tmp_path, without_tensorrt):
    made = prepared(source, tmp_path / "b", check=True, tp=2, quant="nvfp4", plugins="auto")
    values = record(made)
    assert values["producer"]["kind"] == "engine bundle" and values["target"] == "b200"
    report = json.loads((made / "validation.json").read_text())
    assert report["ok"] and {stage["status"] for stage in report["stages"]} == {"passed"}
    assert [stage["stage"] for stage in report["stages"]][-3:] == ["products", "twin", "kernels"]
    manifest = json.loads((made / "plugins" / "manifest.json").read_text())
    assert manifest["sm"] == "SM100" and all((made / "plugins" / one["file"]).exists() for one in manifest["plugins"])
    assert record(made / "verifier")["weights"]["folder"] == "../checkpoints/verifier"
    assert not record(made / "verifier")["plans"] and not list(made.rglob("*.engine"))
    assert (made / "checkpoints" / "verifier" / "rank1.safetensors").exists()
    assert {"validation.json", "plugins/manifest.json"} <= values["files"].keys()


def test_finishing_asks_tensorrt_for_plans_and_nothing_else(source, tmp_path, tensorrt, monkeypatch):
    with monkeypatch.context() as bare:
        bare.setattr(targets, "this_machine", lambda package: Machine(None, None))
        made = prepared(source, tmp_path / "b", tp=2, quant="nvfp4")
    tensorrt.clear()
    bundle.finish(made, tmp_path / "engines", Progress())
    asked = [builder.calls for builder in tensorrt]
    assert asked[:5] == [[]] * 5  # all contracts are compared before anything is compiled
    generation, context, *judges = asked[5:]
    assert generation == [
        ("create_timing_cache", b""),
        ("set_timing_cache", "cache", False),
        ("profile", ((1,), (1,), (2,))),  # a token each of two sequences
        ("build", "verifier", 6),  # two sums a layer, one more, one gather
    ]
    assert context == [
        ("create_timing_cache", b"timings"),
        ("set_timing_cache", "cache", False),
        ("profile", ((1,), (1,), (64,))),
        ("build", "verifier", 6),
    ]
    assert [calls[-1] for calls in judges] == [("build", name, 0) for name in ("accept", "sample", "logprobs")]
    assert all(call[0] != "set_preview_feature" for calls in asked for call in calls)  # no plugins
    values = record(tmp_path / "engines")
    assert values["tensorrt"] == {"package": "tensorrt", "version": VERSION}
    assert (values["target"], values["compute_capability"]) == ("b200", "SM100")
    assert values["mapping"] == {"tp_size": 2, "moe_ep_size": 1}
    home = tmp_path / "engines" / "verifier"
    assert (home / "generation.engine").read_bytes() == b"plan of verifier 4"
    assert (home / "timing.cache").read_bytes() == b"timings"
    weights = record(home)["weights"]
    assert (home / weights["folder"]).resolve() == made.resolve() / "checkpoints" / "verifier"
    assert "as it was built" in verify_folder(tmp_path / "engines", Progress())


@pytest.fixture
def with_plugins(monkeypatch):
    """A stand-in for `tensorrt` that takes plugins, on a machine with a B200; what its builders were asked."""
    asked: list[tuple] = []
    stands = networks_with_plugins(monkeypatch)
    module = next(stands)
    module.PreviewFeature = SimpleNamespace(ALIASED_PLUGIN_IO_10_03="aliased")

    class Builder(module.Builder):
        """Networks are authored for real, everything else is written down."""

        def create_builder_config(self) -> Any:
            return SimpleNamespace(
                create_timing_cache=lambda data: "cache",
                set_timing_cache=lambda cache, ignore: None,
                get_timing_cache=lambda: SimpleNamespace(serialize=lambda: b"timings"),
                set_preview_feature=lambda feature, on: asked.append((feature, on)),
                add_optimization_profile=lambda profile: 0,
            )

        def build_serialized_network(self, network: Any, config: Any) -> bytes:
            layers = [network.get_layer(at) for at in range(network.num_layers)]
            names = {one.made.plugin.plugin_name for one in layers if isinstance(one, PluginLayer)}
            asked.append((network.name, names))
            return b"a plan"

    module.Builder = Builder
    stand_in, real = Backend(module), targets.backend
    monkeypatch.setattr(targets, "backend", lambda package: stand_in if package == "tensorrt" else real(package))
    yield asked
    next(stands, None)


def test_a_bundle_is_finished_with_its_plugins(source, tmp_path, with_plugins, monkeypatch):
    monkeypatch.setattr(targets, "this_machine", lambda package: Machine(None, None))
    made = prepared(source, tmp_path / "b", plugins="auto")
    assert record(made)["plugins"] == "auto" and record(made)["kernels"] == "plugins"
    kernels = json.loads((made / "plugins" / "manifest.json").read_text())["plugins"]
    with_plugins.clear()
    monkeypatch.setattr(targets, "this_machine", lambda package: Machine("SM100", VERSION))
    bundle.finish(made, tmp_path / "e", Progress())
    assert with_plugins[0] == ("aliased", True)  # caches are written in place
    built = {name: names for name, names in with_plugins if name != "aliased"}
    assert {"kv_append_v1", "sparse_mla_split_v1"} <= built["verifier"]
    assert {one["name"] for one in kernels} == set().union(*built.values())
    assert record(tmp_path / "e" / "verifier")["build_config"]["plugins"] == "auto"


def test_a_bundle_without_plugins_is_finished_without(source, tmp_path, with_plugins, monkeypatch):
    monkeypatch.setattr(targets, "this_machine", lambda package: Machine(None, None))
    made = prepared(source, tmp_path / "b", plugins="off")
    assert record(made)["kernels"] is None and not (made / "plugins").exists()
    with_plugins.clear()
    monkeypatch.setattr(targets, "this_machine", lambda package: Machine("SM100", VERSION))
    bundle.finish(made, tmp_path / "e", Progress())
    assert all(names == set() for _, names in with_plugins)


def test_with_tensorrt_and_the_gpu_engines_are_built_at_once(source, tmp_path, tensorrt):
    options = BuildOptions(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64, plugins="off")
    build_engines(source, (), TARGETS["b200"], options, tmp_path / "e", Progress())
    assert record(tmp_path / "e")["target"] == "b200"
    assert [builder.calls[-1][0] for builder in tensorrt if builder.calls] == ["build"] * 5
    assert all(call[0] != "set_preview_feature" for builder in tensorrt for call in builder.calls)  # one rank


def test_a_converted_checkpoint_is_referred_to_by_hash(source, tmp_path, tensorrt, monkeypatch):
    checkpoint = plan_conversion(source).write(tmp_path / "ck")
    with monkeypatch.context() as bare:
        bare.setattr(targets, "this_machine", lambda package: Machine(None, None))
        made = prepared(tmp_path / "ck", tmp_path / "b")
    assert not (made / "checkpoints").exists()
    assert record(made / "verifier")["weights"] == {"folder": "../../ck", **checkpoint.identity}
    shutil.rmtree(tmp_path / "ck")
    with pytest.raises(EngineError, match=r"expected in .*ck, and are not there"):
        bundle.finish(made, tmp_path / "e", Progress())
    random_verifier(tmp_path / "other", seed=9, **SIZES)
    plan_conversion(tmp_path / "other").write(tmp_path / "ck")
    with pytest.raises(EngineError, match=r"not the checkpoint .* was made for"):
        bundle.finish(made, tmp_path / "e", Progress())


@pytest.fixture
def made(source, tmp_path, monkeypatch) -> Path:
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "tensorrt", None)
        return prepared(source, tmp_path / "b")


@pytest.fixture
def with_kernels(source, tmp_path, monkeypatch) -> Path:
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "tensorrt", None)
        return prepared(source, tmp_path / "b", plugins="auto")


def test_another_gpu_is_refused_with_both(made, tmp_path, tensorrt, monkeypatch):
    monkeypatch.setattr(targets, "this_machine", lambda package: Machine("SM90", VERSION))
    with pytest.raises(EngineError, match="SM100, and this machine's is SM90"):
        bundle.finish(made, tmp_path / "e", Progress())
    assert not (tmp_path / "e").exists()


def test_without_a_gpu_it_says_what_is_missing(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingCapability, match=r"tensorrt not installed and no GPU"):
        bundle.finish(made, tmp_path / "e", Progress())


def test_a_changed_bundle_is_refused(with_kernels, tmp_path, tensorrt):
    target = with_kernels / "plugins" / "manifest.json"
    target.write_text(target.read_text() + " ")
    with pytest.raises(GlmspecError, match=r"manifest\.json: changed"):
        bundle.finish(with_kernels, tmp_path / "e", Progress())


def test_a_member_is_what_its_record_says(tmp_path):
    """Every choice that its network was authored with."""
    chosen = dict(taps=(1, 2), hidden=True, window="hf", drafts=3, sampled=True, source="hf", markov_top_k=5)
    member = Member("dspark", tmp_path, None, q=DraftProbs(4, candidates=True), **chosen)
    choices = json.loads(json.dumps(member.choices))
    assert Member.chosen("dspark", None, tmp_path, choices, "hf") == member


@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_another_contract_is_refused_with_both(made, tmp_path, tensorrt, side):
    def widen(values: dict) -> None:
        specs = values["contract"][side]
        next(one for one in specs if one["name"].startswith("cache.layers.0.latent"))["dims"][3] += 8

    rewrite_model(made, "verifier", widen)
    with pytest.raises(EngineError, match=r"authors cache\.layers\.0\.latent.*prepared with cache\.layers\.0"):
        bundle.finish(made, tmp_path / "e", Progress())
    assert not (tmp_path / "e").exists()


def test_changed_or_missing_weights_are_refused(made, tmp_path, tensorrt):
    path = made / "checkpoints" / "verifier" / "rank0.safetensors"
    data = bytearray(path.read_bytes())
    for broken, text in ((data[:-1], "bytes, expected"), (data[:-1] + bytes([data[-1] ^ 1]), "changed since")):
        path.write_bytes(broken)
        with pytest.raises(GlmspecError, match=text):
            bundle.finish(made, tmp_path / "e", Progress())
    path.unlink()
    with pytest.raises(GlmspecError, match="missing"):
        bundle.finish(made, tmp_path / "e", Progress())


def test_a_missing_file_is_refused(with_kernels, tmp_path, tensorrt):
    (with_kernels / "plugins" / "manifest.json").unlink()
    with pytest.raises(GlmspecError, match=r"manifest\.json: missing"):
        bundle.finish(with_kernels, tmp_path / "e", Progress())


@pytest.mark.parametrize(
    "key, value",
    [
        ("target", "zzz"),
        ("compute", 7),
        ("limits", 7),
        ("drafters", 7),
        ("drafters", [{"name": "x"}]),
        ("plugins", "z"),
    ],
)
def test_a_damaged_record_is_refused_by_key(made, tmp_path, key, value):
    rewrite(made / "config.json", lambda values: values.update({key: value}))
    with pytest.raises(GlmspecError, match=f"(?s){key}: .*found"):
        bundle.finish(made, tmp_path / "e", Progress())


def test_a_bundle_of_an_earlier_version_is_refused_with_what_to_do(made, tmp_path):
    rewrite(made / "config.json", lambda values: values.update(members=[{"name": "verifier"}]))
    for command in (("verify", made), ("inspect", made), ("engine", "--from-bundle", made, "-o", tmp_path / "e")):
        message = refused(1, *command)
        assert "earlier version of glmspec" in message and "Prepare the bundle again" in message
    assert not (tmp_path / "e").exists()


def test_drafters_and_the_mtp_module_come_through(tmp_path, tensorrt, monkeypatch):
    with monkeypatch.context() as bare:
        bare.setattr(targets, "this_machine", lambda package: Machine(None, None))
        options = BuildOptions(
            max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64, mtp=True,
            num_speculative_tokens=3, drafter_window="relative", draft_sampling="probabilistic", plugins="off",
        )  # fmt: skip
        drafters = (ASSETS / "tiny-dspark",)
        build_engines(
            ASSETS / "tiny-verifier", drafters, TARGETS["b300"], options, tmp_path / "b", Progress(), check=False
        )
    monkeypatch.setattr(targets, "this_machine", lambda package: Machine("SM103", VERSION))
    hashed = Hashed(monkeypatch)
    bundle.finish(tmp_path / "b", tmp_path / "e", Progress())
    assert_once(hashed.take(), "verifier/rank0.safetensors", "dspark/rank0.safetensors")
    values = record(tmp_path / "e")
    assert (values["mtp"], [one["name"] for one in values["drafters"]]) == ("mtp", ["dspark"])
    assert values["drafters"][0]["source"] == "tiny-dspark"
    built = record(tmp_path / "e" / "dspark")["build_config"]
    assert (built["num_speculative_tokens"], built["drafter_window"], built["limits"]["block_rows"]) == (
        3,
        "relative",
        4,
    )
    probs = built["law"]
    assert (
        built["sampled"] and probs["candidates"] is False and record(tmp_path / "e" / "mtp")["build_config"]["sampled"]
    )
    assert values["acceptance"][-1] == "reject" and record(tmp_path / "e" / "reject")["build_config"]["q"] == probs
    verifier = record(tmp_path / "e" / "verifier")
    outputs = {one["name"] for one in verifier["contract"]["outputs"]}
    taps = {f"tap.{tap}" for tap in verifier["build_config"]["taps"]}
    assert taps and taps | {"hidden"} <= outputs
    assert (tmp_path / "e" / "tokenizer" / "tokenizer.json").exists()
    assert record(tmp_path / "e" / "mtp")["weights"] == verifier["weights"]


def test_verify_and_inspect_know_a_bundle(made):
    assert "as it was prepared" in done("verify", made).stdout
    shown = " ".join(done("inspect", made).stdout.split())
    assert "engine bundle for b200" in shown and "--from-bundle" in shown
    assert "a bundle, not an engine directory yet" in refused(1, "repo", made, "-o", made.parent / "r")


def test_what_is_no_bundle_is_refused(source, tmp_path):
    with pytest.raises(GlmspecError, match="not a bundle"):
        bundle.finish(source, tmp_path / "e", Progress())


# -- loading engines of another machine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "here, both",
    [
        (Machine("SM90", VERSION), ("SM100", "SM90")),
        (Machine("SM100", "11.2.0"), (VERSION, "11.2.0")),
    ],
)
def test_engines_of_another_machine_are_refused_with_both_values(made, tmp_path, tensorrt, monkeypatch, here, both):
    bundle.finish(made, tmp_path / "e", Progress())
    monkeypatch.setattr("glmspec.runtime.directory.this_machine", lambda package: here)
    with pytest.raises(EngineError) as refused:
        Engine(tmp_path / "e")
    assert all(value in str(refused.value) for value in both)
    EngineDirectory.open(tmp_path / "e").check_machine(Machine("SM100", VERSION))


def test_this_machine_is_described():
    found = this_machine("tensorrt_rtx")
    assert found.version == tensorrt_rtx.__version__
    assert (found.compute_capability is None) == (not torch.cuda.is_available())
