"""Words and sentences: rewriting, grammar, string operations, classification and extraction."""

from __future__ import annotations

from .draw import Draw
from .tables import ADJECTIVES, CATEGORIES, CITIES, MONTHS, NAMES, NOUNS, SURNAMES, VERBS

Row = tuple[str, str, str]
_TIMES = ("this morning", "on Monday", "last week", "after lunch", "before the meeting", "at noon")
_ALL_WORDS = [word for words in CATEGORIES.values() for word in words]


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def synonym(draw: Draw) -> Row:
    word, same, opposite = draw.pick(ADJECTIVES)
    noun = draw.pick(["answer", "day", "person", "story", "place"])
    style = draw.integer(0, 4)
    if style == 0:
        return f"Give a synonym for {word}.", "", same
    if style == 1:
        return f"What is the opposite of {word}?", "", f"The opposite of {word} is {opposite}."
    if style == 2:
        return (
            "Replace the adjective with its opposite.",
            f"{_article(word)} {word} {noun}",
            f"{_article(opposite)} {opposite} {noun}",
        )
    other, kind = draw.pick([(same, "Synonyms"), (opposite, "Antonyms")])
    if style == 3:
        return "Are the two words synonyms or antonyms?", f"{word}, {other}", kind
    return f"Explain how {word} and {other} are related.", "", f"{word.capitalize()} and {other} are {kind.lower()}."


def tense(draw: Draw) -> Row:
    name, (base, past, third, ing, _, thing), when = draw.pick(NAMES), draw.pick(VERBS), draw.pick(_TIMES)
    forms = {
        "present": f"{name} {third} {thing}.",
        "past": f"{name} {past} {thing}.",
        "future": f"{name} will {base} {thing}.",
        "present continuous": f"{name} is {ing} {thing}.",
    }
    if base == past:  # "read": the past looks like another word's present; keep to the forms that differ
        forms.pop("past")
    source, target = draw.sample(list(forms), 2)
    if draw.chance(0.3):
        return f"Use the verb '{base}' in a sentence in the past tense.", "", f"{name} {past} {thing} {when}."
    return f"Rewrite the sentence in the {target} tense.", forms[source], forms[target]


def voice(draw: Draw) -> Row:
    name, (_, past, _, _, participle, thing) = draw.pick(NAMES), draw.pick(VERBS)
    active, passive = f"{name} {past} {thing}.", f"{thing[0].upper() + thing[1:]} was {participle} by {name}."
    if thing == "the dishes":
        passive = passive.replace(" was ", " were ")
    if draw.chance(0.6):
        return draw.pick(["Rewrite in the passive voice.", "Change the sentence to passive voice."]), active, passive
    return "Rewrite in the active voice.", passive, active


def question_or_negative(draw: Draw) -> Row:
    name, (base, past, _, _, _, thing), when = draw.pick(NAMES), draw.pick(VERBS), draw.pick(_TIMES)
    sentence = f"{name} {past} {thing} {when}."
    if draw.chance(0.5):
        return "Turn the statement into a question.", sentence, f"Did {name} {base} {thing} {when}?"
    return "Make the sentence negative.", sentence, f"{name} did not {base} {thing} {when}."


def plural(draw: Draw) -> Row:
    one, many = draw.pick(NOUNS)
    amount = draw.integer(2, 30)
    if draw.chance(0.5):
        return "Write the plural of the noun.", one, many
    return "Correct the noun in this sentence.", f"There are {amount} {one} here.", f"There are {amount} {many} here."


_MISTAKES = (
    ("{n} go to school every day.", "{n} goes to school every day."),
    ("{n} have two brothers.", "{n} has two brothers."),
    ("{n} don't like coffee.", "{n} doesn't like coffee."),
    ("The dog of {n} are friendly.", "The dog of {n} is friendly."),
    ("Me and {n} went to the park.", "{n} and I went to the park."),
    ("{n} could of won the race.", "{n} could have won the race."),
    ("{n} is more taller than me.", "{n} is taller than me."),
    ("{n} recieved a letter.", "{n} received a letter."),
    ("{n} will definately come.", "{n} will definitely come."),
    ("Their going home with {n}.", "They're going home with {n}."),
    ("{n} lost there keys.", "{n} lost their keys."),
    ("Its a gift from {n}.", "It's a gift from {n}."),
    ("{n} eated all the soup.", "{n} ate all the soup."),
    ("{n} has went home.", "{n} has gone home."),
    ("where is {n} today", "Where is {n} today?"),
    ("{n} bought apples pears and plums.", "{n} bought apples, pears, and plums."),
)


