"""What one GPU must hold: exact where it is the networks' inputs, an upper estimate for a step's tensors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import DATA, GOLDENS

from glmspec.build import deployment as deployments
from glmspec.build.deployment import open_deployment
from glmspec.build.memory import greatest_steps, peak, plan_memory, with_pool
from glmspec.build.settings import BuildOptions
from glmspec.build.target import TARGETS
from glmspec.core.errors import ConfigError
from glmspec.network.reader import Graph, Node, Value, read
from glmspec.network.trt import backend

TRT = backend("tensorrt_rtx")


def value(name: str, size: int, dtype: str = "float32") -> Value:
    return Value(name, dtype, (size,))


def node(kind: str, inputs, *outputs: Value) -> Node:
    return Node(outputs[0].name, kind, tuple(inputs), outputs, {})


def test_peak_is_what_is_alive_at_once():
    x, a, b, c, d = value("x", 100), value("a", 10), value("b", 20), value("c", 5), value("d", 1)
    chain = (node("UNARY", [x], a), node("UNARY", [a], b), node("UNARY", [b], c), node("UNARY", [c], d))
    assert peak(Graph("g", (x,), (d,), chain)) == 4 * (10 + 20)  # a and b; the input is not of the step
    kept = (*chain[:3], node("ELEMENTWISE", [c, a], d))
    assert peak(Graph("g", (x,), (d,), kept)) == 4 * (10 + 20 + 5)  # a lives on


def test_peak_of_views_unread_outputs_and_small_dtypes():
    x, a, seen, b, values, rows = (
        value("x", 1), value("a", 10), value("seen", 10), value("b", 4), value("values", 50), value("rows", 8, "int32"),
    )  # fmt: skip
    graph = (
        node("UNARY", [x], a),
        node("SHUFFLE", [a], seen),  # no memory of its own, and a lives as long as it does
        node("TOPK", [seen], values, rows),  # nobody reads the values
        node("CAST", [rows], value("half", 8, "bfloat16")),
        node("ELEMENTWISE", [seen, value("half", 8, "bfloat16")], b),
    )
    assert peak(Graph("g", (x,), (b,), graph)) == 4 * 10 + 4 * 50 + 4 * 8
    codes = node("DYNAMIC_QUANTIZE", [x], value("codes", 64, "float4_e2m1fn"), value("scale", 4, "float8_e4m3fn"))
    assert peak(Graph("g", (x,), (codes.outputs[0],), (codes,))) == 32 + 4


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    home = tmp_path_factory.mktemp("memory")
    shutil.copyfile(DATA / "glm-5.3-config.json", home / "config.json")
    return home


@pytest.fixture(scope="module", autouse=True)
def opened_once():
    """The full model's 59,585 tensors are looked through once for each recipe and division."""
    open_verifier, kept = deployments._open_verifier, {}

    def open_or_find(folder, options, config_only):
        key = (folder, options.quant, options.tp, options.ep, config_only)
        if key not in kept:
            kept[key] = open_verifier(folder, options, config_only)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deployments, "_open_verifier", open_or_find)
        yield


def deployment(full, target: str = "b200", **options):
    return open_deployment(full, (), TARGETS[target], BuildOptions(**options), config_only=True)


def test_weights_are_the_rank_s_files_and_caches_what_a_token_costs(full):
    made = deployment(full, tp=8, quant="nvfp4", mtp=True)
    plan = plan_memory(made, greatest_steps(made, TRT))
    files = sum(tensor.size for tensor in made.verifier.weights.rank_tensors(0).values())
    tables = plan.weights - files
    positions, columns = made.limits.table_positions, 64
    assert tables == positions * columns * 2 + 4  # the rotary table and the start of the vocabulary, shared by both
    assert plan.per_token == 79 * 576 * 2 + 22 * 128 * 2  # latents of 78 layers and the module's; 21 indexers and its
    assert plan.weights + plan.step + plan.caches <= plan.available
    pooled = with_pool(made, plan)
    assert pooled.limits.pool_pages == plan.pool_pages and plan.tokens >= made.limits.max_model_len


def test_what_is_asked_for_is_given_or_refused(full):
    graphs = greatest_steps(deployment(full, tp=8, quant="nvfp4"), TRT)
    some = deployment(full, tp=8, quant="nvfp4", max_cached_tokens=200_000)
    assert plan_memory(some, graphs).tokens == 200_000
    with pytest.raises(ConfigError, match=r"weights .* GB .* room for [\d,]+ cached tokens .* at least 3,000,000"):
        plan_memory(deployment(full, tp=8, quant="nvfp4", max_cached_tokens=3_000_000), graphs)
    with pytest.raises(ConfigError, match=r"--max-cached-tokens: found 90,000,000, expected at most 3,72"):
        plan_memory(deployment(full, tp=8, quant="nvfp4", max_cached_tokens=90_000_000), graphs)
    with pytest.raises(ConfigError, match="one sequence of 131,072 tokens must fit"):
        deployment(full, tp=8, quant="nvfp4", max_cached_tokens=1000)


def test_a_small_model_needs_no_pool():
    made = open_deployment(GOLDENS / "checkpoints" / "verifier", (), TARGETS["cpu"], BuildOptions())
    plan = plan_memory(made, greatest_steps(made, TRT))
    assert plan.available is None and plan.pool_pages == made.limits.num_pages - 1
    assert with_pool(made, plan) is made


