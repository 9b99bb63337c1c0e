"""Golden tensors of every variation of the block drafters, made by the speculators package itself.

speculators wants numpy 2 and glmspec's environment has numpy 1, so this file runs in an environment of its own and
imports nothing of glmspec:

    python -m venv OTHER && OTHER/bin/pip install torch==2.13.0 speculators==0.9.0
    OTHER/bin/pip uninstall -y torchvision torchaudio             # unused, and a nuisance where torch is a CPU build
    OTHER/bin/python scripts/oracle/drafter_goldens.py            # writes tests/data/drafters/family.safetensors
    OTHER/bin/python scripts/oracle/drafter_goldens.py --check    # compares that file with fresh ones

Every parameter is random, and a function of its name and shape alone: variations share most of their weights, and the
file holds each but once. Its metadata has `variants` (name -> config.json, and where each tensor of the checkpoint
and of the verifier lies) and its tensors are

    weights/NAME/SHAPE            bfloat16; a checkpoint's tensors have the names under which speculators saves them
    features/COLUMNS              the taps side by side, [C, taps * D]
    VARIANT/anchors, positions    token and position of the blocks' anchors, [B]; a block sees the rows before it
    VARIANT/hidden                after the final norm, [B, R, D]
    VARIANT/logits                of the rows that draft, before any head, [B, J, V]
    VARIANT/draft_ids             greedy, target ids, [B, J]
    VARIANT/scores                what each draft was chosen by, given those before it: [B, J, V], or DFlash2's
                                  [B, J, K] of VARIANT/candidates (target ids, as torch.topk orders them)
    VARIANT/confidence            where there is such a head, [B, J]
"""

# speculators is in that other environment alone.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config
from transformers.utils.logging import disable_progress_bar

FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "drafters" / "family.safetensors"
HIDDEN, VOCAB, REDUCED, BLOCK, CONTEXT, WINDOW = 32, 64, 24, 5, 24, 6
ANCHORS = (3, 9, 17)  # less than a window of context, more, and much more
CLOSEST = 1e-4  # a draft that wins by less would test rounding, not a drafter
KINDS: dict[str, tuple[type, type]] = {
    "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
    "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    "dflash2": (DFlash2DraftModel, DFlash2SpeculatorConfig),
}

FULL, SLIDING = "full_attention", "sliding_attention"
NO_MARKOV = {"markov_rank": 0, "confidence_head_with_markov": False}
ALL_ROWS, NOT_FIRST = {"sample_from_anchor": True}, {"sample_from_anchor": False}
FEWER = {"draft_vocab_size": REDUCED}

# name -> kind, and what differs from `config_of`.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dspark": ("dspark", {}),
    "dspark gated": ("dspark", {"markov_head_type": "gated"}),
    "dspark rnn": ("dspark", {"markov_head_type": "rnn"}),
    "dspark, not from the anchor": ("dspark", NOT_FIRST),
    "dspark gated, not from the anchor": ("dspark", {"markov_head_type": "gated", **NOT_FIRST}),
    "dspark rnn, not from the anchor": ("dspark", {"markov_head_type": "rnn", **NOT_FIRST}),
    "dspark, fewer tokens": ("dspark", FEWER),
    "dspark gated, fewer tokens": ("dspark", {"markov_head_type": "gated", **FEWER}),
    "dspark rnn, fewer tokens": ("dspark", {"markov_head_type": "rnn", **FEWER}),
    "dspark rnn, fewer tokens, not from the anchor": ("dspark", {"markov_head_type": "rnn", **FEWER, **NOT_FIRST}),
    "dspark without a Markov head": ("dspark", NO_MARKOV),
    "dspark without heads": ("dspark", {**NO_MARKOV, "enable_confidence_head": False, **NOT_FIRST}),
    "dspark without confidence": ("dspark", {"enable_confidence_head": False, "confidence_head_with_markov": False}),
    "dspark rnn, confidence from hidden": ("dspark", {"markov_head_type": "rnn", "confidence_head_with_markov": False}),
    "dspark, sliding both ways": ("dspark", {"sliding_window_non_causal": True}),
    "dspark, one sliding layer": ("dspark", {"layers": [SLIDING], "aux_hidden_state_layer_ids": [0]}),
    "dspark, one full layer": ("dspark", {"layers": [FULL], "aux_hidden_state_layer_ids": [0, 1, 3]}),
    "dflash": ("dflash", {}),
    "dflash from the anchor": ("dflash", ALL_ROWS),
    "dflash, fewer tokens": ("dflash", FEWER),
    "dflash, fewer tokens, from the anchor": ("dflash", {**FEWER, **ALL_ROWS}),
    "dflash, sliding both ways": ("dflash", {"sliding_window_non_causal": True, "layers": [SLIDING, SLIDING]}),
    "dflash2": ("dflash2", {}),
    "dflash2 from the anchor": ("dflash2", ALL_ROWS),
    "dflash2, sliding causal": ("dflash2", {"sliding_window_non_causal": False}),
    "dflash2, three taps": ("dflash2", {"conv_kernel_size": 3, "conv_group_size": 4, "layers": [FULL]}),
    "dflash2, one tap, one group": ("dflash2", {"conv_kernel_size": 1, "conv_group_size": HIDDEN}),
    "dflash2, as many taps as rows": ("dflash2", {"conv_kernel_size": BLOCK, "layers": [SLIDING]}),
    "dflash2, one candidate": ("dflash2", {"selector_top_k": 1, "selector_rank": 1}),
    "dflash2, all are candidates": ("dflash2", {"selector_top_k": VOCAB, "selector_rank": 6, **ALL_ROWS}),
    "dflash2, three layers": ("dflash2", {"layers": [SLIDING, FULL, SLIDING]}),
}


