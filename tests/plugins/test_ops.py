"""Every op: its torch reference, and its native lowering run layer by layer, agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.networks import PLAIN, author, run

from glmspec.core.errors import NetworkError
from glmspec.network.config import NetworkConfig
from glmspec.network.reader import read
from glmspec.plugins import (
    argmax,
    block_attention,
    draft_probs,
    grouped_conv,
    index_topk,
    kv_append,
    lowest_topk,
    margin,
    markov_walk,
    moe,
    moe_fp8,
    moe_fp8_block,
    moe_nvfp4,
    quantize_blocks,
    reject,
    rms_norm,
    rounding,
    sample,
    selector_walk,
    sparse_mla,
)
from glmspec.runtime.executor import ReferenceExecutor

INT = torch.int32


@dataclass
class Case:
    """One call of an op. static: inputs whose first size is known at build time (weights). region: of the layers, where
    it is not called as the op is."""

    op: Any
    inputs: dict[str, torch.Tensor]
    attributes: dict[str, Any] = field(default_factory=dict)
    static: tuple[str, ...] = ()
    net_config: NetworkConfig = PLAIN
    region: str = ""


def table(pages: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randperm(pages - 1, generator=generator)[:columns] + 1).to(INT)


def index_case(seed: int, quantum: float, at_once: int = 2) -> Case:
    """Two sequences in three segments. quantum: scores are multiples of it, so that many are equal."""
    g = torch.Generator().manual_seed(seed)
    q = (torch.randn(11, 2, 4, generator=g) / quantum).round() * quantum
    keys = (torch.randn(40, 1, 4, 4, generator=g) / quantum).round() * quantum
    tables = torch.stack([table(40, 6, 1), table(40, 6, 1), table(40, 6, 2)])
    segment_rows = torch.tensor([[0, 1, 2, 3], [4, 5, 0, 0], [6, 7, 8, 9]], dtype=INT)
    segment_rows = torch.cat([segment_rows, torch.tensor([[10], [0], [0]], dtype=INT)], 1)
    slots = torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [2, 0], [2, 1], [2, 2], [2, 3], [0, 4]])
    positions = torch.tensor([0, 1, 5, 7, 8, 23, 3, 4, 9, 22, 11])
    inputs = {
        "q": q,
        "weight": torch.randn(11, 2, generator=g),
        "keys": keys,
        "page_table": tables,
        "segment_rows": segment_rows,
        "row_slot": slots.to(INT),
        "positions": positions.to(INT),
    }
    return Case(index_topk, inputs, {"k": 8, "at_once": at_once})


def attention_case(causal: bool, window: int, relative: bool) -> Case:
    g = torch.Generator().manual_seed(window + causal)
    inputs = {
        "q": torch.randn(3, 5, 4, 8, generator=g),
        "k": torch.randn(3, 5, 2, 8, generator=g),
        "v": torch.randn(3, 5, 2, 8, generator=g),
        "k_cache": torch.randn(20, 2, 4, 8, generator=g),
        "v_cache": torch.randn(20, 2, 4, 8, generator=g),
        "page_table": torch.stack([table(20, 5, 3), table(20, 5, 4), table(20, 5, 5)]),
        "anchor": torch.tensor([17, 0, 20], dtype=INT),  # one has no context at all
    }
    return Case(block_attention, inputs, dict(scale=0.3, causal=causal, window=window, relative=relative))


def ring_case(causal: bool, window: int, relative: bool) -> Case:
    """Tables that do not begin with the sequence: at its window, later than its window, and a sequence shorter than its
    ring, whose last pages hold another's rows."""
    case = attention_case(causal, window, relative)
    anchor, start = torch.tensor([117, 40, 6], dtype=INT), torch.tensor([100, 36, 0], dtype=INT)
    case.inputs |= {"anchor": anchor, "start": start}
    return case


