"""Many sampled steps: memory stays flat. The models are stand-ins; loop, acceptance and scheduler are real.

(`scripts/benchmark_sampling.py` makes 20,000 steps with the tiny models.)
"""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from types import SimpleNamespace

import torch

from glmspec.models.acceptance import DraftProbs, Greedy, Logprobs, Rejection, Sampled
from glmspec.network.config import NetworkConfig
from glmspec.network.limits import EngineLimits
from glmspec.runtime.accept import Acceptance
from glmspec.runtime.adjustments import Adjustments
from glmspec.runtime.ending import Ending
from glmspec.runtime.model import Model
from glmspec.runtime.propose import Drafts
from glmspec.runtime.request import Request
from glmspec.runtime.sampling import Sampling
from glmspec.runtime.scheduler import Scheduler
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.speculate import SpeculativeLoop
from glmspec.runtime.stats import SpecStats

VOCAB, DRAFTS, STEPS = 48, 3, 2_500
LIMITS = EngineLimits(
    max_model_len=96, max_num_seqs=2, max_num_batched_tokens=32, page_size=16, segment_rows=8, block_rows=1 + DRAFTS
)
CONFIG = SimpleNamespace(vocab_size=VOCAB, index_topk=16)
SETTINGS = (
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=0.8, repetition_penalty=1.2, logprobs=2),
    Sampling(temperature=1.0, min_tokens=5, top_k=9),
)


class Verifier:
    """Random logits."""

    config = CONFIG

    def __init__(self) -> None:
        self.pool = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1))

    def run(self, inputs) -> dict[str, torch.Tensor]:
        rows = inputs["logit_rows"].long() % 64
        logits = self.pool[(rows + inputs["token_ids"][0]) % 64]
        return {"logits": logits, "greedy_ids": logits.argmax(-1).int(), "tap.0": logits}


class Drafter:
    """Random drafts, drawn from a law of their own."""

    num_drafts, max_positions, features, confident = DRAFTS, 10**6, ("tap.0",), True

    def propose(self, features, kept, wanted) -> Drafts:
        q = torch.full((max(1, len(wanted)) * DRAFTS, VOCAB), 1 / VOCAB)
        ids = torch.randint(VOCAB, (len(wanted), DRAFTS)).tolist()
        return Drafts(ids, {"q": q}, (DRAFTS, 1), torch.ones(len(wanted), DRAFTS))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_is_flat():
    networks = (Greedy(CONFIG), Sampled(CONFIG), Logprobs(CONFIG), Rejection(CONFIG, DraftProbs(VOCAB, False)))
    net_config = NetworkConfig(compute="float32")
    loaded = {network.name: Model(network, LIMITS, net_config, [{}]) for network in networks}
    loop = SpeculativeLoop(Verifier(), Drafter(), Acceptance(loaded, LIMITS), LIMITS)
    scheduler, added, steps, sizes = Scheduler(LIMITS, DRAFTS), 0, 0, []
    while steps < STEPS:
        while len(scheduler.running) + len(scheduler.waiting) < 3:
            request = Request(prompt_ids=(1, 2, 3), max_tokens=80, sampling=SETTINGS[added % 3])
            adjustments = Adjustments(request.sampling, request.prompt_ids, (0,))
            stats = SpecStats(DRAFTS)
            scheduler.add(
                Sequence(request, Ending(request, (), None, 80), 83, stats, adjustments, Drafter.max_positions)
            )
            added += 1
        loop.step(scheduler.plan())
        scheduler.retire()
        steps += 1
        if steps % 500 == 0:
            gc.collect()
            sizes.append(resident())
    assert added > 50
    assert sizes[-1] - sizes[0] < 1e6, sizes
