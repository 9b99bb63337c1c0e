"""Checkpoints in, checkpoints out: Hugging Face folders to glmspec's TensorRT-LLM-style layout."""
