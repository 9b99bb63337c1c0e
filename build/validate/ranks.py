"""Stage "ranks": tensor parallelism by dataflow, for the full size and without running anything.

A value is *whole* when every rank has the same; a *part* when ranks have different slices of it (heads, columns,
experts, what is computed from them); a *term* when the whole is the sum of what ranks have (a product over a divided
axis, a lookup that finds nothing on other ranks). Parts may go through anything, a term only through what a sum
commutes with. A collective makes either whole again. Outputs, caches and the other side of a sum with a whole value
must be whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from glmspec.build.member import Member
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.report import Fault
from glmspec.models.layers.basic import EXPERT_START, VOCABULARY_START
from glmspec.network.limits import CONTEXT
from glmspec.network.reader import Graph, Node
from glmspec.network.shards import Mapping, layout_of

PART, COLUMNS, TERM = "part", "columns", "term"
_FLOATS = ("float32", "bfloat16")
_LINEAR = ("CAST", "SHUFFLE", "SLICE", "IDENTITY")  # layers that a sum over ranks commutes with
_ADVICE = "A collective is missing or misplaced in the network's definition: report it."


def check(case: Case, _) -> StageResult:
    """Follow divided values through the verifier; count collectives."""
    mapping, weights = case.deployment.mapping, case.deployment.verifier.weights
    if mapping.tp == 1:
        return StageResult(("one rank: no collectives",), tuple(_collectives_of_one(case)), {"tp": 1})
    facts, faults, numbers = [], [], {"tp": mapping.tp, "ep": mapping.ep, "all_reduces": 0, "all_gathers": 0}
    for member, profile, authored in case.networks():
        if member.weights is not weights or member.accepts:  # a drafter is whole on every rank
            continue
        parts = divided_inputs(member, case, mapping)
        faults += rank_faults(authored.graph, parts)
        collectives = [node for node in authored.graph.nodes if node.kind == "DIST_COLLECTIVE"]
        sums = sum(node.attributes["op"] == "ALL_REDUCE" for node in collectives)
        numbers["all_reduces"] += sums
        numbers["all_gathers"] += len(collectives) - sums
        facts.append(
            f"{member.name}, {profile}: {len(parts):,} inputs are divided among {mapping.tp} ranks (ep {mapping.ep}); "
            f"all-reduces {sums}, all-gathers {len(collectives) - sums}"
        )
        for node in collectives:
            if node.attributes["ranks"] != mapping.tp:
                faults.append(Fault(node.name, f"is for {node.attributes['ranks']} ranks, not {mapping.tp}.", _ADVICE))
    return StageResult(tuple(facts), tuple(faults), numbers)


def divided_inputs(member: Member, case: Case, mapping: Mapping) -> dict[str, str]:
    """Inputs that differ from rank to rank: name -> PART, or COLUMNS for weights divided along what is summed over."""
    net_config = case.deployment.net_config(member, CONTEXT)
    states = {VOCABULARY_START: PART, EXPERT_START: PART}
    for weight in member.model.weights():
        whole = weight.whole(net_config.compute)
        layout = layout_of(whole, mapping)
        if layout.box(0) != layout.box(mapping.tp - 1):
            state = COLUMNS if layout.split.axis == "columns" else PART
            states |= {spec.name: state for spec in net_config.specs(whole).values()}
    return states


def rank_faults(graph: Graph, parts: dict[str, str]) -> Iterator[Fault]:
    """Where a divided value is used as if it were whole, or a term as if it were a part."""
    states = {value.name: _Divided(parts[value.name], value.name) for value in graph.inputs if value.name in parts}
    ops = {node.region["region"]: node.region["op"] for node in graph.nodes if node.region and "op" in node.region}
    for node in graph.nodes:
        inputs = [value for value in node.inputs if value is not None]
        divided = [states[value.name] for value in inputs if value.name in states]
        if node.kind == "DIST_COLLECTIVE":
            yield from _collective_faults(node, divided)
        elif divided and node.kind != "SHAPE":  # every rank has the same shapes
            experts = node.region is not None and ops[node.region["region"]].startswith("moe")
            if wrong := None if experts else _misused(node, len(inputs), divided, states):
                yield wrong
                continue
            lookup = node.kind == "SELECT" and node.operands[0].name in states  # zero where another rank has the row
            state = _state(node, divided, experts or (lookup and node.output.dtype in _FLOATS))
            states.update({value.name: state for value in node.outputs})
    for value in graph.outputs:
        if value.name in states:
            why = f"its result differs between ranks and is the output {value.name}."
            yield Fault(states[value.name].source, why, _ADVICE)


@dataclass(frozen=True)
class _Divided:
    """state: PART, COLUMNS or TERM. source: the last product that made it, for the message."""

    state: str
    source: str


def _state(node: Node, divided: list[_Divided], term: bool) -> _Divided:
    """What a layer makes of divided inputs. term: known to be one (a mixture of experts, of which ranks have different
    ones or different columns of each; a lookup)."""
    source = node.name if node.kind == "MATRIX_MULTIPLY" else divided[-1].source
    states = {value.state for value in divided}
    product = node.kind == "MATRIX_MULTIPLY" and COLUMNS in states
    if term or product or TERM in states:
        return _Divided(TERM, source)
    return _Divided(COLUMNS if states == {COLUMNS} else PART, source)


def _misused(node: Node, inputs: int, divided: list[_Divided], names: Collection[str]) -> Fault | None:
    """The fault of using these where they must be whole, or of bending a term. names: all that is divided."""
    source, states = divided[0].source, [value.state for value in divided]
    if node.kind == "KV_CACHE_UPDATE":
        return Fault(node.name, f"a cache would differ between ranks, since {source}.", _ADVICE)
    sums = node.kind == "ELEMENTWISE" and node.attributes["op"] in ("SUM", "SUB") and node.output.dtype in _FLOATS
    if sums and len(divided) < inputs:
        return Fault(source, f"its result differs between ranks and is added to a whole value at {node.name}.", _ADVICE)
    if TERM not in states:
        return None
    scaled = node.kind == "ELEMENTWISE" and node.attributes["op"] in ("PROD", "DIV") and len(divided) == 1
    rows = node.kind == "GATHER" and len(divided) == 1 and node.operands[0].name in names  # some of a term's rows
    beside = node.kind == "CONCATENATION" and len(divided) == inputs and set(states) == {TERM}
    if node.kind in _LINEAR or scaled or rows or beside or (sums and set(states) == {TERM}):
        return None
    why = f"its result is this rank's term of a sum, and goes into {node.name} before the sum is taken."
    return Fault(divided[states.index(TERM)].source, why, _ADVICE)


def _collective_faults(node: Node, divided: list[_Divided]) -> Iterator[Fault]:
    if not divided:
        yield Fault(node.name, "a collective of a value that is whole already.", _ADVICE)
    elif (node.attributes["op"] == "ALL_REDUCE") != (divided[0].state == TERM):
        what = "slices are added up" if node.attributes["op"] == "ALL_REDUCE" else "terms of a sum are put side by side"
        yield Fault(node.name, f"{what}, of {divided[0].source}.", _ADVICE)


def _collectives_of_one(case: Case) -> Iterator[Fault]:
    for _, _, authored in case.networks():
        for node in authored.graph.nodes:
            if node.kind == "DIST_COLLECTIVE":
                yield Fault(node.name, "a collective in a network of one rank.", _ADVICE)
