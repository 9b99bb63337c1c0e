"""The reference executor: a TensorRT network walked once and run in PyTorch, one rank or several in lockstep.

It is the embedded default (`--target cpu`), and in tests the oracle of every network.
"""

from glmspec.runtime.executor.executor import ReferenceExecutor, Tensors
from glmspec.runtime.executor.lockstep import LockstepExecutor

__all__ = ["LockstepExecutor", "ReferenceExecutor", "Tensors"]
