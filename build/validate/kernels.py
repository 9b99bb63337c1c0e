"""Stage "kernels": the kernels of the networks' plugins compile for the target, within their limits."""

from __future__ import annotations

import hashlib

from glmspec.build.deployment import PLUGINS_OFF, PLUGINS_ON
from glmspec.build.plugin_variants import variants_of
from glmspec.build.validate.case import Case, Checked
from glmspec.build.validate.known import Known
from glmspec.build.validate.report import Fault
from glmspec.core.errors import NetworkError
from glmspec.plugins.compiler import compile_variant, sources_digest, triton

_ADVICE = "Use --plugins off, and report it."
_RECORD = {"registers", "sha256"}


def check(case: Case, wanted) -> Checked:
    """Compile every kernel that a region of a network asks for and that is not known to compile."""
    deployment = case.deployment
    if not deployment.has_plugins:
        return Checked((f"{deployment.target.name}: its engines take no plugins",))
    if deployment.plugins == PLUGINS_OFF:
        return Checked(("plugins are off: nothing to compile",))
    kernels = variants_of(deployment, [network.graph for _, _, network in case.networks()])
    cache, sources = Known(wanted.cache), sources_digest()
    registers, faults, built = [], [], 0
    for variant in kernels.variants:
        case.tick(f"compiling the plugin {variant.plugin.name}")
        digest = hashlib.sha256(f"{variant.name} {triton().__version__} {sources}".encode()).hexdigest()
        found = cache.find(digest, _RECORD)
        if found is None:
            try:
                made = compile_variant(variant)
            except NetworkError as error:
                faults.append(Fault(f"plugin {variant.plugin.id}", str(error), _ADVICE))
                continue
            found = {"plugin": variant.plugin.id, "registers": made.registers, "sha256": made.sha256}
            cache.keep(digest, found)
            built += 1
        registers.append(found["registers"])
    facts = [
        f"{deployment.target.compute_capability}: {len(registers)} kernels ({built} compiled now), at most "
        f"{max(registers, default=0)} registers, none spills"
    ]
    if deployment.plugins == PLUGINS_ON:
        faults += [Fault("--plugins on", reason, "Use --plugins auto.") for reason in kernels.kept]
    else:
        facts += [f"layers instead of a plugin: {reason}" for reason in kernels.kept]
    numbers = {"kernels": len(registers), "compiled_now": built, "most_registers": max(registers, default=0)}
    return Checked(tuple(facts), tuple(faults), numbers)
