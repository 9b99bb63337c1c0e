"""Prose-like documents: templated stories whose names, pronouns and facts agree across sentences."""

from __future__ import annotations

import random

from .kinds import (
    ANIMALS,
    COLORS,
    DAYS,
    DOMAINS,
    NUMBER_WORDS,
    PEOPLE,
    PET_NAMES,
    PLACES,
    Doc,
    invent,
    pick,
    pick_distinct,
    pick_or_invent,
    words,
)

HOBBIES = {
    "paint": ("a brush", "pictures"),
    "bake": ("an oven", "cakes"),
    "sew": ("a needle", "shirts"),
    "write": ("a pen", "letters"),
    "carve": ("a knife", "spoons"),
    "knit": ("some wool", "scarves"),
}
GOODS = words("bread cheese apples flowers milk honey eggs candles soap tea")


def pet_story(rng: random.Random) -> Doc:
    """A person and a pet through the day."""
    name, animal, color = pick(rng, tuple(PEOPLE)), pick(rng, tuple(ANIMALS)), pick(rng, COLORS)
    pet = pick_or_invent(rng, PET_NAMES).capitalize()
    she, _, her = PEOPLE[name]
    food, sound, bed = ANIMALS[animal]
    body = (
        f"{name} has a {color} {animal} called {pet}. Every morning {name} gives {pet} {food}. "
        f"{pet} {sound} when {she} comes home. In the evening {pet} sleeps in the {bed}, "
        f"and {name} reads {her} book. {name} loves {pet}."
    )
    ask = f"Tell a story about {name} and a {color} {animal} called {pet}."
    return Doc("prose", ask, body, f"pet {name} {animal} {pet} {color}")


def house(rng: random.Random) -> Doc:
    """Where a person lives and walks to."""
    name, color, place = pick(rng, tuple(PEOPLE)), pick(rng, COLORS), pick(rng, PLACES)
    she, _, her = PEOPLE[name]
    other = pick(rng, [p for p in PLACES if p != place])
    body = (
        f"{name} lives in a {color} house near the {place}. From {her} window {she} can see the {place}. "
        f"Every day {name} walks from the {color} house to the {other}. "
        f"{she.capitalize()} likes the {other}, but {she} likes the {place} more."
    )
    ask = f"Tell a story about {name}, who lives near the {place} and walks to the {other}. The house is {color}."
    return Doc("prose", ask, body, f"house {name} {color} {place} {other}")


def week(rng: random.Random) -> Doc:
    """Three places on three days in a row."""
    name, first = pick(rng, tuple(PEOPLE)), rng.randrange(7)
    she = PEOPLE[name][0]
    places = pick_distinct(rng, PLACES, 3)
    days = [DAYS[(first + offset) % 7] for offset in range(3)]
    route = f"the {places[0]}, the {places[1]} and the {places[2]}"
    body = (
        f"On {days[0]} {name} went to the {places[0]}. On {days[1]} {she} went to the {places[1]}. "
        f"On {days[2]} {she} went to the {places[2]}. "
        f"{name} liked {route}."
    )
    ask = f"{name} visits {route}, starting on {days[0]}. Tell it as a story."
    return Doc("prose", ask, body, f"week {name} {days[0]} {places}")


def hobby(rng: random.Random) -> Doc:
    """A hobby shared with a friend."""
    name, friend = pick_distinct(rng, tuple(PEOPLE), 2)
    verb, day = pick(rng, tuple(HOBBIES)), pick(rng, DAYS)
    tool, things = HOBBIES[verb]
    she, her, _ = PEOPLE[name]
    body = (
        f"{name} likes to {verb}. For that {she} needs {tool}. Every {day} {name} makes {things} "
        f"for {friend}. {friend} thanks {her} for the {things}. "
        f"Now {friend} wants to {verb} too, so {name} gives {friend} {tool}."
    )
    ask = f"Tell a story about {name}, who likes to {verb} every {day}, and {friend}."
    return Doc("prose", ask, body, f"hobby {name} {friend} {verb} {day}")


def shopping(rng: random.Random) -> Doc:
    """Two things bought in a shop."""
    name, day = pick(rng, tuple(PEOPLE)), pick(rng, DAYS)
    she, _, her = PEOPLE[name]
    first, second = pick_distinct(rng, GOODS, 2)
    body = (
        f"On {day} {name} goes to the shop to buy {first} and {second}. First {she} finds the {first}. "
        f"Then {she} finds the {second}. {name} pays and puts the {first} and the {second} into {her} bag."
    )
    ask = f"Tell a story about {name}, who buys {first} and {second} on {day}."
    return Doc("prose", ask, body, f"shop {name} {day} {first} {second}")


def city(rng: random.Random) -> Doc:
    """Facts about two cities."""
    first, second = pick_distinct(rng, tuple(DOMAINS["city"][1]), 2)
    parts = []
    for name in (first, second):
        country, river, language = DOMAINS["city"][1][name]
        parts.append(f"{name} is a city in {country}. It lies on the {river}. People in {name} speak {language}.")
    ask = f"Describe the cities {first} and {second}."
    return Doc("prose", ask, " ".join(parts), f"city {first} {second}")


def repeat(rng: random.Random) -> Doc:
    """Invented words, said again and again: nothing but copying."""
    words = [invent(rng) for _ in range(rng.randint(2, 4))]
    line, times = " ".join(words), rng.randint(2, 3)
    ask = f"Repeat {NUMBER_WORDS[times]} times: {line}"
    return Doc("prose", ask, "\n".join([line] * times), f"repeat {line}")


def small_talk(rng: random.Random) -> Doc:
    """Greetings: always trained on, never held out."""
    skills = "I can count, add, write small functions, make tables and tell short stories."
    pairs = (
        ("Hello", f"Hello! {skills}"),
        ("Hello!", f"Hello! {skills}"),
        ("Hi", f"Hello! {skills}"),
        ("Hi there!", f"Hello! {skills}"),
        ("Who are you?", f"I am a tiny model. {skills}"),
        ("What can you do?", skills),
        ("Thank you", "You are welcome!"),
        ("Thanks!", "You are welcome!"),
        ("How are you?", "I am fine, thank you. What can I do for you?"),
    )
    ask, body = rng.choice(pairs)
    return Doc("prose", ask, body, "")


MAKERS = (pet_story, pet_story, house, week, hobby, shopping, city, repeat, small_talk)
