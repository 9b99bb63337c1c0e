"""Writes and reads the shipped checkpoints: HF format for the verifier, speculators format for the drafters."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .attention import VerifierConfig
from .drafter import DSPARK, Drafter, DrafterConfig
from .kinds import words
from .tokenizer import END_OF_TEXT, EOS_IDS, write_tokenizer
from .verifier import Verifier

FLOAT32_NAMES = re.compile(r"(mlp\.gate\.weight|e_score_correction_bias|indexer\.weights_proj\.weight)$")
STACKED = {"gate_EIH": "gate_proj", "up_EIH": "up_proj", "down_EHI": "down_proj"}
TRANSFORMERS_VERSION = "5.24.0"


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file that everyone may read."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, content: object) -> None:
    """Write indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def verifier_config(config: VerifierConfig) -> dict[str, object]:
    """config.json of the verifier, with the keys that public GLM-5.3 configs carry."""
    sizes = asdict(config)
    theta = sizes.pop("rope_theta")
    layers = config.num_hidden_layers
    sizes["indexer_types"] = list(config.indexer_types)
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        **sizes,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_rope_head_dim,
        "qk_head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "moe_layer_freq": 1,
        "mlp_layer_types": ["dense" if index < config.first_k_dense_replace else "sparse" for index in range(layers)],
        "layer_types": ["indexed_attention"] * layers,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "output_router_logits": False,
        "bos_token_id": None,
        "eos_token_id": list(EOS_IDS),
        "pad_token_id": END_OF_TEXT,
        "transformers_version": TRANSFORMERS_VERSION,
    }


def verifier_tensors(model: Verifier) -> dict[str, Tensor]:
    """Tensors under their Hugging Face names, one per expert, BF16 but for router and indexer weights."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix = "" if name.startswith("lm_head") else "model."
        stem, _, last = name.rpartition(".")
        if last in STACKED:
            for expert, weight in enumerate(tensor):
                tensors[f"{prefix}{stem}.{expert}.{STACKED[last]}.weight"] = weight
        else:
            tensors[prefix + name] = tensor
    return {
        name: tensor.to(torch.float32 if FLOAT32_NAMES.search(name) else torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }


def save_verifier(model: Verifier, folder: Path) -> None:
    """Write weights, config, generation config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / "model.safetensors", verifier_tensors(model))
    write_json(folder / "config.json", verifier_config(model.config))
    generation = {
        "bos_token_id": None,
        "eos_token_id": list(EOS_IDS),
        "pad_token_id": END_OF_TEXT,
        "do_sample": False,
        "transformers_version": TRANSFORMERS_VERSION,
    }
    write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder)


def load_verifier(folder: Path) -> Verifier:
    """The verifier as shipped (BF16-rounded weights), computing in float32."""
    config = json.loads((folder / "config.json").read_text())
    fields = {name: config[name] for name in asdict(VerifierConfig()) if name in config}
    fields["indexer_types"] = tuple(config["indexer_types"])
    fields["rope_theta"] = config["rope_parameters"]["rope_theta"]
    model = Verifier(VerifierConfig(**fields))
    tensors = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name in model.state_dict():
        prefix = "" if name.startswith("lm_head") else "model."
        stem, _, last = name.rpartition(".")
        if last in STACKED:
            experts = range(model.config.n_routed_experts)
            parts = [tensors.pop(f"{prefix}{stem}.{expert}.{STACKED[last]}.weight") for expert in experts]
            state[name] = torch.stack(parts).float()
        else:
            state[name] = tensors.pop(prefix + name).float()
    if tensors:
        raise ValueError(f"{folder} holds tensors the verifier lacks: {sorted(tensors)[:5]}")
    model.load_state_dict(state)
    return model.eval()


def drafter_config(config: DrafterConfig, verifier_name: str) -> dict[str, object]:
    """config.json of a drafter in the speculators format."""
    name = {"dspark": "DSpark", "dflash2": "DFlash2"}[config.algorithm]
    content: dict[str, object] = {
        "architectures": [f"{name}DraftModel"],
        "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": "bfloat16",
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": config.sliding_window_non_causal,
        "speculators_config": speculators_section(config, verifier_name),
        "speculators_model_type": config.algorithm,
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": transformer_section(config),
        "transformers_version": TRANSFORMERS_VERSION,
    }
    if config.algorithm == "dspark":
        content.update(
            confidence_head_with_markov=True,
            enable_confidence_head=True,
            markov_head_type="vanilla",
            markov_rank=config.markov_rank,
        )
    else:
        for key in ("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"):
            content[key] = getattr(config, key)
    return dict(sorted(content.items()))


def speculators_section(config: DrafterConfig, verifier_name: str) -> dict[str, object]:
    """The `speculators_config` part: how many tokens are drafted, for which verifier."""
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": config.speculative_tokens,
        "verifier_accept_k": 1,
    }
    return {
        "algorithm": config.algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"architectures": ["GlmMoeDsaForCausalLM"], "name_or_path": verifier_name},
    }


def transformer_section(config: DrafterConfig) -> dict[str, object]:
    """The `transformer_layer_config` part: the Qwen3-style layers."""
    shared = words(
        "head_dim hidden_size intermediate_size max_position_embeddings num_attention_heads "
        "num_key_value_heads rms_norm_eps sliding_window vocab_size"
    )
    section: dict[str, object] = {key: getattr(config, key) for key in shared}
    section.update(
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        hidden_act="silu",
        initializer_range=0.02,
        layer_types=list(config.layer_types),
        max_window_layers=28,
        model_type="qwen3",
        num_hidden_layers=len(config.layer_types),
        pad_token_id=None,
        rope_parameters={"rope_theta": config.rope_theta, "rope_type": "default"},
        tie_word_embeddings=False,
        use_cache=True,
        use_sliding_window=True,
    )
    return dict(sorted(section.items()))


def save_drafter(drafter: Drafter, folder: Path, verifier_name: str) -> None:
    """Write a drafter's weights and config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    write_weights(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", drafter_config(drafter.config, verifier_name))


def load_drafter(folder: Path) -> Drafter:
    """A drafter from a speculators-format folder, computing in float32."""
    content = json.loads((folder / "config.json").read_text())
    layers = content["transformer_layer_config"]
    fields = {name: layers[name] for name in asdict(DSPARK) if name in layers}
    fields.update({name: content[name] for name in asdict(DSPARK) if name in content})
    fields.update(
        algorithm=content["speculators_model_type"],
        layer_types=tuple(layers["layer_types"]),
        aux_layer_ids=tuple(content["aux_hidden_state_layer_ids"]),
        speculative_tokens=content["speculators_config"]["proposal_methods"][0]["speculative_tokens"],
        rope_theta=layers["rope_parameters"]["rope_theta"],
    )
    drafter = Drafter(DrafterConfig(**fields))
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return drafter.eval()