def correct(draw: Draw) -> Row:
    wrong, right = draw.pick(_MISTAKES)
    name = draw.pick(NAMES)
    how = draw.pick(
        ["Correct the mistake in the sentence.", "Fix the grammar.", "Proofread the sentence.", "Edit for correctness."]
    )
    return how, wrong.format(n=name), right.format(n=name)


_FORMAL = (
    ("Hey {n}, can you send me the {t}?", "Dear {n}, could you please send me the {t}?"),
    ("Sorry {n}, I can't make it to the {t}.", "Dear {n}, I regret that I am unable to attend the {t}."),
    ("Thanks a ton for the {t}, {n}!", "Thank you very much for the {t}, {n}."),
    ("{n}, the {t} is a mess.", "{n}, the {t} needs considerable improvement."),
    ("Gotta go, {n}, talk about the {t} later.", "I have to leave now, {n}; let us discuss the {t} later."),
    ("No clue what the {t} is about, {n}.", "I do not know what the {t} concerns, {n}."),
)
_TOPICS = (
    "report",
    "meeting",
    "budget",
    "schedule",
    "workshop",
    "contract",
    "interview",
    "presentation",
    "survey",
    "invoice",
)


def formal(draw: Draw) -> Row:
    casual, polite = draw.pick(_FORMAL)
    name, topic = draw.pick(NAMES), draw.pick(_TOPICS)
    casual, polite = casual.format(n=name, t=topic), polite.format(n=name, t=topic)
    if draw.chance(0.7):
        return draw.pick(["Rewrite the message in a formal tone.", "Make this sound professional."]), casual, polite
    return "Rewrite the message in a casual tone.", polite, casual


def strings(draw: Draw) -> Row:
    word = draw.pick(_ALL_WORDS)
    vowels = sum(letter in "aeiou" for letter in word)
    return draw.pick(
        [
            ("Reverse the word.", word, word[::-1]),
            (f"How many letters are in the word '{word}'?", "", f"The word '{word}' has {len(word)} letters."),
            ("Count the vowels in the word.", word, str(vowels)),
            ("Write the word in capital letters.", word, word.upper()),
            (f"Spell '{word}' letter by letter.", "", "-".join(word)),
            (f"What is the first letter of '{word}'?", "", word[0]),
            ("Remove all vowels from the word.", word, "".join(letter for letter in word if letter not in "aeiou")),
            ("Sort the letters of the word.", word, "".join(sorted(word))),
        ]
    )


def word_lists(draw: Draw) -> Row:
    words = draw.sample(_ALL_WORDS, draw.integer(3, 6))
    listed = ", ".join(words)
    style = draw.integer(0, 4)
    if style == 0:
        return (
            draw.pick(["Sort the words alphabetically.", "Put the words in alphabetical order."]),
            listed,
            ", ".join(sorted(words)),
        )
    if style == 1:
        return "Reverse the order of the list.", listed, ", ".join(words[::-1])
    if style == 2:
        return "Make an acronym from the first letters.", listed, "".join(word[0] for word in words).upper()
    if style == 3:
        doubled = draw.shuffled([*words, draw.pick(words)])
        return "Remove the duplicate from the list.", ", ".join(doubled), ", ".join(dict.fromkeys(doubled))
    longest = max(words, key=lambda word: (len(word), word))
    ties = [word for word in words if len(word) == len(longest)]
    answer = longest if len(ties) == 1 else " and ".join(sorted(ties))
    return "Name the longest word, or all of the longest.", listed, answer if len(ties) < 3 else ", ".join(sorted(ties))


