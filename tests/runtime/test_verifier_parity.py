"""The verifier network on the executor against transformers: the same logits, whatever way tokens are packed."""

from __future__ import annotations

import pytest
import torch
from support.models import ASSETS, LIMITS, load_verifier, random_verifier, reference_verifier, stable_topk

from glmspec.network.limits import EngineLimits
from glmspec.runtime.pack import Rows, pack_rows
from glmspec.runtime.pages import Span

TOLERANCE = 1e-4  # relative to the largest logit
PAGES = {"a": [5, 2, 9, 14, 3, 11, 20, 7, 25, 30], "b": [1, 8, 4, 16, 10, 6, 13, 12, 15, 17]}


class Bench:
    """A model under test, its oracle, and the least page table it needs."""

    def __init__(self, model, oracle, limits: EngineLimits) -> None:
        self.model, self.oracle, self.limits = model, oracle, limits
        self.least = limits.least_pages(model.config.index_topk)

    def run(self, *rows: Rows) -> torch.Tensor:
        return self.model.run(pack_rows(rows, self.limits, self.least))["logits"]

    def rows(self, name: str, ids: list[int], start: int, count: int) -> Rows:
        return Rows(Span(PAGES[name], start, count), ids[start : start + count], count)

    def expected(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad(), stable_topk():
            return self.oracle(torch.tensor([ids])).logits[0]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    worst = (found - expected).abs().max() / expected.abs().max()
    assert worst <= TOLERANCE, f"largest relative error {worst:.2e}"
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module", params=["every region as its op", "every layer, ties to the highest index"])
def bench(request, tmp_path_factory) -> Bench:
    home = tmp_path_factory.mktemp("parity")
    oracle = random_verifier(home / "hf", seed=3)
    layers = request.param.startswith("every layer")
    model = load_verifier(home / "hf", home / "ck", regions=not layers, lowest_wins=not layers)
    return Bench(model, oracle, LIMITS)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 97, (length,), generator=generator).tolist()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 40, 75])
def test_prefill_below_and_above_index_topk(bench, length):
    ids = prompt(length, seed=length)
    assert_same(bench.run(bench.rows("a", ids, 0, length)), bench.expected(ids))


@pytest.mark.parametrize("start", [3, 14, 30, 60])
@pytest.mark.parametrize("block", [1, 2, 5, 8, 9])
def test_decode_and_verify_blocks(bench, start, block):
    ids = prompt(start + block, seed=start)
    bench.run(bench.rows("a", ids, 0, start))
    assert_same(bench.run(bench.rows("a", ids, start, block)), bench.expected(ids)[start:])


def test_chunked_prefill_then_one_by_one(bench):
    ids = prompt(70, seed=5)
    expected = bench.expected(ids)
    at = 0
    for count in (13, 8, 1, 27, 1, 1, 19):
        assert_same(bench.run(bench.rows("a", ids, at, count)), expected[at : at + count])
        at += count


def test_two_sequences_interleaved(bench):
    a, b = prompt(50, seed=8), prompt(61, seed=9)
    expected_a, expected_b = bench.expected(a), bench.expected(b)
    plan = [((0, 20), (0, 3)), ((20, 9), (3, 40)), ((29, 1), (43, 9)), ((30, 20), (52, 9))]
    for (at_a, count_a), (at_b, count_b) in plan:
        found = bench.run(bench.rows("a", a, at_a, count_a), bench.rows("b", b, at_b, count_b))
        assert_same(found[:count_a], expected_a[at_a : at_a + count_a])
        assert_same(found[count_a:], expected_b[at_b : at_b + count_b])


def test_rejected_rows_leave_no_trace(bench):
    ids = prompt(48, seed=11)
    wrong = ids[:30] + prompt(9, seed=99)
    bench.run(bench.rows("a", ids, 0, 30))
    bench.run(bench.rows("a", wrong, 30, 9))  # a block whose drafts are all rejected
    assert_same(bench.run(bench.rows("a", ids, 30, 9)), bench.expected(ids)[30:39])


def test_logits_only_for_the_rows_asked_for(bench):
    ids = prompt(25, seed=12)
    found = bench.run(Rows(Span(PAGES["a"], 0, 25), ids, num_logits=2))
    assert found.shape[0] == 2
    assert_same(found, bench.expected(ids)[-2:])


