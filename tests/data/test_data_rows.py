"""The user's own files: what is read, and the one line that names file and line of what is wrong."""

import json

import pytest

from sonar_repro.data import DataSpec, load_corpus
from sonar_repro.data.rows import instruction_row, read_rows, text_row
from sonar_repro.errors import UserError

ROWS = [{"instruction": f"Say {i}.", "input": "", "output": str(i)} for i in range(4)]
GOOD = json.dumps(ROWS[0]).encode()


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", "\n".join(map(json.dumps, ROWS))),
        ("rows.ndjson", "\n\n".join(map(json.dumps, ROWS)) + "\n\n"),  # blank lines
        ("rows.JSONL", "\r\n".join(map(json.dumps, ROWS)) + "\r\n"),
        ("bom.jsonl", b"\xef\xbb\xbf" + "\n".join(map(json.dumps, ROWS)).encode()),
        ("rows.json", json.dumps(ROWS, indent=2)),  # alpaca_data.json's form
        ("lines.json", "\n".join(map(json.dumps, ROWS))),  # JSONL under a common wrong name
    ],
)
def test_every_accepted_form_gives_the_same_rows(tmp_path, name, content):
    assert read_rows(write(tmp_path / name, content), instruction_row) == ROWS


def test_parquet_and_directories(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:2]), data / "train-00000.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[2:]), data / "train-00001.parquet")
    write(tmp_path / "set" / "dataset_infos.json", "{}")  # metadata of a hub clone is no data
    write(tmp_path / "set" / "README.md", "# a data set")
    assert read_rows(tmp_path / "set", instruction_row) == ROWS


def test_missing_input_extra_fields_and_empty_output_are_fine():
    row = {"instruction": "Go.", "output": "", "text": "unused", "input": None}
    assert instruction_row(row, "f:1") == {"instruction": "Go.", "input": "", "output": ""}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"instruction": "x", "output": ', "not a JSON object on one line"),
        (b'["instruction", "output"]', "must be an object"),
        (b'"text"', "must be an object"),
        (b'{"output": "y"}', "field 'instruction' is missing"),
        (
            b'{"instruction": "x", "response": "y"}',
            r"field 'output' is missing \(fields present: instruction, response\)",
        ),
        (b'{"instruction": "x", "output": null}', "field 'output' is NoneType, not text"),
        (b'{"instruction": "x", "output": 3}', "field 'output' is int, not text"),
        (b'{"instruction": "x", "output": "y", "input": ["z"]}', "field 'input' is list, not text"),
        (b'{"instruction": " ", "output": "y"}', "field 'instruction' is empty"),
        (b'{"instruction": "x", "output": "\\ud800"}', "half of a surrogate pair"),
        (b'{"instruction": "x", "output": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, says):
    path = write(tmp_path / "mine.jsonl", b"\n".join([GOOD, b"", GOOD, line, GOOD]))
    with pytest.raises(UserError, match=says) as caught:
        read_rows(path, instruction_row)
    assert str(caught.value).startswith(f"{path}:4: ")
    assert "\n" not in str(caught.value)


def test_a_bad_row_in_a_list_is_named_by_its_number(tmp_path):
    path = write(tmp_path / "mine.json", json.dumps([ROWS[0], {"instruction": "x"}]))
    with pytest.raises(UserError, match="mine.json: item 2 of the list: field 'output' is missing"):
        read_rows(path, instruction_row)
    path = write(tmp_path / "broken.json", '[\n{"instruction": "x",\n "output" "y"}]')
    with pytest.raises(UserError, match="broken.json:3: not JSON"):
        read_rows(path, instruction_row)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.jsonl", "\n\n", "no rows"),
        ("list.json", "[]", "no rows"),
        ("rows.csv", "a,b", "unknown kind '.csv'"),
        ("rows", "a,b", "unknown kind"),
        ("rows.parquet", "PAR0", "not a readable Parquet file"),
    ],
)
def test_files_that_hold_nothing_usable(tmp_path, name, content, says):
    with pytest.raises(UserError, match=says):
        read_rows(write(tmp_path / name, content), instruction_row)


def test_directories_that_are_empty_or_ambiguous(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_rows(tmp_path / "absent.jsonl", instruction_row)
    with pytest.raises(UserError, match="holds no .jsonl"):
        read_rows(tmp_path, instruction_row)
    write(tmp_path / "a.jsonl", GOOD)
    write(tmp_path / "a.json", b"[" + GOOD + b"]")
    with pytest.raises(UserError, match="holds json and jsonl files"):
        read_rows(tmp_path, instruction_row)


def test_text_rows(tmp_path):
    path = write(tmp_path / "text.jsonl", '{"text": "a"}\n{"content": "b"}')
    with pytest.raises(UserError, match="text.jsonl:2: .* field 'text'"):
        read_rows(path, text_row)


def test_own_file_goes_the_same_way_as_the_embedded_set(tmp_path):
    path = write(tmp_path / "mine.jsonl", "\n".join(map(json.dumps, ROWS)))
    spec = DataSpec(name="mine", source="path", path=str(path), train_examples=3, heldout_count=1)
    corpus = load_corpus(spec)
    assert len(corpus.train) == 3 and len(corpus.heldout) == 1
    assert sorted(example.index for example in [*corpus.train, *corpus.heldout]) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="4 rows, but .* need 5"):
        load_corpus(DataSpec(source="path", path=str(path), train_examples=4, heldout_count=1))
