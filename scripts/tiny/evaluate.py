"""Acceptance of the shipped drafters (and the MTP module) on the held-out prompts, and samples of the text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from .corpus import KINDS, Prompt, Stream
from .drafter import Drafter
from .speculate import BlockProposer, Counters, MtpProposer, Proposer, generate, greedy_texts
from .tokenizer import EOS_IDS, decode, encode, render_chat
from .train_verifier import Report
from .verifier import Verifier

MAX_NEW = 96


def evaluate_proposer(
    verifier: Verifier,
    prompts: list[Prompt],
    plain: list[list[int]],
    make: Callable[[], Proposer],
    max_new: int = MAX_NEW,
) -> dict[str, object]:
    """Pooled counters overall, per kind and per form, and how many texts equal plain greedy decoding."""
    pools: dict[str, Counters] = defaultdict(Counters)
    same = 0
    for prompt, expected in zip(prompts, plain, strict=True):
        text, counters = generate(verifier, encode(prompt.prompt), max_new, make())
        same += text == expected
        for name in ("all", prompt.kind, prompt.form):
            pools[name].add(counters)
    numbers: dict[str, object] = {**pools["all"].summary(), "same_as_plain": same, "prompts": len(prompts)}
    numbers["by_kind"] = {kind: round(pools[kind].length, 3) for kind in KINDS}
    numbers["by_form"] = {form: round(pools[form].length, 3) for form in ("chat", "text")}
    if pools["all"].confidence:
        numbers["confidence"] = confidence_numbers(pools["all"].confidence)
    return numbers


def confidence_numbers(pairs: list[tuple[float, bool]]) -> dict[str, float]:
    """How well confidences tell accepted from rejected drafts: area under the ROC curve and mean gap."""
    values = torch.tensor([value for value, _ in pairs])
    accepted = torch.tensor([right for _, right in pairs])
    good, bad = values[accepted], values[~accepted]
    wins = (good[:, None] > bad).float().mean() + 0.5 * (good[:, None] == bad).float().mean()
    return {
        "auc": round(wins.item(), 4),
        "mean_accepted": round(good.mean().item(), 4),
        "mean_rejected": round(bad.mean().item(), 4),
        "mean_confidence": round(values.mean().item(), 4),
        "acceptance": round(accepted.float().mean().item(), 4),
    }


def evaluate_all(
    verifier: Verifier,
    drafters: dict[str, Drafter],
    prompts: list[Prompt],
    report: Report,
    max_new: int = MAX_NEW,
) -> tuple[dict[str, dict[str, object]], list[list[int]]]:
    """(numbers per drafter, plain greedy continuations)."""
    plain = []
    for index, prompt in enumerate(prompts):
        plain.append(generate(verifier, encode(prompt.prompt), max_new)[0])
        report("evaluation, plain greedy", index + 1, len(prompts), {})
    numbers = {}
    makers: dict[str, Callable[[], Proposer]] = {
        name: lambda drafter=drafter: BlockProposer(drafter, verifier) for name, drafter in drafters.items()
    }
    makers["mtp"] = lambda: MtpProposer(verifier)
    for index, (name, make) in enumerate(makers.items()):
        numbers[name] = evaluate_proposer(verifier, prompts, plain, make, max_new)
        report("evaluation, speculative", index + 1, len(makers), {f"{name}": numbers[name]["mean_acceptance_length"]})
    return numbers, plain


def answer_accuracy(verifier: Verifier, per_kind: int, seed: int = 11) -> dict[str, float]:
    """Share of held-out single questions whose greedy answer is exactly the expected one, per kind."""
    shares = {}
    for kind in KINDS:
        stream, right = Stream(seed, held_out=True), 0
        chats = [stream.chat(turns=1, kind=kind) for _ in range(per_kind)]
        prompts = [encode(render_chat(messages)) for messages, _ in chats]
        texts = greedy_texts(verifier, prompts, 320)
        for prompt, text, (_, answer) in zip(prompts, texts, chats, strict=True):
            right += decode([token for token in text[len(prompt) :] if token not in EOS_IDS]) == answer
        shares[kind] = right / per_kind
    return shares
