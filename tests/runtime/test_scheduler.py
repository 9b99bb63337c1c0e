"""Admission, fairness and cleaning up, with made-up tokens in place of a model."""

from __future__ import annotations

import random

import pytest

from glmspec.network.limits import EngineLimits
from glmspec.runtime.accept import Accepted
from glmspec.runtime.ending import Ending
from glmspec.runtime.request import LENGTH, Delta, Request
from glmspec.runtime.scheduler import Scheduler, Share
from glmspec.runtime.sequence import Sequence
from glmspec.runtime.stats import SpecStats

DRAFTS = 4
RING_PAGES = 3
FAR = 10_000  # a drafter trained for longer sequences than any here


def scheduler(seqs: int = 4, batched: int = 40, num_drafts: int = DRAFTS) -> Scheduler:
    limits = EngineLimits(
        max_model_len=200,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        page_size=8,
        segment_rows=16,
        block_rows=1 + DRAFTS,
    )
    return Scheduler(limits, num_drafts, RING_PAGES)


def add(one: Scheduler, prompt: int, answer: int, speculate: bool = True, max_positions: int = FAR) -> Sequence:
    request = Request(prompt_ids=(7,) * prompt, max_tokens=answer, speculate=speculate)
    sequence = Sequence(
        request, Ending(request, (), None, answer), prompt + answer, SpecStats(DRAFTS), max_positions=max_positions
    )
    one.add(sequence)
    return sequence


def step(one: Scheduler, accept: random.Random | None = None) -> list[tuple[Share, Delta | None]]:
    """One step in which the verifier says 7 and a draft is right by chance (always, without a generator)."""
    shares = one.plan()
    check(one, shares)
    done = []
    for share in shares:
        drafts = [7 if accept is None or accept.random() < 0.6 else 8 for _ in range(share.num_drafts)]
        accepted = (*drafts, 8).index(8)
        accepted_block = Accepted(accepted, [7] * (accepted + 1)) if share.completes else None
        done.append((share, share.sequence.advance(share.num_tokens, drafts, accepted_block)))
    one.retire()
    return done


def check(one: Scheduler, shares: list[Share]) -> None:
    """What holds for every plan."""
    limits = one.limits
    assert sum(share.num_tokens + share.num_drafts for share in shares) <= limits.max_num_batched_tokens
    assert len({id(share.sequence) for share in shares}) == len(shares) <= len(one.running) <= limits.max_num_seqs
    owned = [page for sequence in one.running for page in sequence.pages]
    assert len(set(owned)) == len(owned)
    assert one.pool.free + len(owned) == limits.num_pages - 1
    rings = [page for sequence in one.running for page in sequence.ring]
    assert len(set(rings)) == len(rings) == RING_PAGES * len(one.running)
    assert set(rings) <= set(range(1, 1 + RING_PAGES * limits.max_num_seqs))
    assert all(not sequence.ring for sequence in one.waiting)
    for share in shares:
        sequence = share.sequence
        assert 1 <= share.num_tokens <= sequence.pending
        assert share.completes == (share.num_tokens == sequence.pending)
        assert share.num_drafts <= one.num_drafts and (not share.num_drafts or share.completes)
        last = sequence.cached + share.num_tokens + share.num_drafts
        assert last <= len(sequence.pages) * limits.page_size  # every row has a place
        assert last <= sequence.max_tokens


def run_out(one: Scheduler, steps: int = 1000) -> None:
    while one.running or one.waiting:
        step(one)
        steps -= 1
        assert steps, "the scheduler does not come to an end"
    assert all_is_free(one)


def all_is_free(one: Scheduler) -> bool:
    free = (one.pool.free, one.rings.free)
    return free == (one.limits.num_pages - 1, RING_PAGES * one.limits.max_num_seqs)


def test_a_sequence_may_take_every_page():
    one = scheduler(seqs=1)
    add(one, prompt=150, answer=one.limits.max_model_len - 150)
    assert step(one) and one.pool.free == 0


def test_a_prompt_longer_than_the_step_is_split():
    one = scheduler(batched=40)
    sequence = add(one, prompt=100, answer=1)
    shares = [step(one)[0] for _ in range(3)]
    assert [(share.num_tokens, share.completes) for share, _ in shares] == [(40, False), (40, False), (20, True)]
    assert [delta is None for _, delta in shares] == [True, True, False]
    assert sequence.finish_reason == LENGTH
    assert one.plan() == []


def test_prompts_share_a_step_oldest_first():
    one = scheduler(batched=40)
    first, second, third = (add(one, prompt=30, answer=5) for _ in range(3))
    assert [(share.sequence, share.num_tokens) for share, _ in step(one)] == [(first, 30), (second, 10)]
    assert [(share.sequence, share.num_tokens) for share, _ in step(one)] == [(first, 1), (second, 20), (third, 16)]


def test_no_more_than_max_num_seqs_run_and_the_rest_wait_their_turn():
    one = scheduler(seqs=2)
    sequences = [add(one, prompt=3, answer=3) for _ in range(5)]
    step(one)
    assert (one.running, list(one.waiting)) == (sequences[:2], sequences[2:])
    assert [sequence.pages == [] for sequence in sequences] == [False, False, True, True, True]
    finished = []
    while one.running or one.waiting:
        finished += [share.sequence for share, _ in step(one) if share.sequence.finished]
    assert finished == sequences


