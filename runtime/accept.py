"""Accepts drafts and samples the token after them: packs the acceptance networks' inputs, reads their outputs.

A draft that was not drawn (the drafter's best: q is one-hot) is compared, not weighed. Rejection sampling would keep it
with chance p(draft) and else draw from the rest, and just that happens when a token is drawn from p and compared with
it. As the number that draws is the position's, answers are the same with and without drafts, token for token, also at
temperature 1 (but for near ties, within roundings: docs/speculation.md). Drawn drafts go through rejection sampling.

Legend: B blocks, Q rows of a block.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, replace

import numpy as np

from glmspec.models.acceptance import NETWORKS
from glmspec.network.limits import EngineLimits
from glmspec.runtime.adjustments import UNCHANGED
from glmspec.runtime.executor import Tensors
from glmspec.runtime.model import Model
from glmspec.runtime.pack import tensors
from glmspec.runtime.request import TokenLogprob
from glmspec.runtime.sequence import Accepted, Sequence

STANDARD, BLOCK = "standard", "block"


@dataclass(frozen=True)
class DraftBlock:
    """The drafts of a sequence that are verified. q_rows: the row of q that each was drawn from, if they were drawn."""

    sequence: Sequence
    drafts: abc.Sequence[int]
    q_rows: abc.Sequence[int] = ()


class Acceptance:
    """Accepts and rejects drafts. networks: `accept`, `sample`, `logprobs` and, where drafts are drawn, the one that
    samples by rejection. method: how that one verifies, STANDARD or BLOCK."""

    def __init__(self, networks: abc.Mapping[str, Model], limits: EngineLimits, method: str = STANDARD) -> None:
        self._networks, self._limits, self._method = networks, limits, method
        self._rejecting = next((name for name in networks if name not in NETWORKS), "")  # none where no draft is drawn

    def accept(self, verified: Tensors, blocks: abc.Sequence[DraftBlock], probs: Tensors) -> list[Accepted]:
        """The outcome of each block, in order. verified: the verifier's outputs, rows of anchor and drafts block after
        block. probs: the tensors that drafts were drawn from (`Drafts.probs`)."""
        if not blocks:
            return []
        inputs = pack_drafts([block.drafts for block in blocks], self._limits)
        if any(block.q_rows and block.sequence.request.sampling.temperature for block in blocks):
            name = self._rejecting
            inputs |= self._sampling(verified, blocks) | probs | self._rejection(blocks)
        elif all(block.sequence.request.sampling.plain for block in blocks):
            name = "accept"
            inputs["greedy_ids"] = verified["greedy_ids"]
        else:
            name = "sample"
            inputs |= self._sampling(verified, blocks)
            inputs |= tensors({"uniform": np.concatenate([_uniform(block) for block in blocks])})
        out = self._networks[name].run(inputs)
        counts_and_tokens = zip(out["accepted"].tolist(), out["tokens"].tolist(), strict=True)
        accepted = [Accepted(count, tokens[: count + 1]) for count, tokens in counts_and_tokens]
        return self._with_logprobs(verified, blocks, accepted)

    def _sampling(self, verified: Tensors, blocks: abc.Sequence[DraftBlock]) -> Tensors:
        """The inputs that sample every row: its logits, their adjustments, and the settings of its request."""
        rows = [len(block.drafts) + 1 for block in blocks]
        samplings = [block.sequence.request.sampling for block in blocks]
        dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
        settings = {
            name: np.repeat(np.array([getattr(sampling, name) for sampling in samplings], dtype=dtype), rows)
            for name, dtype in dtypes.items()
        }
        # As many as there are, or more, is no limit.
        settings["top_k"][settings["top_k"] >= verified["logits"].shape[1]] = 0
        return {"logits": verified["logits"]} | tensors(settings | _adjustments(blocks))

    def _rejection(self, blocks: abc.Sequence[DraftBlock]) -> Tensors:
        """The numbers that accept drafts and draw the last token, and where each draft's q is."""
        accepting, last, q_rows = [], [], []
        for block in blocks:
            sequence, count = block.sequence, len(block.drafts)
            q_rows += [*block.q_rows, *[0] * (count + 1 - len(block.q_rows))]
            if count and sequence.request.sampling.temperature:
                _, numbers, final = sequence.noise.block(len(sequence.tokens) - 1, count)
                accepting += [*numbers, 0.0]
            else:  # as without drafts: the number of the position
                final = _uniform(block)[0]
                accepting += [0.0] * (count + 1)
            last.append(final)
        return tensors(
            {
                "q_rows": np.array(q_rows),
                "uniform": np.array(accepting, dtype=np.float32),
                "last_uniform": np.array(last, dtype=np.float32),
                "verify_blocks": np.full(len(blocks), int(self._method == BLOCK)),
            }
        )

    def _with_logprobs(
        self, verified: Tensors, blocks: abc.Sequence[DraftBlock], accepted: list[Accepted]
    ) -> list[Accepted]:
        """The outcomes with log-probabilities, where requests want them."""
        top_counts = [block.sequence.request.sampling.logprobs for block in blocks]
        if all(count is None for count in top_counts):
            return accepted
        rows = [(a.tokens + [0] * len(b.drafts))[: len(b.drafts) + 1] for b, a in zip(blocks, accepted, strict=True)]
        chosen = tensors({"token_ids": np.concatenate(rows)})
        out = self._networks["logprobs"].run({"logits": verified["logits"]} | chosen)
        own, ids, values = (out[name].tolist() for name in ("logprobs", "top_ids", "top_logprobs"))
        first = np.cumsum([0, *(len(block.drafts) + 1 for block in blocks)])
        return [
            outcome if count is None else replace(outcome, logprobs=tuple(
                TokenLogprob(own[row], _possible(ids[row][:count], values[row][:count]))
                for row in range(start, start + len(outcome.tokens))
            ))
            for outcome, count, start in zip(accepted, top_counts, first[:-1], strict=True)
        ]  # fmt: skip