def append_case(rand: Callable, heads: int, order: list[int]) -> Case:
    """Five rows to pages 1 (from its second slot on) and 3, of six rows."""
    inputs = {
        "cache": rand(5, heads, 4, 3),
        "rows": rand(6, heads, 3),
        "order": torch.tensor(order, dtype=INT),
        "offset": torch.tensor([0, 1, 0, 2, 0], dtype=INT),
        "cumulative": torch.tensor([0, 0, 3, 3, 5, 5], dtype=INT),
    }
    return Case(kv_append, inputs, {})


def walk_inputs(seed: int, vocab: int, quantum: float = 0.0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, vocab, generator=g)
    if quantum:
        logits = (logits / quantum).round() * quantum
    return {"logits": logits, "anchor": torch.tensor([5, 0, 29], dtype=INT)}


def cases() -> dict[str, Case]:
    g = torch.Generator().manual_seed(0)
    rand = lambda *dims: torch.randn(*dims, generator=g)  # noqa: E731
    offset = torch.tensor([0, 3, 3, 5, 5, 8, 8, 8, 8, 11, 11, 14], dtype=INT)
    made = {
        "rms_norm": Case(rms_norm, {"x": rand(5, 16) * 3, "w": rand(16)}, {"eps": 1e-6}, ("w",)),
        "rms_norm of zeros": Case(rms_norm, {"x": torch.zeros(2, 16), "w": rand(16)}, {"eps": 1e-5}, ("w",)),
        "rms_norm over heads": Case(rms_norm, {"x": rand(5, 3, 16), "w": rand(16)}, {"eps": 1e-6}, ("w",)),
        "argmax": Case(argmax, {"x": rand(6, 33)}),
        "argmax of ties": Case(argmax, {"x": rand(20, 9).round()}),
        "argmax of equal rows": Case(argmax, {"x": torch.zeros(3, 7)}),
        "sparse_mla": Case(
            sparse_mla,
            {
                "q": rand(5, 3, 12),
                "cache": rand(9, 1, 4, 12),
                "rows": torch.randint(0, 36, (5, 6), generator=g).to(INT),
                "visible": (torch.rand(5, 6, generator=g).ge(0.4) | (torch.arange(6) == 0)).to(INT),
            },
            {"scale": 0.4, "value_start": 4},
        ),
        "kv_append": append_case(rand, heads=1, order=[4, 0, 1, 3, 2]),
        "kv_append, some rows left out": append_case(rand, heads=2, order=[4, 0, 3, 2, 1]),
        "grouped_conv": Case(
            grouped_conv,
            {"x": rand(3, 5, 12), "base": rand(2, 3, 12), "delta": rand(3, 5, 2, 3, 4)},
            {"side": 0},
            ("base",),
        ),
        "grouped_conv, one tap, the other side": Case(
            grouped_conv,
            {"x": rand(2, 4, 8), "base": rand(2, 1, 8), "delta": rand(2, 4, 2, 1, 2)},
            {"side": 1},
            ("base",),
        ),
        "grouped_conv and a residual": Case(
            grouped_conv,
            {"x": rand(3, 2, 12), "base": rand(2, 3, 12), "delta": rand(3, 2, 2, 3, 4), "residual": rand(3, 2, 12)},
            {"side": 1},
            ("base",),
        ),
        "lowest_topk": Case(lowest_topk, {"score": rand(6, 40)}, {"k": 7}),
        "lowest_topk with ties": Case(lowest_topk, {"score": rand(30, 40).round()}, {"k": 7}),
        "lowest_topk of few finite scores": Case(
            lowest_topk, {"score": torch.where(rand(9, 40) > 1.5, rand(9, 40), -torch.inf)}, {"k": 7}
        ),
        "lowest_topk of zeros of both signs": Case(lowest_topk, {"score": rand(5, 40).sign() * 0.0}, {"k": 39}),
        "lowest_topk of everything": Case(lowest_topk, {"score": rand(5, 8)}, {"k": 8}),
        "index_topk": index_case(1, 1e-6),
        "index_topk with ties": index_case(2, 0.5),
        "index_topk, all scores equal": index_case(3, 100.0),
        "index_topk, a head at a time": index_case(2, 0.5, at_once=1),
        "selector_walk": Case(
            selector_walk,
            {**walk_inputs(4, 30), "pred": rand(30, 4), "succ": rand(30, 4)},
            {"k": 6},
            ("pred", "succ"),
        ),
        "selector_walk, reduced vocabulary": Case(
            selector_walk,
            {**walk_inputs(5, 12), "pred": rand(30, 4), "succ": rand(12, 4), "offset": offset},
            {"k": 6},
            ("pred", "succ", "offset"),
        ),
        "selector_walk, drawn": Case(
            selector_walk, {**walk_inputs(4, 30), "pred": rand(30, 4), "succ": rand(30, 4), **NOISE}, {"k": 6}
        ),
        "selector_walk, reduced vocabulary, ties, drawn": Case(
            selector_walk,
            {
                **walk_inputs(5, 12, 1.0),
                "pred": rand(30, 4).round(),
                "succ": rand(12, 4).round(),
                "offset": offset,
                **NOISE,
            },
            {"k": 6},
            ("pred", "succ", "offset"),
        ),
        "margin": Case(margin, {"score": rand(6, 33)}),
        "margin of ties": Case(margin, {"score": rand(20, 9).round()}),
        "margin where one is left": Case(margin, {"score": torch.tensor([[0.5, -torch.inf, -torch.inf]])}),
        "margin of one score": Case(margin, {"score": rand(4, 1)}),
        "draft_law": Case(
            draft_probs,
            {
                "score": rand(4, 9) * 3,
                "best": torch.tensor([3, 8, 0, 1], dtype=INT),
                "temperature": torch.tensor([0.0, 1.0, 0.01, 50.0]),
            },
        ),
    }
    made |= markov_cases(rand, offset) | sampling_cases(rand)
    for case in made.values():
        if case.op is selector_walk:  # its second argument
            logits = case.inputs.pop("logits")
            case.inputs = {"logits": logits, "projected": rand(3, 4, 4), **case.inputs}
    for tokens in (1, 5, 40):  # few pairs take the gathering path of the reference, many the looping one
        experts = torch.stack([torch.randperm(6, generator=g)[:2] for _ in range(tokens)]).to(INT)
        made[f"moe, {tokens} tokens"] = Case(
            moe,
            {
                "x": rand(tokens, 8),
                "expert": experts,
                "weight": rand(tokens, 2),
                "gate_up": rand(6, 10, 8),
                "down": rand(6, 8, 5),
            },
            {"prompts": 0},
            ("gate_up", "down"),
        )
    made |= quantized_cases(made, rand)
    for causal, window, relative in [
        (False, 0, False),
        (False, 6, False),
        (True, 6, False),
        (False, 6, True),
        (True, 3, True),
    ]:
        what = f"causal={causal} window={window} relative={relative}"
        made[f"block_attention {what}"] = attention_case(causal, window, relative)
        if window:
            made[f"block_attention of a ring, {what}"] = ring_case(causal, window, relative)
    return made


