"""Which drafts stand and what comes after them: packs the acceptance networks' inputs and reads their verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from glmspec.models.acceptance import NETWORKS
from glmspec.network.limits import EngineLimits
from glmspec.runtime.model import Model
from glmspec.runtime.pack import Inputs, tensors
from glmspec.runtime.request import TokenLogprob
from glmspec.runtime.sequence import Sequence as Running
from glmspec.runtime.sequence import Verdict

STANDARD, BLOCK = "standard", "block"


@dataclass(frozen=True)
class Ballot:
    """A block that the verifier has seen. drafts: those it saw. q_rows: the row of q of each, where they were drawn
    from one."""

    sequence: Running
    drafts: Sequence[int]
    q_rows: Sequence[int] = ()


class Acceptance:
    """Judges blocks. networks: `accept`, `sample`, `logprobs` and, where drafts are drawn, the one that rejects them.
    method: how drawn drafts are verified."""

    def __init__(self, networks: Mapping[str, Model], limits: EngineLimits, method: str = STANDARD) -> None:
        self._networks, self._limits, self._method = networks, limits, method
        self._rejecting = next((name for name in networks if name not in NETWORKS), None)

    def judge(
        self, logits: Mapping[str, torch.Tensor], ballots: Sequence[Ballot], probs: Mapping[str, torch.Tensor]
    ) -> list[Verdict]:
        """The verdicts, in order. logits: the verifier's outputs, whose rows are the ballots' one after the other. law:
        the tensors that drafts were drawn from."""
        if not ballots:
            return []
        inputs = pack_ballots([ballot.drafts for ballot in ballots], self._limits)
        if any(ballot.q_rows and ballot.sequence.request.sampling.temperature for ballot in ballots):
            name = self._rejecting
            inputs |= self._probs(logits, ballots) | dict(probs) | self._rejection(ballots)
        elif all(ballot.sequence.request.sampling.plain for ballot in ballots):
            name = "accept"
            inputs["greedy_ids"] = logits["greedy_ids"]
        else:
            name = "sample"
            inputs |= self._probs(logits, ballots) | tensors({"uniform": np.concatenate([_draws(b) for b in ballots])})
        out = self._networks[name].run(inputs)
        said = zip(out["accepted"].tolist(), out["tokens"].tolist(), strict=True)
        verdicts = [Verdict(accepted, tokens[: accepted + 1]) for accepted, tokens in said]
        return self._with_logprobs(logits, ballots, verdicts)

    def _probs(self, logits: Mapping[str, torch.Tensor], ballots: Sequence[Ballot]) -> Inputs:
        """How every row is sampled."""
        rows = [len(ballot.drafts) + 1 for ballot in ballots]
        settings = [ballot.sequence.request.sampling for ballot in ballots]
        columns = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
        made = {
            name: np.repeat(np.array([getattr(one, name) for one in settings], dtype=dtype), rows)
            for name, dtype in columns.items()
        }
        # As many as there are, or more, is no limit.
        made["top_k"][made["top_k"] >= logits["logits"].shape[1]] = 0
        return {"logits": logits["logits"]} | tensors(made | _entries(ballots))

    def _rejection(self, ballots: Sequence[Ballot]) -> Inputs:
        """The noise of acceptance, and where each draft's q is."""
        accepting, last, rows = [], [], []
        for ballot in ballots:
            sequence, count = ballot.sequence, len(ballot.drafts)
            rows += [*ballot.q_rows, *[0] * (count + 1 - len(ballot.q_rows))]
            if count and sequence.request.sampling.temperature:
                _, numbers, final = sequence.noise.block(len(sequence.tokens) - 1, count)
                accepting += [*numbers, 0.0]
            else:  # as without drafts: the number of the position
                final = _draws(ballot)[0]
                accepting += [0.0] * (count + 1)
            last.append(final)
        return tensors(
            {
                "q_rows": np.array(rows),
                "uniform": np.array(accepting, dtype=np.float32),
                "last_uniform": np.array(last, dtype=np.float32),
                "verify_blocks": np.full(len(ballots), int(self._method == BLOCK)),
            }
        )

    def _with_logprobs(
        self, logits: Mapping[str, torch.Tensor], ballots: Sequence[Ballot], verdicts: list[Verdict]
    ) -> list[Verdict]:
        wanted = [ballot.sequence.request.sampling.logprobs for ballot in ballots]
        if all(one is None for one in wanted):
            return verdicts
        rows = [(v.tokens + [0] * len(b.drafts))[: len(b.drafts) + 1] for b, v in zip(ballots, verdicts, strict=True)]
        chosen = tensors({"token_ids": np.concatenate(rows)})
        out = self._networks["logprobs"].run({"logits": logits["logits"]} | chosen)
        mine, ids, values = (out[name].tolist() for name in ("logprobs", "top_ids", "top_logprobs"))
        made, row = [], 0
        for ballot, verdict, best in zip(ballots, verdicts, wanted, strict=True):
            told = () if best is None else tuple(
                TokenLogprob(mine[at], _listed(ids[at][:best], values[at][:best]))
                for at in range(row, row + len(verdict.tokens))
            )  # fmt: skip
            made.append(Verdict(verdict.accepted, verdict.tokens, told))
            row += len(ballot.drafts) + 1
        return made


def _listed(ids: Sequence[int], logprobs: Sequence[float]) -> tuple[tuple[int, float], ...]:
    """The best tokens, without those that cannot be chosen: fewer than were asked for where fewer can."""
    return tuple((token, logprob) for token, logprob in zip(ids, logprobs, strict=True) if logprob > -math.inf)


def pack_ballots(drafts: Sequence[Sequence[int]], limits: EngineLimits) -> Inputs:
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


def _draws(ballot: Ballot) -> np.ndarray:
    """A number for every row of the block: that of the position whose token it draws."""
    sequence, count = ballot.sequence, len(ballot.drafts) + 1
    if not sequence.request.sampling.temperature:
        return np.zeros(count, dtype=np.float32)
    return sequence.noise.draws(len(sequence.tokens), count)


def _entries(ballots: Sequence[Ballot]) -> dict[str, np.ndarray]:
    """What is adjusted; one entry that changes nothing when there is nothing to adjust."""
    places, before, factor, after, row = [], [], [], [], 0
    for ballot in ballots:
        if ballot.sequence.adjustments is not None:
            for at, entries in enumerate(ballot.sequence.adjustments.rows(ballot.drafts)):
                places.append(np.stack([np.full_like(entries.tokens, row + at), entries.tokens], 1))
                before.append(entries.before)
                factor.append(entries.factor)
                after.append(entries.after)
        row += len(ballot.drafts) + 1
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
