"""Every file of a checkpoint folder besides those of its weights: copied, known to be harmless, or noted.

One table knows them all. What is copied travels as it is with everything made of the checkpoint: what text in and out
needs, and the texts of licences. Code is never run, and of pickles only a mask embedding is read, weights only.
"""

from __future__ import annotations

import codecs
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from glmspec.core.files import write_bytes
from glmspec.core.sealed import MANIFEST

MASK_EMBEDDINGS = ("mask_embedding.pt", "mask_embedding.safetensors")

# What a tokenizer is read from: one of these must be there for text in and text out.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model*",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
)
# Templates in the order in which they are looked for; `tokenizer.py` reads them.
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
TEXT = (
    *VOCABULARIES,
    *TEMPLATES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "generation_config.json",
)
LICENCES = ("licen[cs]e*", "copying*", "notice*", "copyright*", "use_policy*", "third*party*", "licen[cs]es/*")
PICKLED = ("pytorch_model*.bin*", "*.pth", "*.ckpt", "model*.pt", "consolidated*.pt", "*.bin")
OTHER_WEIGHTS = ("*.gguf", "*.h5", "*.msgpack", "*.npz", "*.onnx*", "*.mlmodel", "*.ot")


@dataclass(frozen=True)
class Kind:
    """Files that are one thing to a conversion. why: what they are, so that it is no loss to leave them behind. noted:
    a user should hear of them all the same."""

    why: str
    patterns: tuple[str, ...]
    noted: bool = False


# In this order; the first that fits says what a file is. Names are compared in lower case, folders end in "/".
_CODE = Kind("code, which is never run", ("*.py", "*.ipynb", "*.sh", "__pycache__/", "requirements*.txt"))
_KINDS = (
    Kind(
        "left by a training job",
        (
            *("optimizer*", "scheduler*", "scaler*", "rng_state*", "random_states*", "training_args.*", "latest"),
            *("trainer_state*", "training_state*", "train_*", "*_results.json", "zero_to_fp32.py", "*events.out.*"),
            *("global_step*/", "checkpoint-*/", "runs/", "wandb/", "logs/", "*.log", "training_report.json"),
        ),
    ),
    Kind("a model card or documentation", ("readme*", "*.md", "*.pdf", "*.html", "docs/", "changelog*")),
    Kind("pictures", ("*.png", "*.jpg", "*.jpeg", "*.svg", "*.gif", "*.webp", "*.mp4")),
    Kind("pictures and documentation", ("assets/", "figures/", "images/", "imgs/", "media/")),
    Kind("bookkeeping of a repository or a download", (".*", ".*/", "*.lock", "*.incomplete", "*sha256*", "*.md5")),
    Kind("the same weights in another layout", ("original/", "metal/", "onnx/", "params.json", "consolidated.*.json")),
    Kind("how pictures and sound are prepared, and only text is read here", ("*processor_config.json",)),
    Kind("how the weights were quantized, which their config says too", ("recipe.y*ml", "quantize_config.json")),
    Kind("glmspec's own record of a checkpoint it wrote", (MANIFEST,)),
    _CODE,
    Kind("pickled weights, which are never read", PICKLED, noted=True),
    Kind("weights in another format", OTHER_WEIGHTS),
)
_POINTER = b"version https://git-lfs.github.com/spec/"
_READ = ("config.json", "hf_quant_config.json", "model.safetensors", "*.safetensors.index.json", *MASK_EMBEDDINGS)


@dataclass(frozen=True)
class Beside:
    """text, licences: relative names ("/" between) of files to copy. left: those that stay behind, and why. notes: of
    those that a user should know of."""

    text: tuple[str, ...] = ()
    licences: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def copied(self) -> tuple[str, ...]:
        """All that is copied."""
        return (*self.text, *self.licences)


def survey(folder: Path, config: dict[str, Any], used: Iterable[str]) -> Beside:
    """What lies in a checkpoint folder. used: the names of its files of weights."""
    taken, text, licences = set(used), matching(folder, TEXT), matching(folder, LICENCES)
    kinds: dict[str, Kind | None] = {}
    for path in sorted(folder.iterdir()):
        name = path.name + ("/" if path.is_dir() else "")
        copied = any(other == name or (name.endswith("/") and other.startswith(name)) for other in (*text, *licences))
        if not copied and name not in taken and not _fits(name, _READ):
            kinds[name] = file_kind(name)
    notes = []
    if odd := [name for name, kind in kinds.items() if kind is None]:
        notes.append(f"not known here and left alone, check that none changes results: {', '.join(odd)}")
    if pickled := {name: kind for name, kind in kinds.items() if kind and kind.noted}:
        notes.append(f"left alone, {next(iter(pickled.values())).why}: {', '.join(pickled)}")
    code = [name for name, kind in kinds.items() if kind is _CODE]
    if code and "auto_map" in config:
        notes.append(f"code that config.json names is never run, the network is glmspec's own: {', '.join(code)}")
    return Beside(
        text, licences, {name: kind.why if kind else "not known" for name, kind in kinds.items()}, tuple(notes)
    )


def file_kind(name: str) -> Kind | None:
    """What a file is that is neither read nor copied; None for one that is not known."""
    return next((kind for kind in _KINDS if _fits(name, kind.patterns)), None)


def matching(folder: Path, patterns: tuple[str, ...]) -> tuple[str, ...]:
    """The files of a folder, or of the subfolders that patterns name, that fit; sorted."""
    return tuple(sorted(name for name in _names(folder, patterns) if _fits(name, patterns)))


def copy_files(folder: Path, names: Iterable[str], out: Path) -> None:
    """Copy files by their relative names, links as what they name. Texts lose a byte order mark: transformers refuses
    JSON that has one, and would put a template's into every prompt."""
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if marked(folder / name):
            write_bytes(out / name, (folder / name).read_bytes().removeprefix(codecs.BOM_UTF8))
        else:
            shutil.copyfile(folder / name, out / name)


def marked(path: Path) -> bool:
    """Whether a text begins with a byte order mark."""
    return path.suffix in (".json", ".jinja", ".txt") and _begin(path, len(codecs.BOM_UTF8)) == codecs.BOM_UTF8


def is_pointer(path: Path) -> bool:
    """Whether Git LFS left a pointer where the file should be."""
    return _begin(path, len(_POINTER)) == _POINTER


def _names(folder: Path, patterns: tuple[str, ...]) -> Iterator[str]:
    """Names of files in a folder, and in those subfolders that a pattern with "/" begins with."""
    if not folder.is_dir():
        return
    inside = [pattern.split("/")[0] for pattern in patterns if "/" in pattern]
    for path in folder.iterdir():
        if path.is_file():
            yield path.name
        elif path.is_dir() and any(fnmatch(path.name.lower(), pattern) for pattern in inside):
            yield from (f"{path.name}/{file.name}" for file in path.iterdir() if file.is_file())


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    """A pattern without "/" is for names without one: `*` does not reach into folders."""
    return any(name.count("/") == pattern.count("/") and fnmatch(name.lower(), pattern) for pattern in patterns)


def _begin(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)
