"""The GPUs an engine can be built for, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Target:
    """One row of the table. package: the TensorRT that builds for it, None where the reference executor runs the
    network itself. compute_capability: TensorRT's name. The rest are defaults for options left out."""

    name: str
    description: str
    package: str | None
    compute_capability: str | None
    compute: str  # dtype
    page_size: int  # context rows a page
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    segment_rows: int


def _gpu(name: str, description: str, package: str, capability: str) -> Target:
    return Target(
        name=name,
        description=description,
        package=package,
        compute_capability=capability,
        compute="bfloat16",
        page_size=64,
        max_model_len=131_072,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        segment_rows=32,
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target(
            name="cpu",
            description="the reference executor in PyTorch, any machine",
            package=None,
            compute_capability=None,
            compute="float32",
            page_size=16,
            max_model_len=4096,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            segment_rows=32,
        ),
        _gpu("rtx-pro-6000", "RTX PRO 6000 Blackwell, built ahead of time on any machine", "tensorrt_rtx", "SM120"),
        _gpu("b200", "B200, built on a machine with that GPU", "tensorrt", "SM100"),
        _gpu("b300", "B300, built on a machine with that GPU", "tensorrt", "SM103"),
        _gpu("h200", "H200, built on a machine with that GPU", "tensorrt", "SM90"),
    )
}