def model_of(kind: str, changes: dict[str, Any]) -> Any:
    """A variation in eval mode, its parameters and vocabulary maps filled."""
    architecture, config = KINDS[kind]
    own = {
        "dflash": {},
        "dspark": {"markov_rank": 6, "markov_head_type": "vanilla"},
        "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
    }[kind]
    values = {
        "block_size": BLOCK,
        "draft_vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": [1, 3],
        "mask_token_id": VOCAB - 1,
        "sample_from_anchor": kind == "dspark",
        **own,
        **changes,
    }
    layers = values.pop("layers", [SLIDING, FULL])
    drafts = BLOCK if values["sample_from_anchor"] else BLOCK - 1
    values["speculators_config"] = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=drafts)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["GlmMoeDsaForCausalLM"]),
    )
    model = architecture(config(transformer_layer_config=block_config(layers), **values)).eval()
    fill(model)
    return model


def block_config(layers: list[str]) -> Qwen3Config:
    """The layers, on plain attention: masks are tensors then."""
    block = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_hidden_layers=len(layers),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        layer_types=layers,
        sliding_window=WINDOW,
        use_sliding_window=SLIDING in layers,
    )
    block._attn_implementation = "eager"
    return block


@torch.no_grad()
def fill(model: Any) -> None:
    """Random parameters, rounded to bfloat16, and a reduced vocabulary's maps."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name}{shape}".encode()))
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.3 * noise
        elif name.endswith(("bias", "base_kernel", "embed_tokens.weight", "codebook", "markov_w1.weight")):
            value = noise
        else:
            value = 1.5 * shape[-1] ** -0.5 * noise
        parameter.copy_(value.bfloat16())
    if model.use_draft_vocab:
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:REDUCED].sort().values
        model.load_vocab_mappings(torch.zeros(VOCAB).index_fill(0, kept, 1).bool(), kept - torch.arange(REDUCED))


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """A context of random features and tokens, with anchors among them."""
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(CONTEXT, HIDDEN * 4, generator=generator)[:, : model.fc.in_features].bfloat16().float()
    tokens = torch.randint(0, VOCAB, (CONTEXT,), generator=generator)
    return {"features": features, "tokens": tokens, "positions": torch.tensor(ANCHORS)}


@torch.no_grad()
def golden(model: Any) -> dict[str, torch.Tensor]:
    """Inputs and outputs of one variation."""
    given, config = inputs_of(model), model.config
    wanted = torch.zeros(1, CONTEXT)
    wanted[0, list(ANCHORS)] = 1  # every valid position becomes an anchor, in order
    hidden, logits, *_ = model._backbone_forward(
        given["features"][None],
        given["tokens"][None],
        wanted,
        torch.zeros(1, CONTEXT, HIDDEN),
        torch.zeros(1, CONTEXT, dtype=torch.long),
        max_anchors=len(ANCHORS),
    )
    hidden, logits = (rows.view(len(ANCHORS), BLOCK, -1) for rows in (hidden, logits))
    first = 0 if config.sample_from_anchor else 1
    anchors = given["tokens"][given["positions"]]
    outputs = {"anchors": anchors, "positions": given["positions"], "hidden": hidden, "logits": logits[:, first:]}
    return outputs | walk(model, hidden, logits, anchors, first)


def walk(model: Any, hidden: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor, first: int) -> dict:
    """Draft left to right: each row is scored by speculators with the drafts before it as the block's tokens."""
    tokens = torch.zeros(len(anchors), BLOCK + 1, dtype=torch.long)  # of positions p, p + 1, ...
    tokens[:, 0] = anchors
    previous, scores, candidates = tokens[:, :BLOCK], [], []
    for row in range(first, BLOCK):
        # What speculators trains with: a row's predecessor is the token at its position when it samples from the
        # anchor, else the one before, and the anchor for the anchor's own row.
        previous = tokens[:, :BLOCK] if first == 0 else torch.cat([tokens[:, :1], tokens[:, : BLOCK - 1]], 1)
        ids, score = _scored(model, hidden, logits, previous, row)
        best = score.topk(min(2, score.shape[1])).values
        if (best[:, 0] - best[:, -1] < CLOSEST).any() and score.shape[1] > 1:
            raise SystemExit(f"{model.config.speculators_model_type}: two drafts are nearly equal, change a seed")
        tokens[:, row + 1 - first] = ids.gather(1, score.argmax(1, keepdim=True)).squeeze(1)
        scores.append(score)
        candidates.append(ids)
    drafted = {"draft_ids": tokens[:, 1 : BLOCK + 1 - first], "scores": torch.stack(scores, 1)}
    if hasattr(model, "candidate_selector"):
        drafted["candidates"] = torch.stack(candidates, 1)
    if getattr(model, "confidence_head", None) is not None:
        features = hidden
        if model.config.confidence_head_with_markov:
            features = torch.cat([hidden, model.markov_head.prev_embeddings(previous)], -1)
        drafted["confidence"] = model.confidence_head(features).sigmoid()[:, first:]
    return drafted


