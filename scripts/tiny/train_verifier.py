"""Trains the verifier in three stages: dense attention, indexer warm-up, sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Step
from .corpus import Stream, TextRows, token_rows
from .optim import Muon, Trainer, ramp
from .verifier import Router, Verifier

Report = Callable[[str, int, int, dict[str, float]], None]


@dataclass(frozen=True)
class Stage:
    """One training stage: attention mode, what learns, and the learning-rate ramp's ends."""

    name: str
    steps: int
    batch: int
    row_length: int
    sparse: bool
    learn_model: bool
    learn_index: bool
    start: float
    end: float


def stages(scale: float) -> list[Stage]:
    """The verifier's schedule; `scale` shrinks the step counts, and the batches of runs that train nothing useful."""

    def count(steps: int) -> int:
        return max(2, round(steps * scale))

    return [
        Stage("verifier, dense", count(2700), batch_size(6, scale), 256, False, True, False, 1.0, 0.3),
        Stage("verifier, indexer", count(300), batch_size(6, scale), 384, False, False, True, 1.0, 0.5),
        Stage("verifier, sparse", count(700), batch_size(4, scale), 384, True, True, True, 0.3, 0.0),
    ]


def batch_size(rows: int, scale: float) -> int:
    """Rows of a batch: two where hardly anything is trained."""
    return rows if scale > 0.01 else min(rows, 2)


def index_loss(step: Step) -> Tensor:
    """KL from the attention of a group's layers (averaged) to the softmax of the indexer's scores, per query."""
    total = torch.zeros(())
    allowed_BST = step.allowed_BST
    for scores_BST, attention in step.groups:
        target_BST = torch.stack(attention).mean(0)
        support_BST = allowed_BST & (target_BST > 0) if step.sparse else allowed_BST
        log_q = scores_BST.masked_fill(~support_BST, float("-inf")).log_softmax(-1).masked_fill(~support_BST, 0.0)
        log_p = target_BST.clamp_min(1e-9).log()
        total = total + (target_BST * (log_p - log_q)).sum(-1).mean()
    return total / max(1, len(step.groups))


def token_loss(logits_BSV: Tensor, rows: TextRows, ahead: int) -> Tensor:
    """Weighted loss of predicting the token `ahead` places later."""
    labels_BS, weights_BS = rows.ids_BS[:, ahead:], rows.weights_BS[:, ahead:]
    logits_BSV = logits_BSV[:, : labels_BS.shape[1]].float()
    losses = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), reduction="none")
    return (losses * weights_BS.flatten()).sum() / weights_BS.sum()


def verifier_losses(model: Verifier, rows: TextRows, stage: Stage) -> dict[str, Tensor]:
    """Next-token loss, two chained next-next-token losses of the MTP module, and the indexers' KL."""
    ids_BS, positions_BS = rows.ids_BS, rows.positions_BS
    step_at = partial(model.step, sparse=stage.sparse, learn_index=stage.learn_index)
    step = step_at(positions_BS)
    with torch.set_grad_enabled(stage.learn_model):
        hidden_BSH = model.norm(model.hiddens(ids_BS, step)[-1])
        losses = {"next": token_loss(model.lm_head(hidden_BSH), rows, 1)}
        mtp_steps, chain_BSH = [], hidden_BSH
        for depth in range(2 if stage.sparse else 1):
            length = ids_BS.shape[1] - 1 - depth
            mtp_steps.append(step_at(positions_BS[:, :length]))
            embedded_BSH = model.embed_tokens(ids_BS[:, 1 + depth :])
            chain_BSH = model.mtp.predict(embedded_BSH, chain_BSH[:, :length], mtp_steps[-1])
            losses[f"mtp{depth + 1}"] = token_loss(model.lm_head(chain_BSH), rows, 2 + depth)
    if stage.learn_index:
        losses["index"] = index_loss(step) + 0.2 * index_loss(mtp_steps[0])
    return losses


def make_trainer(model: Verifier) -> Trainer:
    """Muon on the hidden matrices, AdamW on embeddings, head, norms and routers, AdamW on the indexers."""
    matrices, plain, index = [], [], []
    for name, param in model.named_parameters():
        if ".indexer." in name:
            index.append(param)
        elif param.ndim >= 2 and name.startswith("layers.") and not name.endswith("gate.weight"):
            matrices.append(param)
        else:
            plain.append(param)
    return Trainer(
        [
            Muon(matrices, lr=0.012),
            torch.optim.AdamW(plain, lr=4e-3, betas=(0.9, 0.97), weight_decay=0.0),
            torch.optim.AdamW(index, lr=3e-3, betas=(0.9, 0.97), weight_decay=0.0),
        ]
    )


def run_stage(model: Verifier, trainer: Trainer, stage: Stage, seed: int, report: Report) -> None:
    """Train one stage on its own seeded part of the stream."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    rows = token_rows(Stream(seed), stage.row_length, stage.batch)
    for index in range(stage.steps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = verifier_losses(model, next(rows), stage)
        loss = losses.get("index", torch.zeros(()))
        if stage.learn_model:
            loss = loss + losses["next"] + 0.3 * losses["mtp1"] + 0.1 * losses.get("mtp2", torch.zeros(()))
        trainer.update(loss, ramp(index, stage.steps, stage.start, stage.end))
        if stage.learn_model:
            for router in routers:
                router.rebalance(5e-4)
        report(stage.name, index + 1, stage.steps, {name: value.item() for name, value in losses.items()})


@torch.no_grad()
def held_out_loss(model: Verifier, sparse: bool, rows: int, row_length: int = 256) -> float:
    """Mean next-token loss in nats per byte on the continuations of held-out texts."""
    batch = next(token_rows(Stream(3, held_out=True), row_length, rows))
    batch.weights_BS = (batch.weights_BS == 1).float()
    logits_BSV, _ = model.logits(batch.ids_BS, model.step(batch.positions_BS, sparse=sparse))
    return token_loss(logits_BSV, batch, 1).item()


def train_verifier(model: Verifier, scale: float, report: Report) -> dict[str, float]:
    """Run every stage, leave the model in evaluation mode, and return held-out losses."""
    trainer = make_trainer(model)
    numbers: dict[str, float] = {}
    model.train()
    for seed, stage in enumerate(stages(scale)):
        run_stage(model, trainer, stage, 100 + seed, report)
        if stage.name == "verifier, dense":
            numbers["held_out_loss_dense"] = held_out_loss(model.eval(), False, batch_size(32, scale))
            model.train()
    model.eval()
    numbers["held_out_loss_sparse"] = held_out_loss(model, True, batch_size(32, scale))
    return numbers
