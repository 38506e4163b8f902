"""Choosing, masking and dropping instruction examples, on sequences small enough to write down."""

import pytest
import torch
from data_sets import data_config
from torch.nn.functional import cross_entropy

from sonar_repro.data import collate, load_tokenizer
from sonar_repro.data.frozen import frozen_rows
from sonar_repro.data.instructions import choose, encode_rows, mask_example, reorder, shuffled_indices
from sonar_repro.data.prompt import alpaca_prompt
from sonar_repro.errors import UserError

EOS = 9


def test_labels_are_response_and_end_token():
    example = mask_example(4, [5, 6, 7], [1, 2], EOS, 16)
    assert example.index == 4
    assert example.input_ids == [5, 6, 7, 1, 2, EOS]
    assert example.labels == [-100, -100, -100, 1, 2, EOS]
    assert example.supervised_tokens == 3


def test_the_mask_follows_positions_not_token_ids():
    # The end token inside the prompt is not supervised, inside the response it is, and so is the closing one.
    example = mask_example(0, [5, EOS, 7], [1, EOS, 2], EOS, 16)
    assert example.labels == [-100, -100, -100, 1, EOS, 2, EOS]


@pytest.mark.parametrize(
    ("length", "ids", "labels"),
    [
        (6, [5, 6, 7, 1, 2, EOS], [-100, -100, -100, 1, 2, EOS]),
        (5, [5, 6, 7, 1, 2], [-100, -100, -100, 1, 2]),  # the end token is cut off
        (4, [5, 6, 7, 1], [-100, -100, -100, 1]),  # the smallest usable cut
    ],
)
def test_cut_at_the_length_limit(length, ids, labels):
    example = mask_example(0, [5, 6, 7], [1, 2], EOS, length)
    assert (example.input_ids, example.labels) == (ids, labels)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_prompt_that_fills_the_limit_is_dropped(length):
    # trl#6320: no supervised token is left. Exactly as long as the limit is the edge.
    assert mask_example(0, [5, 6, 7], [1, 2], EOS, length) is None


def test_a_response_that_only_the_shift_would_drop_is_dropped():
    # One token in all: position 0 is never predicted, so nothing is supervised although its label is not -100.
    assert mask_example(0, [], [], EOS, 8) is None


def test_dropped_examples_are_counted_and_not_replaced():
    tokenizer = load_tokenizer()
    rows = [{"instruction": "word " * n, "input": "", "output": "yes"} for n in (1, 300, 2, 400, 3)]
    examples, counts = encode_rows(rows, [3, 0, 1, 4], tokenizer, 64)
    assert [example.index for example in examples] == [0, 4]
    assert counts == {"requested": 4, "used": 2, "truncated": 0, "dropped": {"prompt_too_long": 2}}


def test_truncated_examples_are_counted():
    tokenizer = load_tokenizer()
    rows = [
        {"instruction": "Count.", "input": "", "output": "one two three " * 40},
        {"instruction": "Count.", "input": "", "output": "one"},
    ]
    examples, counts = encode_rows(rows, [0, 1], tokenizer, 32)
    assert counts["truncated"] == 1
    assert len(examples[0].input_ids) == 32
    assert examples[0].input_ids[-1] != tokenizer.eos_token_id


def test_an_empty_response_supervises_the_end_token_only():
    tokenizer = load_tokenizer()
    examples, _ = encode_rows([{"instruction": "Stay silent.", "input": "", "output": ""}], [0], tokenizer, 64)
    assert [label for label in examples[0].labels if label != -100] == [tokenizer.eos_token_id]


def test_no_special_token_is_added_between_or_before():
    tokenizer = load_tokenizer()
    row = {"instruction": "Add.", "input": "1, 2", "output": "The sum is 3."}
    examples, _ = encode_rows([row], [0], tokenizer, 64)
    assert tokenizer.decode(examples[0].input_ids) == alpaca_prompt(row) + "The sum is 3.<|endoftext|>"


def test_equals_stanfords_preprocessing_on_the_embedded_set():
    # Stanford tokenizes prompt + response + end token in one piece and masks the first len(tokenize(prompt)) positions.
    tokenizer = load_tokenizer()
    rows = frozen_rows(0)[:200]
    examples, counts = encode_rows(rows, range(200), tokenizer, 64)
    assert counts["used"] == 200
    for row, example in zip(rows, examples):
        prompt = alpaca_prompt(row)
        ids = tokenizer(prompt + row["output"] + tokenizer.eos_token)["input_ids"]
        labels = list(ids)
        labels[: len(tokenizer(prompt)["input_ids"])] = [-100] * len(tokenizer(prompt)["input_ids"])
        assert example.input_ids == ids[:64]
        assert example.labels == labels[:64]


def test_a_start_token_is_added_only_where_the_tokenizer_opens_with_one():
    class WithStart:
        bos_token_id, eos_token_id = 1, 2

        def __call__(self, texts, add_special_tokens=True, **_):
            start = [1] if add_special_tokens else []
            one = lambda text: start + [10 + len(word) for word in text.split()]  # noqa: E731
            return {"input_ids": one(texts) if isinstance(texts, str) else [one(text) for text in texts]}

    examples, _ = encode_rows([{"instruction": "Go.", "input": "", "output": "ok now"}], [0], WithStart(), 64)
    assert examples[0].input_ids[0] == 1
    assert examples[0].input_ids[-3:] == [12, 13, 2]
    assert examples[0].labels[-4:] == [-100, 12, 13, 2]


def test_loss_of_a_batch_is_the_mean_over_supervised_targets():
    # Right value by hand: log-softmax in float64 at each position before a supervised label, over both examples.
    first, second = mask_example(0, [5, 6], [1, 2], EOS, 16), mask_example(1, [5], [3], EOS, 16)
    batch = collate([first, second], pad_id=EOS)
    logits = torch.randn(2, 5, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = cross_entropy(logits[:, :-1].reshape(-1, 10), batch.labels[:, 1:].reshape(-1))
    scores = logits.log_softmax(-1)
    by_hand = [scores[0, 1, 1], scores[0, 2, 2], scores[0, 3, EOS], scores[1, 0, 3], scores[1, 1, EOS]]
    assert batch.supervised_tokens == len(by_hand)
    torch.testing.assert_close(loss, -torch.stack(by_hand).mean(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("n", [7, 1000, 52002])
def test_the_shuffle_is_that_of_datasets(n):
    datasets = pytest.importorskip("datasets")
    shuffled = datasets.Dataset.from_dict({"row": range(n)}).shuffle(seed=42)
    assert shuffled_indices(n, 42) == shuffled["row"][:]


def test_papers_selection_is_disjoint_and_comes_from_one_shuffle():
    spec = data_config(
        source="hub", hub_id="a/b", revision="c", train_examples=8000, heldout_start=8000, heldout_count=500
    )
    train, heldout = choose(spec, 52002)
    order = shuffled_indices(52002, 42)
    assert train == order[:8000]
    assert heldout == order[8000:8500]
    assert not set(train) & set(heldout)


def test_a_set_that_is_too_small_is_refused_with_what_it_needs():
    with pytest.raises(UserError, match=r"100 rows, but train_examples=90 and held-out positions 95-104 need 105"):
        choose(data_config(train_examples=90, heldout_start=95, heldout_count=10), 100)


def test_run_seed_reorders_training_but_selects_the_same():
    spec = data_config(train_examples=50, heldout_count=10)
    train, _ = choose(spec, 1000)
    assert reorder(train, 42) == reorder(train, None) == train
    other = reorder(train, 100)
    assert other != train
    assert sorted(other) == sorted(train)
