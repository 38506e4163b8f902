"""Geography, science and everyday knowledge, short explanations, tips and steps."""

from __future__ import annotations

from .concepts import CONCEPTS, STEPS, TIPS
from .draw import Draw
from .facts import CAUSES, CONTRASTS, FACTS
from .tables import COUNTRIES, ELEMENTS

Row = tuple[str, str, str]
_COUNTS = {2: "two", 3: "three", 4: "four"}


def country(draw: Draw) -> Row:
    name, capital, continent, currency, language = draw.pick(COUNTRIES)
    return draw.pick(
        [
            (f"What is the capital of {name}?", "", capital),
            ("Name the capital of the country.", name, f"The capital of {name} is {capital}."),
            (f"On which continent is {name}?", "", continent),
            ("Which country has this capital?", capital, name),
            (f"Which currency is used in {name}?", "", f"The currency of {name} is the {currency}."),
            (f"Name an official language of {name}.", "", language),
            (
                f"Describe {name} in one sentence.",
                "",
                f"{name} is a country in {continent}; its capital is {capital} and {language} is spoken there.",
            ),
            ("Fill in the blank.", f"{capital} is the capital of ____.", name),
        ]
    )


def countries(draw: Draw) -> Row:
    chosen = draw.sample(COUNTRIES, draw.integer(2, 3))
    names = ", ".join(entry[0] for entry in chosen)
    if draw.chance(0.5):
        return "Name the capital of each country.", names, "\n".join(f"{entry[0]}: {entry[1]}" for entry in chosen)
    first, second = chosen[0], chosen[1]
    same = first[2] == second[2]
    answer = (
        f"Yes, both are in {first[2]}."
        if same
        else f"No, {first[0]} is in {first[2]} and {second[0]} is in {second[2]}."
    )
    return f"Are {first[0]} and {second[0]} on the same continent?", "", answer


def element(draw: Draw) -> Row:
    name, symbol, number = draw.pick(ELEMENTS)
    return draw.pick(
        [
            (f"What is the chemical symbol of {name}?", "", symbol),
            ("Which element has this symbol?", symbol, name.capitalize()),
            (f"What is the atomic number of {name}?", "", f"The atomic number of {name} is {number}."),
            (f"How many protons has an atom of {name}?", "", f"An atom of {name} has {number} protons."),
            ("Name the element with this atomic number.", str(number), f"{name.capitalize()} ({symbol})"),
        ]
    )


def fact(draw: Draw) -> Row:
    question, answer = draw.pick(FACTS)
    style = draw.integer(0, 2)
    if style == 0:
        return question, "", answer
    if style == 1:
        return (
            draw.pick(["Answer the question.", "Answer the trivia question.", "Give a short answer."]),
            question,
            f"{answer}.",
        )
    wrong = draw.pick([other for _, other in FACTS if other != answer])
    shown = draw.shuffled([answer, wrong])
    return (
        "Choose the right answer.",
        f"{question} A: {shown[0]} B: {shown[1]}",
        f"{'AB'[shown.index(answer)]}: {answer}",
    )


def explain(draw: Draw) -> Row:
    term = draw.pick(list(CONCEPTS))
    what, how, example = CONCEPTS[term]
    style = draw.integer(0, 6)
    if style == 0:
        return draw.pick([f"Define {term} in one sentence.", f"What is {term}?", f"Briefly explain {term}."]), "", what
    if style == 1:
        return (
            draw.pick([f"Explain {term}.", f"Describe {term} in simple terms.", f"Tell me about {term}."]),
            "",
            f"{what} {how}",
        )
    if style == 2:
        return draw.pick([f"Give an example of {term}.", f"Illustrate {term} with an example."]), "", example
    if style == 3:
        return (
            draw.pick([f"Explain {term} with an example.", f"Teach a child about {term}."]),
            "",
            f"{what} {how} For example: {example}",
        )
    if style == 4:
        return draw.pick(["Explain the term.", "Define the term.", "Write a short definition."]), term, f"{what} {how}"
    if style == 5:
        other = draw.pick([key for key in CONCEPTS if key != term])
        return (
            draw.pick(["Define both terms.", "Explain the two terms briefly."]),
            f"{term}; {other}",
            f"{what} {CONCEPTS[other][0]}",
        )
    return "Which term fits the description?", how, term


def tips(draw: Draw) -> Row:
    topic = draw.pick(list(TIPS))
    count = draw.integer(2, 4)
    chosen = draw.sample(TIPS[topic], count)
    if draw.chance(0.4):
        text = " ".join(chosen)
        return (
            draw.pick(
                [
                    f"Give {_COUNTS[count]} tips for {topic}.",
                    f"How can I get better at {topic}? Name {_COUNTS[count]} ways.",
                ]
            ),
            "",
            text,
        )
    listed = "\n".join(f"{i}. {tip}" for i, tip in enumerate(chosen, 1))
    return (
        draw.pick([f"List {_COUNTS[count]} tips for {topic}.", f"Make a list of {_COUNTS[count]} ideas for {topic}."]),
        "",
        listed,
    )