def test_a_long_answer_gets_its_turn_while_a_prompt_arrives_every_step():
    """Case E38."""
    one = scheduler(seqs=4, batched=40)
    long = add(one, prompt=3, answer=150)
    step(one)
    came = {}
    for now in range(25):
        came[add(one, prompt=16, answer=1)] = now
        done = {share.sequence: delta for share, delta in step(one)}
        assert done[long] is not None, "the long answer gained nothing in this step"
        for sequence in done:
            if sequence is not long and sequence.finished:
                assert now - came.pop(sequence) <= 1
    assert len(came) <= 1


@pytest.mark.parametrize("extra", [0, 3])
def test_a_prompt_moves_on_beside_answers_that_fill_the_step(extra):
    """The least step the limits allow, all other sequences with full blocks: still one block's worth of prompt."""
    one = scheduler(seqs=4, batched=4 * (1 + DRAFTS) + extra)
    for _ in range(3):
        add(one, prompt=1, answer=180)
    step(one)
    late = add(one, prompt=30, answer=1)
    for _ in range(-(-30 // (1 + DRAFTS + extra))):
        assert not late.finished
        done = {share.sequence: share for share, _ in step(one)}
        assert len(done) == 4
        assert sum(share.num_drafts for share in done.values()) == 3 * DRAFTS  # nobody's block was cut
    assert late.finished


@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_always_ends_and_returns_every_page(seed):
    rng = random.Random(seed)
    one, everyone = scheduler(seqs=rng.randint(1, 4), batched=rng.choice([20, 23, 64])), []
    for _ in range(60):
        if rng.random() < 0.5:
            prompt = rng.randint(1, 120)
            everyone.append(add(one, prompt, rng.randint(1, 40), rng.random() < 0.7))
        if everyone and rng.random() < 0.3:
            one.abort(rng.choice(everyone))
        step(one, rng)
    run_out(one)
    assert all(sequence.finished and not sequence.pages and not sequence.ring for sequence in everyone)


def state(one: Scheduler, sequence: Sequence) -> str:
    if sequence.finished:
        return "finished"
    if sequence in one.waiting:
        return "waiting"
    assert sequence in one.running
    return "in prefill" if sequence.cached < len(sequence.request.prompt_ids) else "answering"


def test_fifty_cancelled_requests_leave_nothing_behind():
    """Case E40: two seats; cancelled while queued, in prefill, in mid-answer and after the end, twice each."""
    one = scheduler(seqs=2, batched=10)
    phases = [("waiting", 0), ("in prefill", 1), ("answering", 4), ("finished", 30)]
    for at in range(50):
        phase, steps = phases[at % 4]
        before = [add(one, prompt=4, answer=50) for _ in range(2)] if phase == "waiting" else []
        victim = add(one, prompt=30, answer=20)
        for _ in range(steps):
            step(one)
        assert state(one, victim) == phase
        for sequence in [victim, victim, *before]:
            one.abort(sequence)
        assert (one.running, list(one.waiting)) == ([], []) and all_is_free(one)
        assert one.plan() == []
    normal = add(one, prompt=30, answer=20)
    run_out(one)
    assert (normal.finish_reason, len(normal.tokens)) == (LENGTH, 50)


def test_an_aborted_sequence_has_no_turn_and_the_next_takes_its_place():
    one = scheduler(seqs=1)
    first, second = add(one, prompt=3, answer=9), add(one, prompt=3, answer=9)
    step(one)
    one.abort(first)
    assert [share.sequence for share, _ in step(one)] == [second]


def test_blocks_of_every_length_in_one_step():
    """Case E42: a full block, a short one before the budget, none, and a prompt."""
    one = scheduler(seqs=4, batched=60)
    full, short, none = add(one, 2, 50), add(one, 2, 4), add(one, 2, 50, speculate=False)
    step(one)  # each has its first token: `short` may gain three more, the last of them from the verifier
    prompt = add(one, 90, 5)
    shares = {share.sequence: (share.num_tokens, share.num_drafts, share.completes) for share in one.plan()}
    assert shares == {full: (1, 4, True), short: (1, 2, True), none: (1, 0, True), prompt: (51, 0, False)}


def test_a_step_without_drafts_still_yields_a_token():
    one = scheduler(num_drafts=0)
    sequence = add(one, prompt=3, answer=5)
    gained = [len(delta.tokens) for _ in range(5) for _, delta in step(one)]
    assert gained == [1] * 5
    assert sequence.stats.num_steps == 0


def test_the_drafter_stays_silent_beyond_its_reach():
    one = scheduler()
    sequence, drafts = add(one, prompt=10, answer=30, max_positions=20), []
    assert not sequence.outgrew_drafter
    while not sequence.finished:
        drafts += [(len(share.sequence.tokens), share.num_drafts) for share in one.plan()]
        step(one)
    assert [many for length, many in drafts if length + DRAFTS > 20] == [0] * sum(n + DRAFTS > 20 for n, _ in drafts)
    assert any(many == DRAFTS for _, many in drafts)
    assert sequence.outgrew_drafter


def test_a_sequence_may_draft_until_its_block_would_end_beyond_the_reach():
    one = scheduler()
    assert add(one, prompt=10, answer=30, max_positions=10 + DRAFTS).may_draft  # in its prompt: later
    assert not add(one, prompt=10, answer=30, max_positions=9 + DRAFTS).may_draft
    assert not add(one, prompt=10, answer=30, speculate=False).may_draft