def markov_cases(rand: Callable, offset: torch.Tensor) -> dict[str, Case]:
    """Every head with the full and the reduced vocabulary, ties, and an anchor's row that drafts nothing."""
    found, weights = {}, ("w1", "w2", "recurrent", "offset")
    for head, rows, columns in (("vanilla", 0, 0), ("gated", 4, 4), ("rnn", 12, 8)):
        for kind, vocab, quantum in (("", 30, 0.0), (" with ties", 30, 1.0), (", reduced vocabulary", 12, 0.0)):
            inputs = {**walk_inputs(len(found), vocab, quantum), "w1": rand(30, 4), "w2": rand(vocab, 4)}
            if quantum:
                inputs |= {name: inputs[name].round() for name in ("w1", "w2")}
            if rows:
                inputs |= {"rows": rand(3, 4 + (head == "rnn"), rows), "recurrent": rand(rows, columns)}
            if vocab == 12:
                inputs["offset"] = offset
            found[f"markov_walk, {head}{kind}"] = Case(
                markov_walk, inputs, {"head": head, "margins": bool(quantum)}, weights
            )
            drawn = inputs | NOISE
            found[f"markov_walk, {head}{kind}, drawn"] = Case(
                markov_walk, drawn, {"head": head, "margins": True}, weights
            )
    return found