def _possible(ids: abc.Sequence[int], logprobs: abc.Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The best tokens, without those that cannot be chosen: fewer than were asked for where fewer can."""
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > -math.inf)


def pack_drafts(drafts: abc.Sequence[abc.Sequence[int]], limits: EngineLimits) -> Tensors:
    """Blocks as network inputs: the drafts of each, and its rows among the verifier's. Beyond its drafts a block
    repeats its last row. drafts: token ids, a list a block."""
    count_B = np.array([len(ids) for ids in drafts])
    first_B = np.cumsum(count_B + 1) - (count_B + 1)
    column_Q = np.arange(limits.block_rows)
    return tensors(
        {
            "draft_ids": np.concatenate([[*ids, 0] for ids in drafts]),
            "block_rows": first_B[:, None] + np.minimum(column_Q, count_B[:, None]),
            "draft_counts": count_B,
        }
    )


def _uniform(block: DraftBlock) -> np.ndarray:
    """A number for every row of the block: that of the position whose token it draws."""
    sequence, count = block.sequence, len(block.drafts) + 1
    if not sequence.request.sampling.temperature:
        return np.zeros(count, dtype=np.float32)
    return sequence.noise.draws(len(sequence.tokens), count)


def _adjustments(blocks: abc.Sequence[DraftBlock]) -> dict[str, np.ndarray]:
    """The entries of every row; one that changes nothing when there is nothing to adjust."""
    rows, row = [], 0
    for block in blocks:
        if block.sequence.adjustments is not None:
            rows += enumerate(block.sequence.adjustments.rows(block.drafts), row)
        row += len(block.drafts) + 1
    if not any(len(entries.tokens) for _, entries in rows):
        rows = [(0, UNCHANGED)]
    places = [np.stack([np.full_like(entries.tokens, row), entries.tokens], 1) for row, entries in rows]
    return {
        "adjust_places": np.concatenate(places),
        "adjust_before": np.concatenate([entries.before for _, entries in rows]),
        "adjust_factor": np.concatenate([entries.factor for _, entries in rows]),
        "adjust_after": np.concatenate([entries.after for _, entries in rows]),
    }
