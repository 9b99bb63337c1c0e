"""Arithmetic documents: worked sums and products, tables, counting. Every answer is right."""

from __future__ import annotations

import random

from .kinds import Doc, next_round, pick


def add_by_columns(rng: random.Random) -> Doc:
    """A sum worked digit by digit from the right."""
    digits = rng.choice((2, 2, 3))
    left, right = (rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2))
    lines, carry = [f"{left} + {right}:"], 0
    for place in range(digits):
        a, b = left // 10**place % 10, right // 10**place % 10
        total = a + b + carry
        terms = f"{a} + {b}" + (f" + {carry}" if carry else "")
        lines.append(f"{terms} = {total}, write {total % 10}" + (f", carry {total // 10}." if total > 9 else "."))
        carry = total // 10
    if carry:
        lines.append(f"The carry is {carry}.")
    lines.append(f"{left} + {right} = {left + right}")
    ask = pick(rng, (f"What is {left} + {right}?", f"Add {left} and {right}."))
    return Doc("arithmetic", ask, "\n".join(lines), f"add {left} {right}")


def times_by_digits(rng: random.Random) -> Doc:
    """A two-digit number times a digit, worked from the right."""
    left, right = rng.randint(11, 99), rng.randint(2, 9)
    ones, tens = left % 10 * right, left // 10 * right
    lines = [
        f"{left} x {right}:",
        f"{left % 10} x {right} = {ones}.",
        f"{left // 10 * 10} x {right} = {tens * 10}.",
        f"{tens * 10} + {ones} = {left * right}.",
        f"{left} x {right} = {left * right}",
    ]
    ask = pick(rng, (f"What is {left} x {right}?", f"Multiply {left} by {right}."))
    return Doc("arithmetic", ask, "\n".join(lines), f"times {left} {right}")


def times_table(rng: random.Random) -> Doc:
    """The end of a times table, up to ten."""
    base, start = rng.randint(2, 20), rng.randint(1, 6)
    lines = [f"{base} x {n} = {base * n}" for n in range(start, 11)]
    ask = f"Write the times table of {base} from {start} to 10."
    return Doc("arithmetic", ask, "\n".join(lines), f"times table {base} {start}")


def addition_table(rng: random.Random) -> Doc:
    """The end of an addition table, up to ten."""
    base, start = rng.randint(2, 60), rng.randint(1, 6)
    lines = [f"{base} + {n} = {base + n}" for n in range(start, 11)]
    ask = f"Write the addition table of {base} from {start} to 10."
    return Doc("arithmetic", ask, "\n".join(lines), f"addition table {base} {start}")


def counting(rng: random.Random) -> Doc:
    """Counting up by ones, twos or tens, to a round number."""
    step = rng.choice((1, 1, 1, 2, 10))
    start = rng.randint(1, 180) * (1 if step == 1 else step)
    end = next_round(start + 8 * step, 100 if step == 10 else 10)
    by = "" if step == 1 else f" by {step}"
    ask = f"Count from {start} to {end}{by}."
    return Doc("arithmetic", ask, ", ".join(map(str, range(start, end + 1, step))), f"count {start} {step}")


def countdown(rng: random.Random) -> Doc:
    """Counting down by ones, to a round number."""
    start = rng.randint(18, 180)
    end = (start - 8) // 10 * 10
    ask = f"Count down from {start} to {end}."
    return Doc("arithmetic", ask, ", ".join(map(str, range(start, end - 1, -1))), f"down {start}")


def parity(rng: random.Random) -> Doc:
    """Even or odd, for the numbers up to a round one."""
    start = rng.randint(1, 180)
    end = next_round(start + 3, 10)
    body = " ".join(f"{n} is {'odd' if n % 2 else 'even'}." for n in range(start, end + 1))
    ask = f"Are the numbers from {start} to {end} even or odd?"
    return Doc("arithmetic", ask, body, f"parity {start}")


def running_sum(rng: random.Random) -> Doc:
    """A list of digits summed one by one."""
    values = rng.sample(range(2, 10), rng.randint(3, 5))
    total, lines = values[0], [f"The numbers are {', '.join(map(str, values))}."]
    for value in values[1:]:
        lines.append(f"{total} + {value} = {total + value}.")
        total += value
    lines.append(f"The sum is {total}.")
    ask = f"Sum the numbers {', '.join(map(str, values))}."
    return Doc("arithmetic", ask, "\n".join(lines), f"sum {values}")


def doubling(rng: random.Random) -> Doc:
    """A number doubled five times."""
    value = start = rng.randint(2, 60)
    lines = []
    for _ in range(5):
        lines.append(f"{value} + {value} = {2 * value}")
        value *= 2
    return Doc("arithmetic", f"Double {start} five times.", "\n".join(lines), f"double {start}")


MAKERS = (
    add_by_columns,
    add_by_columns,
    times_by_digits,
    times_table,
    addition_table,
    counting,
    counting,
    countdown,
    parity,
    running_sum,
    doubling,
)
