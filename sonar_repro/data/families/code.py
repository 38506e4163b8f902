"""Small programs, queries and data formats."""

from __future__ import annotations

import json

from .draw import Draw
from .tables import CATEGORIES, CITIES, NAMES

Row = tuple[str, str, str]
_TABLES = (
    ("users", "name", "age"),
    ("orders", "item", "price"),
    ("books", "title", "year"),
    ("cities", "name", "population"),
)

# What the function does, its name, its parameter and the expression it returns.
_FUNCTIONS = (
    ("returns the square of a number", "square", "x", "x * x"),
    ("checks whether a number is even", "is_even", "n", "n % 2 == 0"),
    ("reverses a string", "reverse", "text", "text[::-1]"),
    ("returns the length of a list", "size", "items", "len(items)"),
    ("sums a list", "total", "numbers", "sum(numbers)"),
    ("finds the largest item of a list", "largest", "items", "max(items)"),
    ("sorts a list in descending order", "descending", "items", "sorted(items, reverse=True)"),
    ("counts the words of a text", "count_words", "text", "len(text.split())"),
    ("converts Celsius to Fahrenheit", "to_fahrenheit", "c", "c * 9 / 5 + 32"),
    ("returns the absolute value", "absolute", "x", "abs(x)"),
    ("removes duplicates and keeps the order", "unique", "items", "list(dict.fromkeys(items))"),
    ("checks whether a word is a palindrome", "is_palindrome", "word", "word == word[::-1]"),
    ("keeps the positive numbers", "positives", "numbers", "[n for n in numbers if n > 0]"),
    ("returns the last item of a list", "last", "items", "items[-1]"),
    ("joins words with spaces", "join", "words", '" ".join(words)'),
    ("doubles every number", "double", "numbers", "[2 * n for n in numbers]"),
)


def function(draw: Draw) -> Row:
    purpose, name, parameter, body = draw.pick(_FUNCTIONS)
    source = f"def {name}({parameter}):\n    return {body}"
    style = draw.integer(0, 3)
    if style == 0:
        return (
            draw.pick([f"Write a Python function that {purpose}.", f"Create a function in Python that {purpose}."]),
            "",
            source,
        )
    if style == 1:
        return draw.pick(["What does this function do?", "Explain the code."]), source, f"It {purpose}."
    if style == 2:
        return "Write the function as a lambda.", source, f"{name} = lambda {parameter}: {body}"
    return "Name the function and its parameter.", source, f"Function: {name}, parameter: {parameter}"


def evaluate(draw: Draw) -> Row:
    a, b, word = draw.integer(2, 40), draw.integer(2, 12), draw.pick(draw.pick(list(CATEGORIES.values())))
    shown, value = draw.pick(
        [
            (f"{a} // {b}", a // b),
            (f"{a} % {b}", a % b),
            (f"len('{word}')", len(word)),
            (f"'{word}'[0]", word[0]),
            (f"list(range({b}))[-1]", b - 1),
            (f"'{word}'.upper()", word.upper()),
            (f"[{a}, {b}][1]", b),
            (f"max({a}, {b})", max(a, b)),
            (f"sum([{a}, {b}, 1])", a + b + 1),
            (f"'{word[:3]}' * 2", word[:3] * 2),
            (f"{a} > {b}", a > b),
            (f"'{word}'[::-1]", word[::-1]),
        ]
    )
    if draw.chance(0.6):
        return (
            draw.pick(["What does this Python expression return?", "Give the output of the code."]),
            shown,
            str(value),
        )
    return f"What is the value of {shown} in Python?", "", f"The expression {shown} evaluates to {value}."


def query(draw: Draw) -> Row:
    table, text, number = draw.pick(_TABLES)
    limit, word = draw.integer(1, 90) * 5, draw.pick(CITIES)
    return draw.pick(
        [
            (
                f"Write an SQL query for all {table} with {number} over {limit}.",
                "",
                f"SELECT * FROM {table} WHERE {number} > {limit};",
            ),
            (
                f"Write SQL that counts the {table} with {number} under {limit}.",
                "",
                f"SELECT COUNT(*) FROM {table} WHERE {number} < {limit};",
            ),
            (
                f"Write SQL for the {limit // 5} largest {table} by {number}.",
                "",
                f"SELECT {text} FROM {table} ORDER BY {number} DESC LIMIT {limit // 5};",
            ),
            (
                f"Select the {number} of the {table} entry '{word}' in SQL.",
                "",
                f"SELECT {number} FROM {table} WHERE {text} = '{word}';",
            ),
            (
                f"Delete the {table} whose {number} equals {limit} in SQL.",
                "",
                f"DELETE FROM {table} WHERE {number} = {limit};",
            ),
            (
                "Explain the SQL query.",
                f"SELECT AVG({number}) FROM {table} WHERE {number} > {limit};",
                f"It returns the average {number} of the {table} whose {number} is over {limit}.",
            ),
        ]
    )


def formats(draw: Draw) -> Row:
    name, age, city = draw.pick(NAMES), draw.integer(18, 80), draw.pick(CITIES)
    record = json.dumps({"name": name, "age": age, "city": city})
    sentence, csv = f"{name} is {age} and lives in {city}.", f"{name},{age},{city}"
    return draw.pick(
        [
            ("Convert the sentence to JSON.", sentence, record),
            ("Turn the CSV line into JSON with name, age and city.", csv, record),
            ("Write the JSON record as a sentence.", record, sentence),
            ("Convert the JSON record to a CSV line.", record, csv),
            ("What is the value of 'city' in the JSON?", record, city),
            ("Make an HTML list of the values.", csv, f"<ul><li>{name}</li><li>{age}</li><li>{city}</li></ul>"),
        ]
    )


def repair(draw: Draw) -> Row:
    n, name = draw.integer(2, 99), draw.pick(["total", "count", "value", "result", "score", "index"])
    wrong, right = draw.pick(
        [
            (f"for i in range({n})\n    print(i)", f"for i in range({n}):\n    print(i)"),
            (f"if {name} = {n}:\n    pass", f"if {name} == {n}:\n    pass"),
            (f"print('{name} {n})", f"print('{name} {n}')"),
            (f"{name} = [{n}, {n + 1}", f"{name} = [{n}, {n + 1}]"),
            (f"while {name} < {n}\n    {name} += 1", f"while {name} < {n}:\n    {name} += 1"),
            (f"{name} == int('{n}')", f"{name} = int('{n}')"),
        ]
    )
    return draw.pick(["Fix the bug in this Python code.", "Correct the syntax error.", "Debug the code."]), wrong, right


def shell(draw: Draw) -> Row:
    name = draw.pick(NAMES).lower()
    file, folder = (
        f"{name}.{draw.pick(['txt', 'csv', 'log', 'md'])}",
        draw.pick(["backup", "archive", "data", "reports"]),
    )
    return draw.pick(
        [
            (f"Write a shell command that copies {file} to {folder}.", "", f"cp {file} {folder}/"),
            (f"Which command shows the first ten lines of {file}?", "", f"head -n 10 {file}"),
            (f"Count the lines of {file} in the shell.", "", f"wc -l {file}"),
            (f"Find '{name}' in all files under {folder}.", "", f"grep -r '{name}' {folder}"),
            (f"Rename {file} to {folder}.txt in the shell.", "", f"mv {file} {folder}.txt"),
            (
                "What does this command do?",
                f"rm {folder}/{file}",
                f"It deletes the file {file} in the folder {folder}.",
            ),
        ]
    )


FAMILIES = [(4, function), (4, evaluate), (4, query), (4, formats), (2, repair), (2, shell)]
