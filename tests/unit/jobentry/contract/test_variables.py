"""Variables in a file are dumped and loaded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jobentry.contract import variables

VALUES = st.binary().map(lambda value: value.replace(b"\0", b"").decode("utf-8", "surrogateescape"))
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)


@given(st.dictionaries(NAMES, VALUES))
def test_what_is_dumped_is_loaded(values: dict[str, str]):
    """Values may contain any bytes that an environment can hold; their order is kept."""
    assert list(variables.load(variables.dump(values)).items()) == list(values.items())


def test_the_format_is_that_of_proc_environ():
    assert variables.dump({"A": "1", "B": "x=y", "C": ""}) == b"A=1\0B=x=y\0C=\0"
