"""The generated model repository: what Triton reads in it, and what it refuses to write."""

from __future__ import annotations

import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import text_format
from support.records import rewrite
from tritonclient.grpc import model_config_pb2

from glmspec.core.errors import EngineError, GlmspecError
from glmspec.runtime.adaptive import Adaptive
from glmspec.triton_repo.interface import INPUTS, OUTPUTS
from glmspec.triton_repo.parameters import engine_options
from glmspec.triton_repo.repository import write_repository


@pytest.fixture
def engines(golden_engines, tmp_path) -> Path:
    """An engine directory whose drafters came from folders of other names."""
    folder = Path(shutil.copytree(golden_engines, tmp_path / "home" / "engines"))
    rewrite(
        folder / "config.json", lambda record: [one.update(source=f"my-{one['name']}") for one in record["drafters"]]
    )
    return folder


@pytest.fixture
def repo(engines) -> Path:
    out = engines.parent / "repo"
    write_repository(engines, out, None, True)
    return out


def config_of(repo: Path) -> model_config_pb2.ModelConfig:
    text = (repo / "glmspec" / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def parameters_of(repo: Path) -> dict[str, str]:
    return {key: value.string_value for key, value in config_of(repo).parameters.items()}


def test_the_config_is_one_decoupled_unbatched_python_model(repo):
    config = config_of(repo)
    assert (config.name, config.backend, config.max_batch_size) == ("glmspec", "python", 0)
    assert config.model_transaction_policy.decoupled
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, config.instance_group[0].KIND_CPU)]
    assert (repo / "glmspec" / "1" / "model.py").exists()


@pytest.mark.parametrize(("side", "fields"), [("input", INPUTS), ("output", OUTPUTS)])
def test_every_alias_is_declared_with_its_type_and_shape(repo, side, fields):
    entries = getattr(config_of(repo), side)
    expected = [(name, spec.dtype, spec.dims) for spec in fields.values() for name in spec.names]
    found = [(one.name, model_config_pb2.DataType.Name(one.data_type), tuple(one.dims)) for one in entries]
    assert found == expected
    assert len({name for name, *_ in found}) == len(found)
    assert side == "output" or all(one.optional for one in entries)


@pytest.mark.parametrize(
    ("drafter", "speculate", "expected"),
    [
        (None, True, ("", "true")),
        ("dflash2", True, ("dflash2", "true")),
        ("my-dflash2", True, ("dflash2", "true")),  # the folder it was built from
        (None, False, ("", "false")),
    ],
)
def test_what_is_served_is_in_the_parameters(engines, drafter, speculate, expected):
    out = engines.parent / "repo"
    write_repository(engines, out, drafter, speculate)
    parameters = parameters_of(out)
    assert (parameters["drafter"], parameters["speculate"]) == expected


