"""A checkpoint that is not there: the tensors that its config.json implies, in the published layout, without data.

What `convert --dry-run` plans with when the folder holds no weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from glmspec.convert.recipe import quantizable
from glmspec.convert.source import Source, TensorInfo
from glmspec.convert.storage import EXPERT_MATRICES, FUSED_EXPERTS, Shape
from glmspec.core.errors import CheckpointError
from glmspec.core.fields import read_json
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.models.registry import checkpoint_specs
from glmspec.network.config import field_name
from glmspec.network.contract import TensorSpec
from glmspec.network.formats import FORMATS

_MAX_EXPERTS = 1_000_000  # more is a slip of the pen, and fills the memory with names


class ImpliedSource(Source):
    """The tensors of a verifier by its config: quantized where it declares that matrices are, else BF16.
    place: a config.json, whatever it is called, or the folder of one."""

    def __init__(self, place: Path) -> None:
        file = place if place.is_file() else place / "config.json"
        folder = file.parent
        self.folder, self.notes, self.tensors, self.known_digests = folder, [], {}, {}
        self._descriptors, self._kept = {}, {}
        self.config = read_json(file)
        config = VerifierConfig.from_hf(self.config, str(file))
        layers = config.num_hidden_layers + config.num_nextn_predict_layers
        if layers * config.n_routed_experts > _MAX_EXPERTS:
            raise CheckpointError(
                f"{file}: num_hidden_layers and n_routed_experts: found {layers:,} layers of "
                f"{config.n_routed_experts:,} experts, expected at most {_MAX_EXPERTS:,} experts in all."
            )
        for name, shape, dtype in _tensors(config):
            format = self._format(name.removesuffix(".weight"))
            if format is None:
                self.tensors[name] = TensorInfo(folder, dtype, shape)
                continue
            for suffix, field in FORMATS[format].items():
                size = field.size(*shape) if field.rows else ()
                self.tensors[field_name(name, suffix)] = TensorInfo(folder, field.dtype, size)

    def _format(self, module: str) -> str | None:
        """The number format that is declared for a module, None for a plain one."""
        formats = self.declared.formats(module)
        matrix = quantizable(module) or module.endswith("kv_b_proj")
        return formats[0] if formats and matrix and not self.declared.ignores(module) else None

    def rows(self, name: str, first: int = 0, count: int | None = None, columns: int | None = None) -> np.ndarray:
        """There are none."""
        raise CheckpointError(f"{self.folder}: tensor {name}: the folder holds a config and no weights.")


def _tensors(config: VerifierConfig) -> list[tuple[str, Shape, str]]:
    """Name, shape and dtype of every tensor, those of MTP modules last."""
    specs = checkpoint_specs(config, config.num_nextn_predict_layers)
    return [tensor for spec in specs for tensor in _published(config, spec)]


def _published(config: VerifierConfig, spec: TensorSpec) -> list[tuple[str, Shape, str]]:
    """The tensors that a weight of the network is made of."""
    dims = spec.sizes
    if match := FUSED_EXPERTS.fullmatch(spec.name):
        kinds = EXPERT_MATRICES[match[2]]
        shape = (dims[1] // len(kinds), dims[2])
        return [(f"{match[1]}.{e}.{kind}.weight", shape, "BF16") for e in range(dims[0]) for kind in kinds]
    if spec.name.endswith("self_attn.w_uv"):
        return []
    if spec.name.endswith("self_attn.w_uk"):
        rows = config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        return [(spec.name.replace("w_uk", "kv_b_proj.weight"), (rows, config.kv_lora_rank), "BF16")]
    return [(spec.name, dims, "F32" if spec.name.endswith("e_score_correction_bias") else "BF16")]