def _scored(model: Any, hidden: torch.Tensor, logits: torch.Tensor, previous: torch.Tensor, row: int) -> tuple:
    """Target ids that a row may draft, [B, K], and what speaks for each."""
    if hasattr(model, "candidate_selector"):
        return model.candidate_selector.select(logits[:, row], hidden[:, row], previous[:, row])
    score = logits[:, row]
    if getattr(model, "markov_head", None) is not None:
        score = score + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)[:, row]
    ids = torch.arange(score.shape[1]) + (model.d2t if model.use_draft_vocab else 0)
    return ids.expand(len(score), -1), score


def saved(model: Any, pool: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What speculators writes of the model: its config.json, and names of its tensors, whose values join the pool."""

    def pooled(name: str, tensor: torch.Tensor) -> str:
        size = "x".join(map(str, tensor.shape))
        key = f"weights/{name}/{size}"
        pool[key] = tensor.bfloat16() if tensor.is_floating_point() else tensor
        return key

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        own = {name: pooled(name, tensor) for name, tensor in load_file(Path(folder) / "model.safetensors").items()}
    verifier = {"model.embed_tokens.weight": pooled("embed_tokens.weight", model.embed_tokens.weight.detach())}
    if not model.use_draft_vocab:
        verifier["lm_head.weight"] = pooled("lm_head.weight", model.lm_head.weight.detach())
    return {"config": config, "own": own, "verifier": verifier}


def make() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of the file, and its record."""
    tensors: dict[str, torch.Tensor] = {}
    record = {}
    for name, (kind, changes) in VARIANTS.items():
        model = model_of(kind, changes)
        record[name] = saved(model, tensors)
        features = inputs_of(model)["features"]
        tensors[f"features/{features.shape[1]}"] = features
        for key, tensor in golden(model).items():
            tensors[f"{name}/{key}"] = (tensor.int() if tensor.dtype == torch.long else tensor).contiguous()
    return tensors, record


def check(tensors: dict[str, torch.Tensor], record: dict[str, Any]) -> None:
    """Compare with the stored file: integers and weights exactly, results within rounding."""
    with safe_open(FILE, "pt") as file:
        stored, kept = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["variants"])  # noqa: SIM118
    for config in (variant["config"] for variants in (record, kept) for variant in variants.values()):
        for version in ("transformers_version", "speculators_version"):
            config.pop(version, None)
        config["transformer_layer_config"].pop("transformers_version", None)
    if kept != record or stored.keys() != tensors.keys():
        raise SystemExit("the configs or the names of tensors differ")
    for key, tensor in tensors.items():
        exact = key.startswith("weights/") or not tensor.is_floating_point()
        torch.testing.assert_close(
            stored[key], tensor, rtol=0, atol=0 if exact else 1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
    print(f"{len(record)} variants, {len(tensors)} tensors: as stored")


def main() -> None:
    """Write the file, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the stored file with fresh tensors")
    arguments = parser.parse_args()
    disable_progress_bar()
    tensors, record = make()
    if arguments.check:
        check(tensors, record)
        return
    FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, FILE, {"variants": json.dumps(record, sort_keys=True)})
    print(f"{FILE}: {len(record)} variants, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
