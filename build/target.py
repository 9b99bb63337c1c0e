"""The GPUs an engine can be built for, as data."""

from __future__ import annotations

from dataclasses import dataclass

from glmspec.core.errors import EngineError, MissingCapability
from glmspec.network.machine import this_machine
from glmspec.network.trt import Backend, backend

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Target:
    """One row of the table. package: the TensorRT that builds for it, None where the reference executor runs the
    network itself. compute_capability: TensorRT's name. memory: bytes of one GPU, None for the host's. bandwidth: its
    bytes a second; flops: dense bfloat16 ones a second (as NVIDIA states them, 0 where nobody plans with them). The
    rest, here as for GPUs, are defaults for options left out."""

    name: str
    description: str
    package: str | None
    compute_capability: str | None
    memory: int | None
    bandwidth: float
    flops: float
    compute: str = "bfloat16"  # dtype
    page_size: int = 64  # context rows a page
    max_model_len: int = 131_072
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    segment_rows: int = 32

    @property
    def gpu(self) -> str:
        """The compute capability of a target that is a GPU. Raises `ValueError` for another."""
        if self.compute_capability is None:
            raise ValueError(f"{self.name}: no GPU")
        return self.compute_capability

    @property
    def usable_memory(self) -> int | None:
        """Bytes that an engine may plan with: the CUDA context, NCCL's buffers and fragmentation take some."""
        return None if self.memory is None else int(0.92 * self.memory)


def _gpu(
    name: str, description: str, package: str, capability: str, memory: int, bandwidth: float, flops: float
) -> Target:
    return Target(
        name=name,
        description=description,
        package=package,
        compute_capability=capability,
        memory=memory * GB,
        bandwidth=bandwidth,
        flops=flops,
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="cpu",
            description="the reference executor in PyTorch, any machine",
            package=None,
            compute_capability=None,
            memory=None,
            bandwidth=0.0,
            flops=0.0,
            compute="float32",
            page_size=16,
            max_model_len=4096,
            max_num_seqs=8,
        ),
        _gpu(
            "rtx-pro-6000",
            "RTX PRO 6000 Blackwell, built ahead of time on any machine",
            "tensorrt_rtx",
            "SM120",
            96,
            1.79e12,
            0.50e15,
        ),
        _gpu("b200", "B200, finished on a machine with that GPU", "tensorrt", "SM100", 180, 8e12, 2.25e15),
        _gpu("b300", "B300, finished on a machine with that GPU", "tensorrt", "SM103", 288, 8e12, 2.25e15),
        _gpu("h200", "H200, finished on a machine with that GPU", "tensorrt", "SM90", 141, 4.8e12, 0.99e15),
    )
}
# What networks for a GPU that cannot be built for here are compiled for instead, to see that they compile.
PROXY_PACKAGE, PROXY_CAPABILITY = "tensorrt_rtx", "SM120"


def compiler_for(target: Target) -> Backend | None:
    """The TensorRT that compiles for the target on this machine; None when it is not here, or its GPU is not.
    Raises `EngineError` when the GPU is another one, `MissingCapability` when no TensorRT at all is here."""
    if target.package in (None, PROXY_PACKAGE):
        try:
            return backend(target.package)
        except MissingCapability as error:
            raise MissingCapability(f"--target {target.name} ({target.description}): {error}") from None
    machine = this_machine(target.package)
    if machine.version is None or machine.compute_capability is None:
        return None
    if machine.compute_capability != target.compute_capability:
        raise EngineError(
            f"--target {target.name}: needs a GPU of {target.compute_capability}, and this machine's is "
            f"{machine.compute_capability}. Build where that GPU is, or choose another target."
        )
    return backend(target.package)
