"""Trains the tiny GLM-5.3-shaped verifier and its two block drafters that ship under assets/."""
