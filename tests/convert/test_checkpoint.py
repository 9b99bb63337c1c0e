"""Whole conversions: what is written is what was there, whatever it was stored as, and says where it came from."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.models import GOLDENS, convert_and_load, edit_checkpoint, random_verifier, write_checkpoint

from glmspec.convert.checkpoint import is_converted, read_checkpoint
from glmspec.convert.conversion import plan_conversion
from glmspec.convert.writer import Run
from glmspec.core import sealed
from glmspec.core.errors import CheckpointError, ConfigError, GlmspecError
from glmspec.core.fields import Fields
from glmspec.core.sealed import check_shape, check_written
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.registry import model_of

CHECKPOINTS = GOLDENS / "checkpoints"
VERIFIER = CHECKPOINTS / "verifier"
FP8 = torch.float8_e4m3fn
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def record(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


# -- what is written --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["verifier", "dspark", "dflash2", "dspark_redvocab"])
def test_a_conversion_holds_what_the_network_wants(tmp_path, name):
    checkpoint, weights = convert_and_load(CHECKPOINTS / name, tmp_path / "ck")
    wanted = {spec.name: spec.dims for spec in model_of(checkpoint.config).weight_specs("float32")}
    shared = {"embed_tokens.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    expected = {} if name == "verifier" else {k: v for k, v in shared.items() if k not in weights}
    assert checkpoint.shared == expected
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == {
        key: dims for key, dims in wanted.items() if key not in expected
    }
    assert isinstance(checkpoint.config, VerifierConfig) == (name == "verifier")
    source = tensors_of(CHECKPOINTS / name)
    for key in weights.keys() & source.keys():
        assert torch.equal(weights[key], source[key].to(weights[key].dtype))


def test_the_record_of_a_conversion(tmp_path):
    checkpoint, weights = convert_and_load(VERIFIER, tmp_path / "ck")
    values = record(tmp_path / "ck")
    assert values == checkpoint.record
    assert sorted(path.name for path in (tmp_path / "ck").iterdir()) == [
        "config.json", "generation_config.json", "rank0.safetensors",
    ]  # fmt: skip
    assert values["producer"]["name"] == "glmspec"
    assert (values["architecture"], values["dtype"]) == ("GlmMoeDsaForCausalLM", "float32")
    assert values["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1, "moe_tp_size": 1, "moe_ep_size": 1}
    path = tmp_path / "ck" / "rank0.safetensors"
    assert values["parts"] == {"rank0.safetensors": {"size": path.stat().st_size, "sha256": digest(path)}}
    assert values["ranks"] == [["rank0.safetensors"]]
    assert values["quantization"].pop("formats") == dict.fromkeys(weights, "float32")
    assert values["quantization"] == {"quant_algo": None, "kv_cache_quant_algo": None, "recipe": "auto", "inputs": []}
    assert values["source"] == {
        "folder": "verifier",
        "repo": None,
        "revision": None,
        "files": {"model.safetensors": digest(VERIFIER / "model.safetensors")},
    }
    assert values["hf_config"] == record(VERIFIER)
    assert (values["left_out"], values["notes"], values["shared_from_verifier"]) == ({}, [], {})


def test_the_same_input_gives_the_same_bytes(tmp_path):
    """Twice, from shards, and from experts in another order: nothing of the way it was stored is left."""
    expected = plan_conversion(VERIFIER).write(tmp_path / "one").weights_sha256
    assert plan_conversion(VERIFIER).write(tmp_path / "two").weights_sha256 == expected
    sharded = write_checkpoint(tmp_path / "sharded", tensors_of(VERIFIER), record(VERIFIER), shards=4)
    checkpoint = plan_conversion(sharded).write(tmp_path / "three")
    assert checkpoint.weights_sha256 == expected
    assert len(checkpoint.record["source"]["files"]) == 4


def test_a_stray_shard_is_in_the_record(tmp_path):
    sharded = write_checkpoint(tmp_path / "sharded", tensors_of(VERIFIER), record(VERIFIER), shards=2)
    (sharded / "extra.safetensors").write_bytes((VERIFIER / "model.safetensors").read_bytes())
    checkpoint = plan_conversion(sharded).write(tmp_path / "ck")
    assert "extra.safetensors" in checkpoint.record["notes"][0]
    assert "extra.safetensors" not in checkpoint.record["source"]["files"]


def test_progress_counts_every_byte(tmp_path):
    """Of the tensors, and of the file that is hashed for the record."""
    seen: list[int] = []
    conversion = plan_conversion(CHECKPOINTS / "dspark")
    conversion.write(tmp_path / "ck", Run(advance=seen.append))
    tensors = sum(t.nbytes for t in tensors_of(CHECKPOINTS / "dspark").values())
    assert sum(seen) == conversion.size == tensors + (CHECKPOINTS / "dspark" / "model.safetensors").stat().st_size


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    def fail(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plan_conversion(CHECKPOINTS / "dspark").write(tmp_path / "out" / "ck", Run(advance=fail))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_saved_by_transformers_and_in_the_hub_s_bfloat16(tmp_path):
    """What save_pretrained writes is read; precision is kept, and what must be float32 is."""
    random_verifier(tmp_path / "hf", num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    halved = {name: tensor.bfloat16() for name, tensor in tensors_of(tmp_path / "hf").items()}
    write_checkpoint(tmp_path / "bf16", halved, record(tmp_path / "hf"))
    _, weights = convert_and_load(tmp_path / "bf16", tmp_path / "ck")
    assert record(tmp_path / "ck")["dtype"] == "bfloat16"
    assert weights["model.layers.2.mlp.gate.weight"].dtype == torch.float32
    assert weights["model.layers.2.self_attn.w_uk"].dtype == torch.bfloat16
    assert torch.equal(weights["lm_head.weight"], halved["lm_head.weight"])


# -- a quantized checkpoint ---------------------------------------------------------------------------


def noise(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def as_fp8_blocks(name: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Stored tensors, and what they mean."""
    rows, columns = weight.shape
    scale = noise(name, -(-rows // 128), -(-columns // 128)).exp()
    stored = (weight * 50).to(FP8)
    meant = torch.empty_like(weight)
    for row in range(rows):
        for block in range(scale.shape[1]):
            part = slice(128 * block, 128 * block + 128)
            meant[row, part] = stored[row, part].float() * scale[row // 128, block]
    return {name: stored, f"{name.removesuffix('weight')}weight_scale_inv": scale}, meant


def as_fp8(name: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    stored = (weight * 50).to(FP8)
    return {name: stored, f"{name.removesuffix('weight')}weight_scale": torch.tensor(0.25)}, stored.float() * 0.25


def as_nvfp4(name: str, weight: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Its outer scale is a power of two of its own, so gate and up of an expert differ (case B15)."""
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(sum(name.encode())))
    scale = noise(name, rows, columns // 16).exp().to(FP8)
    second = torch.tensor(1.0 if "up" in name else 0.5)
    stem = name.removesuffix("weight")
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    meant = FP4[codes] * scale.float().repeat_interleave(16, 1) * second
    tensors = {name: packed, f"{stem}weight_scale": scale, f"{stem}weight_scale_2": second}
    if "experts.3." not in name:  # an expert that saw no calibration token (case B14)
        tensors[f"{stem}input_scale"] = torch.tensor(0.1)
    return tensors, meant


def quantizer(name: str):
    """The hub's mix: experts NVFP4, the shared expert one FP8 scale, attention and dense MLP FP8 blocks."""
    if ".mlp.experts." in name:
        return as_nvfp4
    if ".shared_experts." in name:
        return as_fp8
    kinds = ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj", "wq_b", ".wk.", "mlp.gate_proj", "mlp.up_proj")
    return as_fp8_blocks if any(kind in name for kind in kinds) else None


def test_a_quantized_checkpoint_equals_its_dequantized_self(tmp_path):
    stored, meant = {}, {}
    for name, weight in tensors_of(VERIFIER).items():
        quantize = quantizer(name)
        tensors, meaning = quantize(name, weight) if quantize else ({name: weight}, weight)
        stored |= tensors
        meant[name] = meaning
    config = record(VERIFIER) | {"quantization_config": {"quant_method": "modelopt", "ignore": ["*indexers_proj*"]}}
    write_checkpoint(tmp_path / "quantized", stored, config, shards=3)
    write_checkpoint(tmp_path / "plain", meant, record(VERIFIER))
    checkpoint, found = convert_and_load(tmp_path / "quantized", tmp_path / "a")
    _, expected = convert_and_load(tmp_path / "plain", tmp_path / "b")
    assert checkpoint.record["left_out"] == {}
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_wide_fp8_attention_splits_like_its_dequantized_self(tmp_path):
    """Scale blocks that run across heads: kv_b_proj is dequantized before it is split (case B12)."""
    sizes = dict(qk_nope_head_dim=40, v_head_dim=50, kv_lora_rank=144, qk_rope_head_dim=8, num_hidden_layers=1)
    lists = dict(mlp_layer_types=["dense"], indexer_types=["full"], first_k_dense_replace=1)
    random_verifier(tmp_path / "hf", **sizes, **lists)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    plain = tensors_of(tmp_path / "hf")
    tensors, meant = as_fp8_blocks(name, plain[name])
    assert tensors["model.layers.0.self_attn.kv_b_proj.weight_scale_inv"].shape == (3, 2)
    _, found = convert_and_load(edit_checkpoint(tmp_path / "hf", tmp_path / "q", add=tensors), tmp_path / "ck")
    for head in range(4):
        rows = meant[90 * head : 90 * head + 90]
        assert torch.equal(found["model.layers.0.self_attn.w_uk"][head], rows[:40])
        assert torch.equal(found["model.layers.0.self_attn.w_uv"][head], rows[40:].T)


# -- end tokens and tokenizer -------------------------------------------------------------------------


def with_end_tokens(folder: Path, config, generation=None, tokenizer=None) -> Path:
    edit_checkpoint(VERIFIER, folder, config={"eos_token_id": config})
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    if tokenizer is not None:
        added = [{"id": 30, "content": "<end>"}, {"id": 31, "content": "<other>"}]
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    return folder


@pytest.mark.parametrize(
    "config, generation, tokenizer, expected",
    [
        ([29, 30, 31], 29, "<end>", [29, 30, 31]),
        (29, [31], "<end>", [29, 31, 30]),
        (29, 30, None, [29, 30]),
        (29, None, {"content": "<end>"}, [29, 30]),
        ([29], [29, 29], "<unknown>", [29]),
        (0, None, None, [0]),
        (None, [29, 30], None, [29, 30]),
        (None, None, "<end>", [30]),
    ],
)
def test_end_tokens_are_the_union(tmp_path, config, generation, tokenizer, expected):
    """Case C32: of config.json, generation_config.json and the tokenizer, each once."""
    folder = with_end_tokens(tmp_path / "v", config, generation, tokenizer)
    assert plan_conversion(folder).write(tmp_path / "ck").record["eos_token_ids"] == expected


def test_a_generation_config_without_end_tokens(tmp_path):
    folder = with_end_tokens(tmp_path / "v", [29])
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    assert plan_conversion(folder).write(tmp_path / "ck").record["eos_token_ids"] == [29]


@pytest.mark.parametrize("generation", ["x", [1, 96], [1, -1], [1, None]])
def test_wrong_end_tokens_of_a_generation_config_are_refused(tmp_path, generation):
    with pytest.raises(GlmspecError, match=r"generation_config\.json"):
        plan_conversion(with_end_tokens(tmp_path / "v", [29], generation)).write(tmp_path / "ck")


def test_an_end_token_of_the_plain_vocabulary_counts(tmp_path):
    folder = with_end_tokens(tmp_path / "v", [29], tokenizer="</s>")
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "model": {"vocab": {"a": 0, "</s>": 7}}}))
    assert plan_conversion(folder).write(tmp_path / "ck").record["eos_token_ids"] == [29, 7]


def test_the_tokenizer_comes_along(tmp_path):
    folder = with_end_tokens(tmp_path / "v", 29, 30, "<end>")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    plan_conversion(folder).write(tmp_path / "ck")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "ck" / name).read_bytes() == (folder / name).read_bytes()


def test_a_drafter_has_no_end_tokens(tmp_path):
    assert plan_conversion(CHECKPOINTS / "dspark").write(tmp_path / "ck").record["eos_token_ids"] is None


# -- reading it back ----------------------------------------------------------------------------------


def test_a_converted_folder_is_told_from_a_source(tmp_path):
    plan_conversion(CHECKPOINTS / "dspark").write(tmp_path / "ck")
    assert is_converted(tmp_path / "ck") and not is_converted(CHECKPOINTS / "dspark")
    again = read_checkpoint(tmp_path / "ck")
    assert again.config == plan_conversion(CHECKPOINTS / "dspark").config
    with pytest.raises(CheckpointError, match="glmspec-build convert"):
        read_checkpoint(CHECKPOINTS / "dspark")


def test_a_converted_folder_without_its_weights_is_refused(tmp_path):
    plan_conversion(CHECKPOINTS / "dspark").write(tmp_path / "ck")
    (tmp_path / "ck" / "rank0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors: missing"):
        read_checkpoint(tmp_path / "ck")


def test_a_converted_folder_given_to_convert_is_recognized(tmp_path):
    plan_conversion(CHECKPOINTS / "dspark").write(tmp_path / "ck")
    with pytest.raises(GlmspecError) as caught:
        plan_conversion(tmp_path / "ck")
    assert "already a converted checkpoint" in str(caught.value)


def test_what_the_hub_s_client_noted_is_taken_over(tmp_path):
    """Commit and digest of a download: 700 GB are not hashed again. Not for a file that changed since."""
    folder = edit_checkpoint(VERIFIER, tmp_path / "hf")
    note = folder / ".cache" / "huggingface" / "download" / "model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"{'c' * 40}\n{'d' * 64}\n1790000000.0\n")
    source = plan_conversion(folder).write(tmp_path / "a").record["source"]
    assert (source["revision"], source["files"]) == ("c" * 40, {"model.safetensors": "d" * 64})
    path = folder / "model.safetensors"
    os.utime(path, (path.stat().st_atime, note.stat().st_mtime + 60))
    source = plan_conversion(folder).write(tmp_path / "b").record["source"]
    assert source["files"] == {"model.safetensors": digest(path)}
    note.write_text(f"{'c' * 40}\nnot-a-digest\n1790000000.0\n")
    os.utime(path)
    assert plan_conversion(folder).write(tmp_path / "c").record["source"]["files"] == {path.name: digest(path)}


def test_what_a_load_compares(tmp_path, monkeypatch):
    """Sizes of weights too large to be hashed, and a number is no truth value."""
    (tmp_path / "a.safetensors").write_bytes(b"four")
    record = {"files": {}, "parts": {"a.safetensors": {"size": 4, "sha256": sha256(b"four").hexdigest()}}}
    check_written(tmp_path, record, "")
    for hashed in (1 << 30, 0):
        monkeypatch.setattr(sealed, "HASHED_AT_LOAD", hashed)
        for data in (b"five!", b"six", b"four"):
            (tmp_path / "a.safetensors").write_bytes(data)
            if data == b"four":
                check_written(tmp_path, record, "")
                continue
            with pytest.raises(CheckpointError, match=f"found {len(data)} bytes, expected 4"):
                check_written(tmp_path, record, "")
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        check_written(tmp_path, record, "")
    with pytest.raises(ConfigError, match="size: found True, expected an integer"):
        check_shape(Fields({"size": True}, "config.json"), {"size": int})
