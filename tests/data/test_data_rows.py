"""The user's own files: what is read, and the one line that names file and line of what is wrong."""

import json
import os
from pathlib import Path

import pytest
from data_sets import data_config

from sonar_repro.config.identity import content_digest
from sonar_repro.data import check_available, load_corpus
from sonar_repro.data.checks import check_data
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
        ("list.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("two.jsonl", b"\n".join(b"\xef\xbb\xbf" + json.dumps(row).encode() for row in ROWS)),  # `cat` of such files
    ],
)
def test_every_accepted_form_gives_the_same_rows(tmp_path, name, content):
    assert read_rows(write(tmp_path / name, content), instruction_row) == ROWS


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert read_rows(path, instruction_row) == ROWS
    broken = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0"), pyarrow.py_buffer(b"\xe9"))
    parquet.write_table(pyarrow.table({"instruction": ["x"], "output": broken}), path)
    with pytest.raises(UserError, match="train.parquet: not a readable Parquet file: .*utf-8"):
        read_rows(path, instruction_row)


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
        (b'{"instruction": "x", "output": "\xff"}', "not UTF-8 .byte 0xff"),
        ('{"instruction": "caf\u00e9", "output": "y"}'.encode("latin-1"), "not UTF-8 .byte 0xe9"),
        (b"\xef\xbb\xbf" + '{"instruction": "caf\u00e9", "output": "y"}'.encode("latin-1"), "not UTF-8 .byte 0xe9"),
        (b'{"instruction": "x", "output": "\xed\xa0\x80"}', "not UTF-8 .byte 0xed"),  # half a pair, as bytes
        (b'{"instruction": "x\0", "output": "y"}', "holds a NUL byte"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"instruction": "x", "output": "y", "id": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"instruction": "x", "output": ' + b"7" * 5000 + b"}", "holds a number of more than 4300 digits"),
        (
            b'{"instruction": "x", "output": "y", "id": -' + b"7" * 4301 + b"}",
            "holds a number of more than 4300 digits",
        ),
        (b"7" * 5000, "holds a number of more than 4300 digits"),
        (b'{"instruction": "x", "output": NaN}', "field 'output' is float, not text"),
        (b'{"instruction": "x", "output": 1e999999}', "field 'output' is float, not text"),
        (b'{"instruction": "x", "a\\nb": 1, "\\ud800": 2}', r"fields present: instruction, a.nb, .ud800"),
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


@pytest.mark.parametrize(
    ("third", "says"),
    [
        (b'"output" "y"}]', "not JSON: "),
        (b'"output": "\xe9"}]', "not UTF-8 .byte 0xe9"),
        (b'"output": "\0"}]', "holds a NUL byte"),
        (b'"output": ' + b"7" * 5000 + b"}]", "holds a number of more than 4300 digits"),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_what_breaks_a_list_is_named_by_its_line(tmp_path, mark, third, says):
    path = write(tmp_path / "broken.json", mark + b'[\n{"instruction": "x",\n' + third)
    with pytest.raises(UserError, match=f"broken.json:3: {says}"):
        read_rows(path, instruction_row)


def test_a_list_nested_too_deeply(tmp_path):
    with pytest.raises(UserError, match="deep.json:1: not a row: nested too deeply"):
        read_rows(write(tmp_path / "deep.json", b"[" * 100_000), instruction_row)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_wide_encodings_are_named_for_what_they_are(tmp_path, name, encoding):
    path = write(tmp_path / name, json.dumps(ROWS[0]).encode(encoding))
    with pytest.raises(UserError, match=f"{name}:1: holds a NUL byte, as UTF-16 and binary files do: save it as UTF-8"):
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


@pytest.fixture
def no_file(tmp_path, request):
    """Each thing that a path can name in place of a readable file, and what is said of it."""
    folder = tmp_path / "folder.jsonl"
    folder.mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    write(tmp_path / "file.jsonl", GOOD)
    return {
        "absent": (tmp_path / "absent.jsonl", "no such file"),
        "folder": (folder, "is a folder; name one"),
        "the folder itself": (tmp_path, "is a folder; name one"),
        "pipe": (tmp_path / "pipe.jsonl", "is a pipe, socket or device"),
        "device": (Path("/dev/zero"), "is a pipe, socket or device"),
        "dangling link": (tmp_path / "link.jsonl", "no such file"),
        "link to itself": (tmp_path / "loop.jsonl", "cannot be read: Too many levels"),
        "below a file": (tmp_path / "file.jsonl" / "x.jsonl", "no such file"),
        "name too long": (tmp_path / ("x" * 300 + ".jsonl"), "cannot be read: File name too long"),
        "NUL": (f"{tmp_path}/a\0.jsonl", "cannot be read: embedded null byte"),
        "no such home": ("~nobody-of-this-name/x.jsonl", "no such file"),
    }[request.param]


NO_FILE = ["absent", "folder", "the folder itself", "pipe", "device", "dangling link", "link to itself", "below a file"]


@pytest.mark.parametrize("no_file", [*NO_FILE, "name too long", "NUL", "no such home"], indirect=True)
def test_what_is_no_readable_file_is_refused_before_it_is_opened(no_file):
    path, says = no_file
    config = data_config(source="path", path=str(path), train_examples=1, heldout_count=0)
    for call in (lambda: read_rows(path, instruction_row), lambda: check_available(config), lambda: check_data(config)):
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value).startswith(f"data.path={path}: {says}") and "\n" not in str(caught.value)


def test_a_file_without_permission(monkeypatch, tmp_path):
    path = write(tmp_path / "mine.jsonl", GOOD)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(UserError, match="mine.jsonl: cannot be read: permission denied"):
        read_rows(path, instruction_row)


def test_the_home_folder_and_a_link_to_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine.jsonl", GOOD)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "mine.jsonl")
    assert read_rows("~/mine.jsonl", instruction_row) == read_rows(tmp_path / "link.jsonl", instruction_row) == ROWS[:1]
    assert content_digest("~/mine.jsonl") == content_digest(str(tmp_path / "mine.jsonl"))


def test_text_rows(tmp_path):
    path = write(tmp_path / "text.jsonl", '{"text": "a"}\n{"content": "b"}')
    with pytest.raises(UserError, match="text.jsonl:2: .* field 'text'"):
        read_rows(path, text_row)


def test_own_file_goes_the_same_way_as_the_embedded_set(tmp_path):
    path = write(tmp_path / "mine.jsonl", "\n".join(map(json.dumps, ROWS)))
    spec = data_config(name="mine", source="path", path=str(path), train_examples=3, heldout_count=1)
    corpus = load_corpus(spec)
    assert len(corpus.train) == 3 and len(corpus.heldout) == 1
    assert sorted(example.index for example in [*corpus.train, *corpus.heldout]) == [0, 1, 2, 3]
    with pytest.raises(UserError, match="4 rows, but .* need 5"):
        load_corpus(data_config(source="path", path=str(path), train_examples=4, heldout_count=1))
