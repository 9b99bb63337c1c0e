"""Stage "profiles": every legal step fits a profile, and every profile can be met.

The steps are packed by the runtime's own code, from sequences at the edges of what the limits allow: one token and the
longest context, one sequence and as many as there may be, blocks alone, chunks alone and both together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from glmspec.build.member import MTP, Member
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.report import Fault
from glmspec.network.contract import Contract
from glmspec.network.limits import EngineLimits, Ranges
from glmspec.runtime.accept import pack_drafts
from glmspec.runtime.executor import Tensors
from glmspec.runtime.pack import Anchor, Rows, pack_blocks, pack_rows
from glmspec.runtime.pages import Span

_ADVICE = "The profile would refuse this step at run time: report it, with the limits shown."


def check(case: Case, _) -> StageResult:
    """Pack the steps and look where they fit."""
    facts, faults, count = [], [], 0
    limits = case.deployment.limits
    for member in case.deployment.members:
        k = member.index_topk(limits)
        profiles = member.ranges(limits)
        contract = case.authored(member, case.deployment.profiles(member)[0]).contract
        steps = list(_steps(member, limits, k))
        count += len(steps)
        faults += profile_faults(member, profiles, steps, contract, k, limits.page_size)
        facts.append(f"{member.name}: {len(steps)} extreme steps, {' and '.join(profiles)}")
    return StageResult(tuple(facts), tuple(faults), {"steps": count})


def _steps(member: Member, limits: EngineLimits, k: int) -> Iterator[tuple[str, Tensors]]:
    if member.accepts:
        return acceptance_steps(limits)
    if member.name == MTP:
        return mtp_steps(limits, k, member.config.hidden_size)
    return verifier_steps(limits, k) if k else drafter_steps(limits, limits.ring_pages(member.sliding_window))


def profile_faults(
    member: Member,
    profiles: dict[str, Ranges],
    steps: list[tuple[str, Tensors]],
    contract: Contract,
    k: int,
    page_size: int,
) -> Iterator[Fault]:
    """Profiles that contradict themselves, and steps that fit none."""
    for name, ranges in profiles.items():
        for symbol, (least, typical, most) in ranges.items():
            if not 0 < least <= typical <= most:
                yield Fault(f"{member.name}: profile {name}: {symbol}", f"found {least}, {typical}, {most}.", _ADVICE)
        if k and ranges["M"][0] * page_size < k:
            rows = ranges["M"][0] * page_size
            why = f"its shortest page table names {rows} rows, fewer than the {k} that the top-k takes."
            yield Fault(f"{member.name}: profile {name}: M", why, "TensorRT does not check this: report it.")
    for what, inputs in steps:
        tight = [_outside(ranges, inputs, contract) for ranges in profiles.values()]
        if all(tight):
            first = min(tight, key=len)
            yield Fault(f"{member.name}: {what}", f"fits no profile: {'; '.join(first)}.", _ADVICE)


def _outside(ranges: Ranges, inputs: Tensors, contract: Contract) -> list[str]:
    """The sizes of a step that a profile does not allow."""
    outside = []
    for spec in contract.inputs:
        if spec.name not in inputs:
            continue
        for symbol, size in zip(spec.dims, inputs[spec.name].shape, strict=True):
            least, most = (symbol, symbol) if isinstance(symbol, int) else ranges[symbol][::2]
            if not least <= size <= most:
                outside.append(f"{spec.name}: {symbol} is {size}, allowed {least} to {most}")
    return outside


def verifier_steps(limits: EngineLimits, k: int) -> Iterator[tuple[str, Tensors]]:
    """Extreme steps of the verifier, with what each is. k: of the DSA top-k."""
    least = -(-k // limits.page_size)
    most, tokens = limits.max_model_len, limits.max_num_batched_tokens
    pages = list(range(1, limits.pages_per_sequence + 1))

    def rows(end: int, count: int, logits: int) -> Rows:
        return Rows(Span(pages, end - count, count), [0] * count, logits)

    for sequences in sorted({1, 2, limits.max_num_seqs}):
        if sequences > limits.max_num_seqs:
            continue
        for count in sorted({1, limits.block_rows}):
            for end in sorted(end for end in {count, limits.page_size + 1, most} if count <= end <= most):
                step = [rows(end, count, count)] * sequences
                yield f"{sequences} sequences with {count} rows at {end}", pack_rows(step, limits, least)
            left = tokens - (sequences - 1) * count
            chunk = min(left, most)
            mixed = [rows(most, count, count)] * (sequences - 1) + [rows(chunk, chunk, 0)]
            yield f"{sequences - 1} blocks of {count} and a chunk of {chunk}", pack_rows(mixed, limits, least)
            each = min(max(left // sequences, 1), most)
            yield f"{sequences} chunks of {each}", pack_rows([rows(each, each, 1)] * sequences, limits, least)


def mtp_steps(limits: EngineLimits, k: int, width: int) -> Iterator[tuple[str, Tensors]]:
    """Extreme steps of the MTP module: its rows are some of the verifier's. width: of a hidden state."""
    for what, inputs in verifier_steps(limits, k):
        rows = len(inputs["token_ids"])
        for source in sorted({rows, limits.max_num_batched_tokens}):
            hidden = torch.empty(source, width, device="meta")
            yield f"{what}, going on from {source}", inputs | {"hidden": hidden, "hidden_rows": inputs["positions"]}


def acceptance_steps(limits: EngineLimits) -> Iterator[tuple[str, Tensors]]:
    """Extreme steps of an acceptance network."""
    for blocks in sorted({1, limits.max_num_seqs}):
        for drafts in sorted({0, limits.block_rows - 1}):
            yield f"{blocks} blocks of {drafts} drafts", pack_drafts([[0] * drafts] * blocks, limits)


def drafter_steps(limits: EngineLimits, ring_pages: int) -> Iterator[tuple[str, Tensors]]:
    """Extreme steps of a drafter. ring_pages: of a sequence, 0 where no layer slides."""
    pages = list(range(1, limits.pages_per_sequence + 1))
    rings = [range(1 + at * ring_pages, 1 + (at + 1) * ring_pages) for at in range(limits.max_num_seqs)]
    most, tokens, sequences = limits.max_model_len, limits.max_num_batched_tokens, limits.max_num_seqs
    for count in sorted({min(count, most) for count in (1, limits.block_rows, tokens // sequences, tokens)}):
        for owners in sorted({1, min(sequences, tokens // count)}):
            kept = [Span(pages, 0, count, ring) for ring in rings[:owners]]
            for blocks in sorted({0, 1, sequences}):
                for position in sorted({count, most - 1}):
                    drafted = [Anchor(pages, 0, position, ring) for ring in rings[:blocks]]
                    what = f"{owners} sequences with {count} kept rows and {blocks} blocks at {position}"
                    yield what, pack_blocks(range(owners * count), kept, drafted, limits)
