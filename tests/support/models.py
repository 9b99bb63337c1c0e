"""Tiny random models for tests: Hugging Face folders, loaded networks, a verifier to compare with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from glmspec.build.validate.twin import stable_topk as stable_topk
from glmspec.convert.calibration import Activations
from glmspec.convert.conversion import plan_conversion
from glmspec.convert.recipe import quantizable
from glmspec.convert.source import Source
from glmspec.convert.storage import weights_of
from glmspec.models.configs.drafter import DrafterConfig
from glmspec.models.dflash import BlockAttention
from glmspec.models.layers.paged import WHOLE
from glmspec.models.registry import model_of
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.runtime.model import Model

DATA = Path(__file__).resolve().parent.parent / "data"
GOLDENS = DATA / "goldens"
ASSETS = Path(__file__).resolve().parent.parent.parent / "assets"

# Smaller than ordinary prompts on purpose: beyond index_topk, sparse attention differs from dense.
VERIFIER_CONFIG: dict[str, Any] = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=6,
    num_experts_per_tok=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    kv_lora_rank=32,
    q_lora_rank=48,
    qk_rope_head_dim=8,
    qk_nope_head_dim=24,
    v_head_dim=20,
    first_k_dense_replace=2,
    index_topk=16,
    index_head_dim=16,
    index_n_heads=3,
    indexer_types=["full", "full", "shared", "full", "shared", "shared"],
    max_position_embeddings=256,
    rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    rms_norm_eps=1e-5,
    eos_token_id=1,
    bos_token_id=0,
)

LIMITS = EngineLimits(
    max_model_len=256, max_num_seqs=4, max_num_batched_tokens=128, page_size=8, segment_rows=12, block_rows=9
)


def random_verifier(folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Write a random verifier to `folder` in Hugging Face format; returns transformers' model of it.

    A default-initialized checkpoint is a weak oracle (norms 1, biases 0): every norm and bias is random here, and
    linears are scaled to 1.5 / sqrt(fan in), so that a planted bug shows.
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(seed)
    model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**{**VERIFIER_CONFIG, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif parameter.dim() < 2:
                parameter.copy_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(1.5 * parameter.shape[-1] ** -0.5 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    model.config._attn_implementation = "eager"
    return model


def reference_verifier(folder: Path) -> Any:
    """transformers' model of a checkpoint folder, float32, eager attention."""
    from transformers import GlmMoeDsaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def calibrated(folder: Path, amax: float) -> Activations:
    """One largest activation for every quantizable matrix of a checkpoint."""
    modules = [name.removesuffix(".weight") for name in weights_of(Source(folder))]
    return Activations({module: amax for module in modules if quantizable(module)})


def convert_and_load(folder: Path, out: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Convert a Hugging Face folder; its checkpoint and tensors."""
    checkpoint = plan_conversion(folder).write(out)
    return checkpoint, checkpoint.load()


def golden_drafters(home: Path) -> dict[str, tuple[dict, dict[str, torch.Tensor]]]:
    """Config values and tensors of each golden drafter, the verifier's where it shares them. home: a folder to use."""
    _, verifier = convert_and_load(GOLDENS / "checkpoints" / "verifier", home / "verifier")
    made = {}
    for name in ("dspark", "dflash2", "dspark_redvocab"):
        checkpoint, own = convert_and_load(GOLDENS / "checkpoints" / name, home / name)
        shared = {ours: verifier[theirs] for ours, theirs in checkpoint.shared.items()}
        made[name] = (checkpoint.record["hf_config"], {**own, **shared})
    return made


def features_as_taps(config: DrafterConfig, features: torch.Tensor) -> dict[str, torch.Tensor]:
    """Concatenated features [rows, taps * hidden] as a drafter's inputs."""
    parts = features.split(config.hidden_size, 1)
    return {f"tap.{tap}": part.contiguous() for tap, part in zip(config.taps, parts, strict=True)}


@contextmanager
def whole_contexts() -> Iterator[None]:
    """Drafters made inside keep whole contexts in their sliding layers too, and have no rings."""
    made = BlockAttention.__init__

    def init(self: BlockAttention, config: DrafterConfig, index: int) -> None:
        made(self, config, index)
        self.kind = WHOLE

    BlockAttention.__init__ = init
    try:
        yield
    finally:
        BlockAttention.__init__ = made


def load_verifier(
    folder: Path, out: Path, limits: EngineLimits = LIMITS, taps: tuple[int, ...] = (), **options: Any
) -> Model:
    """A verifier on the reference executor, float32."""
    checkpoint, weights = convert_and_load(folder, out)
    return Model(model_of(checkpoint.config, taps), limits, NetworkConfig(compute="float32"), [weights], **options)


def edit_checkpoint(source: Path, out: Path, *, config: dict | None = None, drop=(), add: dict | None = None) -> Path:
    """Copy a single-file checkpoint with changes. config: keys to set (None removes one); drop: tensor names to
    leave out; add: tensors to put in or replace."""
    out.mkdir(parents=True)
    values = json.loads((source / "config.json").read_text())
    for key, value in (config or {}).items():
        values[key] = value
        if value is None:
            del values[key]
    (out / "config.json").write_text(json.dumps(values))
    tensors = load_file(source / "model.safetensors")
    for name in drop:
        del tensors[name]
    save_file({**tensors, **(add or {})}, out / "model.safetensors")
    return out


def mtp_tensors(tensors: dict[str, torch.Tensor], like: int, layer: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """An MTP module as layer `layer`: the decoder layer `like` (with experts and an indexer), its columns moved on by
    one, and random weights of the module's own."""
    generator, prefix = torch.Generator().manual_seed(seed), f"model.layers.{layer}"
    of_layer = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{like}.")}
    made = {name.replace(f"layers.{like}.", f"layers.{layer}."): t.roll(1, -1) for name, t in of_layer.items()}
    width, dtype = len(tensors["model.norm.weight"]), tensors["model.norm.weight"].dtype
    own = {name: 1 + 0.2 * torch.randn(width, generator=generator) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj"] = width**-0.5 * torch.randn(width, 2 * width, generator=generator)
    return made | {f"{prefix}.{name}.weight": tensor.to(dtype) for name, tensor in own.items()}


def write_checkpoint(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None, shards: int = 0
) -> Path:
    """A Hugging Face folder that holds `tensors`: in one file, or in as many shards and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{at + 1:05}-of-{shards:05}.safetensors" for at in range(shards)]
    weight_map = {name: names[at % shards] for at, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({n: tensors[n] for n in weight_map if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