def sampling_cases(rand: Callable) -> dict[str, Case]:
    """The ops that begin with logits; `test_sampling_ops.py` has the adversarial ones."""
    probs = {
        "logits": rand(6, 30) * 2,
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 1.0]),
        "top_k": torch.tensor([0, 0, 5, 0, 9, 0], dtype=INT),
        "top_p": torch.tensor([1.0, 1.0, 1.0, 0.9, 0.9, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.1]),
    }
    blocks = {
        "draft": torch.tensor([3, 8, 0, 1, 2, 0], dtype=INT),
        "q_row": torch.tensor([1, 0, 0, 1, 1, 0], dtype=INT),
        "rows": torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=INT),
        "count": torch.tensor([2, 2], dtype=INT),
        "accept": torch.tensor([0.3, 0.6, 0.0, 0.01, 0.02, 0.0]),
        "last": torch.tensor([0.4, 0.7]),
        "verify": torch.tensor([0, 1], dtype=INT),
    }
    ids = torch.stack([torch.arange(9), torch.arange(9).flip(0)]).to(INT)
    return {
        "sample": Case(sample, {**probs, "u": torch.linspace(0.05, 0.95, 6)}),
        "reject": Case(reject, {**probs, **blocks, "q": (rand(2, 30)).softmax(-1)}),
        "reject, candidates": Case(reject, {**probs, **blocks, "q": (rand(2, 9)).softmax(-1), "q_ids": ids}),
    }


# Three rows of four drafts: greedy, cold and hot.
NOISE = {
    "temperature": torch.tensor([0.0, 0.1, 2.0]),
    "uniform": torch.rand(3, 4, generator=torch.Generator().manual_seed(8)),
}


def quantized_cases(made: dict[str, Case], rand: Callable) -> dict[str, Case]:
    """Rounded activations (values on ties, zeros, outliers), and experts that round in the middle."""
    wide = rand(7, 2, 96) * torch.logspace(-3, 3, 7).view(-1, 1, 1)
    wide[0, 0, :16], wide[1, 1, 3] = 0.0, 500.0
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(2, 2) * torch.tensor([[1.0], [-1.0]])
    scales = torch.rand(7) * 0.01 + 0.005
    found = {
        **blocks_cases({"whole": rand(5, 256) * 9, "partial": rand(5, 200), "narrow": rand(5, 40), "of experts": wide}),
        "rounding, one scale": Case(
            rounding, {"x": rand(5, 40) * 99, "s": torch.tensor(0.3)}, {"format": "fp8"}, ("s",)
        ),
        "rounding, a scale an expert": Case(rounding, {"x": wide, "s": scales}, {"format": "fp8"}, ("x", "s")),
        "rounding, groups": Case(rounding, {"x": rand(5, 64), "s": torch.tensor(0.002)}, {"format": "nvfp4"}, ("s",)),
        "rounding, groups with ties": Case(rounding, {"x": ties, "s": torch.tensor(1.0)}, {"format": "nvfp4"}, ("s",)),
        "rounding, groups of experts": Case(rounding, {"x": wide, "s": scales}, {"format": "nvfp4"}, ("x", "s")),
    }
    return found | scaled_experts(made["moe, 40 tokens"].inputs, rand)


