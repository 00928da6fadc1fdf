"""Lines that are searched together match as each alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cloudjob.model.patterns import Pattern

# Some expressions are searched in many lines at once, and the others line by line.
PARTS = (
    "loss", "x", ".*", ".", "[a-z]", "[^x]", "[^\\n]", "\\d+", "\\s", "\\S", "\\b", "^", "$", "|",
    "(x|1)", "(?:1)?", "(?i)X", "(?s).", "\\n", "é", "1{1,2}", "\\.", "[[:alpha:]]", "\\pL", "\\W",
    "\\x0a", "(?P<a>1)",
)  # fmt: skip
LINES = st.lists(
    st.sampled_from([b"loss", b"x", b"X", b"1", b".", b" ", b"\xff", "é".encode(), b"\r", b"\t"])
    | st.binary(max_size=3),
    max_size=6,
).map(lambda pieces: b"".join(pieces).replace(b"\n", b" "))


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=5), st.lists(LINES, max_size=12))
def test_an_expression_matches_the_same_lines_together_and_alone(
    parts: list[str], lines: list[bytes]
):
    for ignores_case in (False, True):
        try:
            pattern = Pattern("".join(parts), ignores_case=ignores_case)
        except ValueError:
            return  # It is no expression.
        text = b"".join(line + b"\n" for line in lines)

        together = list(pattern.matching_lines(text))

        assert together == [n for n, line in enumerate(lines) if pattern.search(line)]
        assert not together or pattern.may_match(text)
