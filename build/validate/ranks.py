"""Stage "ranks": tensor parallelism by dataflow, for the full size and without running anything.

A value is *divided* when ranks hold different ones: a part of a weight, what is computed from it, a rank's own offset.
A collective makes it whole again. What must be whole: every output, every cache, the lengths and choices of the step.
And a divided term must not be added to a whole one: the sum over ranks would count the whole one once a rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from glmspec.build.configs.limits import CONTEXT
from glmspec.build.deployment import Member
from glmspec.build.layers.basic import EXPERT_START, VOCABULARY_START
from glmspec.build.network.reader import Graph, Node
from glmspec.build.network.shards import Mapping, layout_of
from glmspec.build.validate.case import Case, Checked
from glmspec.build.validate.report import Fault

_ADVICE = "A collective is missing or misplaced in the network's definition: report it."


def check(case: Case, _) -> Checked:
    """Follow divided values through the verifier; count collectives."""
    mapping, origin = case.deployment.mapping, case.deployment.verifier.origin
    if mapping.tp == 1:
        return Checked(("one rank: no collectives",), tuple(_collectives_of_one(case)))
    facts, faults = [], []
    for member, profile, authored in case.networks():
        if member.origin is not origin:  # a drafter is whole on every rank
            continue
        parts = divided_inputs(member, case, mapping)
        faults += rank_faults(authored.graph, parts)
        found = [node for node in authored.graph.nodes if node.kind == "DIST_COLLECTIVE"]
        sums = sum(node.attributes["op"] == "ALL_REDUCE" for node in found)
        facts.append(
            f"{member.name}, {profile}: {len(parts):,} inputs are divided among {mapping.tp} ranks (ep {mapping.ep}), "
            f"{sums} sums and {len(found) - sums} gathers make them whole"
        )
        for node in found:
            if node.attributes["ranks"] != mapping.tp:
                faults.append(Fault(node.name, f"is for {node.attributes['ranks']} ranks, not {mapping.tp}.", _ADVICE))
    return Checked(tuple(facts), tuple(faults))


def divided_inputs(member: Member, case: Case, mapping: Mapping) -> set[str]:
    """Names of the inputs that differ from rank to rank."""
    form = case.deployment.form(member, CONTEXT)
    names = {VOCABULARY_START, EXPERT_START}
    for weight in member.model.weights():
        whole = weight.whole(form.compute)
        layout = layout_of(whole, mapping)
        if layout.box(0) != layout.box(mapping.tp - 1):
            names |= {spec.name for spec in form.specs(whole).values()}
    return names


def rank_faults(graph: Graph, parts: set[str]) -> Iterator[Fault]:
    """Where a divided value is used as if it were whole."""
    origin: dict[str, str] = {}  # divided value -> the layer whose product made it, for the message
    for value in graph.inputs:
        if value.name in parts:
            origin[value.name] = value.name
    for node in graph.nodes:
        inputs = [value for value in node.inputs if value is not None]
        from_parts = [value for value in inputs if value.name in origin]
        if node.kind == "DIST_COLLECTIVE":
            if not from_parts:
                yield Fault(node.name, "a collective of a value that is whole already.", _ADVICE)
            continue
        if not from_parts:
            continue
        if node.kind == "KV_CACHE_UPDATE":
            yield Fault(node.name, f"a cache would differ between ranks, since {origin[from_parts[0].name]}.", _ADVICE)
            continue
        if _adds_whole(node, inputs, origin):
            made = origin[from_parts[0].name]
            why = f"its result differs between ranks and is added to a whole value at {node.name}."
            yield Fault(made, why, _ADVICE)
            continue
        source = node.name if node.kind == "MATRIX_MULTIPLY" else origin[from_parts[-1].name]
        origin.update({value.name: source for value in node.outputs})
    for value in graph.outputs:
        if value.name in origin:
            why = f"its result differs between ranks and is the output {value.name}."
            yield Fault(origin[value.name], why, _ADVICE)


def _adds_whole(node: Node, inputs: list, origin: dict[str, str]) -> bool:
    """True for a sum of a divided value and a whole one, in floating point (offsets of ids are meant to differ)."""
    if node.kind != "ELEMENTWISE" or node.attributes["op"] not in ("SUM", "SUB") or len(inputs) != 2:
        return False
    return node.output.dtype in ("float32", "bfloat16") and sum(value.name in origin for value in inputs) == 1


def _collectives_of_one(case: Case) -> Iterator[Fault]:
    for _, _, authored in case.networks():
        for node in authored.graph.nodes:
            if node.kind == "DIST_COLLECTIVE":
                yield Fault(node.name, "a collective in a network of one rank.", _ADVICE)
