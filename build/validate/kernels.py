"""Stage "kernels": the plugins' kernels compile for the target's GPU, within registers, stack and shared memory."""

from __future__ import annotations

from glmspec.build.configs.target import PROXY_CAPABILITY
from glmspec.build.errors import NetworkError
from glmspec.build.validate.case import Case, Checked
from glmspec.build.validate.report import Fault
from glmspec.plugins.kernels import KERNELS
from glmspec.plugins.kernels.compiler import compile_kernel


def check(case: Case, _) -> Checked:
    """Compile every kernel with every signature."""
    capability = case.deployment.target.compute_capability or PROXY_CAPABILITY
    made, faults = [], []
    for kernel in KERNELS.values():
        case.tick(f"compiling the kernel {kernel.name}")
        try:
            made += compile_kernel(kernel, capability)
        except NetworkError as error:
            faults.append(Fault(f"kernel {kernel.name}", str(error), "Report it, with your version of triton."))
    most = max((one.registers for one in made), default=0)
    stack = max((one.stack for one in made), default=0)
    fact = f"{capability}: {len(made)} kernels, at most {most} registers and {stack} bytes of stack"
    return Checked((fact,), tuple(faults))