def scaled_experts(plain: dict[str, torch.Tensor], rand: Callable) -> dict[str, Case]:
    """Experts in every number format, with ids that are other ranks' among them. Halves of 144 rows end in a partial
    block."""
    g, found = torch.Generator().manual_seed(3), {}
    codes = [(rand(6, *shape) * 60).to(torch.float8_e4m3fn) for shape in ((288, 32), (32, 144))]
    pairs = [torch.randint(0, 256, shape, generator=g, dtype=torch.uint8) for shape in ((6, 288, 16), (6, 32, 72))]
    steps = [(torch.rand(shape, generator=g) + 0.5).to(torch.float8_e4m3fn) for shape in ((6, 288, 2), (6, 32, 9))]
    blocks = [torch.rand(shape, generator=g) * 0.01 for shape in ((6, 4, 1), (6, 1, 2))]
    scales = {"scale": torch.rand(6, 2, generator=g) * 0.002, "down_scale": torch.rand(6, generator=g) * 0.002}
    inputs = {"input": torch.rand(6, 2, generator=g) * 0.02, "middle": torch.rand(6, generator=g) * 0.002 + 0.001}
    for tokens in (1, 5, 40):
        first = {name: plain[name][:tokens] for name in ("expert", "weight")}
        first["expert"] = torch.where(torch.rand(tokens, 2, generator=g) < 0.2, 6, first["expert"]).to(INT)
        given = {"x": rand(tokens, 32), **first}
        fp8, fp4 = (
            dict(zip(("gate_up", "down"), codes, strict=True)),
            dict(zip(("gate_up", "down", "groups", "groups2"), pairs + steps, strict=True)),
        )
        for name, op, rest in (
            ("moe_fp8, weights only", moe_fp8, fp8 | scales),
            ("moe_fp8", moe_fp8, fp8 | scales | inputs),
            ("moe_nvfp4, weights only", moe_nvfp4, fp4 | scales),
            ("moe_nvfp4", moe_nvfp4, fp4 | scales | inputs),
            ("moe_fp8_block", moe_fp8_block, fp8 | dict(zip(("blocks", "down_blocks"), blocks, strict=True))),
        ):
            found[f"{name}, {tokens} tokens"] = Case(op, given | rest, {"prompts": 0}, tuple(rest))
    return found


class Blocks:
    """Blocks, and back."""

    native, reference = staticmethod(rounding.blocks), staticmethod(rounding.blocks_reference)


def blocks_cases(given: dict[str, torch.Tensor]) -> dict[str, Case]:
    """FP8 blocks: codes and scales, and the numbers they stand for."""
    found = {}
    for name, x in given.items():
        static = ("x",) if x.dim() == 3 else ()
        found[f"quantize_blocks, {name}"] = Case(quantize_blocks, {"x": x}, {}, static)
        found[f"rounding, blocks, {name}"] = Case(Blocks, {"x": x}, {}, static, region="quantize_blocks")
    return found


CASES = cases()


