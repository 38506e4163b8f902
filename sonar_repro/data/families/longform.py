"""Answers of several sentences to a page's paragraph: essays, reports, plans, letters, longer code."""

from __future__ import annotations

from .concepts import CONCEPTS, STEPS, TIPS
from .draw import Draw
from .facts import CONTRASTS
from .tables import CITIES, COUNTRIES, GOODS, MONTHS, NAMES, SURNAMES

Row = tuple[str, str, str]


def essay(draw: Draw) -> Row:
    topic = draw.pick(list(TIPS))
    tips = draw.sample(TIPS[topic], 6)
    start = draw.pick(["Few things are as useful as", "It is never too late to think about", "Everyone can improve at"])
    end = draw.pick(["None of this needs talent, only practice.", "Choose one of these and begin today."])
    text = (
        f"{start} {topic}. First of all: {tips[0][0].lower()}{tips[0][1:]} {tips[1]} "
        f"Then there are the small things. {tips[2]} {tips[3]} "
        f"In the long run, two more habits help. {tips[4]} {tips[5]} {end}"
    )
    how = draw.pick(
        [f"Write an essay about {topic}.", f"Write a detailed guide to {topic}.", f"Give a talk about {topic}."]
    )
    return how, "", text


def walkthrough(draw: Draw) -> Row:
    task, name = draw.pick(list(STEPS)), draw.pick(NAMES)
    parts = [part[0].lower() + part[1:-1] for part in STEPS[task]]
    minutes = draw.integer(1, 9) * 5
    closing = draw.pick(["Take your time with each step.", "With practice it goes faster."])
    text = (
        f"{name} needs about {minutes} minutes to {task}. First, {parts[0]}. Next, {parts[1]}. "
        f"After that, {parts[2]}. Then {parts[3]}. Finally, {parts[4]}. {closing}"
    )
    return f"Describe step by step how {name} can {task} in {minutes} minutes.", "", text


def sales(draw: Draw) -> Row:
    first = draw.integer(0, 8)
    months = MONTHS[first : first + 4]
    values = draw.sample(range(10, 99), 4)
    (thing, _, _), city = draw.pick(GOODS), draw.pick(CITIES)
    best, worst, change = max(values), min(values), "rose" if values[3] > values[0] else "fell"
    shown = ", ".join(f"{month} {value}" for month, value in zip(months, values))
    text = (
        f"The shop in {city} sold {sum(values)} {thing} in four months, {sum(values) / 4:g} a month on average. "
        f"The best month was {months[values.index(best)]} with {best}, "
        f"the weakest {months[values.index(worst)]} with {worst}. "
        f"Between {months[0]} and {months[3]} sales {change} by {abs(values[3] - values[0])}."
    )
    return (
        draw.pick(["Write a report on the sales.", "Analyze the data in a paragraph."]),
        f"{thing}, {city}: {shown}",
        text,
    )


def lecture(draw: Draw) -> Row:
    terms = draw.sample(list(CONCEPTS), 3)
    first, second, third = (CONCEPTS[term] for term in terms)
    how = draw.pick(
        [
            f"Explain {terms[0]}, {terms[1]} and {terms[2]}, with an example for the first.",
            f"Prepare notes for a lesson on {terms[0]}, {terms[1]} and {terms[2]}.",
        ]
    )
    return how, "", f"1. {first[0]} {first[1]} {first[2]}\n2. {second[0]} {second[1]}\n3. {third[0]} {third[1]}"


def depth(draw: Draw) -> Row:
    term, name = draw.pick(list(CONCEPTS)), draw.pick(NAMES)
    what, how, example = CONCEPTS[term]
    age = draw.integer(7, 15)
    text = (
        f"Good question, {name}! {what} How does that work? {how} Here is something you may know: {example} "
        f"Look around at home and try to find another example of {term}. If you find one, tell your class about it."
    )
    return f"Explain {term} to {name}, who is {age} years old, in a friendly way.", "", text


def debate(draw: Draw) -> Row:
    first, second, one, other, shared = draw.pick(CONTRASTS)
    name, rival = draw.sample(NAMES, 2)
    text = (
        f"{name} prefers {first}, because {first} {one}. {rival} prefers {second}, since {second} {other}. "
        f"Both have a point: {shared}. In the end {name} and {rival} agree that the choice depends on the situation, "
        f"and that there is room for {first} and {second} alike."
    )
    return f"Write a paragraph in which {name} and {rival} discuss {first} and {second}.", "", text


def tour(draw: Draw) -> Row:
    days = draw.integer(3, 4)
    route = draw.sample(COUNTRIES, days)
    lines = []
    for day, (country, capital, _, currency, language) in enumerate(route, 1):
        advice = f"Learn to say hello in {language}, and pay with the {currency}."
        lines.append(f"Stop {day}: {capital}, the capital of {country}. {advice}")
    return "Plan a trip through these countries, one stop each.", ", ".join(stop[0] for stop in route), "\n".join(lines)


