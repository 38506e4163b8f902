"""The sets that ship and their tokenizers: the bytes, what a changed file says, and that they fit their purpose."""

import gzip
import hashlib
import json
import statistics
import time

import pytest
from data_sets import data_config
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from sonar_repro.data import check_available, frozen, load_corpus, load_tokenizer
from sonar_repro.data.frozen import FOLDER, ROWS, SHA256, frozen_documents, frozen_file, frozen_rows
from sonar_repro.data.prompt import FIXED_PARTS
from sonar_repro.errors import UserError

# sha256 of the rows as JSONL, the first 1,000 and all: what the generator wrote on every Python version.
SMALL_SHA256 = "f2f5b6b9af65e981f77c08c32613c5ab061830dec303f973adf675fb9badb894"
ALL_SHA256 = "54d65686d8b639c99e7e2bed112a0f5abe5d924b80351fa91ef92d09471fef6b"


# ---- the files -----------------------------------------------------------------------------------------------------


def test_every_file_that_ships_has_its_hash_in_the_readme_and_is_checked():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert {path.name for path in FOLDER.iterdir()} == {*SHA256, "README.md"}
    assert set(SHA256) == {*frozen.SETS.values(), *frozen.TOKENIZERS.values()}
    for name, sha256 in SHA256.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == sha256
        assert f"| `{name}` |" in readme and f"    {sha256}  {name}\n" in readme


def test_the_rows_are_those_that_the_generator_made():
    raw = gzip.decompress(frozen_file("instructions.jsonl.gz").read_bytes())
    small = b"".join(line + b"\n" for line in raw.split(b"\n")[:1000])
    assert hashlib.sha256(raw).hexdigest() == ALL_SHA256
    assert hashlib.sha256(small).hexdigest() == SMALL_SHA256
    assert (FOLDER / "instructions.jsonl.gz").read_bytes()[4:8] == bytes(4)  # no time of making


@pytest.mark.parametrize(("needed", "count"), [(0, 1000), (1000, 1000), (1001, 1001), (8500, 8500), (9000, 9000)])
def test_as_many_rows_as_a_selection_needs_and_a_thousand_at_least(needed, count):
    assert frozen_rows(needed) == frozen_rows(ROWS)[:count]


def test_more_rows_than_there_are_is_refused_before_anything_runs():
    says = "9000 rows, but train_examples=8990 and held-out positions 8990-9000 need 9001: lower"
    for call in (check_available, load_corpus):
        with pytest.raises(UserError, match=says):
            call(data_config(train_examples=8990, heldout_count=11))


@pytest.mark.parametrize("fault", ["one byte", "cut", "empty", "other rows", "missing", "folder"])
@pytest.mark.parametrize("name", sorted(SHA256))
def test_a_changed_file_is_one_line_that_names_it(monkeypatch, tmp_path, name, fault):
    for shipped in SHA256:
        (tmp_path / shipped).write_bytes((FOLDER / shipped).read_bytes())
    path = tmp_path / name
    whole = path.read_bytes()
    path.unlink()
    if fault == "folder":
        path.mkdir()
    elif fault != "missing":
        other = gzip.compress(b'{"instruction": "a", "input": "", "output": "b"}\n')
        changed = {"one byte": whole[:50] + b"?" + whole[51:], "cut": whole[:-7], "empty": b"", "other rows": other}
        path.write_bytes(changed[fault])
    monkeypatch.setattr(frozen, "FOLDER", tmp_path)
    kind = "text" if name.startswith("text") else "instructions"
    for call in (check_available, load_corpus):
        with pytest.raises(UserError) as caught:
            call(data_config(kind=kind, train_examples=8, heldout_count=2))
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
        assert "restore it" in str(caught.value)


# ---- the rows ------------------------------------------------------------------------------------------------------


def test_rows_are_many_varied_and_different():
    for rows in (frozen_rows(0), frozen_rows(ROWS)):
        assert all(list(row) == ["instruction", "input", "output"] for row in rows)
        assert all(isinstance(value, str) for row in rows for value in row.values())
        assert all(row["output"].strip() and row["instruction"].strip() for row in rows)
        assert len({(row["instruction"], row["input"]) for row in rows}) == len(rows)
        assert len({row["output"] for row in rows}) > 0.75 * len(rows)
        assert 0.3 < sum(bool(row["input"]) for row in rows) / len(rows) < 0.5  # Alpaca: about 0.4
        words = [len(row["output"].split()) for row in rows]
        assert min(words) == 1 and max(words) > 60


