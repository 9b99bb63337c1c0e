"""The terms of a checkpoint: what its model card and its licence files say, and the strictest of several.

Only what is named here is known; a licence that is not in the table is called unknown, and is to be read. This is
bookkeeping, no legal advice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_READ = 1 << 16  # bytes of a card or of a licence's text that are looked at


@dataclass(frozen=True)
class Class:
    """Licences that ask for the same. says: what whoever passes things on should know. copies: whether changed copies
    may be passed on at all."""

    says: str
    names: str  # a pattern
    copies: bool = True


_BSD = r"bsd(-[0-9]-clause(-clear)?)?"
# From the most permissive to the strictest.
CLASSES = (
    Class(
        "keep its notices",
        rf"mit|mit-0|apache-2\.0|{_BSD}|isc|zlib|unlicense|cc0-1\.0|wtfpl|bsl-1\.0|ms-pl|ncsa|postgresql|cc-by-[0-9.]+"
        r"|cdla-permissive-[12]\.0|odc-by|pddl",
    ),
    Class(
        "pass changed copies on under the same licence only",
        r"(a|l)?gpl(-lesser)?(-[0-9.]+)?|cc-by-sa-[0-9.]+|mpl-2\.0|epl-[12]\.0|eupl-1\.[12]|osl-3\.0|odbl|cdla-sharing-1\.0",
    ),
    Class(
        "it has terms of its own: read its text",
        r"other.*|.*openrail.*|llama[0-9.-]*|gemma|glm[-a-z0-9._]*|deepfloyd.*",
    ),
    Class("no commercial use", r"cc-by-nc-[0-9.]+|apple-(amlr|ascl)|.*-?research.*|.*non-?commercial.*"),
    Class("no commercial use, and changed copies under the same licence only", r"cc-by-nc-sa-[0-9.]+"),
    Class("changed copies may not be passed on, and what glmspec writes is one", r"cc-by-nd-[0-9.]+", copies=False),
    Class(
        "no commercial use, and changed copies may not be passed on: what glmspec writes is one",
        r"cc-by-nc-nd-[0-9.]+",
        copies=False,
    ),
)
# How the texts of licences begin, by what they are called.
_TEXTS = {
    r"(?<!modified )mit license": "mit",
    r"apache license,? version 2\.0": "apache-2.0",
    r"attribution-noncommercial-noderivatives 4\.0": "cc-by-nc-nd-4.0",
    r"attribution-noncommercial-sharealike 4\.0": "cc-by-nc-sa-4.0",
    r"attribution-noncommercial 4\.0": "cc-by-nc-4.0",
    r"attribution-noderivatives 4\.0": "cc-by-nd-4.0",
    r"attribution-sharealike 4\.0": "cc-by-sa-4.0",
    r"attribution 4\.0 international": "cc-by-4.0",
    r"gnu affero general public license,? version 3": "agpl-3.0",
    r"gnu general public license,? version 3": "gpl-3.0",
}


@dataclass(frozen=True)
class Terms:
    """name: of the licence, None where nothing says. link: where its text is, as the card says. files: texts that lie
    in the folder. source: what was read."""

    name: str | None = None
    link: str | None = None
    files: tuple[str, ...] = ()
    source: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """The greater, the stricter; -1 where it is not known."""
        return _rank(self.name)

    @property
    def says(self) -> str:
        """What whoever passes it on should know."""
        if self.name is None:
            return "nothing in its folder says" if not self.files else f"not recognized: read {self.files[0]}"
        return CLASSES[self.rank].says if self.rank >= 0 else "not one that glmspec knows: read its text"

    @property
    def warning(self) -> str | None:
        """A note for someone who makes a copy, where that must be said."""
        if self.rank < 0 or CLASSES[self.rank].copies:
            return None
        return f"licence {self.name} ({self.source}): {self.says}"

    def to_json(self) -> dict[str, Any]:
        """For a record."""
        return {"name": self.name, "link": self.link, "files": list(self.files), "source": self.source}

    @classmethod
    def from_json(cls, value: Any) -> Terms:
        """Of a record; unknown where it has none."""
        if not isinstance(value, dict):
            return cls()
        return cls(value.get("name"), value.get("link"), tuple(value.get("files") or ()), value.get("source"))


def read_terms(folder: Path, files: tuple[str, ...], record: Any = None) -> Terms:
    """The terms of a checkpoint folder. files: its licence files; one that the card names is added. record: what
    glmspec noted of a checkpoint it wrote. Where a card and a text disagree, the stricter of them."""
    card = _card(folder)
    linked = (card.link or "").rpartition("/blob/main/")[2]
    if linked and Path(linked).name == linked and (folder / linked).is_file():
        files = tuple(dict.fromkeys([*files, linked]))
    names = {card.source: card.name} if card.name else {}
    for file in files:
        if name := _of_text(_head(folder / file)):
            names[file] = name
    recorded = Terms.from_json(record)
    if not names:
        return Terms(recorded.name, recorded.link, files, recorded.source)
    source = max(names, key=lambda file: _rank(names[file]))
    notes = ()
    if len({name for name in names.values() if _rank(name) >= 0 and not name.startswith("other")}) > 1:
        listed = ", ".join(f"{file} says {name}" for file, name in names.items())
        notes = (f"its licence is told differently ({listed}): the strictest is taken",)
    return Terms(names[source], card.link, files, source, notes)


def terms_lines(name: str, record: Mapping[str, Any]) -> list[str]:
    """What a record of ours knows of licences: a line a part, and the strictest of them. name: of a folder that is one
    part. No lines of a record that is older."""
    parts = record.get("licenses", {name: record["license"]} if "license" in record else {})
    known = {name: Terms.from_json(value) for name, value in parts.items()}
    lines = [f"licence of {name}: {terms.name or 'unknown'} ({terms.says})" for name, terms in known.items()]
    if len(known) > 1 and any(terms.rank >= 0 for terms in known.values()):
        strictest = max(known.values(), key=lambda terms: terms.rank)
        odd = [name for name, terms in known.items() if terms.rank < 0]
        apart = f"; not known: {', '.join(odd)}" if odd else ""
        lines.append(f"the strictest licence: {strictest.name} ({strictest.says}){apart}")
    return lines


def _rank(name: str | None) -> int:
    spelled = re.sub(r"[\s_]+", "-", (name or "").strip().lower())
    return next((rank for rank, licences in enumerate(CLASSES) if re.fullmatch(licences.names, spelled)), -1)


def _card(folder: Path) -> Terms:
    """What the front matter of README.md says."""
    import yaml

    match = re.match(r"\ufeff?---\s*\n(.*?)\n---\s*(\n|$)", _head(folder / "README.md"), re.DOTALL)
    try:
        header = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        header = None
    if not isinstance(header, dict):
        return Terms()
    names = header.get("license")
    names = [str(licence) for licence in names] if isinstance(names, list) else [str(names)] if names else []
    if (own := header.get("license_name")) and names in ([], ["other"]):
        names = [str(own) if _rank(str(own)) >= 0 else f"other: {own}"]
    link = header.get("license_link")
    return Terms(max(names, key=_rank, default=None), str(link) if link else None, source="README.md")


def _of_text(text: str) -> str | None:
    """The licence whose text this is."""
    begin = re.sub(r"\s+", " ", text[:400].lower())
    return next((name for pattern, name in _TEXTS.items() if re.search(pattern, begin)), None)


def _head(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file.read(_MAX_READ).decode("utf-8", errors="replace").replace("\r\n", "\n")
