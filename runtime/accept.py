"""Which drafts are accepted and what comes after them: packs the acceptance networks' inputs, reads their outputs.

A draft that was not drawn (the drafter's best: q is one-hot) is compared, not weighed. Rejection sampling would keep it
with chance p(draft) and else draw from the rest, which is what happens when a token is drawn from p and compared with
it. As the number that draws is the position's, answers are the same with and without drafts, token for token, also at
temperature 1 (but for near ties, within roundings: docs/speculation.md). Drawn drafts go through rejection sampling.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, replace

import numpy as np
import torch

from glmspec.models.acceptance import NETWORKS
from glmspec.network.limits import EngineLimits
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Inputs, tensors
from glmspec.runtime.request import TokenLogprob
from glmspec.runtime.sequence import Accepted, Sequence

Outputs = abc.Mapping[str, torch.Tensor]
STANDARD, BLOCK = "standard", "block"


@dataclass(frozen=True)
class DraftBlock:
    """The drafts of a sequence that the verifier was shown. q_rows: the row of q of each, where they were drawn."""

    sequence: Sequence
    drafts: abc.Sequence[int]
    q_rows: abc.Sequence[int] = ()


class Acceptance:
    """Accepts and rejects drafts. networks: `accept`, `sample`, `logprobs` and, where drafts are drawn, the one that
    rejects them. method: how drawn drafts are verified."""

    def __init__(self, networks: abc.Mapping[str, Model], limits: EngineLimits, method: str = STANDARD) -> None:
        self._networks, self._limits, self._method = networks, limits, method
        self._rejecting = next((name for name in networks if name not in NETWORKS), "")  # none where no draft is drawn

    def accept(
        self,
        logits: Outputs,
        blocks: abc.Sequence[DraftBlock],
        probs: Outputs,
    ) -> list[Accepted]:
        """The verdicts, in order. logits: the verifier's outputs, whose rows are the ballots' one after the other. law:
        the tensors that drafts were drawn from."""
        if not blocks:
            return []
        inputs = pack_drafts([block.drafts for block in blocks], self._limits)
        if any(block.q_rows and block.sequence.request.sampling.temperature for block in blocks):
            name = self._rejecting
            inputs |= self._probs(logits, blocks) | dict(probs) | self._rejection(blocks)
        elif all(block.sequence.request.sampling.plain for block in blocks):
            name = "accept"
            inputs["greedy_ids"] = logits["greedy_ids"]
        else:
            name = "sample"
            inputs |= self._probs(logits, blocks) | tensors({"uniform": np.concatenate([_draws(b) for b in blocks])})
        out = self._networks[name].run(inputs)
        counts_and_tokens = zip(out["accepted"].tolist(), out["tokens"].tolist(), strict=True)
        accepted = [Accepted(count, tokens[: count + 1]) for count, tokens in counts_and_tokens]
        return self._with_logprobs(logits, blocks, accepted)

    def _probs(self, logits: Outputs, blocks: abc.Sequence[DraftBlock]) -> Inputs:
        """How every row is sampled."""
        rows = [len(block.drafts) + 1 for block in blocks]
        settings = [block.sequence.request.sampling for block in blocks]
        columns = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
        values = {
            name: np.repeat(np.array([getattr(one, name) for one in settings], dtype=dtype), rows)
            for name, dtype in columns.items()
        }
        # As many as there are, or more, is no limit.
        values["top_k"][values["top_k"] >= logits["logits"].shape[1]] = 0
        return {"logits": logits["logits"]} | tensors(values | _entries(blocks))

    def _rejection(self, blocks: abc.Sequence[DraftBlock]) -> Inputs:
        """The noise of acceptance, and where each draft's q is."""
        accepting, last, rows = [], [], []
        for block in blocks:
            sequence, count = block.sequence, len(block.drafts)
            rows += [*block.q_rows, *[0] * (count + 1 - len(block.q_rows))]
            if count and sequence.request.sampling.temperature:
                _, numbers, final = sequence.noise.block(len(sequence.tokens) - 1, count)
                accepting += [*numbers, 0.0]
            else:  # as without drafts: the number of the position
                final = _draws(block)[0]
                accepting += [0.0] * (count + 1)
            last.append(final)
        return tensors(
            {
                "q_rows": np.array(rows),
                "uniform": np.array(accepting, dtype=np.float32),
                "last_uniform": np.array(last, dtype=np.float32),
                "verify_blocks": np.full(len(blocks), int(self._method == BLOCK)),
            }
        )

    def _with_logprobs(
        self, logits: Outputs, blocks: abc.Sequence[DraftBlock], accepted: list[Accepted]
    ) -> list[Accepted]:
        best = [block.sequence.request.sampling.logprobs for block in blocks]
        if all(count is None for count in best):
            return accepted
        rows = [(a.tokens + [0] * len(b.drafts))[: len(b.drafts) + 1] for b, a in zip(blocks, accepted, strict=True)]
        chosen = tensors({"token_ids": np.concatenate(rows)})
        out = self._networks["logprobs"].run({"logits": logits["logits"]} | chosen)
        own, ids, values = (out[name].tolist() for name in ("logprobs", "top_ids", "top_logprobs"))
        first = np.cumsum([0, *(len(block.drafts) + 1 for block in blocks)])
        return [
            one if count is None else replace(one, logprobs=tuple(
                TokenLogprob(own[row], _listed(ids[row][:count], values[row][:count]))
                for row in range(start, start + len(one.tokens))
            ))
            for one, count, start in zip(accepted, best, first[:-1], strict=True)
        ]  # fmt: skip


