"""Stage "kernels": the kernels of the networks' plugins compile for the target, within their limits."""

from __future__ import annotations

from functools import partial
from typing import Any

from glmspec.build.plugin_variants import variants_of
from glmspec.build.settings import PLUGINS_OFF, PLUGINS_ON
from glmspec.build.validate.case import Case, StageResult
from glmspec.build.validate.compile_cache import CompileCache
from glmspec.build.validate.report import Fault
from glmspec.core.errors import NetworkError
from glmspec.plugins.compiler import Variant, compile_variant, sources_digest, triton

_ADVICE = "Use --plugins off, and report it."
_RECORD = {"registers", "sha256"}


def check(case: Case, options) -> StageResult:
    """Compile every kernel that a region of a network asks for and that is not known to compile."""
    deployment = case.deployment
    if not deployment.has_plugins:
        return StageResult((f"{deployment.target.name}: its engines take no plugins",))
    if deployment.plugins == PLUGINS_OFF:
        return StageResult(("plugins are off: nothing to compile",))
    kernels = variants_of(deployment, [network.graph for _, _, network in case.networks()])
    cache, sources = CompileCache(options.cache), sources_digest()
    registers, faults = [], []
    for variant in kernels.variants:
        case.tick(f"compiling the plugin {variant.plugin.name}")
        identity = f"{variant.name} {triton().__version__} {sources}"
        try:
            registers.append(cache.record(identity, _RECORD, partial(_compile, variant))["registers"])
        except NetworkError as error:
            faults.append(Fault(f"plugin {variant.plugin.id}", str(error), _ADVICE))
    most_registers = max(registers, default=0)
    facts = [
        f"{deployment.target.compute_capability}: {len(registers)} kernels ({cache.num_compiled} compiled now), "
        f"at most {most_registers} registers, none spills"
    ]
    if deployment.plugins == PLUGINS_ON:
        faults += [Fault("--plugins on", reason, "Use --plugins auto.") for reason in kernels.kept]
    else:
        facts += [f"layers instead of a plugin: {reason}" for reason in kernels.kept]
    numbers = {
        "kernels": len(registers),
        "compiled_now": cache.num_compiled,
        "most_registers": most_registers,
    }
    return StageResult(tuple(facts), tuple(faults), numbers)


def _compile(variant: Variant) -> dict[str, Any]:
    kernel = compile_variant(variant)
    return {"plugin": variant.plugin.id, "registers": kernel.registers, "sha256": kernel.sha256}
