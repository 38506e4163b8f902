"""The embedded set and tokenizers: made again they are the same, and they fit their purpose."""

import hashlib
import json
import statistics
import time

import pytest
from tokenizers import Tokenizer

from sonar_repro.data import DataSpec, load_corpus, load_tokenizer
from sonar_repro.data.families import families
from sonar_repro.data.families.draw import Draw
from sonar_repro.data.make_embedded import SHIPPED, generate, main, shipped_files
from sonar_repro.data.prompt import FIXED_PARTS
from sonar_repro.data.sources import embedded_path
from sonar_repro.errors import UserError

# sha256 of instructions.jsonl: pins the generator across Python versions, and against edits that change every record.
SHIPPED_SHA256 = "f2f5b6b9af65e981f77c08c32613c5ab061830dec303f973adf675fb9badb894"


def test_made_again_the_shipped_rows_are_the_same_bytes():
    made = shipped_files()
    assert embedded_path("instructions.jsonl").read_bytes() == made["instructions.jsonl"].encode("utf-8")
    assert hashlib.sha256(made["instructions.jsonl"].encode("utf-8")).hexdigest() == SHIPPED_SHA256


@pytest.mark.parametrize("name", ["instructions_bpe_2048.json", "text_bpe_2048.json"])
def test_trained_again_the_tokenizers_are_the_same(name):
    # Vocabulary and merges, not bytes: how a tokenizer is written down is up to the library's version.
    made, shipped = json.loads(shipped_files()[name]), json.loads(embedded_path(name).read_text(encoding="utf-8"))
    assert made["model"]["vocab"] == shipped["model"]["vocab"]
    assert made["model"]["merges"] == shipped["model"]["merges"]
    assert made["added_tokens"] == shipped["added_tokens"]


def test_rows_are_many_varied_and_different():
    rows = generate(SHIPPED)
    assert SHIPPED >= 600
    assert len({(row["instruction"], row["input"]) for row in rows}) == SHIPPED
    assert len({row["output"] for row in rows}) > 850
    assert len(families()) > 60
    with_input = sum(bool(row["input"]) for row in rows) / SHIPPED
    assert 0.3 < with_input < 0.5  # Alpaca: about 0.4
    words = [len(row["output"].split()) for row in rows]
    assert min(words) == 1 and max(words) > 60
    assert all(row["output"].strip() and row["instruction"].strip() for row in rows)


def test_every_family_gives_sound_rows_and_many_of_them():
    for _, family in families():
        draw = Draw(5)
        made = [family(draw) for _ in range(200)]
        assert all(isinstance(part, str) for row in made for part in row), family
        assert all(row[0].strip() and row[2].strip() for row in made), family
        assert len(set(made)) >= 15, family


def test_a_longer_list_starts_with_the_shorter_one():
    assert generate(1500)[:200] == generate(200)
    assert generate(50, seed=1) != generate(50)
    assert generate(0) == []


def test_any_number_on_demand():
    rows = generate(20_000)
    assert len({(row["instruction"], row["input"]) for row in rows}) == 20_000
    with pytest.raises(UserError, match="count=-1"):
        generate(-1)


def test_draw_uses_the_stable_method_only():
    # random.Random(0).random() gives 0.8444218515250481, 0.7579544029403025, 0.420571580830845, ... on every version.
    draw = Draw(0)
    assert [draw.integer(0, 9) for _ in range(3)] == [8, 7, 4]
    assert Draw(0).pick("abcdefghij") == "i"
    assert Draw(0).weighted([(8, "a"), (1, "b"), (1, "c")]) == "b"  # 0.844 of 10 falls into the second part
    assert sorted(Draw(3).shuffled(range(10))) == list(range(10))
    assert len(set(Draw(3).sample(range(10), 4))) == 4


