"""Longer answers: mail, stories, descriptions, summaries and other texts of one to several sentences."""

from __future__ import annotations

from .concepts import TIPS
from .draw import Draw
from .tables import CITIES, MONTHS, NAMES

Row = tuple[str, str, str]
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_EVENTS = ("meeting", "workshop", "interview", "lesson", "appointment", "dinner", "call", "visit")
_PRODUCTS = (
    ("water bottle", "keeps drinks cold all day"),
    ("backpack", "has room for a laptop and lunch"),
    ("desk lamp", "dims at a touch"),
    ("headset", "blocks out noise"),
    ("running shoe", "is light and soft"),
    ("coffee maker", "brews in two minutes"),
    ("notebook", "lies flat on any page"),
    ("rain jacket", "folds into its own pocket"),
    ("pillow", "stays cool at night"),
    ("bicycle light", "shines for forty hours"),
)
_HEROES = (
    "a young fox",
    "an old sailor",
    "a shy robot",
    "a clever crow",
    "a lost kitten",
    "a lighthouse keeper",
    "a baker",
    "a tiny dragon",
)
_SETTINGS = (
    "in a deep forest",
    "by the sea",
    "on a snowy hill",
    "in a busy city",
    "on a small island",
    "in an old library",
)
_GOALS = (
    ("wanted to find a friend", "shared bread with a stranger", "kindness comes back"),
    ("wished to see the stars", "climbed all night", "patience is rewarded"),
    ("feared the dark", "carried a small lantern", "courage grows with each step"),
    ("lost a golden key", "asked everyone for help", "no one is alone"),
    ("dreamed of flying", "built wings from old paper", "every dream begins with work"),
    ("heard a strange song", "followed it to a well", "curiosity opens doors"),
)


def mail(draw: Draw) -> Row:
    name, day, event, hour = draw.pick(NAMES), draw.pick(_DAYS), draw.pick(_EVENTS), draw.integer(8, 17)
    purpose, body = draw.pick(
        [
            (
                f"move the {event} to {day}",
                f"Could we move the {event} to {day} at {hour}:00? Please let me know if that suits you.",
            ),
            (f"confirm the {event} on {day}", f"I confirm our {event} on {day} at {hour}:00. I look forward to it."),
            (
                f"cancel the {event} on {day}",
                f"I am sorry, but I have to cancel our {event} on {day}. Could we find a new date?",
            ),
            (
                f"thank them for the {event}",
                f"Thank you for the {event} on {day}. I learned a great deal and enjoyed it.",
            ),
            (
                f"ask about the {event}",
                f"Could you tell me where the {event} on {day} takes place and what I should bring?",
            ),
        ]
    )
    how = draw.pick([f"Write a short e-mail to {name} to {purpose}.", f"Draft a message to {name} to {purpose}."])
    return how, "", f"Dear {name},\n{body}\nKind regards"


def story(draw: Draw) -> Row:
    hero, place, (wish, deed, moral) = draw.pick(_HEROES), draw.pick(_SETTINGS), draw.pick(_GOALS)
    name = draw.pick(NAMES)
    opening = f"{hero[0].upper() + hero[1:]} named {name} lived {place}."
    if draw.chance(0.3):
        return f"Write the first sentence of a story about {hero} {place}.", "", opening
    text = f"{opening} {name} {wish}. One day {name} {deed}, and things changed. The lesson: {moral}."
    how = draw.pick(
        [
            f"Write a short story about {hero} {place}.",
            f"Tell a story about {hero} who {wish}.",
            f"Invent a fable about {hero}.",
        ]
    )
    return how, f"Name: {name}", text


def product(draw: Draw) -> Row:
    (thing, strength), city = draw.pick(_PRODUCTS), draw.pick(CITIES)
    price = draw.integer(9, 120)
    style = draw.integer(0, 3)
    if style == 0:
        return f"Write a slogan for a {thing} from {city}.", "", f"From {city}, for you: the {thing} that {strength}."
    if style == 1:
        text = f"Meet our new {thing}. It {strength} and costs only ${price}. Made in {city}, it is built to last."
        return (
            draw.pick([f"Write an advertisement for a {thing}.", f"Describe this product: a {thing}."]),
            f"${price}, made in {city}",
            text,
        )
    if style == 2:
        stars = draw.integer(1, 5)
        view = (
            f"I like it: it {strength}."
            if stars > 3
            else "It is fine, but nothing special."
            if stars == 3
            else "It broke within a week."
        )
        return (
            f"Write a {stars}-star review of a {thing}.",
            f"Bought in {city} for ${price}",
            f"I paid ${price} in {city}. {view}",
        )
    return (
        f"Suggest a name for a brand of {thing}s from {city}.",
        "",
        f"{city} {draw.pick(['Best', 'Craft', 'Works', 'Made', 'Studio'])}",
    )


