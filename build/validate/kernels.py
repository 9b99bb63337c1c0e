"""Stage "kernels": the kernels of the networks' plugins compile for the target, within their limits."""

from __future__ import annotations

from glmspec.build.deployment import PLUGINS_OFF, PLUGINS_ON
from glmspec.build.errors import NetworkError
from glmspec.build.kernels import kernels_of
from glmspec.build.validate.case import Case, Checked
from glmspec.build.validate.report import Fault
from glmspec.plugins.compiler import compile_variant


def check(case: Case, _) -> Checked:
    """Compile every kernel that a region of a network asks for."""
    deployment = case.deployment
    if deployment.plugins == PLUGINS_OFF or not deployment.has_plugins:
        return Checked((f"{deployment.target.name}: its engines have no plugins",))
    kernels = kernels_of(deployment, [network.graph for _, _, network in case.networks()])
    made, faults = [], []
    for variant in kernels.variants:
        case.tick(f"compiling the plugin {variant.plugin.name}")
        try:
            made.append(compile_variant(variant))
        except NetworkError as error:
            faults.append(Fault(f"plugin {variant.plugin.id}", str(error), "Report it, with your version of triton."))
    most = max((one.registers for one in made), default=0)
    facts = [f"{deployment.target.compute_capability}: {len(made)} kernels, at most {most} registers, none spills"]
    if deployment.plugins == PLUGINS_ON:
        faults += [Fault("--plugins on", reason, "Use --plugins auto.") for reason in kernels.kept]
    else:
        facts += [f"layers instead of a plugin: {reason}" for reason in kernels.kept]
    return Checked(tuple(facts), tuple(faults))
