"""A setting of a request is everywhere or nowhere: what the table of settings does not derive is compared with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path

import click
import pytest

from glmspec.build.cli import main
from glmspec.core.errors import RequestError
from glmspec.runtime.prompts import LABELS
from glmspec.runtime.request import Request
from glmspec.runtime.request_table import SETTINGS, TEXTS, WHOLE, Setting
from glmspec.runtime.sampling import Sampling
from glmspec.runtime.settings import request_of
from glmspec.triton_repo.interface import INPUTS

PAGE = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` (\|.*)$", PAGE.partition("## Settings of a request")[2], re.M)
OF_REQUEST = {field.name: field for field in fields(Request) if field.name not in ("prompt_ids", "sampling")}
OF_SAMPLING = {field.name: field for field in fields(Sampling)}
OPTIONS = {option.name: option for option in main.commands["generate"].params if isinstance(option, click.Option)}
NUMBERS = {name: setting for name, setting in SETTINGS.items() if setting.range and name != "top_k"}


def row(name: str, setting: Setting) -> str:
    """How the row of a setting's name goes on, up to its meaning."""
    inputs = ", ".join(f"`{alias.format(name)}`" for alias in setting.names)
    return f"| {setting.kind.expected} | {setting.range} | {inputs} |".replace("|  |", "| |")


def missing(settings: Mapping[str, Setting]) -> Iterator[str]:
    """Where a setting is not, or is another one than the table has."""
    rows = dict(ROWS)
    for name, setting in settings.items():
        if (name in OF_REQUEST) + (name in OF_SAMPLING) != 1:
            yield f"{name}: a field of Request or of Sampling"
        if name not in INPUTS or INPUTS[name].dtype != setting.kind.triton:
            yield f"{name}: an input of the Triton model"
        if setting.meaning and (name not in OPTIONS or OPTIONS[name].help != setting.meaning):
            yield f"{name}: an option of generate"
        if not rows.get(name, "").startswith(row(name, setting)):
            yield f"{name}: a row of docs/speculation.md: | `{name}` {row(name, setting)} ... |"
    for name in sorted({*OF_REQUEST, *OF_SAMPLING, *rows} - settings.keys()):
        yield f"{name}: the table of settings"


def test_a_setting_is_everywhere():
    assert list(missing(SETTINGS)) == []


def test_a_setting_in_one_place_only_is_told():
    novel = Setting(WHOLE, "Novel.", least=1)
    assert list(missing(SETTINGS | {"novel": novel})) == [
        "novel: a field of Request or of Sampling",
        "novel: an input of the Triton model",
        "novel: an option of generate",
        "novel: a row of docs/speculation.md: | `novel` | a whole number | at least 1 | `novel` | ... |",
    ]
    assert list(missing({name: SETTINGS[name] for name in SETTINGS if name != "seed"})) == [
        "seed: the table of settings"
    ]
    assert list(missing(SETTINGS | {"seed": Setting(TEXTS, SETTINGS["seed"].meaning, SETTINGS["seed"].names)})) == [
        "seed: an input of the Triton model",
        "seed: a row of docs/speculation.md: | `seed` | a list of texts | | `seed`, `sampling_param_seed` | ... |",
    ]


def test_the_page_has_the_settings_in_their_order():
    assert [name for name, _ in ROWS] == list(SETTINGS)


def test_the_page_has_the_labels_that_a_line_may_carry():
    listed = PAGE.partition("a line may carry ")[2].partition(" of its own")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == LABELS


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_another_kind_is_refused_in_the_kind_s_words(name):
    with pytest.raises(RequestError) as caught:
        request_of([1], {"max_tokens": 4, name: [[]]}, None)
    assert str(caught.value) == f"{name}: found [[]], expected {SETTINGS[name].kind.expected}"


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, setting.least - 1) for name, setting in NUMBERS.items()]
    + [(name, setting.most + 1) for name, setting in NUMBERS.items() if setting.most < 2**65],
)
def test_a_number_out_of_its_range_is_refused_in_the_range_s_words(name, value):
    with pytest.raises(RequestError) as caught:
        request_of([1], {"max_tokens": 4, name: value}, None).check(1000, 100, True)
    shown = value if isinstance(value, int) else f"{value:g}"
    assert str(caught.value) == f"{name}: found {shown}, expected {SETTINGS[name].range}"


@pytest.mark.parametrize("name", NUMBERS)
def test_both_ends_of_a_range_are_legal(name):
    """As far as others allow: no top-p is 0."""
    for end in (NUMBERS[name].least, NUMBERS[name].most):
        if abs(end) < 2**65 and (name, end) != ("top_p", 0):
            request_of([1], {"max_tokens": 4, name: end}, None).check(1000, 100, True)


def test_a_setting_that_is_left_out_is_legal():
    defaults = {field.name: field.default for field in OF_SAMPLING.values()}
    assert MISSING not in defaults.values()
    Sampling(**defaults).check(1000)
