"""Stage "weights": what the checkpoint holds for every rank is what the rank's network takes, both ways."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from glmspec.build.deployment import Deployment
from glmspec.build.member import MTP, Member
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.report import Fault
from glmspec.convert.checkpoint import Checkpoint
from glmspec.convert.weights import Implied
from glmspec.core.dtypes import FP4
from glmspec.core.units import size_text
from glmspec.models.configs.verifier import VerifierConfig
from glmspec.network.config import RankTensor
from glmspec.network.contract import TensorSpec
from glmspec.network.limits import CONTEXT

# What may be bound to an input: a plain weight is cast to the compute dtype, what insists on float32 must be it.
_FITS = {
    "float32": ("F32",),
    "bfloat16": ("BF16", "F16", "F32"),
    "int32": ("I32",),
    "float8_e4m3fn": ("F8_E4M3",),
    FP4: ("U8",),
}


def check(case: Case, _) -> StageResult:
    """Names, dtypes and shapes."""
    facts, faults, counts = [], [], Counter()
    deployment = case.deployment
    for member in deployment.members:
        if isinstance(member.weights, Implied):
            facts.append(f"{member.name}: only its config is there")
        elif member.name != MTP and not member.accepts:  # whose weights lie in the verifier's checkpoint, if any
            users = [user for user in deployment.members if user.weights is member.weights]
            result = _check_checkpoint(deployment, member, users)
            facts += result.facts
            faults += result.faults
            counts.update(result.numbers)
    return StageResult(tuple(facts), tuple(faults), dict(counts))


def _check_checkpoint(deployment: Deployment, member: Member, users: list[Member]) -> StageResult:
    """One checkpoint and the networks that take its tensors; what one rank holds, counted."""
    specs: dict[str, TensorSpec] = {}
    for user in users:
        net_config = replace(deployment.net_config(user, CONTEXT), compute="bfloat16")
        specs |= {spec.name: spec for spec in user.model.weight_inputs(net_config)}
    ranks, faults, tensors = member.weights.mapping.tp, [], {}
    for rank in range(ranks):
        every = member.weights.rank_tensors(rank)
        tensors = {name: tensor for name, tensor in every.items() if name in specs or not _beyond(member, name)}
        faults += _compare(member, rank, tensors, specs)
    size = sum(tensor.size for tensor in tensors.values())
    parameters = sum(math.prod(spec.sizes) for spec in specs.values())
    names = " and ".join(user.name for user in users)
    fact = f"{names}: {ranks} x {len(tensors):,} tensors, {size_text(size)} and {parameters / 1e9:.2f} G numbers a rank"
    return StageResult((fact,), tuple(faults), {"tensors": len(tensors), "bytes": size, "parameters": parameters})


def _compare(
    member: Member, rank: int, tensors: dict[str, RankTensor], specs: dict[str, TensorSpec]
) -> Iterator[Fault]:
    where = f"{member.folder}: rank {rank}"
    advice = "Convert the checkpoint again." if isinstance(member.weights, Checkpoint) else "Check the checkpoint."
    for name in sorted(specs.keys() | tensors.keys()):
        if name not in tensors:
            if name not in member.weights.shared:
                yield Fault(f"{where}: {name}", f"missing, expected {specs[name]}.", advice)
        elif name not in specs:
            yield Fault(f"{where}: {name}", "surplus: no input of the network takes it.", advice)
        elif not _fits(tensors[name], specs[name]):
            shown = f"{tensors[name].dtype}{list(tensors[name].shape)}"
            yield Fault(f"{where}: {name}", f"found {shown}, expected {specs[name]}.", advice)


def _fits(tensor: RankTensor, spec: TensorSpec) -> bool:
    shape = tensor.shape
    if spec.dtype == FP4 and shape:  # two codes a byte
        shape = (*shape[:-1], 2 * shape[-1])
    return shape == tuple(spec.dims) and tensor.dtype in _FITS[spec.dtype]


def _beyond(member: Member, name: str) -> bool:
    """True for a tensor of the MTP module: it lies in the verifier's checkpoint, and another network takes it."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    config = member.config
    return isinstance(config, VerifierConfig) and match is not None and int(match[1]) >= config.num_hidden_layers