def _listed(ids: abc.Sequence[int], logprobs: abc.Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The best tokens, without those that cannot be chosen: fewer than were asked for where fewer can."""
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > -math.inf)


def pack_drafts(drafts: abc.Sequence[abc.Sequence[int]], limits: EngineLimits) -> Inputs:
    """Blocks as network inputs: whose rows are whose, and what was drafted. Beyond its drafts a block repeats its last
    row."""
    counts = np.array([len(one) for one in drafts])
    first = np.cumsum(counts + 1) - (counts + 1)
    column = np.arange(limits.block_rows)
    return tensors(
        {
            "draft_ids": np.concatenate([[*one, 0] for one in drafts]),
            "block_rows": first[:, None] + np.minimum(column, counts[:, None]),
            "draft_counts": counts,
        }
    )


def _draws(block: DraftBlock) -> np.ndarray:
    """A number for every row of the block: that of the position whose token it draws."""
    sequence, count = block.sequence, len(block.drafts) + 1
    if not sequence.request.sampling.temperature:
        return np.zeros(count, dtype=np.float32)
    return sequence.noise.draws(len(sequence.tokens), count)


def _entries(blocks: abc.Sequence[DraftBlock]) -> dict[str, np.ndarray]:
    """What is adjusted; one entry that changes nothing when there is nothing to adjust."""
    places, before, factor, after, row = [], [], [], [], 0
    for block in blocks:
        if block.sequence.adjustments is not None:
            for at, entries in enumerate(block.sequence.adjustments.rows(block.drafts)):
                places.append(np.stack([np.full_like(entries.tokens, row + at), entries.tokens], 1))
                before.append(entries.before)
                factor.append(entries.factor)
                after.append(entries.after)
        row += len(block.drafts) + 1
    if not any(len(one) for one in places):
        one = np.ones(1, dtype=np.float32)
        return {
            "adjust_places": np.zeros((1, 2)),
            "adjust_before": 0 * one,
            "adjust_factor": one,
            "adjust_after": 0 * one,
        }
    return {
        "adjust_places": np.concatenate(places),
        "adjust_before": np.concatenate(before),
        "adjust_factor": np.concatenate(factor),
        "adjust_after": np.concatenate(after),
    }
