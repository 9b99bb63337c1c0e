"""Code-like documents: small Python functions, loops, classes and tests."""

from __future__ import annotations

import random

from .kinds import Doc, join_and, next_round, pick, pick_distinct, pick_or_invent, words

NOUNS = words("order user item book car ticket player file lamp room song plant task coin card shop train door")
ATTRIBUTES = words("price name color size weight age score speed length count level width title rank")
NUMERIC = words("price size weight age score speed length count level width rank")
OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
COMPARE = {"above": ">", "below": "<", "equal to": "=="}


def article(word: str) -> str:
    """The word with its indefinite article."""
    return ("an " if word[0] in "aeiou" else "a ") + word


def a_class(rng: random.Random) -> Doc:
    """A class with attributes and a method that shows them."""
    noun = pick_or_invent(rng, NOUNS)
    attributes = pick_distinct(rng, ATTRIBUTES, rng.choice((2, 2, 3)))
    lines = [f"class {noun.capitalize()}:", f'    """{article(noun).capitalize()} with {join_and(attributes)}."""', ""]
    lines.append(f"    def __init__(self, {', '.join(attributes)}):")
    lines += [f"        self.{attribute} = {attribute}" for attribute in attributes]
    lines += ["", "    def show(self):"]
    lines += [f'        print("{attribute}:", self.{attribute})' for attribute in attributes]
    ask = f"Write a class {noun.capitalize()} with {join_and(attributes)}."
    return Doc("code", ask, "\n".join(lines), f"class {noun} {attributes}")


def a_total(rng: random.Random) -> Doc:
    """A loop that totals an attribute."""
    noun, attribute = pick_or_invent(rng, NOUNS), pick(rng, NUMERIC)
    body = (
        f"def total_{attribute}({noun}s):\n"
        f'    """Return the total {attribute} of all {noun}s."""\n'
        f"    total = 0\n"
        f"    for {noun} in {noun}s:\n"
        f"        total += {noun}.{attribute}\n"
        f"    return total"
    )
    ask = f"Write a function for the total {attribute} of all {noun}s."
    return Doc("code", ask, body, f"total {noun} {attribute}")


def a_filter(rng: random.Random) -> Doc:
    """A loop that collects the items on one side of a limit."""
    noun, attribute, relation = pick_or_invent(rng, NOUNS), pick(rng, NUMERIC), pick(rng, tuple(COMPARE))
    body = (
        f"def find_{noun}s({noun}s, limit):\n"
        f'    """Return the {noun}s with {attribute} {relation} limit."""\n'
        f"    found = []\n"
        f"    for {noun} in {noun}s:\n"
        f"        if {noun}.{attribute} {COMPARE[relation]} limit:\n"
        f"            found.append({noun})\n"
        f"    return found"
    )
    ask = f"Write a function that finds {noun}s with {attribute} {relation} a limit."
    return Doc("code", ask, body, f"filter {noun} {attribute} {relation}")


def a_binary(rng: random.Random) -> Doc:
    """A function of two values."""
    verb, noun = pick(rng, tuple(OPERATIONS)), pick(rng, NUMERIC)
    first, second = rng.choice((("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")))
    body = (
        f"def {verb}_{noun}s({first}, {second}):\n"
        f'    """{verb.capitalize()} {noun} {first} and {noun} {second}."""\n'
        f"    return {first} {OPERATIONS[verb]} {second}"
    )
    ask = f"Write a function to {verb} {noun}s {first} and {second}."
    return Doc("code", ask, body, f"binary {verb} {noun} {first}")


def a_largest(rng: random.Random) -> Doc:
    """A search for the largest or smallest item."""
    noun, attribute = pick_or_invent(rng, NOUNS), pick(rng, NUMERIC)
    word, sign = rng.choice((("largest", ">"), ("smallest", "<")))
    body = (
        f"def {word}_{noun}({noun}s):\n"
        f'    """Return the {noun} with the {word} {attribute}."""\n'
        f"    best = {noun}s[0]\n"
        f"    for {noun} in {noun}s:\n"
        f"        if {noun}.{attribute} {sign} best.{attribute}:\n"
        f"            best = {noun}\n"
        f"    return best"
    )
    ask = f"Write a function for the {noun} with the {word} {attribute}."
    return Doc("code", ask, body, f"best {noun} {attribute} {word}")


def a_counter(rng: random.Random) -> Doc:
    """Counts by attribute in a dictionary."""
    noun, attribute = pick_or_invent(rng, NOUNS), pick(rng, ATTRIBUTES)
    body = (
        f"def count_by_{attribute}({noun}s):\n"
        f'    """Count the {noun}s of every {attribute}."""\n'
        f"    counts = {{}}\n"
        f"    for {noun} in {noun}s:\n"
        f"        counts[{noun}.{attribute}] = counts.get({noun}.{attribute}, 0) + 1\n"
        f"    return counts"
    )
    ask = f"Write a function that counts {noun}s by {attribute}."
    return Doc("code", ask, body, f"counter {noun} {attribute}")


def a_loop(rng: random.Random) -> Doc:
    """A printing loop and what it prints."""
    start, factor = rng.randint(1, 95), rng.choice((1, 1, 10))
    stop = next_round(start + 4, 10)
    inner = "i" if factor == 1 else f"i * {factor}"
    printed = ", ".join(str(i * factor) for i in range(start, stop))
    body = f"for i in range({start}, {stop}):\n    print({inner})\n# prints {printed}"
    ask = f"Write a loop that prints {inner} for i from {start} to {stop - 1}."
    return Doc("code", ask, body, f"loop {start} {factor}")


def a_test(rng: random.Random) -> Doc:
    """Tests whose asserted results are right."""
    verb = rng.choice(("add", "multiply"))
    first, second, count = rng.randint(1, 30), rng.randint(2, 9), 4
    lines = [f"def test_{verb}_{second}():"]
    for value in range(first, first + count):
        result = value + second if verb == "add" else value * second
        lines.append(f"    assert {verb}({value}, {second}) == {result}")
    ask = f"Write four tests for {verb} with {second}, starting at {first}."
    return Doc("code", ask, "\n".join(lines), f"test {verb} {first} {second}")


MAKERS = (a_class, a_total, a_filter, a_binary, a_largest, a_counter, a_loop, a_test)
