"""The token ids that a checkpoint's tokenizer knows, read as the runtime reads the tokenizer."""

from __future__ import annotations

from pathlib import Path

from glmspec.build.errors import CheckpointError


def known_ids(folder: Path) -> frozenset[int] | None:
    """Ids of the vocabulary and of the tokens added to it; None for a folder without a tokenizer. Raises
    `CheckpointError` for one that transformers cannot read."""
    if not (folder / "tokenizer.json").exists():
        return None
    from transformers import AutoTokenizer

    try:
        return frozenset(AutoTokenizer.from_pretrained(folder, local_files_only=True).get_vocab().values())
    except Exception as error:  # the library raises every kind for what it does not know
        raise CheckpointError(f"{folder}: not a tokenizer that transformers can load ({error}).") from None