def test_taps_are_the_residual_stream(tmp_path):
    oracle = random_verifier(tmp_path / "hf", seed=4)
    model = load_verifier(tmp_path / "hf", tmp_path / "ck", taps=(0, 1, 4, 6))
    ids = prompt(33, seed=1)
    out = model.run(pack_rows([Rows(Span(PAGES["a"], 0, 33), ids, 1)], LIMITS, 2))
    streams = {}
    hooks = [
        layer.register_forward_hook(lambda module, given, gave, k=k: streams.__setitem__(k, gave[0]))
        for k, layer in enumerate(oracle.model.layers, 1)
    ]
    with torch.no_grad(), stable_topk():
        oracle(torch.tensor([ids]))
        streams[0] = oracle.model.embed_tokens(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    for tap in (0, 1, 4, 6):
        torch.testing.assert_close(out[f"tap.{tap}"], streams[tap][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("key", ["rope_interleave", "indexer_rope_interleave"])
def test_each_rotary_flag_changes_its_own_module_only(tmp_path, key):
    """Half-split instead of interleaved pairs: the output moves, and the other module's cache does not."""
    random_verifier(tmp_path / "hf", seed=6)
    config = tmp_path / "hf" / "config.json"
    ids, caches = prompt(30, seed=2), {}
    for name, value in (("on", "true"), ("off", "false")):
        text = config.read_text().replace(f'"{key}": true,', "").replace(f'"{key}": false,', "")
        config.write_text(text.replace("{", f'{{"{key}": {value},', 1))
        model = load_verifier(tmp_path / "hf", tmp_path / f"ck-{name}")
        model.run(pack_rows([Rows(Span(PAGES["a"], 0, 30), ids, 1)], LIMITS, 2))
        caches[name] = {
            "latent": model.caches[0]["cache.layers.0.latent"],
            "index": model.caches[0]["cache.layers.0.index"],
        }
    moved = {kind: not torch.equal(caches["on"][kind], caches["off"][kind]) for kind in ("latent", "index")}
    assert moved == {"latent": key == "rope_interleave", "index": key == "indexer_rope_interleave"}


def test_equal_experts_are_chosen_alike_whatever_topk_does(tmp_path):
    """Experts that score the same tie; which are chosen then depends on TopK, unless the lowest wins."""
    oracle = random_verifier(tmp_path / "hf", seed=7)
    for layer in oracle.model.layers[2:]:
        layer.mlp.gate.weight.data.zero_()
        layer.mlp.gate.e_score_correction_bias.zero_()
    oracle.save_pretrained(tmp_path / "hf")
    ids, logits = prompt(20, seed=3), []
    for number, lowest in enumerate((True, False)):
        model = load_verifier(tmp_path / "hf", tmp_path / f"ck{number}", regions=False, lowest_wins=lowest)
        logits.append(model.run(pack_rows([Rows(Span(PAGES["a"], 0, 20), ids, 20)], LIMITS, 2))["logits"])
    model = load_verifier(tmp_path / "hf", tmp_path / "ck")
    logits.append(model.run(pack_rows([Rows(Span(PAGES["a"], 0, 20), ids, 20)], LIMITS, 2))["logits"])
    torch.testing.assert_close(logits[1], logits[0])
    torch.testing.assert_close(logits[2], logits[0], rtol=1e-4, atol=1e-4)


def test_shipped_verifier(tmp_path):
    """The trained model too, at a length well past its index_topk."""
    limits = EngineLimits(
        max_model_len=512, max_num_seqs=2, max_num_batched_tokens=256, page_size=16, segment_rows=32, block_rows=9
    )
    model = load_verifier(ASSETS / "tiny-verifier", tmp_path / "ck", limits)
    bench = Bench(model, reference_verifier(ASSETS / "tiny-verifier"), limits)
    text = "def add_numbers(first, second):\n    return first + second\n\nCount: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11.\n"
    ids = list((text * 2).encode())
    expected = bench.expected(ids)
    assert model.config.index_topk < 100 < len(ids)
    assert_same(bench.run(bench.rows("a", ids, 0, 100)), expected[:100])
    assert_same(bench.run(bench.rows("a", ids, 100, 9)), expected[100:109])
    assert_same(bench.run(bench.rows("a", ids, 109, 1)), expected[109:110])
