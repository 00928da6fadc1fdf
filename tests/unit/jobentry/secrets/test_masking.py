"""Which values are secrets, and where text contains them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from jobentry import log
from jobentry.contract import masks as marks
from jobentry.secrets import masking

# In two parts, as cloudjob refuses to send a folder that contains a key.
KEY = """-----BEGIN OPENSSH {0}-----
b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ
QyNTUxOQAAACCuYzZrLhZ0V5a1cJ
-----END OPENSSH {0}-----
""".format("PRIVATE KEY")


@pytest.fixture(autouse=True)
def reset_secrets() -> Iterator[None]:
    yield
    masking.mask_secrets_of({})


def mask_secrets_of(**values: str) -> None:
    masking.mask_secrets_of({"CLOUDJOB_SECRET_NAMES": "S T", **values})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("S", "hunter2hunter2"),
        ("S", "correct horse"),
        ("S", "UPPERlower"),
        ("WANDB_API_KEY", "0123456789abcdef"),
        ("HF_TOKEN", "hf_abcdefgh"),
        ("db_password", "pass/word"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG"),
        ("CLOUDJOB_S3_ACCESS_KEY", "AKIAIOSFODNN7EXAMPLE"),
        ("CLOUDJOB_S3_SESSION_TOKEN", "FwoGZXIvYXdzEBYaD" * 20),
    ],
)
def test_secrets_are_masked(name: str, value: str):
    mask_secrets_of(**{name: value})

    assert masking.hide(f"x{value}, {value}!") == "x***, ***!"
    assert value not in masking.hide(
        f"{base64.b64encode(value.encode())!r} {quote(value, safe='')}"
    )
    assert masking.hide(json.dumps({"a": value})) == '{"a": "***"}'


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("S", "short12"),
        ("S", "production"),
        ("S", "Production"),
        ("TOKENIZERS_PARALLELISM", "false-or-true"),
        ("CLOUDJOB_S3_ENDPOINT", "http://127.0.0.1:9000"),
        ("MONKEY", "banana-banana"),
        ("GOOGLE_CREDENTIALS", __file__),
    ],
)
def test_short_and_ordinary_values_are_not_masked(name: str, value: str):
    mask_secrets_of(**{name: value})

    assert masking.hide(value) == value


def test_a_secret_of_several_lines_is_masked_line_by_line(tmp_path: Path):
    key = tmp_path / "key"
    key.write_text(KEY)
    mask_secrets_of(S=KEY.replace("b3Bl", "second"), CLOUDJOB_SSH_KEY=f"file://{key}")

    first, *middle, last = KEY.splitlines()
    assert masking.hide(KEY.replace("\n", "\r\n")) == f"{first}\r\n***\r\n***\r\n{last}\r\n"
    assert masking.hide(json.dumps(KEY)) == f'"{first}\\n***\\n***\\n{last}\\n"'
    assert masking.hide(middle[0].replace("b3Bl", "second")) == "***"


def test_a_value_within_another_leaves_nothing_of_it():
    mask_secrets_of(S="abcd-efgh", T="abcd-efgh-ijkl-mnop")

    assert masking.hide("abcd-efgh-ijkl-mnop abcd-efgh") == "*** ***"
    assert masking.find(b"1abcd-efgh-ijkl-mnop") == [(1, 20)]


def test_last_lines_of_a_log_are_masked_before_they_are_cut(tmp_path: Path):
    mask_secrets_of(S="hunter2hunter2")
    path = tmp_path / "rank-0.log"
    path.write_text("x" * 100 + "hunter2hunter2" + "y" * 10 + "\n")

    assert log.last_lines(str(path), 20, 20) == ["x" * 6 + "***" + "y" * 10]


@pytest.mark.parametrize("cuts", [(5,), (3, 9), (1, 2, 3, 4, 5, 6, 7, 8, 9), (7, 8, 20)])
def test_a_secret_written_in_parts_is_masked(tmp_path: Path, cuts: tuple[int, ...]):
    """At most its first three bytes are shown, before it is recognised as a secret."""
    mask_secrets_of(S="hunter2hunter2")
    whole = b"my hunter2hunter2 hunting\n"
    text, written = b"", log._Log(4, str(tmp_path / "log"))
    for start, end in zip((0, *cuts), (*cuts, len(whole))):
        with (tmp_path / "log").open("ab") as file:
            file.write(whole[start:end])
        written.grow()
        text += b"".join(written.pieces(is_last=True))

    output, _ = marks.Splitter().split(text)
    joined = b"".join(line.partition(b" ")[2] for line in output.split(b"\n"))

    assert b"hunt" not in joined.replace(b"hunting", b"")
    assert b"unte" not in joined
    assert joined.endswith(b" hunting")
