"""Segments scored tile by tile choose the same rows, and a step that needs it is legal."""

from __future__ import annotations

import pytest
import torch
from support.models import LIMITS, load_verifier, random_verifier

from glmspec.network import limits as module
from glmspec.network.limits import CONTEXT
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span

COLUMNS = 16  # of index keys, the random verifier's
CELL = 256 * COLUMNS  # numbers of a segment's keys: 256 rows of context


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiles")
    random_verifier(path / "hf", seed=7)
    return path


def steps() -> list[dict[str, torch.Tensor]]:
    """Chunks of three prompts, in segments of 12 rows: six segments; then one row alone: one segment."""
    g = torch.Generator().manual_seed(1)

    def rows(pages: list[int], start: int, count: int, logits: int) -> Rows:
        return Rows(Span(pages, start, count), torch.randint(0, 97, (count,), generator=g).tolist(), logits)

    first = [rows([3, 1, 7, 4, 9], 0, 37, 3), rows([2, 5], 0, 7, 1), rows([6, 8, 11], 0, 20, 2)]
    second = [rows([3, 1, 7, 4, 9], 37, 1, 1)]
    return [pack_rows(one, LIMITS, 2) for one in (first, second)]


@pytest.mark.parametrize("regions", [True, False])
@pytest.mark.parametrize("most, tiles", [(6, 3), (14, 1), (2, 8), (13, 2)])
def test_same_logits(folder, tmp_path, monkeypatch, most, tiles, regions):
    """most: segments that a tile may have, of 15 in a step; attention and experts have tiles too."""
    whole = load_verifier(folder / "hf", tmp_path / "whole", regions=regions)
    monkeypatch.setattr(module, "MAX_ELEMENTS", most * CELL + 5)
    assert LIMITS.index_tiles(COLUMNS, CONTEXT) == -(-15 // most)
    found = load_verifier(folder / "hf", tmp_path / "tiles", regions=regions)
    for step in steps():
        expected, got = whole.run(step), found.run(step)
        torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-4, atol=1e-4)
        assert torch.equal(got["greedy_ids"], expected["greedy_ids"])
