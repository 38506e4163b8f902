"""Make the questions of the local tasks: ``python -m sonar_repro.tasks.downstream_data.make`` (``--check`` compares).

They are drawn from the tables behind the embedded instructions, so that a model trained on those has met the subjects;
they measure that the evaluation works, and nothing about the quality of a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sonar_repro.data.families.concepts import CONCEPTS
from sonar_repro.data.families.draw import Draw
from sonar_repro.data.families.facts import FACTS
from sonar_repro.data.families.tables import ADJECTIVES, COUNTRIES, ELEMENTS, NOUNS

SEED = 42
LABELS = "ABCD"
DEV = 5  # examples of a few-shot prompt, as in MMLU's dev split
SCIENCE, GEOGRAPHY, CHEMISTRY = 64, 32, 24  # questions that are asked: a CPU answers them in seconds


def _choices(draw: Draw, answer: str, others: Iterable[str]) -> list[str]:
    """The answer and three different wrong ones in random order."""
    wrong = draw.sample([other for other in dict.fromkeys(others) if other != answer], len(LABELS) - 1)
    return draw.shuffled([answer, *wrong])


def _similar_answers(question: str) -> list[str]:
    """Answers of the questions that start as this one does; of all questions where those are too few."""
    start = question.split()[0]
    alike = [answer for other, answer in FACTS if other.split()[0] == start]
    return alike if len(alike) >= len(LABELS) else [answer for _, answer in FACTS]


def science(seed: int = SEED) -> list[dict[str, Any]]:
    """Questions in the format of ARC: ``id``, ``question``, ``choices`` (``text``, ``label``), ``answerKey``."""
    draw = Draw(seed)
    pairs = [(question, answer, _similar_answers(question)) for question, answer in FACTS]
    opposites, plurals = [opposite for _, _, opposite in ADJECTIVES], [many for _, many in NOUNS]
    pairs += [(f"What is the opposite of '{word}'?", opposite, opposites) for word, _, opposite in ADJECTIVES]
    pairs += [(f"What is the plural of '{one}'?", many, plurals) for one, many in NOUNS]
    pairs += [(f"Which term is described? {text[1]}", term, list(CONCEPTS)) for term, text in CONCEPTS.items()]
    rows = []
    for number, (question, answer, others) in enumerate(draw.sample(pairs, SCIENCE)):
        choices = _choices(draw, answer, others)
        rows.append(
            {
                "id": f"local_{number:03d}",
                "question": question,
                "choices": {"text": choices, "label": list(LABELS)},
                "answerKey": LABELS[choices.index(answer)],
            }
        )
    return rows


def subject(pattern: str, pairs: Sequence[tuple[str, str]], seed: int = SEED) -> list[dict[str, Any]]:
    """Questions in the format of MMLU: ``question``, ``choices``, ``answer`` (an index)."""
    draw = Draw(seed)
    answers = [answer for _, answer in pairs]
    rows = []
    for name, answer in draw.shuffled(pairs):
        choices = _choices(draw, answer, answers)
        rows.append({"question": pattern.format(name), "choices": choices, "answer": choices.index(answer)})
    return rows


def files(seed: int = SEED) -> dict[str, str]:
    """File name -> content of everything that this script makes."""
    geography = subject("What is the capital of {}?", [(country[0], country[1]) for country in COUNTRIES], seed)
    chemistry = subject("What is the chemical symbol of {}?", [(name, symbol) for name, symbol, _ in ELEMENTS], seed)
    made = {"local_arc.jsonl": science(seed)}
    for name, rows, count in (("geography", geography, GEOGRAPHY), ("chemistry", chemistry, CHEMISTRY)):
        made[f"local_mmlu_{name}_dev.jsonl"] = rows[:DEV]
        made[f"local_mmlu_{name}_test.jsonl"] = rows[DEV : DEV + count]
    return {name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) for name, rows in made.items()}


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code (1: ``--check`` found a difference)."""
    prog = "python -m sonar_repro.tasks.downstream_data.make"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files that ship, write nothing")
    check = parser.parse_args(arguments).check
    different = 0
    for name, content in files().items():
        path = Path(__file__).parent / name
        if not check:
            path.write_text(content, encoding="utf-8", newline="\n")
        elif not path.is_file() or path.read_text(encoding="utf-8") != content:
            print(f"{path}: differs from what this script makes")
            different += 1
    return min(different, 1)


if __name__ == "__main__":
    sys.exit(main())
