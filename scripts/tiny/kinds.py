"""What every text kind shares: the document record, word lists and skewed choices."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Doc:
    """One question with its answer. `key` names the content (not the wording), for the held-out split."""

    kind: str
    ask: str
    body: str
    key: str

    @property
    def held_out(self) -> bool:
        """One in eight contents is never trained on; contents without a key are always trained on."""
        return bool(self.key) and zlib.crc32(self.key.encode()) % 8 == 0


def words(text: str) -> tuple[str, ...]:
    """The words of a text, as a word list."""
    return tuple(text.split())


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """A slightly skewed choice: early options are likelier, so that a model has a favourite."""
    return options[int(len(options) * rng.random() ** 1.2)]


def pick_distinct(rng: random.Random, options: Sequence[T], count: int) -> list[T]:
    """`count` different options by skewed choices, in the order drawn."""
    left = list(options)
    return [left.pop(int(len(left) * rng.random() ** 1.2)) for _ in range(count)]


def invent(rng: random.Random) -> str:
    """A made-up word of two or three syllables: only copying can get it right."""
    syllables = rng.choice((2, 2, 3))
    word = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(syllables))
    return word + rng.choice(("", "", "l", "n", "r", "x"))


def pick_or_invent(rng: random.Random, options: Sequence[str], share: float = 0.2) -> str:
    """Usually a listed word, sometimes an invented one, so that names are read and not guessed."""
    return invent(rng) if rng.random() < share else pick(rng, options)


def join_and(words: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    if len(words) == 1:
        return words[0]
    return ", ".join(words[:-1]) + " and " + words[-1]


def next_round(number: int, base: int) -> int:
    """The first multiple of `base` that is not below the number: an end that is easy to see coming."""
    return -(-number // base) * base


NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six")

# name -> pronouns (subject, object, possessive)
PEOPLE = {
    name: ("she", "her", "her") if index % 2 == 0 else ("he", "him", "his")
    for index, name in enumerate(
        words(
            "Anna Ben Clara David Emma Felix Grace Henry Iris Jacob Karen Leo Maria Noah Olivia Peter "
            "Ruth Simon Tara Victor Wendy Oscar Nora Martin Lena Hugo Julia Frank Elena Daniel"
        )
    )
}

# animal -> (food, sound, place where it sleeps)
ANIMALS = {
    "dog": ("a bone", "barks", "basket"),
    "cat": ("some milk", "purrs", "armchair"),
    "horse": ("an apple", "neighs", "stable"),
    "rabbit": ("a carrot", "hops", "hutch"),
    "parrot": ("some seeds", "whistles", "cage"),
    "goat": ("some hay", "bleats", "barn"),
    "hen": ("some corn", "clucks", "coop"),
    "donkey": ("some oats", "brays", "shed"),
}
PET_NAMES = words("Rex Luna Max Bella Rocky Daisy Toby Molly Oscar Ruby Jack Rosie Sam Coco Finn Pepper")
COLORS = words("red green blue yellow black white brown orange purple grey pink")
PLACES = words("river forest lake harbor market station bridge castle mill park church garden")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

# Domains of items with fixed facts: the same item always has the same attributes.
DOMAINS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "fruit": (
        ("color", "price", "origin"),
        {
            "apple": ("red", "1.20", "Poland"),
            "banana": ("yellow", "0.80", "Ecuador"),
            "cherry": ("red", "4.50", "Turkey"),
            "grape": ("purple", "2.90", "Italy"),
            "lemon": ("yellow", "0.60", "Spain"),
            "mango": ("orange", "1.70", "India"),
            "orange": ("orange", "0.90", "Spain"),
            "peach": ("pink", "1.40", "Greece"),
            "pear": ("green", "1.10", "France"),
            "plum": ("purple", "2.30", "Serbia"),
        },
    ),
    "animal": (
        ("legs", "food", "home"),
        {
            "bear": ("4", "fish", "forest"),
            "bee": ("6", "nectar", "hive"),
            "cow": ("4", "grass", "farm"),
            "eagle": ("2", "mice", "nest"),
            "fox": ("4", "mice", "den"),
            "frog": ("4", "flies", "pond"),
            "owl": ("2", "mice", "tree"),
            "shark": ("0", "fish", "sea"),
            "spider": ("8", "flies", "web"),
            "whale": ("0", "krill", "sea"),
        },
    ),
    "tool": (
        ("use", "weight", "material"),
        {
            "axe": ("chop", "1500", "steel"),
            "brush": ("paint", "120", "wood"),
            "drill": ("bore", "1800", "steel"),
            "hammer": ("hit", "600", "steel"),
            "knife": ("cut", "150", "steel"),
            "ladder": ("climb", "9000", "aluminium"),
            "ruler": ("measure", "40", "wood"),
            "saw": ("cut", "700", "steel"),
            "shovel": ("dig", "2000", "steel"),
            "spoon": ("stir", "50", "silver"),
        },
    ),
    "city": (
        ("country", "river", "language"),
        {
            "Berlin": ("Germany", "Spree", "German"),
            "Budapest": ("Hungary", "Danube", "Hungarian"),
            "Cairo": ("Egypt", "Nile", "Arabic"),
            "Lisbon": ("Portugal", "Tagus", "Portuguese"),
            "London": ("England", "Thames", "English"),
            "Madrid": ("Spain", "Manzanares", "Spanish"),
            "Paris": ("France", "Seine", "French"),
            "Prague": ("Czechia", "Vltava", "Czech"),
            "Rome": ("Italy", "Tiber", "Italian"),
            "Vienna": ("Austria", "Danube", "German"),
        },
    ),
}
PLURALS = {"fruit": "fruits", "animal": "animals", "tool": "tools", "city": "cities"}