def adventure(draw: Draw) -> Row:
    hero, friend = draw.sample(NAMES, 2)
    city, (thing, _, _) = draw.pick(CITIES), draw.pick(GOODS)
    weather = draw.pick(["a storm came up", "fog covered the road", "the sun burned", "snow began to fall"])
    helper = draw.pick(["an old woman", "a stray dog", "a young musician", "a bus driver"])
    text = (
        f"{hero} had to bring {thing} to {friend}, who lived in {city}. Halfway there {weather}, "
        f"and {hero} lost the way. Just then {helper} appeared and showed a path through the hills. "
        f"It was late when {hero} knocked on the door. "
        f'"I knew you would come," said {friend}, and they laughed until midnight.'
    )
    return (
        draw.pick(
            [f"Write a story about {hero}, {thing} and {city}.", f"Tell how {hero} travels to {city} with {thing}."]
        ),
        "",
        text,
    )


def application(draw: Draw) -> Row:
    name, surname, city, years = draw.pick(NAMES), draw.pick(SURNAMES), draw.pick(CITIES), draw.integer(2, 20)
    job, skill, result = draw.pick(
        [
            ("chef", "running a busy kitchen", "new menus that guests love"),
            ("nurse", "caring for patients on a large ward", "a calm and safe routine"),
            ("teacher", "planning clear lessons", "pupils who enjoy learning"),
            ("programmer", "testing code before it ships", "programs that rarely fail"),
            ("carpenter", "building furniture by hand", "work that lasts"),
            ("librarian", "organizing large collections", "readers who find what they need"),
        ]
    )
    text = (
        f"Dear Sir or Madam,\nI am writing to apply for the position of {job} in {city}. "
        f"I have {years} years of experience in {skill}. "
        f"My work has led to {result}. I learn quickly, I am reliable, and I enjoy working in a team. "
        f"I would be glad to meet you in person.\nYours faithfully,\n{name} {surname}"
    )
    return f"Write a cover letter for a {job}.", f"{name} {surname}, {years} years of experience, job in {city}", text


def budget(draw: Draw) -> Row:
    name, income = draw.pick(NAMES), draw.integer(16, 50) * 100
    rent, food, travel = draw.integer(5, 9) * 100, draw.integer(2, 4) * 100, draw.integer(1, 2) * 100
    spent = rent + food + travel
    given = f"income {income}, rent {rent}, food {food}, travel {travel}"
    text = (
        f"Step 1: add the costs. {rent} + {food} + {travel} = {spent}.\nStep 2: subtract them from the income. "
        f"{income} - {spent} = {income - spent}.\nStep 3: compare. {name} keeps {income - spent} a month, "
        f"which is {12 * (income - spent)} in a year. The largest cost is the rent."
    )
    return f"How much can {name} save each month and each year? Show your work.", given, text


# What the loop does, its name, the condition and what is added, each as source and as a function.
_LOOPS = (
    ("counts the even numbers", "count_even", "number % 2 == 0", lambda n: n % 2 == 0, "1", lambda n: 1),
    ("sums the numbers over five", "sum_over_five", "number > 5", lambda n: n > 5, "number", lambda n: n),
    (
        "sums the odd squares",
        "sum_odd_squares",
        "number % 2 == 1",
        lambda n: n % 2 == 1,
        "number * number",
        lambda n: n * n,
    ),
    ("counts the numbers over ten", "count_large", "number > 10", lambda n: n > 10, "1", lambda n: 1),
    ("sums the multiples of three", "sum_threes", "number % 3 == 0", lambda n: n % 3 == 0, "number", lambda n: n),
)


def program(draw: Draw) -> Row:
    purpose, name, condition, holds, gain, value = draw.pick(_LOOPS)
    numbers = [draw.integer(1, 30) for _ in range(4)]
    result = sum(value(number) for number in numbers if holds(number))
    text = (
        f"def {name}(numbers):\n    result = 0\n    for number in numbers:\n        if {condition}:\n"
        f"            result += {gain}\n    return result\n\nprint({name}({numbers}))  # {result}"
    )
    return f"Write a Python function with a loop that {purpose}, and show a call with {numbers}.", "", text


def shop_class(draw: Draw) -> Row:
    (thing, low, high), name = draw.pick(GOODS), draw.pick(["Shop", "Store", "Stock", "Basket"])
    price = draw.integer(low, high)
    text = (
        f"class {name}:\n    def __init__(self):\n        self.count = 0\n\n"
        f"    def add(self, n):\n        self.count += n\n\n"
        f"    def value(self):\n        return self.count * {price}"
    )
    return f"Write a Python class {name} that counts {thing} and gives their value at {price} each.", "", text


FAMILIES = [
    (7, essay),
    (7, walkthrough),
    (6, sales),
    (6, lecture),
    (6, depth),
    (6, debate),
    (6, tour),
    (7, adventure),
    (6, application),
    (5, budget),
    (4, program),
    (4, shop_class),
]
