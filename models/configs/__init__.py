"""Frozen, validated configs: what a checkpoint says, what a target can do, how large a step may be."""
