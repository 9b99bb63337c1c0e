"""Reading JSON fields so that every mistake is named.

The one place where a key of somebody else's config.json is turned into a value:
a missing key, a wrong type and an illegal value each raise `ConfigError` with the
file, the key, what was found and what was expected. null says nothing: where a key
has a default it is absent, and where it has none it is missing. Which keys were asked
for is noted, so that those nobody asked for can be looked at (`models/configs/unread.py`).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from glmspec.core.errors import ConfigError

_REQUIRED = object()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ConfigError` when absent, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # editors may begin it with a byte order mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Give a folder that holds a {path.name}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: found a JSON {type(value).__name__}, expected an object.")
    return value


@dataclass(frozen=True)
class Fields:
    """A JSON object and where it came from.

    values: the object. source: shown before the key in messages, such as `DIR/config.json`. asked: keys that were
    read; sections: objects among them, which have fields of their own.
    """

    values: dict[str, Any]
    source: str
    asked: set[str] = field(default_factory=set, compare=False, repr=False)
    sections: dict[str, Fields] = field(default_factory=dict, compare=False, repr=False)

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise `ConfigError` for `key`: shows what was found beside `expected`."""
        shown = repr(self.values[key]) if key in self.values else "no such key"
        raise ConfigError(f"{self.source}: {key}: found {shown}, expected {expected}.")

    def get(self, key: str) -> Any:
        """The value as it stands; None when the key is absent or null."""
        self.asked.add(key)
        return self.values.get(key)

    def has(self, key: str) -> bool:
        """True when the key is present with a value other than null."""
        return self.get(key) is not None

    def section(self, key: str) -> Fields:
        """The object under `key`."""
        if not isinstance(self.get(key), dict):
            self.fail(key, "an object")
        return self.sections.setdefault(key, Fields(self.values[key], f"{self.source}: {key}"))

    def integer(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(key, f"an integer of at least {least}")
        return value

    def number(self, key: str) -> float:
        """A positive number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            self.fail(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: Any = _REQUIRED) -> bool:
        """true or false."""
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    def choice(self, key: str, legal: tuple[Any, ...], default: Any = _REQUIRED) -> Any:
        """One of `legal`."""
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not any(value == choice and type(value) is type(choice) for choice in legal):
            self.fail(key, " or ".join(map(repr, legal)))
        return value

    def integers(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        """A non-empty list of integers of at least `least` each."""
        value = self.get(key)
        if not isinstance(value, list) or not value:
            self.fail(key, "a list of integers")
        if any(isinstance(entry, bool) or not isinstance(entry, int) or entry < least for entry in value):
            self.fail(key, f"integers of at least {least}")
        return tuple(value)

    def choices(self, key: str, legal: tuple[str, ...], length: int) -> tuple[str, ...]:
        """A list of `length` entries, each one of `legal`."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) != length or any(entry not in legal for entry in value):
            self.fail(key, f"a list of {length} entries, each {' or '.join(map(repr, legal))}")
        return tuple(value)