_NEWS = (
    (
        "The city council of {c} voted on {d} to build {n} new parks. Work begins in {m}. Residents welcomed the plan.",
        "{c} will build {n} new parks, starting in {m}.",
    ),
    (
        "A storm hit {c} on {d}. {n} houses lost power for a night. Repairs should end by {m}.",
        "A storm in {c} cut power to {n} houses; repairs last until {m}.",
    ),
    (
        "Students in {c} collected {n} books for a library. It opens in {m}. Teachers praised the effort.",
        "Students in {c} gave {n} books to a library that opens in {m}.",
    ),
    (
        "The museum of {c} shows {n} paintings from {m} on. Entry is free on {d}. Visitors come from afar.",
        "From {m}, the museum of {c} shows {n} paintings, free on {d}.",
    ),
    (
        "A bakery in {c} sold {n} loaves on {d}. It was a record. The owner hopes to grow by {m}.",
        "A bakery in {c} sold a record {n} loaves on {d}.",
    ),
)


def summarize(draw: Draw) -> Row:
    article, summary = draw.pick(_NEWS)
    facts = {"c": draw.pick(CITIES), "d": draw.pick(_DAYS), "n": draw.integer(12, 900), "m": draw.pick(MONTHS)}
    article, summary = article.format(**facts), summary.format(**facts)
    style = draw.integer(0, 2)
    if style == 0:
        return (
            draw.pick(["Summarize the text in one sentence.", "Give the main point.", "Shorten the article."]),
            article,
            summary,
        )
    if style == 1:
        return "Answer from the text: which city is it about?", article, facts["c"]
    return "Expand the note into a short news report.", summary, article


def note(draw: Draw) -> Row:
    name, city, month, day = draw.pick(NAMES), draw.pick(CITIES), draw.pick(MONTHS), draw.integer(1, 28)
    occasion = draw.pick(["birthday", "wedding", "new job", "graduation", "move", "retirement"])
    style = draw.integer(0, 3)
    if style == 0:
        return (
            f"Write a card for the {occasion} of {name}.",
            "",
            f"Dear {name}, congratulations on your {occasion}! I wish you joy and good luck.",
        )
    if style == 1:
        text = f"You are invited to celebrate the {occasion} of {name} in {city} on {month} {day}. Please reply soon."
        return "Write an invitation.", f"{occasion}, {name}, {city}, {month} {day}", text
    if style == 2:
        return (
            f"Write a tweet about a trip to {city}.",
            f"in {month}",
            f"{city} in {month}: good food, kind people and long walks. I will be back!",
        )
    return f"Write a headline about a {occasion} in {city}.", "", f"{city} celebrates a {occasion} to remember"


_SCENES = {
    "autumn": "Leaves of gold drift down, / the wind hums through empty fields, / the year folds its hands.",
    "the sea": "Waves come and go back, / each with a small, salty word / for the waiting sand.",
    "winter": "Snow on the quiet roof, / smoke climbs from a single house, / someone stays awake.",
    "spring": "Buds on the bare branch, / a bird tries its oldest song, / the air smells of rain.",
    "the moon": "Pale coin in the dark, / you pay for the traveler's road / and ask for nothing.",
    "morning": "Light finds the window, / the kettle begins to sing, / a day is unwrapped.",
}


def poem(draw: Draw) -> Row:
    subject = draw.pick(list(_SCENES))
    kind, name = draw.pick(["poem", "short verse", "three-line poem"]), draw.pick(NAMES)
    if draw.chance(0.5):
        return f"Write a {kind} about {subject}.", "", _SCENES[subject].replace(" / ", "\n").replace("/ ", "\n")
    lines = _SCENES[subject].split(" / ")
    return f"Finish the {kind} about {subject} for {name}.", "\n".join(lines[:2]), lines[2]


def plan(draw: Draw) -> Row:
    city, event, hour = draw.pick(CITIES), draw.pick(_EVENTS), draw.integer(8, 11)
    style = draw.integer(0, 2)
    if style == 0:
        sights = draw.sample(["the old town", "a museum", "the market", "a park", "the river", "a cathedral"], 3)
        text = f"Morning: {sights[0]}. Afternoon: {sights[1]}. Evening: {sights[2]} and dinner."
        return f"Plan a day in {city}.", "", text
    if style == 1:
        parts = ["Welcome", "Review of tasks", "New ideas", "Next steps"]
        return (
            f"Make an agenda for a {event} at {hour}:00.",
            "",
            "\n".join(f"{hour}:{10 * i:02} {part}" for i, part in enumerate(parts)),
        )
    items = draw.sample(
        ["passport", "charger", "raincoat", "map", "water", "snacks", "camera", "toothbrush", "book"],
        draw.integer(3, 5),
    )
    return f"Write a packing list of {len(items)} items for a trip to {city}.", "", ", ".join(items)


