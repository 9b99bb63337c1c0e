"""Table documents: markdown, CSV and JSON records about items with fixed facts, and conversions."""

from __future__ import annotations

import random

from .kinds import DOMAINS, NUMBER_WORDS, PLURALS, Doc, join_and, next_round, pick, pick_distinct

Rows = list[list[str]]
NUMERIC_COLUMNS = {"price", "legs", "weight"}


def markdown(header: list[str], rows: Rows) -> str:
    """The table in markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def csv(header: list[str], rows: Rows) -> str:
    """The table as comma-separated lines."""
    return "\n".join(",".join(line) for line in [header, *rows])


def json_records(header: list[str], rows: Rows) -> str:
    """The table as a JSON list of objects, one a line."""

    def value(column: str, text: str) -> str:
        return text if column in NUMERIC_COLUMNS else f'"{text}"'

    lines = ["{" + ", ".join(f'"{c}": {value(c, t)}' for c, t in zip(header, row, strict=True)) + "}" for row in rows]
    return "[\n  " + ",\n  ".join(lines) + "\n]"


FORMATS = {"markdown table": markdown, "CSV table": csv, "JSON list": json_records}


def draw_table(rng: random.Random, most_rows: int) -> tuple[str, list[str], list[str], Rows]:
    """(domain, chosen columns, header, rows) of a table with one to three fact columns."""
    domain = pick(rng, tuple(DOMAINS))
    columns, facts = DOMAINS[domain]
    chosen = pick_distinct(rng, columns, rng.choice((1, 1, 2)))
    names = pick_distinct(rng, tuple(facts), rng.randint(2, most_rows))
    rows = [[name, *(facts[name][columns.index(column)] for column in chosen)] for name in names]
    return domain, chosen, [domain, *chosen], rows


def named_table(rng: random.Random) -> Doc:
    """A table whose rows the question names."""
    _, chosen, header, rows = draw_table(rng, 4)
    style = pick(rng, tuple(FORMATS))
    names = [row[0] for row in rows]
    ask = f"Make a {style} of {join_and(names)} with {join_and(chosen)}."
    return Doc("table", ask, FORMATS[style](header, rows), f"named {style} {names} {chosen}")


def open_table(rng: random.Random) -> Doc:
    """A table whose rows are up to the writer: the first items of the domain, from a start."""
    domain = pick(rng, tuple(DOMAINS))
    columns, facts = DOMAINS[domain]
    column, count = pick(rng, columns), rng.randint(2, 4)
    names = list(facts)[:count]
    rows = [[name, facts[name][columns.index(column)]] for name in names]
    style = pick(rng, tuple(FORMATS))
    ask = f"Make a {style} of {NUMBER_WORDS[count]} {PLURALS[domain]} with {column}."
    return Doc("table", ask, FORMATS[style]([domain, column], rows), "")


def convert(rng: random.Random) -> Doc:
    """The same records in another format."""
    _, _, header, rows = draw_table(rng, 3)
    source, target = rng.choice([(a, b) for a in FORMATS for b in FORMATS if a != b])
    ask = f"Turn this {source} into a {target}:\n{FORMATS[source](header, rows)}"
    return Doc("table", ask, FORMATS[target](header, rows), f"convert {source} {target} {rows}")


def number_table(rng: random.Random) -> Doc:
    """A table of numbers, up to a round one, with their doubles or successors."""
    start = rng.randint(1, 90)
    end = next_round(start + 3, 10)
    word, rule = rng.choice((("double", lambda n: 2 * n), ("next", lambda n: n + 1)))
    style = pick(rng, ("markdown table", "CSV table"))
    rows = [[str(n), str(rule(n))] for n in range(start, end + 1)]
    ask = f"Make a {style} of the numbers from {start} to {end} with {word}."
    return Doc("table", ask, FORMATS[style](["number", word], rows), f"numbers {style} {start} {word}")


MAKERS = (named_table, named_table, open_table, convert, number_table)