def test_computed_answers_are_right():
    by_instruction = {}
    for row in frozen_rows(ROWS):
        by_instruction.setdefault(row["instruction"], []).append(row)
    for row in by_instruction["Convert the decimal number to binary."]:
        assert int(row["output"], 2) == int(row["input"])
    for row in by_instruction["Format this date as YYYY-MM-DD."]:
        assert time.strptime(row["input"], "%B %d, %Y") == time.strptime(row["output"], "%Y-%m-%d")
    for row in by_instruction["Name the day of the week of this date."]:
        assert time.strftime("%A", time.strptime(row["input"], "%B %d, %Y")) == row["output"]
    for row in by_instruction["Sort the numbers from smallest to largest."]:
        assert json.loads(f"[{row['output']}]") == sorted(json.loads(f"[{row['input']}]"))
    programs = [
        row for row in frozen_rows(ROWS) if row["instruction"].startswith("Write a Python function with a loop")
    ]
    assert len(programs) > 20
    for row in programs:
        printed = []
        exec(row["output"], {"print": printed.append})
        assert printed == [int(row["output"].rsplit("# ", 1)[1])]


# ---- the tokenizers ------------------------------------------------------------------------------------------------


def trained(texts, fixed=()):
    """A byte-level BPE of 2,048 entries in all; ``fixed`` parts become one token each, as a chat format's markers."""
    fixed = [AddedToken(part, normalized=False, special=False) for part in fixed]
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=2048 - len(fixed),
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(fixed)
    return tokenizer


@pytest.mark.parametrize("kind", ["instructions", "text"])
def test_trained_again_the_tokenizers_are_the_same(kind):
    fields = [row[field] for row in frozen_rows(0) for field in ("instruction", "input", "output") if row[field]]
    made = trained(fields, FIXED_PARTS) if kind == "instructions" else trained(frozen_documents())
    # Vocabulary and merges, not bytes: how a tokenizer is written down is up to the library's version.
    made, shipped = json.loads(made.to_str()), json.loads(frozen_file(frozen.TOKENIZERS[kind]).read_text("utf-8"))
    assert made["model"]["vocab"] == shipped["model"]["vocab"]
    assert made["model"]["merges"] == shipped["model"]["merges"]
    assert made["added_tokens"] == shipped["added_tokens"]


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
    raw = Tokenizer.from_file(str(frozen_file("instructions_bpe_2048.json")))
    pieces = raw.encode("Antidisestablishmentarianism costs 12345 yen").tokens
    assert 8 < len(pieces) < len("Antidisestablishmentarianism costs 12345 yen")
    texts = [row["output"] for row in frozen_rows(3000)[1000:]]  # rows that it was not trained on
    tokens = sum(len(raw.encode(text).ids) for text in texts)
    assert sum(map(len, texts)) / tokens > 3  # characters a token


# ---- what arms train on --------------------------------------------------------------------------------------------

# Order hashes that the generating code gave: its rows, its tokenizers and its shuffle, at each scale's selection.
SMOKE = dict(train_examples=200, heldout_start=600, heldout_count=16)
PAPER = dict(train_examples=8000, heldout_start=8000, heldout_count=500, max_length=256)
ORDERS = {
    "b06724ee521ec2bd622f49968a7b9d3e2aebbbdb92126347dcc6f6077db4baaf": (SMOKE, 42),
    "c23ea7028c7b7137262630c73cc651021562bfc0f39b67e1f62433146a7823e5": (SMOKE, 100),
    "bf6af345af5d58f44be1af676780b753811185b40256a3444e3e7bee8dc28d6f": (
        dict(train_examples=901, heldout_count=100),
        512,
    ),
    "f8718f074226ead46389bb803dd3d4bb518cf82bcb6e753dd6bccb15a75ebb5c": (PAPER, 42),
    "75af84a4abacf65bb9478b9886815ef6ff28dc507ae05810fdaa7c58ab485f85": (
        dict(kind="text", train_examples=None, heldout_count=512),
        42,
    ),
}


@pytest.mark.parametrize("sha256", ORDERS)
def test_the_order_is_that_of_the_records_made_before_the_rows_were_frozen(sha256):
    fields, seed = ORDERS[sha256]
    assert load_corpus(data_config(**fields), seed=seed).sha256 == sha256


def test_fits_the_smoke_scale():
    corpus = load_corpus(data_config(train_examples=900, heldout_count=100, max_length=64))
    examples = [*corpus.train, *corpus.heldout]
    assert corpus.dropped == {"prompt_too_long": 0}
    truncated = corpus.counts["train"]["truncated"] + corpus.counts["heldout"]["truncated"]
    assert truncated < 350  # at least 65% of the rows stay whole
    assert 20 < statistics.mean(example.supervised_tokens for example in examples) < 30
    assert 40 < statistics.mean(len(example.input_ids) for example in examples) < 50


def test_papers_selection_from_the_embedded_set():
    corpus = load_corpus(data_config(**PAPER))
    assert corpus.counts["train"]["used"] == 8000 and corpus.counts["heldout"]["used"] == 500
    assert not {e.index for e in corpus.train} & {e.index for e in corpus.heldout}
