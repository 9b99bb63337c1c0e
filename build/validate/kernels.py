"""Stage "kernels": the kernels of the networks' plugins compile for the target, within their limits."""

from __future__ import annotations

from glmspec.build.errors import NetworkError
from glmspec.build.validate.case import Case, Checked
from glmspec.build.validate.report import Fault
from glmspec.plugins.compiler import SMS, compile_variant
from glmspec.plugins.variants import network_variants, regions_of


def check(case: Case, _) -> Checked:
    """Compile every variant that a region of a network asks for."""
    sm = case.deployment.target.compute_capability
    if sm not in SMS:
        return Checked((f"{case.deployment.target.name}: its engines have TensorRT's layers only",))
    regions = [one for _, _, network in case.networks() for one in regions_of(network.graph)]
    variants, kept = network_variants(regions, sm)
    made, faults = [], []
    for variant in variants:
        case.tick(f"compiling the plugin {variant.plugin.name}")
        try:
            made.append(compile_variant(variant))
        except NetworkError as error:
            faults.append(Fault(f"plugin {variant.plugin.id}", str(error), "Report it, with your version of triton."))
    most = max((one.registers for one in made), default=0)
    facts = [f"{sm}: {len(made)} kernels, at most {most} registers and no spilled one"]
    facts += [f"TensorRT's layers instead of a plugin: {reason}" for reason in kept]
    return Checked(tuple(facts), tuple(faults))