def as_list(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


# How many inputs a walk always has; the others go by name.
FIRST = {markov_walk: 4, selector_walk: 5}


def native(case: Case) -> Callable:
    first = FIRST.get(case.op, len(case.inputs))
    names = [*case.inputs][first:]

    def body(*inputs):
        made = case.op.native(*inputs[:first], **case.attributes, **dict(zip(names, inputs[first:], strict=True)))
        return tuple(one for one in vars(made).values() if one is not None) if case.op in FIRST else made

    return body


def copies(case: Case) -> dict[str, torch.Tensor]:
    """The inputs, for an op that may change them."""
    return {name: x.clone() for name, x in case.inputs.items()}


def reference(case: Case) -> list[torch.Tensor]:
    given = {"given": [*case.inputs][FIRST[case.op] :]} if case.op in FIRST else {}
    return as_list(case.op.reference(*copies(case).values(), **case.attributes, **given))


@pytest.mark.parametrize("lowest_wins", [True, False], ids=["TopK ties low", "TopK ties high"])
@pytest.mark.parametrize("name", CASES)
def test_native_layers_equal_the_reference(name, lowest_wins):
    case = CASES[name]
    expected = reference(case)
    found = run(copies(case), native(case), case.static, case.net_config, regions=False, lowest_wins=lowest_wins)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        bound = 0 if one.dtype == torch.float8_e4m3fn else 1e-5
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", CASES)
def test_the_region_is_replaced_by_the_reference(name):
    case = CASES[name]
    net = author(case.inputs, native(case), case.static, case.net_config)
    ops = {node.region["op"] for node in read(net.definition, net.backend).nodes if node.region and "op" in node.region}
    assert ops == {case.region or case.op.OP.name}
    expected = reference(case)
    for one, other in zip(run(copies(case), native(case), case.static, case.net_config), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_kv_append_reference_against_a_plain_loop():
    """Of an order longer than the plan, the rest is not written."""
    given = copies(CASES["kv_append, some rows left out"])
    given["order"] = torch.tensor([4, 0, 3, 2, 1, 5], dtype=INT)
    expected = given["cache"].clone()
    for row, (page, slot) in zip([4, 0, 3, 2, 1], [(1, 1), (1, 2), (1, 3), (3, 2), (3, 3)], strict=True):
        expected[page, :, slot] = given["rows"][row]
    found = kv_append.reference(*given.values())
    assert found is given["cache"]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("regions", [True, False])
def test_kv_append_writes_in_place(regions):
    case, given = CASES["kv_append"], copies(CASES["kv_append"])
    net = author(given, native(case), ("cache",))
    caches = {"cache": given.pop("cache")}
    executor = ReferenceExecutor(read(net.definition, net.backend), {}, caches, regions=regions)
    assert executor.run(given)["out0"].data_ptr() == caches["cache"].data_ptr()
    assert torch.equal(caches["cache"], reference(case)[0])


def test_kv_append_has_no_layers_for_a_float8_cache():
    given = {**CASES["kv_append"].inputs, "scale": torch.tensor([0.5])}
    given["cache"] = given["cache"].to(torch.float8_e4m3fn)
    with pytest.raises(NetworkError, match="float8 cache: TensorRT has no layer that updates it"):
        author(given, kv_append.native)


def test_sparse_mla_has_no_layers_for_a_float8_cache():
    inputs = {**CASES["sparse_mla"].inputs, "scale": torch.tensor([0.5])}
    inputs["cache"] = inputs["cache"].to(torch.float8_e4m3fn)
    with pytest.raises(NetworkError, match="float8 cache: TensorRT has no layer that gathers its rows"):
        author(inputs, lambda *given: sparse_mla.native(*given, scale=0.4, value_start=4))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("lowest_topk")])
def test_lowest_topk_reference_against_sorting(name):
    case = CASES[name]
    k = case.attributes["k"]
    for row, found in zip(case.inputs["score"].tolist(), lowest_topk.reference(case.inputs["score"], k=k), strict=True):
        best = sorted(range(len(row)), key=lambda column, row=row: (-row[column], column))[:k]
        assert found.tolist() == sorted(best)


def test_index_topk_reference_against_a_plain_loop():
    """The oracle itself, checked by sorting (-score, column) in Python."""
    for case in (CASES["index_topk"], CASES["index_topk with ties"]):
        rows, visible = index_topk.reference(*case.inputs.values(), **case.attributes)
        given = case.inputs
        for token, (segment, _) in enumerate(given["row_slot"].tolist()):
            pages, position = given["page_table"][segment].tolist(), int(given["positions"][token])
            cache_rows = [pages[column // 4] * 4 + column % 4 for column in range(24)]
            keys = given["keys"].view(-1, 4)[cache_rows[: position + 1]]
            score = torch.relu(keys @ given["q"][token].T) @ given["weight"][token]
            best = sorted(range(position + 1), key=lambda column, s=score: (-round(s[column].item(), 5), column))[:8]
            assert rows[token][visible[token] > 0].tolist() == [cache_rows[column] for column in sorted(best)]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("block_attention of a ring")])
