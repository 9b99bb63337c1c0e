"""A checkpoint's tokenizer and chat templates, read: the same way when an engine is built and when it runs.

What transformers cannot read, or reads without a fast tokenizer behind it, is refused here by name. Its own code is
never run. Chat templates are taken from the first place that has one: `chat_template.jinja` and
`additional_chat_templates/NAME.jinja`, `chat_template` in tokenizer_config.json (a text, or a list of named ones),
`chat_template.json`. Of several names "default" is the one that is used.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from glmspec.convert.beside import TEXT, VOCABULARIES, copy_files, is_pointer, marked, matching
from glmspec.core.errors import CheckpointError, GlmspecError
from glmspec.core.fields import read_json


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds what a tokenizer is read from."""
    return bool(matching(folder, VOCABULARIES))


def check_tokenizer(folder: Path) -> None:
    """Raise `CheckpointError` where a folder has a tokenizer that cannot be used; reads it as the runtime does."""
    if has_tokenizer(folder):
        load_tokenizer(folder)


def known_ids(folder: Path) -> frozenset[int] | None:
    """Ids of the vocabulary and of the tokens added to it, None for a folder without a tokenizer. Raises as
    `load_tokenizer` does."""
    return frozenset(load_tokenizer(folder).get_vocab().values()) if has_tokenizer(folder) else None


def unreadable(folder: Path) -> list[str]:
    """The same as notes: conversion goes on without text."""
    try:
        check_tokenizer(folder)
    except GlmspecError as error:
        return [f"engines of this checkpoint will be refused: {error}"]
    return []


def load_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder. Raises `CheckpointError` for one that cannot be used, and for templates that
    are none. Only what an engine's tokenizer folder would hold is looked at: a model's config may not change it."""
    names = matching(folder, TEXT)
    if not (folder / "config.json").exists() and not any(marked(folder / name) for name in names):
        return _loaded(folder, folder, names)
    with TemporaryDirectory() as home:
        copy_files(folder, names, Path(home))
        return _loaded(Path(home), folder, names)


def _loaded(home: Path, folder: Path, names: tuple[str, ...]) -> Any:
    """home: where the files are read. folder: where they are from."""
    for name in names:
        if is_pointer(home / name):
            _refuse(folder, f"{name} is a pointer of Git LFS, not the file", "Download it again.")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(home, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises every kind, bare `Exception` for a format it does not know
        if "custom code" in str(error):
            advice = (
                "If tokenizer.json is all there is to it, convert a copy whose tokenizer_config.json has no auto_map."
            )
            _refuse(folder, "it asks for code of its own, which is never run", advice)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".replace(str(home), str(folder))
        _refuse(folder, reason, "A newer transformers may read it; or convert a copy without its files, and send ids.")
    if not hasattr(tokenizer, "backend_tokenizer"):
        _refuse(folder, f"{type(tokenizer).__name__} has no fast tokenizer", "Add its tokenizer.json.")
    tokenizer.chat_template = tokenizer.chat_template or _legacy_template(home, folder)
    _check_templates(folder, tokenizer)
    return tokenizer


def _legacy_template(home: Path, folder: Path) -> str | None:
    """Where processors keep it; transformers' tokenizers do not look there."""
    path = home / "chat_template.json"
    template = read_json(path).get("chat_template") if path.is_file() else None
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder / path.name}: chat_template: found a {type(template).__name__}, expected a text."
        )
    return template


def _check_templates(folder: Path, tokenizer: Any) -> None:
    """Every template must be one; what it makes of a conversation is its own business."""
    from jinja2 import TemplateSyntaxError

    templates = tokenizer.chat_template or {}
    named = templates if isinstance(templates, dict) else {"default": templates}
    if named and "default" not in named:
        raise CheckpointError(
            f"{folder}: chat templates: found {', '.join(sorted(named))}, expected one that is called default. "
            "Rename the one to use, or put it into chat_template.jinja."
        )
    for name, text in named.items():
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], chat_template=text, tokenize=False)
        except TemplateSyntaxError as error:
            raise CheckpointError(
                f"{folder}: chat template {name}: line {error.lineno}: {error.message}. Mend it, or take it out."
            ) from None
        except Exception:  # it parses, and does not like this conversation
            continue


def _refuse(folder: Path, why: str, advice: str) -> NoReturn:
    raise CheckpointError(f"{folder}: not a tokenizer that transformers can load ({why}). {advice}")
