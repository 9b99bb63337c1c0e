"""Optimizers: Muon for hidden matrices (few steps go far), AdamW for everything else, one learning-rate ramp."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalize(update_GMN: Tensor, rounds: int = 5) -> Tensor:
    """Newton-Schulz iteration that pushes all singular values of a batch of matrices towards one."""
    tall = update_GMN.shape[-2] > update_GMN.shape[-1]
    x = update_GMN.mT if tall else update_GMN
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized per matrix; matrices of one shape are handled as one batch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  (no closures)
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is None:
                    continue
                speed = self.state[param].setdefault("speed", torch.zeros_like(param))
                speed.lerp_(param.grad, 1 - group["momentum"])
                update = param.grad.lerp(speed, group["momentum"])
                by_shape[(param.shape[-2], param.shape[-1])].append((param, update.reshape(-1, *param.shape[-2:])))
            for (rows, columns), members in by_shape.items():
                updates = orthogonalize(torch.cat([update for _, update in members]))
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                pieces = updates.split([update.shape[0] for _, update in members])
                for (param, _), piece in zip(members, pieces, strict=True):
                    param.mul_(1 - group["lr"] * group["decay"]).add_(piece.view_as(param), alpha=-scale)


class Trainer:
    """Several optimizers behind one learning-rate ramp, with gradient clipping."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.base = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    def update(self, loss: Tensor, ramp: float, clip: float = 1.0) -> None:
        """One step at `ramp` times the base learning rates."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        params = [p for o in self.optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(params, clip)
        for optimizer, rates in zip(self.optimizers, self.base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * ramp
            optimizer.step()


def ramp(step: int, total: int, start: float = 1.0, end: float = 0.0, hold: float = 0.3, warmup: int = 20) -> float:
    """Warm up, hold at `start` for a part of the steps, then fall linearly to `end`."""
    if step < warmup:
        return start * (step + 1) / warmup
    done = step / total
    if done <= hold:
        return start
    return start + (end - start) * (done - hold) / (1 - hold)