def test_block_attention_reference_against_a_plain_loop(name):
    """Row by row over the positions that the conventions name."""
    case = CASES[name]
    q, k, v, k_cache, v_cache, tables, anchor, start = case.inputs.values()
    window, relative, causal = (case.attributes[key] for key in ("window", "relative", "causal"))
    found = block_attention.reference(*case.inputs.values(), **case.attributes)
    for block, (table, p, first) in enumerate(zip(tables.tolist(), anchor.tolist(), start.tolist(), strict=True)):
        for row in range(5):
            oldest = p + row - window + 1 if relative else p - window
            positions = range(max(oldest, first, 0), p)
            places = [(table[(at - first) // 4], (at - first) % 4) for at in positions]
            own = [r for r in range(5) if (r <= row or not causal) and (abs(r - row) < window or not relative)]
            seen_LJD = [
                torch.stack([cache[page, :, slot] for page, slot in places] + [mine[block, r] for r in own])
                for cache, mine in ((k_cache, k), (v_cache, v))
            ]
            for head in range(4):
                k_LD, v_LD = (seen[:, head // 2] for seen in seen_LJD)
                p_L = torch.softmax(k_LD @ q[block, row, head] * case.attributes["scale"], 0)
                torch.testing.assert_close(found[block, row, head], p_L @ v_LD, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", [0, 1])
def test_grouped_conv_reference_against_the_formula(side):
    given = CASES["grouped_conv"].inputs
    x, base, delta = given["x"], given["base"][side], given["delta"][:, :, side]
    found = grouped_conv.reference(*given.values(), 2 * x, side=side)
    for block in range(3):
        for row in range(5):
            for column in range(12):
                taps = range(min(3, row + 1))
                y = sum((base[t, column] + delta[block, row, t, column // 3]) * x[block, row - t, column] for t in taps)
                torch.testing.assert_close(found[block, row, column], 2 * x[block, row, column] + y)


@pytest.mark.parametrize("way", ["_gathered", "_batched", "_looped"])
def test_moe_reference_against_a_plain_loop(monkeypatch, way):
    """Each of the ways the reference may take."""
    monkeypatch.setattr(moe, "_GATHER_PAIRS", 1 << 30 if way == "_gathered" else 0)
    monkeypatch.setattr(moe, "_SMALL_WEIGHTS", 1 << 30 if way == "_batched" else 0)
    given = {name: tensor.clone() for name, tensor in CASES["moe, 40 tokens"].inputs.items()}
    if way == "_gathered":  # it is for fewer pairs than experts
        given |= {name: given[name][:2] for name in ("x", "expert", "weight")}
    x, gate_up, down = given["x"], given["gate_up"], given["down"]
    expected = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(given["expert"][token].tolist(), given["weight"][token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(moe.reference(*given.values(), prompts=0), expected, rtol=1e-5, atol=1e-5)


def test_e2m1_rounds_ties_to_even_codes():
    """Literally, so that nothing is compared with itself: values, then the seven ties between neighbours."""
    given = [0.0, 0.2, 0.3, 0.6, 1.1, 1.6, 2.2, 3.4, 4.4, 5.1, 9.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    wanted = [0.0, 0.0, 0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    x = torch.tensor(given)
    assert rounding.to_e2m1(x).tolist() == wanted
    assert rounding.to_e2m1(-x).tolist() == [-value for value in wanted]


def test_rounding_by_hand():
    """A block's largest value becomes 448 steps; a group's becomes 6; one scale saturates at 448 of it."""
    x = torch.zeros(1, 128)
    x[0, :4] = torch.tensor([896.0, 1.0, 33.0, -100.0])  # step 2: 448, 0.5, 16.5 -> 16, -50 -> -48 or -52
    found = rounding.blocks_reference(x)[0, :4].tolist()
    assert found == [896.0, 1.0, 32.0, -96.0]
    assert rounding.reference(torch.tensor([[900.0, 3.0]]), torch.tensor(1.0), format="fp8").tolist() == [[448.0, 3.0]]
    group = torch.zeros(1, 16)
    group[0, :5] = torch.tensor([12.0, 1.0, 2.0, -5.0, 0.4])  # step 2: 6, 0.5, 1, -2.5 -> -2, 0.2 -> 0
    assert rounding.reference(group, torch.tensor(1.0), format="nvfp4")[0, :5].tolist() == [12.0, 1.0, 2.0, -4.0, 0.0]