def test_drafters_that_borrow_cost_nothing_on_one_rank():
    verifier, drafter = GOLDENS / "checkpoints" / "verifier", GOLDENS / "checkpoints" / "dspark"
    alone, both = (
        open_deployment(verifier, drafters, TARGETS["cpu"], BuildOptions()) for drafters in ((), (drafter,))
    )  # fmt: skip
    one = plan_memory(alone, greatest_steps(alone, TRT))
    two = plan_memory(both, greatest_steps(both, TRT))
    own = sum(tensor.size for tensor in both.drafters[0].weights.rank_tensors(0).values())
    config, limits = both.drafters[0].config, both.limits
    table = limits.table_positions * config.head_dim * 4
    longer = (limits.table_positions - alone.limits.table_positions) * alone.verifier.config.qk_rope_head_dim * 4
    assert two.weights - one.weights == own + table + longer
    # On two ranks each has whole copies of embedding and head beside its halves of the verifier's.
    halves, divided = (
        open_deployment(verifier, drafters, TARGETS["cpu"], replace(BuildOptions(), tp=2))
        for drafters in ((), (drafter,))
    )
    borrowed = 2 * config.vocab_size * config.hidden_size * 4
    less, more = (plan_memory(one, greatest_steps(one, TRT)).weights for one in (halves, divided))
    assert more - less == own + table + longer + borrowed


# -- rings ------------------------------------------------------------------------------------------------------------

NO_STEP = Graph("g", (value("x", 1),), (value("y", 1),), (node("UNARY", [value("x", 1)], value("y", 1)),))
RINGS = 6 * 2 * (1 + 16 * 33) * 64 * 8 * 128 * 2  # layers, keys and values, pages of 64 rows, heads, columns, bytes


def dflash2(folder: Path, full_layers: int, window: int = 2048) -> Path:
    """The config of a DFlash2 for GLM-5.3 with six sliding layers."""
    values = json.loads((GOLDENS / "checkpoints" / "dflash2" / "config.json").read_text())
    kinds = ["sliding_attention"] * 6 + ["full_attention"] * full_layers
    sizes = dict(hidden_size=6144, vocab_size=154_880, intermediate_size=12_288, head_dim=128, sliding_window=window)
    sizes |= dict(num_attention_heads=48, num_key_value_heads=8, num_hidden_layers=len(kinds), layer_types=kinds)
    values["transformer_layer_config"] |= sizes | {"max_position_embeddings": 1 << 20}
    values |= dict(aux_hidden_state_layer_ids=[6, 20, 34, 48, 62, 76], draft_vocab_size=154_880, mask_token_id=154_856)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def glm(full, tmp_path_factory):
    """By full layers of the drafter (None: no drafter): GLM-5.3 with it, on eight B300, for so long sequences."""
    home = tmp_path_factory.mktemp("drafters")
    windows = {0: (0, 2048), 1: (1, 2048), "wide": (0, 131_072)}
    folders = [dflash2(home / str(name), *sizes) for name, sizes in windows.items()]
    options = BuildOptions(tp=8, quant="nvfp4")
    opened = open_deployment(full, folders, TARGETS["b300"], options, config_only=True)
    drafters = dict(zip(windows, opened.drafters, strict=True))

    def made(drafter: int | str | None, max_model_len: int, max_num_seqs: int = 16):
        limits = replace(opened.limits, max_model_len=max_model_len, max_num_seqs=max_num_seqs)
        members = (opened.verifier, *([] if drafter is None else [drafters[drafter]]))
        return replace(opened, members=members, limits=limits)

    return made


def test_rings_are_as_large_at_a_million_tokens(glm):
    """33 pages of 64 rows hold a window of 2,048; what grows with the tokens is the verifier's, and full layers'."""
    alone = plan_memory(glm(None, 131_072), [NO_STEP])
    assert alone.rings == 0
    for full_layers in (0, 1):
        for length in (131_072, 1 << 20):
            made = glm(full_layers, length)
            plan = plan_memory(made, [NO_STEP])
            assert plan.rings == RINGS == 832_045_056
            assert plan.per_token == alone.per_token + full_layers * 2 * 8 * 128 * 2
            page = plan.page_size * plan.per_token
            assert plan.caches == (plan.pool_pages + 1) * page + RINGS
            assert plan.pool_pages < made.limits.num_pages - 1  # what is left is less than a page
            assert 0 <= plan.available - plan.weights - plan.step - plan.caches < page


def test_a_step_of_sliding_layers_alone_does_not_grow_with_the_context(glm):
    """What is gathered of rings is as much as they hold; a full layer's context is another matter."""
    steps = {}
    for full_layers in (0, 1):
        for length in (131_072, 262_144):
            made = glm(full_layers, length, max_num_seqs=4)
            net = made.author(made.drafters[0], "generation", TRT, static=True)
            steps[full_layers, length] = peak(read(net.definition, net.backend))
    assert steps[0, 131_072] == steps[0, 262_144] < steps[1, 131_072] < steps[1, 262_144]


def test_rings_that_cannot_be_counted_are_refused(glm):
    told = r"--max-num-seqs: found 16, expected at most 15 with a sliding window of 131,072 tokens \(dflash2-3\)"
    with pytest.raises(ConfigError, match=told):
        plan_memory(glm("wide", 1 << 20), [NO_STEP])
    plan_memory(glm("wide", 1 << 20, max_num_seqs=15), [NO_STEP])


def test_rings_count_when_nothing_fits(glm):
    made = glm("wide", 1 << 20, max_num_seqs=15)
    small = replace(made, target=replace(made.target, memory=120 * 10**9))
    with pytest.raises(ConfigError, match=r"sliding windows 48\.3 GB, weights"):
        plan_memory(small, [NO_STEP])
