"""Running engines: executors, paged caches, sequences, and the draft-verify-accept loop."""
