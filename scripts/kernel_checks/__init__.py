"""Kernels run on torch tensors and compared with their references: for `gpu_check` and for tests."""
