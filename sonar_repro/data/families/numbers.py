"""Arithmetic, units, dates and sequences: answers are computed, so they are right."""

from __future__ import annotations

import datetime
from fractions import Fraction

from .draw import Draw
from .tables import CITIES, GOODS, MONTHS, NAMES, PLACES

Row = tuple[str, str, str]


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def arithmetic(draw: Draw) -> Row:
    a, b = draw.integer(12, 989), draw.integer(3, 97)
    word, sign, value = draw.pick(
        [("sum", "+", a + b), ("difference", "-", a - b), ("product", "*", a * b), ("sum", "+", b + a)]
    )
    style = draw.integer(0, 3)
    if style == 0:
        return f"What is {a} {sign} {b}?", "", str(value)
    if style == 1:
        return f"Calculate the {word} of the two numbers.", f"{a}, {b}", str(value)
    if style == 2:
        return "Solve the expression and show the result.", f"{a} {sign} {b}", f"{a} {sign} {b} = {value}"
    return f"Find the {word} of {a} and {b}.", "", f"The {word} of {a} and {b} is {value}."


def shopping(draw: Draw) -> Row:
    name, (thing, low, high) = draw.pick(NAMES), draw.pick(GOODS)
    count, price = draw.integer(3, 14), draw.integer(low, high)
    paid = ((count * price) // 10 + 1) * 10
    story = f"{name} buys {count} {thing} at ${price} each"
    if draw.chance(0.5):
        answer = f"{count} {thing} at ${price} each cost {count} x {price} = ${count * price}."
        return (
            draw.pick(["Solve the word problem.", "Answer the question and explain the step."]),
            f"{story}. What is the total?",
            answer,
        )
    change = paid - count * price
    answer = (
        f"The {thing} cost {count} x {price} = ${count * price}. The change is {paid} - {count * price} = ${change}."
    )
    return f"{story} and pays with ${paid}. How much change is due?", "", answer


def travel(draw: Draw) -> Row:
    speed, hours = draw.integer(4, 24) * 5, draw.integer(2, 9)
    start, end = draw.sample(CITIES, 2)
    vehicle = draw.pick(["train", "bus", "car", "truck"])
    if draw.chance(0.5):
        question = (
            f"A {vehicle} leaves {start} at {speed} km/h and reaches {end} after {hours} hours. How far did it go?"
        )
        return question, "", f"Distance is speed times time: {speed} x {hours} = {speed * hours} km."
    question = f"The road from {start} to {end} is {speed * hours} km. How long does a {vehicle} take at {speed} km/h?"
    return (
        "Work out the travel time.",
        question,
        f"Time is distance over speed: {speed * hours} / {speed} = {hours} hours.",
    )


def percentage(draw: Draw) -> Row:
    percent, base = draw.integer(1, 19) * 5, draw.integer(2, 60) * 20
    value = percent * base // 100
    style = draw.integer(0, 2)
    if style == 0:
        return f"What is {percent}% of {base}?", "", str(value)
    if style == 1:
        return "Calculate the discounted price.", f"Price: ${base}, discount: {percent}%", f"${base - value}"
    answer = f"{percent}% of {base} is {value}, so the new value is {base} + {value} = {base + value}."
    return f"Increase {base} by {percent} percent and explain how.", "", answer


def fraction(draw: Draw) -> Row:
    denominator, factor = draw.integer(2, 12), draw.integer(2, 9)
    numerator = draw.integer(1, denominator - 1)
    reduced = Fraction(numerator, denominator)
    shown = f"{numerator * factor}/{denominator * factor}"
    if draw.chance(0.5):
        return draw.pick(["Simplify the fraction.", "Reduce this fraction to lowest terms."]), shown, str(reduced)
    divisor = numerator * factor // reduced.numerator
    return f"Simplify {shown} and show how.", "", f"Divide the top and the bottom by {divisor}: {shown} = {reduced}."


def statistics(draw: Draw) -> Row:
    values = [draw.integer(1, 60) for _ in range(draw.pick([3, 5, 7]))]
    listed, ordered = ", ".join(map(str, values)), sorted(values)
    kind = draw.pick(["mean", "median", "range", "maximum", "minimum", "sum"])
    answers = {
        "mean": _number(sum(values) / len(values)),
        "median": str(ordered[len(values) // 2]),
        "range": str(ordered[-1] - ordered[0]),
        "maximum": str(ordered[-1]),
        "minimum": str(ordered[0]),
        "sum": str(sum(values)),
    }
    if kind == "mean" and draw.chance(0.5):
        answer = f"The sum is {sum(values)} and there are {len(values)} numbers, so the mean is {answers['mean']}."
        return "Compute the average of these numbers, step by step.", listed, answer
    return draw.pick([f"Find the {kind} of the numbers.", f"What is the {kind} of this list?"]), listed, answers[kind]


_UNITS = [
    ("kilometers", "meters", 1000),
    ("meters", "centimeters", 100),
    ("hours", "minutes", 60),
    ("days", "hours", 24),
    ("kilograms", "grams", 1000),
    ("liters", "milliliters", 1000),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
    ("yards", "feet", 3),
    ("minutes", "seconds", 60),
    ("gallons", "quarts", 4),
    ("pounds", "ounces", 16),
]


def units(draw: Draw) -> Row:
    large, small, factor = draw.pick(_UNITS)
    amount = draw.integer(2, 90)
    if draw.chance(0.4):
        return f"Convert {amount} {large} to {small}.", "", f"{amount * factor} {small}"
    if draw.chance(0.5):
        return (
            f"How many {large} are {amount * factor} {small}?",
            "",
            f"{amount * factor} {small} are {amount} {large}.",
        )
    answer = (
        f"There are {factor} {small} to one, so {amount} {large} are {amount} x {factor} = {amount * factor} {small}."
    )
    return "Convert the units and explain the step.", f"{amount} {large} to {small}", answer


def temperature(draw: Draw) -> Row:
    celsius = draw.integer(-8, 20) * 5
    fahrenheit = celsius * 9 // 5 + 32
    if draw.chance(0.5):
        return (
            f"Convert {celsius} degrees Celsius to Fahrenheit.",
            "",
            f"{celsius} degrees Celsius is {fahrenheit} degrees Fahrenheit.",
        )
    return "Convert the temperature to Celsius.", f"{fahrenheit} F", f"{celsius} C"


def _day(draw: Draw) -> datetime.date:
    return datetime.date(draw.integer(1950, 2049), draw.integer(1, 12), draw.integer(1, 28))


def _spoken(day: datetime.date) -> str:
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"


def add_days(draw: Draw) -> Row:
    day, delta = _day(draw), draw.integer(3, 120)
    if draw.chance(0.5):
        return (
            f"What date is {delta} days after the given date?",
            _spoken(day),
            _spoken(day + datetime.timedelta(delta)),
        )
    earlier = day - datetime.timedelta(delta)
    return f"Which date was {delta} days before {_spoken(day)}?", "", f"It was {_spoken(earlier)}."


_WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def weekday(draw: Draw) -> Row:
    day = _day(draw)
    name = _WEEKDAYS[day.weekday()]
    if draw.chance(0.5):
        return "Name the day of the week of this date.", _spoken(day), name
    return f"What day of the week is {_spoken(day)}?", "", f"{_spoken(day)} is a {name}."


def date_format(draw: Draw) -> Row:
    day = _day(draw)
    target, shown = draw.pick(
        [("YYYY-MM-DD", day.isoformat()), ("DD/MM/YYYY", f"{day.day:02}/{day.month:02}/{day.year}")]
    )
    return draw.pick([f"Rewrite the date as {target}.", f"Format this date as {target}."]), _spoken(day), shown


def sequence(draw: Draw) -> Row:
    start, step, length = draw.integer(1, 30), draw.integer(2, 12), draw.integer(4, 6)
    if draw.chance(0.3):
        start, step = draw.integer(1, 5), draw.pick([2, 3])
        terms = [start * step**i for i in range(length + 1)]
        rule = f"Each term is {step} times the one before it"
    else:
        terms = [start + step * i for i in range(length + 1)]
        rule = f"Each term is {step} more than the one before it"
    listed = ", ".join(map(str, terms[:-1]))
    if draw.chance(0.5):
        return draw.pick(["Give the next number in the sequence.", "What comes next?"]), listed, str(terms[-1])
    return "Explain the pattern and give the next number.", listed, f"{rule}, so the next number is {terms[-1]}."


def sort_numbers(draw: Draw) -> Row:
    values = [draw.integer(1, 99) for _ in range(draw.integer(4, 8))]
    down = draw.chance(0.5)
    order = draw.pick(["descending", "from largest to smallest"] if down else ["ascending", "from smallest to largest"])
    how = f"in {order} order" if " " not in order else order
    return f"Sort the numbers {how}.", ", ".join(map(str, values)), ", ".join(map(str, sorted(values, reverse=down)))


def geometry(draw: Draw) -> Row:
    a, b = draw.integer(2, 40), draw.integer(2, 40)
    place = draw.pick(PLACES)
    kind = draw.integer(0, 3)
    if kind == 0:
        return (
            f"Find the area of a rectangle with sides {a} cm and {b} cm.",
            "",
            f"The area is {a} x {b} = {a * b} square cm.",
        )
    if kind == 1:
        return (
            f"A {place} is {a} m long and {b} m wide. What is its perimeter?",
            "",
            f"2 x ({a} + {b}) = {2 * (a + b)} m",
        )
    if kind == 2:
        return "Compute the area of the square.", f"side = {a}", str(a * a)
    return f"What is the volume of a box of {a} by {b} by 3?", "", f"{a} x {b} x 3 = {a * b * 3}"


def compare_numbers(draw: Draw) -> Row:
    a, b = draw.integer(1, 9999), draw.integer(1, 9999)
    if a == b:
        b += 1
    larger, smaller = max(a, b), min(a, b)
    if draw.chance(0.5):
        return draw.pick(["Which number is larger?", "Pick the greater number."]), f"{a} or {b}", str(larger)
    return f"Compare {a} and {b}.", "", f"{larger} is greater than {smaller} by {larger - smaller}."


def parity_and_primes(draw: Draw) -> Row:
    n = draw.integer(2, 400)
    if draw.chance(0.4):
        return "Is the number even or odd?", str(n), "Even" if n % 2 == 0 else "Odd"
    divisor = next((d for d in range(2, n) if n % d == 0), None)
    if divisor is None:
        return f"Is {n} a prime number?", "", f"Yes, {n} is prime: its only divisors are 1 and {n}."
    return f"Is {n} a prime number?", "", f"No, {n} is not prime: {n} = {divisor} x {n // divisor}."


def number_bases(draw: Draw) -> Row:
    n = draw.integer(3, 255)
    name, shown = draw.pick(
        [("binary", f"{n:b}"), ("hexadecimal", f"{n:X}"), ("binary", f"{n:b}"), ("octal", f"{n:o}")]
    )
    if draw.chance(0.5):
        return f"Convert the decimal number to {name}.", str(n), shown
    return f"Write {n} in {name}.", "", f"{n} in {name} is {shown}."


_ROMAN = [
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
]


def roman(draw: Draw) -> Row:
    n = rest = draw.integer(1, 2049)
    letters = ""
    for value, letter in _ROMAN:
        letters += letter * (rest // value)
        rest %= value
    if draw.chance(0.5):
        return draw.pick(["Write the number in Roman numerals.", "Convert to Roman numerals."]), str(n), letters
    return draw.pick(["What number is this Roman numeral?", "Convert from Roman numerals."]), letters, str(n)


FAMILIES = [
    (3, arithmetic),
    (4, shopping),
    (3, travel),
    (2, percentage),
    (2, fraction),
    (3, statistics),
    (3, units),
    (1, temperature),
    (2, add_days),
    (2, weekday),
    (1, date_format),
    (3, sequence),
    (2, sort_numbers),
    (2, geometry),
    (1, compare_numbers),
    (2, parity_and_primes),
    (2, number_bases),
    (2, roman),
]