@pytest.mark.parametrize("out", ["repo", "deep/er/repo", "../elsewhere/repo"])
def test_engines_are_found_from_the_version_folder_wherever_the_pair_moves(engines, tmp_path, out, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = engines.parent
    write_repository(Path("home/engines"), Path("home") / out, None, True)
    for place in (tmp_path, tmp_path / "moved" / "away"):
        if place != tmp_path:
            shutil.copytree(tmp_path, place, ignore=lambda folder, names: {"moved"} & set(names))
            shutil.rmtree(home)
        version = place / "home" / out / "glmspec" / "1"
        relative = parameters_of(place / "home" / out)["engines"]
        assert not Path(relative).is_absolute()
        assert (version / relative).resolve() == place / "home" / "engines"
        assert (version / relative / "config.json").exists()


def test_the_model_loads_the_engines_from_its_own_folder(engines, repo, monkeypatch):
    """With nothing but the generated file, from another working directory (case G50)."""
    asked = {}

    class Asked:
        def __init__(self, folder, drafter, speculate, **settings):
            asked.update(folder=folder, drafter=drafter, speculate=speculate, **settings)
            raise EngineError("enough")

    monkeypatch.setitem(
        sys.modules, "triton_python_backend_utils", types.SimpleNamespace(TRITONSERVER_RESPONSE_COMPLETE_FINAL=1)
    )
    monkeypatch.delitem(sys.modules, "glmspec.triton_repo.model", raising=False)
    monkeypatch.setattr("glmspec.runtime.engine.Engine", Asked)
    monkeypatch.chdir("/")
    source = (repo / "glmspec" / "1" / "model.py").read_text()
    namespace: dict = {}
    exec(compile(source, "model.py", "exec"), namespace)
    parameters = {key: {"string_value": value} for key, value in parameters_of(repo).items()}
    args = {
        "model_config": json.dumps({"parameters": parameters}),
        "model_repository": str(repo / "glmspec"),
        "model_version": "1",
    }
    with pytest.raises(EngineError, match="enough"):
        namespace["TritonPythonModel"]().initialize(args)
    assert asked == {
        "folder": engines,
        "drafter": None,
        "speculate": True,
        "verification": "standard",
        "adaptive": None,
    }
    sys.modules.pop("glmspec.triton_repo.model", None)


def test_an_unknown_drafter_is_refused_and_nothing_written(engines):
    out = engines.parent / "repo"
    with pytest.raises(EngineError, match=r"drafter 'eagle': no such drafter .*It has: dspark, dflash2, dspark-2\.$"):
        write_repository(engines, out, "eagle", True)
    assert sorted(engines.parent.iterdir()) == [engines]


def test_a_folder_that_is_no_engine_directory_is_refused(engines):
    (engines / "config.json").write_text('{"producer": {"name": "glmspec"}}')
    with pytest.raises(EngineError, match=f"^{engines}: not an engine directory. Make one: glmspec-build engine"):
        write_repository(engines, engines.parent / "repo", None, True)


def test_a_foreign_output_folder_is_not_replaced(engines):
    out = engines.parent / "repo"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(GlmspecError, match=f"^{out}: exists and is not a folder that glmspec wrote"):
        write_repository(engines, out, None, True)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    assert sorted(engines.parent.iterdir()) == [engines, out]


def test_an_older_repository_is_replaced_whole(engines, repo):
    (repo / "glmspec" / "2").mkdir()
    write_repository(engines, repo, "dflash2", True)
    assert not (repo / "glmspec" / "2").exists()
    assert parameters_of(repo)["drafter"] == "dflash2"


@pytest.mark.parametrize("out", [".", ".."])
def test_the_engines_themselves_are_never_replaced(engines, out):
    """Also as the folder that holds them."""
    with pytest.raises(GlmspecError, match="the output would replace its own input"):
        write_repository(engines, engines / out, None, True)
    assert (engines / "config.json").exists()


def test_another_folder_of_ours_is_not_replaced(engines, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(engines, other)
    record = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**record, "producer": {"name": "glmspec", "kind": "checkpoint"}}))
    with pytest.raises(GlmspecError, match="is a glmspec checkpoint, which this model repository would replace"):
        write_repository(engines, other, None, True)
    assert sorted(path.name for path in other.iterdir()) == sorted(path.name for path in engines.iterdir())


@pytest.mark.parametrize("settings", [None, Adaptive(), Adaptive(threshold=0.1, temperatures=(0.5, 1.25))])
def test_adaptive_settings_are_in_the_parameters(engines, settings):
    out = engines.parent / "deep" / "repo"
    if settings:
        settings = replace(settings, costs=engines.parent / "costs.json" if settings.threshold else None)
    write_repository(engines, out, None, True, adaptive=settings)
    loaded = {"drafter": None, "speculate": True, "verification": "standard"}
    assert engine_options(parameters_of(out), out / "glmspec" / "1") == loaded | {"adaptive": settings}
    assert str(engines.parent) not in (out / "glmspec" / "config.pbtxt").read_text()  # only relative places
    older = {"engines": "x", "drafter": "", "speculate": "true", "verification": "standard"}
    assert engine_options(older, out) == loaded | {"adaptive": None}


def test_adaptive_serving_needs_a_drafter(engines, tmp_path):
    with pytest.raises(EngineError, match="there is no drafter"):
        write_repository(engines, tmp_path / "repo", None, False, adaptive=Adaptive())
