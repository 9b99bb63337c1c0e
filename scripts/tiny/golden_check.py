"""Compares the drafter modules with published golden outputs: `python -m tiny.golden_check FOLDER` in scripts/.

FOLDER holds `dspark_block_speculators.safetensors`, `dflash2_block_speculators.safetensors` (inputs and outputs of
one block, anchored windows) and `checkpoints/{dspark,dflash2,verifier}`. Nothing else in the project needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from .drafter import Drafter
from .drafting import draft_block
from .export import load_drafter


def compare(name: str, value: Tensor, expected: Tensor, tolerance: float = 1e-4) -> float:
    """The largest difference; raise when it exceeds the tolerance."""
    difference = (value - expected).abs().max().item()
    if difference > tolerance:
        raise ValueError(f"{name} differs by {difference:.3g} (allowed {tolerance:.3g})")
    return difference


@torch.no_grad()
def check(algorithm: str, folder: Path) -> float:
    """Raise unless context K/V, block hidden states, logits and draft tokens agree; return the largest difference."""
    drafter: Drafter = load_drafter(folder / "checkpoints" / algorithm)
    golden = load_file(folder / f"{algorithm}_block_speculators.safetensors")
    shared = load_file(folder / "checkpoints" / "verifier" / "model.safetensors")
    features, position = golden["context_features"], golden["position"]
    context = drafter.context(features[None], torch.arange(len(features))[None])
    worst = 0.0
    for index, (key, value) in enumerate(context.layers):
        worst = max(worst, compare(f"ctx_k.{index}", key[0], golden[f"ctx_k.{index}"]))
        worst = max(worst, compare(f"ctx_v.{index}", value[0], golden[f"ctx_v.{index}"]))
    hidden = drafter.block(golden["anchor"][None], position[None], context, shared["model.embed_tokens.weight"])[0, 0]
    logits = hidden @ shared["lm_head.weight"].T
    rows = drafter.config.rows
    worst = max(worst, compare("block_hidden", hidden, golden["block_hidden"][:rows]))
    worst = max(worst, compare("block_logits", logits, golden["block_logits"][:rows]))
    draft = draft_block(drafter, logits, hidden, int(golden["anchor"]), real_vocab=logits.shape[-1])
    if draft.tokens != golden["draft_tokens"].tolist():
        raise ValueError(f"{algorithm} drafts {draft.tokens}, expected {golden['draft_tokens'].tolist()}")
    if algorithm == "dspark":
        worst = max(worst, compare("markov_logits", draft.scores, golden["markov_logits"]))
        worst = max(worst, compare("confidence", torch.tensor(draft.confidence), golden["confidence"]))
    else:
        if draft.candidates is None or not torch.equal(draft.candidates, golden["candidate_ids"]):
            raise ValueError("dflash2 candidate ids differ")
        worst = max(worst, compare("candidate_scores", draft.scores, golden["candidate_scores"]))
    return worst


if __name__ == "__main__":
    for kind in ("dspark", "dflash2"):
        print(f"{kind}: agrees, largest difference {check(kind, Path(sys.argv[1])):.2g}")
