"""One file a model: the verifier, the DFlash block, and the two drafters built on it."""
