"""What steps cost: tables looked up, measured without disturbing anyone, kept, and refused where they do not belong."""

from __future__ import annotations

import numpy as np
import pytest
from support.records import rewrite

from glmspec.core.errors import ConfigError
from glmspec.runtime import profile
from glmspec.runtime.adaptive import Adaptive
from glmspec.runtime.cost_table import CostCurve, CostTable, MeasuredOn, load_costs, save_costs
from glmspec.runtime.engine import Engine
from glmspec.runtime.generate import answer_all
from glmspec.runtime.profile import LoadedModels, measure_costs, measured_sizes
from glmspec.runtime.request import Request

TABLE = CostTable(CostCurve((1, 4), (1.0, 1.5), 4), CostCurve((2, 4, 8), (1.0, 2.0, 2.5), 4))
MINE = MeasuredOn("ab" * 32, "dspark")


def test_steps_inside_the_captured_range_and_a_line_above():
    found = TABLE.verify_ms.at(np.array([1, 2, 3, 4, 5, 8, 16]))
    assert found.tolist() == [1.0, 1.0, 2.0, 2.0, 2.125, 2.5, 3.5]
    assert CostCurve((2, 4), (1.0, 2.0)).at(np.array([1, 2, 3, 6])).tolist() == [1.0, 1.0, 1.5, 3.0]  # none captured
    assert CostCurve((3,), (2.0,), 3).at(np.array([1, 9])).tolist() == [2.0, 2.0]
    assert TABLE.step_ms(2, np.array([4, 8])).tolist() == [3.5, 4.0]


def test_costs_never_fall_with_size():
    column = CostCurve.of([1, 2, 4, 8], [2.0, 1.0, 3.0, 2.9], 4)
    assert column.ms == (2.0, 2.0, 3.0, 3.0)
    assert (np.diff(column.at(np.arange(1, 20))) >= 0).all()


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (((1, 1), (1.0, 2.0)), r"sizes: found \[1, 1\], expected growing numbers from 1 up"),
        (((0,), (1.0,)), "sizes: found"),
        (((1, 2), (2.0, 1.0)), "ms: found .* never fall"),
        (((1,), (0.0,)), "ms: found"),
        (((1,), (float("nan"),)), "ms: found"),
        (((1,), (1.0, 2.0)), "found 1 sizes and 2 times"),
        (((), ()), "found 0 sizes"),
        (((1, 4), (1.0, 2.0), 3), "captured: found 3, expected 0 or one of"),
    ],
)
def test_a_column_that_is_none(column, message):
    with pytest.raises(ConfigError, match=message):
        CostCurve(*column)


def test_a_table_is_kept(tmp_path):
    save_costs(tmp_path / "costs.json", TABLE, MINE)
    assert load_costs(tmp_path / "costs.json", MINE) == TABLE
    with pytest.raises(ConfigError, match="cannot be written"):
        save_costs(tmp_path / "no" / "costs.json", TABLE, MINE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engines_sha256": "cd" * 32}, "engines_sha256: found 'cdcdcdcdcdcd', expected 'abababababab'.*Delete it"),
        ({"drafter": "dflash2"}, "drafter: found 'dflash2', expected 'dspark'"),
        ({"producer": {"kind": "engine"}}, "kind: found 'engine', expected 'cost table'"),
        ({"producer": None}, "producer: found None, expected an object"),
        ({"verify_ms": {"sizes": [1], "ms": ["a"], "captured": 0}}, "verify_ms: ms: found"),
        ({"verify_ms": {"sizes": [2, 1], "ms": [1, 2], "captured": 0}}, "verify_ms: sizes: found"),
        ({"draft_ms": {"sizes": [1], "ms": [1.0]}}, "draft_ms: captured: found no such key"),
    ],
)
def test_a_table_that_does_not_belong_here_is_refused(tmp_path, change, message):
    path = tmp_path / "costs.json"
    save_costs(path, TABLE, MINE)
    rewrite(path, lambda values: values.update(change))
    with pytest.raises(ConfigError, match=f"costs.json: .*{message}"):
        load_costs(path, MINE)


# -- measuring ----------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(profile, "ROUNDS", 1)


def test_sizes_end_at_the_limit():
    assert measured_sizes(1) == [1]
    assert measured_sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]


@pytest.mark.parametrize("drafter", ["dspark", "dflash2"])
def test_measuring_disturbs_nobody(golden_engines, quick, drafter):
    engine = Engine(golden_engines, drafter)
    limits, pool, rings = engine.limits, engine.scheduler.pool, engine.scheduler.rings
    requests = [Request(prompt_ids=tuple(range(2, 2 + count)), max_tokens=12) for count in (3, 40)]
    expected = [job.answer for job in answer_all(engine, requests)]
    free, round_free = list(pool._free), list(rings._free)
    table = measure_costs(LoadedModels(engine.verifier, engine.drafter, limits, pool, rings))
    assert pool._free == free and rings._free == round_free
    assert table.verify_ms.sizes[-1] == limits.max_num_seqs * limits.block_rows
    assert table.draft_ms.sizes[-1] == limits.max_num_seqs
    for models in (engine.verifier, engine.drafter.model):
        assert not any(cache[0].any() for cache in models.caches[0].values())  # the null page
    assert [job.answer for job in answer_all(engine, requests)] == expected


def test_few_free_pages_are_enough(golden_engines, quick):
    engine = Engine(golden_engines, "dspark")
    held = engine.scheduler.pool.take(engine.scheduler.pool.free - 3)
    models = LoadedModels(engine.verifier, engine.drafter, engine.limits, engine.scheduler.pool, engine.scheduler.rings)
    assert measure_costs(models).verify_ms.sizes[-1] < engine.limits.max_num_seqs * engine.limits.block_rows
    assert engine.scheduler.pool.free == 3 and held


def test_a_file_is_measured_into_once_and_read_after(golden_engines, tmp_path, quick, monkeypatch):
    path = tmp_path / "costs.json"
    table = Engine(golden_engines, "dspark", adaptive=Adaptive(costs=path)).loop.adaptive.costs
    monkeypatch.setattr(profile, "measure_costs", None)
    assert Engine(golden_engines, "dspark", adaptive=Adaptive(costs=path)).loop.adaptive.costs == table
    with pytest.raises(ConfigError, match="drafter: found 'dspark', expected 'dflash2'"):
        Engine(golden_engines, "dflash2", adaptive=Adaptive(costs=path))
