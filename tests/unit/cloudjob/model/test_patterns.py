"""Lines that are searched together match as each alone."""

from __future__ import annotations

from itertools import product

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


def check(expression: str, lines: list[bytes]) -> None:
    """An expression matches the same lines together and alone, unless it is none."""
    for ignores_case in (False, True):
        try:
            pattern = Pattern(expression, ignores_case=ignores_case)
        except ValueError:
            return
        text = b"".join(line + b"\n" for line in lines)

        together = list(pattern.matching_lines(text))

        assert together == [n for n, line in enumerate(lines) if pattern.search(line)], expression
        assert not together or pattern.may_match(text)


@given(st.lists(st.sampled_from(PARTS), min_size=3, max_size=5), st.lists(LINES, max_size=12))
def test_an_expression_matches_the_same_lines_together_and_alone(
    parts: list[str], lines: list[bytes]
):
    check("".join(parts), lines)


def test_no_expression_of_one_or_two_parts_matches_across_lines():
    """A part that matches a newline, such as a space of any kind, would join two lines."""
    lines = [b"x", b"", b"loss", b"1", b"X x", b" ", "é".encode(), b"\xff", b"11", b"x\r", b"."]
    for parts in (*product(PARTS), *product(PARTS, PARTS)):
        check("".join(parts), lines)
