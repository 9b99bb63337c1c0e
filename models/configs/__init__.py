"""Frozen, validated configs of models. Every Hugging Face key is spelled here once."""
