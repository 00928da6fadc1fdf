"""Tests of what is shown of output files, whoever wrote them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from cloudjob.console import preview as previews
from cloudjob.console.archive import zipped
from cloudjob.console.preview import FileKind, FilePreview, media_type, preview
from cloudjob.errors import StoreError
from cloudjob.tracking.outputs import Output

DEEP = "[" * 900 + "1," * 120_000 + "1" + "]" * 900
PNG = b"\x89PNG\r\n\x1a\n" + bytes(8)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (PNG, "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "image/webp"),
        # Neither what may hold scripts nor what only has the name of an image.
        (b"<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>", ""),
        (b"<html>", ""),
        (b"RIFF\0\0\0\0WAVE", ""),
        (b"", ""),
    ],
)
def test_an_image_is_known_by_its_first_bytes(head: bytes, kind: str):
    assert media_type(head) == kind


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.png", PNG, FilePreview(FileKind.IMAGE)),
        ("a.txt", PNG, FilePreview(FileKind.IMAGE)),
        ("a.png", b"<script>\x1b[31m", FilePreview(FileKind.TEXT, "<script>")),
        ("a.html", b"<b>", FilePreview(FileKind.TEXT, "<b>")),
        ("a.bin", b"a\0b", FilePreview(FileKind.NOTHING, "It has no preview.")),
        ("a.json", b'{"a":[1]}', FilePreview(FileKind.TEXT, '{\n  "a": [\n    1\n  ]\n}')),
        ("a.json", b"{", FilePreview(FileKind.TEXT, "{")),
        ("a.json", b"[" * 100_000, FilePreview(FileKind.TEXT, "[" * 100_000)),
        # Indented, this is 200 MB.
        ("a.json", DEEP.encode(), FilePreview(FileKind.TEXT, DEEP)),
        ("A.CSV", b'a,"b,\n', FilePreview(FileKind.TABLE, rows=[["a", "b,"]])),
        ("a.tsv", b"a\tb\n1\t2\n", FilePreview(FileKind.TABLE, rows=[["a", "b"], ["1", "2"]])),
        ("empty", b"", FilePreview(FileKind.TEXT)),
        ("a.txt", b"caf\xe9", FilePreview(FileKind.TEXT, "caf\ufffd")),
    ],
)
def test_a_file_is_shown_as_what_it_is(name: str, data: bytes, expected: FilePreview):
    assert preview(name, data, len(data)) == expected


def test_only_the_beginning_of_a_large_text_is_shown():
    content = preview("a.json", b"1" * 5_000_000, 5_000_000)

    assert (len(content.text), content.is_cut) == (previews.MAX_TEXT_BYTES, True)


def test_a_large_image_is_not_shown():
    assert preview("a.png", PNG, previews.MAX_IMAGE_BYTES + 1).kind is FileKind.NOTHING


def test_only_the_first_rows_and_columns_of_a_table_are_shown_and_no_part_of_a_row():
    row = ",".join(map(str, range(40)))
    content = preview("a.csv", f"{row}\n".encode() * 1000, 10**9)
    short = preview("a.csv", b"a,b\n1,2\n3", 100)

    assert (len(content.rows), len(content.rows[0]), content.is_cut) == (201, 30, True)
    assert short.rows == [["a", "b"], ["1", "2"]]


class Stored(list[Output]):
    """Outputs with this content."""

    def __init__(self, *files: Output, content: dict[str, bytes]) -> None:
        super().__init__(files)
        self._content = content

    def read(self, file: Output) -> Iterator[bytes]:
        data = self._content.get(file.name)
        if data is None:
            raise StoreError(f"reading {file.name}: it is gone")
        yield from (data[at : at + 3] for at in range(0, len(data), 3))


def output(name: str, **more: Any) -> Output:
    return Output(name, name, 0, frozenset(), **{"modified_ns": 0, **more})


def test_a_folder_is_one_zip_file_in_which_links_are_named():
    files = (
        output("OUT/a/b.txt"),
        output("OUT/a/caf\udce9"),
        output("OUT/a/link", link="../../etc/passwd"),
        output("OUT/other"),
    )
    stored = Stored(*files, content={"OUT/a/b.txt": b"hello", "OUT/a/caf\udce9": b""})
    pieces = list(zipped(stored, "OUT/a"))  # type: ignore[arg-type]

    assert all(pieces)
    with zipfile.ZipFile(io.BytesIO(b"".join(pieces))) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == {
            "b.txt": b"hello",
            "caf_udce9": b"",
            "left out.txt": b"links:\nOUT/a/link -> ../../etc/passwd\n",
        }


def test_no_name_in_an_archive_leads_out_of_its_folder_or_hides_another():
    """What an entry is called is safe after its name was made readable, on Windows, too."""
    names = {
        "OUT/.\x01./\x1b[0m../up": "_/_/up",
        "OUT/\x02/etc/passwd": "_/etc/passwd",
        "OUT/..\\up": ".._up",
        "OUT/a\x01": "a",
        "OUT/a\x02": "a~2",
        "OUT/left out.txt": "left out.txt",
    }
    files = (*(output(name) for name in names), output("OUT/link", link="/etc/passwd"))
    stored = Stored(*files, content={name: name.encode() for name in names})
    whole = b"".join(zipped(stored, "OUT"))  # type: ignore[arg-type]

    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        contents = {name: archive.read(name).decode() for name in archive.namelist()}
    links = contents.pop("left out.txt~2")
    assert contents == {entry: name for name, entry in names.items()}
    assert links == "links:\nOUT/link -> /etc/passwd\n"


@pytest.mark.parametrize(
    ("modified_ns", "year"),
    [(-(10**30), 1980), (0, 1980), (10**18, 2001), (2**62, 2107), (2**63, 2107), (10**30, 2107)],
)
def test_a_file_of_any_time_is_in_the_archive(modified_ns: int, year: int):
    file = output("OUT/a", modified_ns=modified_ns)
    whole = b"".join(zipped(Stored(file, content={"OUT/a": b"a"}), ""))  # type: ignore[arg-type]

    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.getinfo("OUT/a").date_time[0] == year


def test_an_archive_with_a_file_that_cannot_be_read_has_no_end():
    stored = Stored(output("OUT/a"), output("OUT/b"), content={"OUT/a": b"hello"})
    pieces = []
    with pytest.raises(StoreError):
        pieces.extend(zipped(stored, ""))  # type: ignore[arg-type]

    assert not zipfile.is_zipfile(io.BytesIO(b"".join(pieces)))
