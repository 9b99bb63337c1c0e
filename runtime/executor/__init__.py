"""The reference executor: a TensorRT network walked once and run in PyTorch."""

from glmspec.runtime.executor.executor import ReferenceExecutor

__all__ = ["ReferenceExecutor"]
