"""`validate`: planted faults are caught by the stage that should catch them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.validation import STATIC, check, failed, told

from glmspec.build.validate import coverage
from glmspec.build.validate.compile_cache import CompileCache
from glmspec.build.validate.run import NAMES
from glmspec.convert.conversion import ConvertOptions, plan_conversion
from glmspec.convert.recipe import RECIPES
from glmspec.core.errors import NetworkError
from glmspec.models import verifier
from glmspec.models.layers import basic, mla, moe
from glmspec.network import limits, ops, shards
from glmspec.plugins import block_product, compiler, index_topk, sparse_mla
from glmspec.plugins import moe as moe_op
from glmspec.runtime import model as runtime_model


@dataclass
class Plant:
    """stage: that must catch it. text: that must be in the fault. plant: changes code, or returns another source."""

    stage: str
    text: str
    plant: Callable[..., Path | None]
    options: dict[str, Any] = field(default_factory=dict)
    stages: tuple[str, ...] = STATIC


TP2 = dict(tp=2)
TWIN = ("config", "twin")


def converted(source: Path, home: Path, quant: str, tp: int = 1, change: Callable = lambda tensors: None) -> Path:
    """A converted checkpoint whose rank 0 was changed afterwards."""
    out = home / "ck"
    plan_conversion(source, ConvertOptions(RECIPES[quant], shards.Mapping(tp))).write(out)
    path = out / "rank0.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return out


def in_checkpoint(change: Callable, quant: str = "fp8") -> Callable:
    return lambda monkeypatch, source, home: converted(source, home, quant, change=change)


def in_config(**values: Any) -> Callable:
    def plant(monkeypatch, source: Path, home: Path) -> Path:
        shutil.copytree(source, home / "hf")
        path = home / "hf" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        return home / "hf"

    return plant


def in_code(owner: Any, name: str, replacement: Any) -> Callable:
    return lambda monkeypatch, source, home: monkeypatch.setattr(owner, name, replacement)


def reshaped(name: str, *shape: int) -> Callable:
    return lambda tensors: tensors.update({name: tensors[name].reshape(shape)})


EXPERTS, O_PROJ = "model.layers.2.mlp.experts.down_proj", "model.layers.0.self_attn.o_proj.weight"
ROUTER = "model.layers.2.mlp.gate.weight"


def _transposed(tensors):
    tensors[O_PROJ] = tensors[O_PROJ].t().contiguous()


def _rounded_router(tensors):
    tensors[ROUTER] = tensors[ROUTER].bfloat16()


def _mlp(self, x_ND, step):
    more = (step.expert_tiles, step.expert_prompts) if self.sparse else ()
    return self.mlp(self.post_attention_layernorm(x_ND), *more)


def _without_sum(self, x_ND, step, shared):
    attention_ND, attended = self.self_attn(self.input_layernorm(x_ND), step, shared)
    x_ND = x_ND + attention_ND  # no all-reduce
    return x_ND + ops.all_reduce(_mlp(self, x_ND, step)), attended


def _summed_twice(self, x_ND, step, shared):
    attention_ND, attended = self.self_attn(self.input_layernorm(x_ND), step, shared)
    x_ND = ops.all_reduce(x_ND + ops.all_reduce(attention_ND))
    return x_ND + ops.all_reduce(_mlp(self, x_ND, step)), attended


def _bent_term(self, x_ND, step, shared):
    attention_ND, attended = self.self_attn(self.input_layernorm(x_ND), step, shared)
    x_ND = x_ND + ops.all_reduce(ops.silu(attention_ND))  # of every rank's term, instead of their sum
    return x_ND + ops.all_reduce(_mlp(self, x_ND, step)), attended


def _own_words_only(part_RF, vocab):
    return ops.narrow(ops.concat([part_RF, part_RF], 1), 1, 0, vocab)  # as if every rank had the same columns


def _own_rows_only(self, ids_N):
    own_N = ids_N - ids_N.net.inputs[basic.VOCABULARY_START]
    return ops.gather(self.weight.tensor, own_N)  # as if the others' rows did not matter


def _without_up(self, x_ND):
    return self.down_proj(ops.silu(self.gate_proj(x_ND)))


def _without_cast(self, x_ND):
    return ops.matmul(x_ND, self.weight.tensor, transpose_b=True)


def _kept_to_itself(name, rows_NJD, plan):
    cache = rows_NJD.net.inputs[name]
    return ops.kv_update(cache, ops.gather(rows_NJD, plan.order_N), plan.offset_X, plan.cumulative_X1)


def _softmax(x, axis, original=ops.softmax):
    return ops.cast(original(ops.cast(x, "bfloat16"), axis), "float32")


def _tight_ranges(self, k, rows, segments, segment_rows, original=limits.EngineLimits._ranges):
    made = original(self, k, rows, segments, segment_rows)
    return made | {"N": (1, 1, min(made["N"][2], 100))}


def _short_tables(self, k, rows, segments, segment_rows, original=limits.EngineLimits._ranges):
    made = original(self, k, rows, segments, segment_rows)
    return made | {"M": (1, *made["M"][1:])}


def _short_tables_and_a_long_k(monkeypatch, source, home):
    monkeypatch.setattr(limits.EngineLimits, "_ranges", _short_tables)
    return in_config(index_topk=100)(monkeypatch, source, home)


def _late_tap(self, layers, x_ND, original=verifier.Verifier.tap):
    original(self, (layers + 1) % (1 + self.config.num_hidden_layers), x_ND)


def _unscaled(self, x_ND, original=moe.Router.forward):
    expert_NA, weight_NA = original(self, x_ND)
    return expert_NA, weight_NA * (1 / self.scaling)


def _halves_swapped(x_ND, expert_NA, weight_NA, gate_up_EFD, *rest, original=moe_op.native, **attributes):
    width = gate_up_EFD.shape[1] // 2
    parts = [ops.narrow(gate_up_EFD, 1, at, width) for at in (width, 0)]
    return original(x_ND, expert_NA, weight_NA, ops.concat(parts, 1), *rest, **attributes)


def _first_experts(spec, config, mapping, rank, original=runtime_model._table):
    return original(spec, config, mapping, 0 if spec.name == basic.EXPERT_START else rank)


def _little_memory(monkeypatch, source, home):
    monkeypatch.setattr(compiler, "SHARED_MEMORY", 16)


PLANTS: dict[str, Plant] = {
    "contradictory indexer pattern": Plant("config", "indexer_types", in_config(index_topk_pattern="FSSS")),
    "K over TensorRT's limit": Plant(
        "config", "index_topk: found 4096", in_config(index_topk=4096, max_position_embeddings=8192),
        dict(max_model_len=8192),
    ),
    "ranks that do not divide the heads": Plant("config", "Legal with --ep 1", lambda *_: None, dict(tp=16)),
    "an FP8 cache": Plant("config", "--kv-cache-dtype", lambda *_: None, dict(kv_cache_dtype="fp8")),
    "wrong scale shape": Plant("weights", "scale_inv", in_checkpoint(reshaped(f"{O_PROJ}_scale_inv", 2, 1))),
    "transposed weight": Plant("weights", O_PROJ, in_checkpoint(_transposed)),
    "missing tensor": Plant("weights", "missing, expected", in_checkpoint(lambda tensors: tensors.pop(ROUTER))),
    "surplus tensor": Plant(
        "weights", "surplus", in_checkpoint(lambda t: t.update({"model.layers.0.extra.weight": torch.ones(2)}))
    ),
    "router rounded to BF16": Plant("weights", "found BF16", in_checkpoint(_rounded_router)),
    "NVFP4 codes one a byte": Plant(
        "weights", EXPERTS, in_checkpoint(lambda t: t.update({EXPERTS: t[EXPERTS].repeat_interleave(2, -1)}), "nvfp4")
    ),
    "BF16 meets FP32": Plant("layers", "weights_proj/matmul.1", in_code(basic.Linear, "forward", _without_cast)),
    "FP8 codes multiplied as they are": Plant(
        "layers",
        "FP8",
        in_code(block_product.ops, "dequantize", lambda codes, *_: codes),
        dict(quant="fp8"),
    ),
    "probabilities in BF16": Plant("layers", "expected float32", in_code(sparse_mla.ops, "softmax", _softmax)),
    "a weight nobody reads": Plant("layers", "up_proj.weight: an input", in_code(basic.MLP, "forward", _without_up)),
    "a cache that is not given back": Plant("layers", "without giving it", in_code(mla, "append", _kept_to_itself)),
    "missing all-reduce": Plant(
        "ranks", "self_attn.o_proj/matmul.1", in_code(verifier.DecoderLayer, "forward", _without_sum), TP2
    ),
    "one all-reduce too many": Plant(
        "ranks", "whole already", in_code(verifier.DecoderLayer, "forward", _summed_twice), TP2
    ),
    "embedding of one rank": Plant(
        "ranks", "differ", in_code(basic.VocabularyEmbedding, "forward", _own_rows_only), TP2
    ),
    "a term of a sum bent before the sum": Plant(
        "ranks", "before the sum is taken", in_code(verifier.DecoderLayer, "forward", _bent_term), TP2
    ),
    "logits of one rank's words": Plant(
        "ranks", "is the output", in_code(verifier, "legal_logits", _own_words_only), dict(tp=2)
    ),
    "profile that excludes a legal batch": Plant(
        "profiles", "fits no profile", in_code(limits.EngineLimits, "_ranges", _tight_ranges)
    ),
    "page tables shorter than K": Plant(
        "profiles", "fewer than the 100", _short_tables_and_a_long_k, dict(max_model_len=256)
    ),
    "off-by-one tap": Plant("twin", "(tap 0)", in_code(verifier.Verifier, "tap", _late_tap), {}, TWIN),
    "rotary pairs half a head apart": Plant("twin", "layers.0", in_config(rope_interleave=False), {}, TWIN),
    "wrong eps of the latent norms": Plant("twin", "layers.0", in_code(mla, "LATENT_NORM_EPS", 1e-2), {}, TWIN),
    "index scores without ReLU": Plant("twin", "layers.", in_code(index_topk.ops, "relu", lambda x: x), {}, TWIN),
    "routing weights not scaled": Plant("twin", "layers.2", in_code(moe.Router, "forward", _unscaled), {}, TWIN),
    "gate and up swapped": Plant("twin", "layers.2", in_code(moe, "_OPS", {None: (_halves_swapped, ("",))}), {}, TWIN),
    "experts of the wrong rank": Plant(
        "twin", "ranks", in_code(runtime_model, "_table", _first_experts), dict(tp=2, ep=2), TWIN
    ),
    "experts of the wrong rank, in FP8": Plant(
        "twin", "model.layers.", in_code(runtime_model, "_table", _first_experts), dict(tp=2, ep=2, quant="fp8"), TWIN
    ),
    "a kernel beyond its shared memory": Plant("kernels", "shared memory", _little_memory, {}, ("config", "kernels")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_caught_by_its_stage(name, folder, tmp_path, monkeypatch):
    plant = PLANTS[name]
    source = plant.plant(monkeypatch, folder, tmp_path) or folder
    options = {"max_num_seqs": 2, "max_model_len": 64, "target": "b200", **plant.options}
    report = check(source, *plant.stages, **options)
    assert failed(report)[:1] == [plant.stage], told(report) or [one.why for one in report.outcomes]
    assert plant.text in told(report)
    assert not report.ok


def test_the_unbroken_verifier_passes_where_faults_are_planted(folder, tmp_path):
    for options in ({}, TP2, dict(tp=2, ep=2), dict(quant="fp8")):
        report = check(folder, *STATIC, "twin", max_num_seqs=2, max_model_len=64, **options)
        assert report.ok, told(report)


def test_too_little_memory_says_what_would_fit(full):
    stages = ("config", "layers", "memory", "limits")
    report = check(full, *stages, config_only=True, quant="fp8", tp=4, target="h200")
    assert failed(report) == ["memory"]
    assert "h200" in told(report) and "Use more ranks" in told(report) and "cached tokens" in told(report)
    assert "nvfp4" not in told(report)  # which that GPU does not multiply
    assert {one.stage for one in report.outcomes if one.why} == {"limits"}  # which needs the memory plan


def test_every_rank_s_files_are_looked_at(folder, tmp_path):
    out = converted(folder, tmp_path, "auto", tp=2)
    path = out / "rank1.safetensors"
    tensors = load_file(path)
    tensors[O_PROJ] = tensors[O_PROJ].t().contiguous()
    save_file(tensors, path)
    report = check(out, *STATIC)
    assert failed(report) == ["weights"] and "rank 1" in told(report) and "rank 0" not in told(report)


def test_kernels_that_are_known_to_compile_are_not_compiled_again(folder, tmp_path, monkeypatch):
    first, second = (
        check(folder, "config", "kernels", max_model_len=64, wanted={"cache": tmp_path / "known"}) for _ in range(2)
    )
    assert first.ok and second.ok
    assert "(0 compiled now)" not in " ".join(first.outcomes[-1].facts)
    assert "(0 compiled now)" in " ".join(second.outcomes[-1].facts)
    with monkeypatch.context() as patch:
        patch.setattr("glmspec.build.validate.kernels.sources_digest", lambda: "other sources")
        third = check(folder, "config", "kernels", max_model_len=64, wanted={"cache": tmp_path / "known"})
    assert "(0 compiled now)" not in " ".join(third.outcomes[-1].facts)


def test_a_record_without_what_is_asked_of_it_is_none(tmp_path):
    cache = CompileCache(tmp_path / "known")
    compiled = iter([{"registers": count} for count in range(40, 50)])

    def registers(identity, *keys):
        return cache.record(identity, {"registers", *keys}, lambda: next(compiled))["registers"]

    assert [registers("kernel"), registers("kernel"), registers("other")] == [40, 40, 41]
    assert registers("kernel", "sha256") == 42
    for path in (tmp_path / "known").iterdir():
        path.write_text("[40")
    assert [registers("kernel"), registers("kernel"), registers("other")] == [43, 43, 44]
    assert (cache.num_compiled, cache.num_known) == (5, 2)
    assert "sha256" not in cache.record("kernel", {"registers"}, dict)


def test_what_does_not_compile_is_not_remembered(tmp_path):
    cache = CompileCache(tmp_path / "known")
    for _ in range(2):
        with pytest.raises(NetworkError, match="spills"):
            cache.record("kernel", {"registers"}, _spills)
    assert not (tmp_path / "known").exists() and cache.num_compiled == 0


def _spills():
    raise NetworkError("the kernel spills")


def test_with_plugins_on_a_region_without_is_a_fault(folder, monkeypatch):
    monkeypatch.setattr("glmspec.build.plugin_variants.network_variants", lambda regions, sm: ([], ["argmax: made up"]))
    report = check(folder, "config", "kernels", max_model_len=64, plugins="on")
    assert failed(report) == ["kernels"] and "argmax: made up" in told(report)
    report = check(folder, "config", "kernels", max_model_len=64)
    assert report.ok and "layers instead of a plugin: argmax: made up" in report.outcomes[-1].facts


def test_a_package_that_is_missing_is_not_a_pass(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    report = check(folder, "config", "kernels", target="b200")
    assert report.ok and report.exit_code == 3
    assert "triton" in report.outcomes[-1].why


def test_a_stage_that_fails_in_our_own_code_leaves_the_others(folder, monkeypatch):
    monkeypatch.setattr(coverage, "verifier_steps", lambda limits, k: {}["nothing"])
    report = check(folder, *STATIC)
    assert failed(report) == ["profiles"] and report.exit_code == 1
    assert "glmspec failed in" in told(report) and "KeyError" in told(report)
    assert report.outcomes[-1].stage == "limits" and report.outcomes[-1].status == "passed"


def test_a_checkpoint_that_does_not_open_is_blamed_on_its_stage(folder, tmp_path):
    broken = in_config(rms_norm_eps="small")(None, folder, tmp_path)
    report = check(broken)
    assert failed(report) == ["config"] and "rms_norm_eps" in told(report)
    assert [one.stage for one in report.outcomes] == list(NAMES)
    (broken / "model.safetensors").unlink()
    shutil.copyfile(folder / "config.json", broken / "config.json")
    report = check(broken)
    assert failed(report) == ["weights"]
    assert [one.stage for one in report.outcomes] == list(NAMES)