def odd_one_out(draw: Draw) -> Row:
    kind, other = draw.sample(list(CATEGORIES), 2)
    words, stranger = draw.sample(CATEGORIES[kind], 3), draw.pick(CATEGORIES[other])
    shown = ", ".join(draw.shuffled([*words, stranger]))
    if draw.chance(0.4):
        return draw.pick(["Find the odd one out.", "Which word does not belong?"]), shown, stranger
    reason = f"{stranger.capitalize()} does not belong: it is in the group '{other}', the others in the group '{kind}'."
    return "Which item does not belong, and why?", shown, reason


def categorize(draw: Draw) -> Row:
    kinds = draw.sample(list(CATEGORIES), 2)
    picked = [(kind, word) for kind in kinds for word in draw.sample(CATEGORIES[kind], draw.integer(1, 3))]
    if draw.chance(0.4):
        kind, word = picked[0]
        return f"Which group does '{word}' belong to: {kinds[0]} or {kinds[1]}?", "", kind.capitalize()
    shown = ", ".join(draw.shuffled([word for _, word in picked]))
    groups = [f"{kind.capitalize()}: {', '.join(sorted(w for k, w in picked if k == kind))}" for kind in sorted(kinds)]
    return (
        draw.pick(["Group the words by category.", f"Sort into {' and '.join(sorted(kinds))}."]),
        shown,
        "\n".join(groups),
    )


_GOOD = ("wonderful", "excellent", "delightful", "superb", "friendly", "reliable", "impressive", "charming")
_BAD = ("terrible", "disappointing", "rude", "broken", "boring", "dreadful", "noisy", "overpriced")
_THINGS = ("hotel", "film", "restaurant", "phone", "course", "museum", "concert", "app", "bicycle", "novel")
_PLAIN = (
    "The {t} opens at nine.",
    "The {t} is near the station.",
    "I saw the {t} in {m}.",
    "The {t} comes in two sizes.",
)


def sentiment(draw: Draw) -> Row:
    thing, label = draw.pick(_THINGS), draw.pick(["Positive", "Negative", "Neutral"])
    if label == "Neutral":
        text = draw.pick(_PLAIN).format(t=thing, m=draw.pick(MONTHS))
    else:
        first, second = draw.sample(_GOOD if label == "Positive" else _BAD, 2)
        text = draw.pick(
            [
                f"The {thing} was {first} and {second}.",
                f"What a {first} {thing}!",
                f"{second.capitalize()} {thing}, simply {first}.",
            ]
        )
    how = draw.pick(
        ["Classify the sentiment of the review.", "Is the text positive, negative or neutral?", "Label the sentiment."]
    )
    if draw.chance(0.2) and label != "Neutral":
        return (
            "Name the sentiment and the words that show it.",
            f"The {thing} was {first} and {second}.",
            f"{label}: {first}, {second}",
        )
    return how, text, label


def spam(draw: Draw) -> Row:
    amount, name, topic = draw.integer(2, 90) * 50, draw.pick(NAMES), draw.pick(_TOPICS)
    text, label = draw.pick(
        [
            (f"You won ${amount}! Click now to claim your prize.", "Spam"),
            (f"Hi {name}, the {topic} is attached.", "Not spam"),
            (f"Urgent: send ${amount} to unlock your account.", "Spam"),
            (f"{name}, can we move the {topic} to Friday?", "Not spam"),
            (f"Cheap pills, {amount // 50}% off, only today!!!", "Spam"),
            (f"Your {topic} is confirmed, {name}. See you there.", "Not spam"),
        ]
    )
    return draw.pick(["Decide whether the message is spam.", "Classify the e-mail as spam or not spam."]), text, label


def extract(draw: Draw) -> Row:
    name, surname, city = draw.pick(NAMES), draw.pick(SURNAMES), draw.pick(CITIES)
    month, day, amount = draw.pick(MONTHS), draw.integer(1, 28), draw.integer(12, 950)
    mail = f"{name}.{surname}@example.com".lower()
    phone = f"555-{draw.integer(1000, 9999)}"
    text = draw.pick(
        [
            f"{name} {surname} moves to {city} on {month} {day}.",
            f"On {month} {day}, {name} {surname} paid ${amount} in {city}.",
        ]
    )
    style = draw.integer(0, 5)
    if style == 0:
        return "Extract the name of the person.", text, f"{name} {surname}"
    if style == 1:
        return draw.pick(["Which city is mentioned?", "Extract the place."]), text, city
    if style == 2:
        return "Extract the date from the text.", text, f"{month} {day}"
    if style == 3:
        return "Find the e-mail address.", f"Write to {name} at {mail} or call {phone}.", mail
    if style == 4:
        return "Find the phone number.", f"Reach {name} in {city} at {phone}.", phone
    return (
        "List the person, the place and the date.",
        text,
        f"Person: {name} {surname}\nPlace: {city}\nDate: {month} {day}",
    )