def test_computed_answers_are_right():
    by_instruction = {}
    for row in generate(8000):
        by_instruction.setdefault(row["instruction"], []).append(row)
    for row in by_instruction["Convert the decimal number to binary."]:
        assert int(row["output"], 2) == int(row["input"])
    for row in by_instruction["Format this date as YYYY-MM-DD."]:
        assert time.strptime(row["input"], "%B %d, %Y") == time.strptime(row["output"], "%Y-%m-%d")
    for row in by_instruction["Name the day of the week of this date."]:
        assert time.strftime("%A", time.strptime(row["input"], "%B %d, %Y")) == row["output"]
    for row in by_instruction["Sort the numbers from smallest to largest."]:
        assert json.loads(f"[{row['output']}]") == sorted(json.loads(f"[{row['input']}]"))
    programs = [row for row in generate(8000) if row["instruction"].startswith("Write a Python function with a loop")]
    assert len(programs) > 20
    for row in programs:
        printed = []
        exec(row["output"], {"print": printed.append})
        assert printed == [int(row["output"].rsplit("# ", 1)[1])]


def test_command_line(tmp_path, capsys):
    out = tmp_path / "more.jsonl"
    assert main(["--count", "12", "--seed", "3", "--out", str(out)]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == generate(12, seed=3)
    with pytest.raises(SystemExit) as caught:
        main(["--count", "12"])
    assert caught.value.code == 2


@pytest.mark.parametrize(("kind", "added"), [("instructions", 4), ("text", 0)])
def test_tokenizer_has_2048_entries_and_round_trips(kind, added):
    tokenizer = load_tokenizer(kind)
    assert len(tokenizer) == 2048
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (0, 1, None)
    assert max(tokenizer.get_vocab().values()) == 2047
    for text in ("Plain words, 1234!", "caf\u00e9 \u2014 \u4f60\u597d \U0001f600", "  two  spaces\n\ttab\n"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert sum(len(token) > 40 for token in tokenizer.get_vocab()) == added // 2  # the two openings of the prompt


def test_the_prompts_constant_parts_are_one_token_each():
    tokenizer = load_tokenizer()
    assert [len(tokenizer(part)["input_ids"]) for part in FIXED_PARTS] == [1, 1, 1, 1]


def test_it_is_a_bpe_and_not_a_split_on_spaces():
    raw = Tokenizer.from_file(str(embedded_path("instructions_bpe_2048.json")))
    pieces = raw.encode("Antidisestablishmentarianism costs 12345 yen").tokens
    assert 8 < len(pieces) < len("Antidisestablishmentarianism costs 12345 yen")
    texts = [row["output"] for row in generate(3000)[SHIPPED:]]  # rows that it was not trained on
    tokens = sum(len(raw.encode(text).ids) for text in texts)
    assert sum(map(len, texts)) / tokens > 3  # characters a token


def test_fits_the_smoke_scale():
    corpus = load_corpus(DataSpec(train_examples=900, heldout_count=100, max_length=64))
    examples = [*corpus.train, *corpus.heldout]
    assert corpus.dropped == {"prompt_too_long": 0}
    truncated = corpus.counts["train"]["truncated"] + corpus.counts["heldout"]["truncated"]
    assert truncated < 350  # at least 65% of the rows stay whole
    assert 20 < statistics.mean(example.supervised_tokens for example in examples) < 30
    assert 40 < statistics.mean(len(example.input_ids) for example in examples) < 50


def test_papers_selection_from_the_embedded_set_grows_it_on_demand():
    spec = DataSpec(train_examples=8000, heldout_start=8000, heldout_count=500, max_length=256)
    corpus = load_corpus(spec)
    assert corpus.counts["train"]["used"] == 8000 and corpus.counts["heldout"]["used"] == 500
    assert not {e.index for e in corpus.train} & {e.index for e in corpus.heldout}


def test_speed_of_a_thousand_examples():
    load_corpus(DataSpec(train_examples=8, heldout_count=2))  # imports and the tokenizer's file
    started = time.perf_counter()
    load_corpus(DataSpec(train_examples=900, heldout_count=100))
    assert time.perf_counter() - started < 3  # 0.2 s on two cores; the bound is for a busy machine