def role(draw: Draw) -> Row:
    job, task, skill = draw.pick(
        [
            ("nurse", "cares for patients", "patience"),
            ("teacher", "helps students learn", "clear speech"),
            ("chef", "plans and cooks meals", "a fine palate"),
            ("pilot", "flies aircraft safely", "calm judgment"),
            ("librarian", "helps people find books", "order"),
            ("farmer", "grows crops", "knowledge of the soil"),
            ("journalist", "reports the news", "good questions"),
            ("carpenter", "builds with wood", "steady hands"),
            ("programmer", "writes and tests software", "logical thinking"),
            ("judge", "decides cases in court", "fairness"),
        ]
    )
    name, years = draw.pick(NAMES), draw.integer(2, 25)
    style = draw.integer(0, 3)
    if style == 0:
        return f"What does a {job} do?", "", f"A {job} {task}."
    if style == 1:
        return f"Which skill matters most for a {job}?", "", f"A {job} needs {skill} above all, because a {job} {task}."
    if style == 2:
        text = f"{name} is a {job} with {years} years of experience who {task} and is known for {skill}."
        return (
            draw.pick(["Write a short biography.", "Write one sentence for a profile."]),
            f"{name}, {job}, {years} years",
            text,
        )
    text = f"Hello, I am {name}. I have worked as a {job} for {years} years. My strength is {skill}."
    return f"Introduce {name}, a {job} of {years} years, in the first person.", "", text


def dialogue(draw: Draw) -> Row:
    first, second = draw.sample(NAMES, 2)
    city, event, day = draw.pick(CITIES), draw.pick(_EVENTS), draw.pick(_DAYS)
    ask, answer = draw.pick(
        [
            (f"Are you free on {day}?", f"Yes, shall we meet for the {event}?"),
            (f"How was {city}?", "Lovely, but it rained a lot."),
            (f"Did the {event} go well?", f"It did. {second} says thanks."),
        ]
    )
    if draw.chance(0.5):
        return (
            f"Write a two-line dialogue between {first} and {second}.",
            f"topic: {ask}",
            f"{first}: {ask}\n{second}: {answer}",
        )
    return (
        draw.pick(["Reply to the message.", "Answer in one sentence."]),
        f"{first}: {ask}",
        answer.replace(f" {second} says thanks.", ""),
    )


def article(draw: Draw) -> Row:
    topic = draw.pick(list(TIPS))
    chosen = draw.sample(TIPS[topic], 4)
    name, years = draw.pick(NAMES), draw.integer(2, 20)
    opening = draw.pick(
        [
            f"Many people ask me about {topic}.",
            f"After {years} years I have learned what matters for {topic}.",
            f"Nothing helps with {topic} like good habits.",
        ]
    )
    closing = draw.pick(
        ["Start small, and be patient.", "Try one thing today.", "You will see a difference in a month."]
    )
    how = draw.pick(
        [f"Write a blog post about {topic}.", f"Write a paragraph about {topic}.", f"Give {name} advice about {topic}."]
    )
    return how, "", " ".join([opening, *chosen, closing])


def letter(draw: Draw) -> Row:
    name, city, month, other = draw.pick(NAMES), draw.pick(CITIES), draw.pick(MONTHS), draw.pick(NAMES)
    taste = draw.pick(["rich", "simple", "spicy", "excellent"])
    later = draw.pick(["Tomorrow I take the boat.", "On Sunday I will climb the hill.", "I stay for one more week."])
    seen = draw.sample(
        ["the old harbor", "a flower market", "the castle", "two museums", "a jazz concert", "the botanical garden"], 2
    )
    text = (
        f"Dear {name},\nGreetings from {city}! I arrived in {month} and have already seen {seen[0]} and {seen[1]}. "
        f"The food is {taste} and the people are kind. {later} I hope to see you soon.\n{other}"
    )
    return (
        draw.pick([f"Write a letter to {name} about a trip to {city}.", f"Write a postcard from {city} to {name}."]),
        "",
        text,
    )


FAMILIES = [
    (3, article),
    (2, letter),
    (5, mail),
    (5, story),
    (5, product),
    (4, summarize),
    (4, note),
    (1, poem),
    (3, plan),
    (3, role),
    (2, dialogue),
]