def join_sentences(draw: Draw) -> Row:
    name = draw.pick(NAMES)
    first, second, joined = draw.pick(
        [
            (f"{name} was tired.", "The work went on.", f"{name} was tired, but the work went on."),
            ("It rained all day.", f"{name} stayed at home.", f"It rained all day, so {name} stayed at home."),
            (
                f"{name} missed the bus.",
                "The alarm did not ring.",
                f"{name} missed the bus because the alarm did not ring.",
            ),
            (f"{name} likes tea.", "Coffee is fine too.", f"{name} likes tea, and coffee is fine too."),
            ("The shop was closed.", f"{name} came back later.", f"The shop was closed, so {name} came back later."),
            (f"{name} studied hard.", "The exam was easy.", f"{name} studied hard, so the exam was easy."),
        ]
    )
    return (
        draw.pick(["Combine the two sentences.", "Join the sentences with a conjunction."]),
        f"{first} {second}",
        joined,
    )


def part_of_speech(draw: Draw) -> Row:
    name, (_, past, _, _, _, thing), (adjective, _, _) = draw.pick(NAMES), draw.pick(VERBS), draw.pick(ADJECTIVES)
    noun = thing.split()[-1]
    sentence = f"The {adjective} {draw.pick(['teacher', 'neighbor', 'artist', 'pilot'])} {past} {thing} with {name}."
    kind, answer = draw.pick(
        [("verb", past), ("adjective", adjective), ("proper noun", name), ("object of the verb", noun)]
    )
    if kind == "object of the verb" and len(thing.split()) > 2:
        kind, answer = "verb", past
    return draw.pick([f"Identify the {kind} in the sentence.", f"Which word is the {kind}?"]), sentence, answer


_WORDS_ABROAD = (
    ("house", "maison", "casa", "Haus"),
    ("water", "eau", "agua", "Wasser"),
    ("book", "livre", "libro", "Buch"),
    ("friend", "ami", "amigo", "Freund"),
    ("bread", "pain", "pan", "Brot"),
    ("sun", "soleil", "sol", "Sonne"),
    ("moon", "lune", "luna", "Mond"),
    ("tree", "arbre", "\u00e1rbol", "Baum"),
    ("dog", "chien", "perro", "Hund"),
    ("cat", "chat", "gato", "Katze"),
    ("school", "\u00e9cole", "escuela", "Schule"),
    ("city", "ville", "ciudad", "Stadt"),
    ("night", "nuit", "noche", "Nacht"),
    ("milk", "lait", "leche", "Milch"),
    ("window", "fen\u00eatre", "ventana", "Fenster"),
    ("thank you", "merci", "gracias", "danke"),
    ("good morning", "bonjour", "buenos d\u00edas", "guten Morgen"),
)


def translate(draw: Draw) -> Row:
    word, *others = draw.pick(_WORDS_ABROAD)
    which = draw.integer(0, 2)
    language, foreign = ("French", "Spanish", "German")[which], others[which]
    if draw.chance(0.5):
        return f"Translate '{word}' into {language}.", "", foreign
    return f"Translate the {language} word into English.", foreign, word


FAMILIES = [
    (2, synonym),
    (3, tense),
    (2, voice),
    (2, question_or_negative),
    (1, plural),
    (3, correct),
    (3, formal),
    (3, strings),
    (4, word_lists),
    (3, odd_one_out),
    (3, categorize),
    (4, sentiment),
    (2, spam),
    (4, extract),
    (2, join_sentences),
    (2, part_of_speech),
    (1, translate),
]