def steps(draw: Draw) -> Row:
    task = draw.pick(list(STEPS))
    parts = STEPS[task]
    style = draw.integer(0, 3)
    if style == 0:
        return (
            draw.pick([f"How do I {task}?", f"Explain how to {task}.", f"Write instructions to {task}."]),
            "",
            " ".join(parts),
        )
    if style == 1:
        cut = draw.integer(1, len(parts) - 1)
        return f"I want to {task}. What is the next step?", " ".join(parts[:cut]), parts[cut]
    if style == 2:
        return f"List the steps to {task}.", "", "\n".join(f"{i}. {part}" for i, part in enumerate(parts, 1))
    mixed = draw.shuffled(parts)
    return f"Put the steps to {task} in order.", " ".join(mixed), " ".join(parts)


def contrast(draw: Draw) -> Row:
    first, second, one, other, shared = draw.pick(CONTRASTS)
    style = draw.integer(0, 3)
    verb = "is" if not first.endswith("s") or first == "gas" else "are"
    if style == 0:
        text = f"{first.capitalize()} {one}, while {second} {other}."
        return (
            draw.pick([f"What is the difference between {first} and {second}?", f"Contrast {first} and {second}."]),
            "",
            text,
        )
    if style == 1:
        text = f"{first.capitalize()} {one}, and {second} {other}; {shared}."
        return draw.pick([f"Compare {first} and {second}.", f"Compare and contrast {first} with {second}."]), "", text
    if style == 2:
        return f"What do {first} and {second} have in common?", "", f"{shared.capitalize()}."
    return f"Name one way in which {first} {verb} unlike {second}.", "", f"{first.capitalize()} {one}."


def cause(draw: Draw) -> Row:
    why, what = draw.pick(CAUSES)
    style = draw.integer(0, 3)
    if style == 0:
        return (
            draw.pick(["Which sentence is the cause?", "Identify the cause."]),
            " ".join(draw.shuffled([why, what])),
            why,
        )
    if style == 1:
        return (
            draw.pick(["Which sentence is the effect?", "Identify the effect."]),
            " ".join(draw.shuffled([why, what])),
            what,
        )
    if style == 2:
        return "Predict what may happen next.", why, what
    return "Suggest a cause for the event.", what, why


def true_or_false(draw: Draw) -> Row:
    name, capital, continent, _, _ = draw.pick(COUNTRIES)
    claimed = capital if draw.chance(0.5) else draw.pick([entry[1] for entry in COUNTRIES if entry[0] != name])
    right = claimed == capital
    claim = f"{claimed} is the capital of {name}."
    if draw.chance(0.5):
        return draw.pick(["True or false?", "Check the statement."]), claim, "True" if right else "False"
    answer = (
        f"This is true: {capital} is the capital of {name}, in {continent}."
        if right
        else f"This is false: the capital of {name} is {capital}."
    )
    return "Check the claim and explain.", claim, answer


def portrait(draw: Draw) -> Row:
    name, capital, continent, currency, language = draw.pick(COUNTRIES)
    text = (
        f"{name} lies in {continent}. Its capital is {capital}. An official language is {language}, "
        f"and people pay with the {currency}."
    )
    style = draw.integer(0, 2)
    if style == 0:
        return (
            draw.pick(
                [f"Write a short entry about {name}.", f"Describe {name} in three sentences.", f"Tell me about {name}."]
            ),
            "",
            text,
        )
    other = draw.pick([entry for entry in COUNTRIES if entry[0] != name])
    shared = (
        f"Both are in {continent}." if other[2] == continent else f"{name} is in {continent}, {other[0]} in {other[2]}."
    )
    answer = (
        f"{shared} The capital of {name} is {capital}, that of {other[0]} is {other[1]}. "
        f"{name} uses the {currency}, {other[0]} the {other[3]}."
    )
    return draw.pick([f"Compare {name} and {other[0]}.", f"How do {name} and {other[0]} differ?"]), "", answer


def lesson(draw: Draw) -> Row:
    first, second = draw.sample(list(CONCEPTS), 2)
    how = draw.pick(["Write a short lesson on two terms.", "Explain both terms with an example each."])
    (what, _, example), (other, _, another) = CONCEPTS[first], CONCEPTS[second]
    return how, f"{first} and {second}", f"{what} {example} {other} {another}"


FAMILIES = [
    (3, portrait),
    (2, lesson),
    (5, country),
    (3, countries),
    (3, element),
    (3, fact),
    (6, explain),
    (6, tips),
    (4, steps),
    (3, contrast),
    (2, cause),
    (2, true_or_false),
]
