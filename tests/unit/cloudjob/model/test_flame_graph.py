"""A flame graph is one page that loads nothing, whatever the names in it are."""

from __future__ import annotations

from html.parser import HTMLParser

from cloudjob.model.flame_graph import Call, page

STEP = Call("train.py", 41, "train_step")
ROWS = [
    ((STEP, Call("data.py", 30, "augment")), "", 60),
    ((STEP, Call("data.py", 31, "augment")), "", 20),
    ((STEP,), "waits for other ranks", 20),
]


class Bars(HTMLParser):
    """The bars of a page: their texts, titles and widths."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.bars: list[tuple[str, float]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)
        values = dict(attrs)
        if "data-width" in values:
            self.bars.append((str(values["title"]), float(str(values["data-width"]))))


def test_each_call_has_a_bar_as_wide_as_its_time_below_its_caller():
    bars = Bars(page("train, rank 1", [], ROWS)).bars

    assert bars == [
        ("all: 100.0 %", 1.0),
        ("train_step() at train.py:41: 100.0 %", 1.0),
        ("augment() at data.py:30, 31: 80.0 %", 0.8),
        ("waits for other ranks: 20.0 %", 0.2),
    ]


def test_the_legend_has_the_share_of_each_wait():
    text = page("train, rank 1", [], ROWS)

    assert "computes 80 %" in text
    assert "waits for other ranks 20 %" in text


def test_names_are_text_and_nothing_is_loaded_from_elsewhere():
    name = '</div><script src="https://example.org/x.js">alert(1)</script>\x1b[2J"onclick="x'
    text = page(name, [name], [((Call(name, 1, name),), name, 3)])

    bars_shown = Bars(text)
    assert text.count("<script") == 1
    assert bars_shown.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "p", "div", "span", "script",
    }  # fmt: skip
    assert "\x1b" not in text
    assert bars_shown.attributes <= {
        "lang", "charset", "http-equiv", "content", "name", "style", "id", "title",
        "data-left", "data-width",
    }  # fmt: skip
    assert "default-src 'none'" in text


def test_bars_that_nobody_can_see_are_left_out():
    rows = [((Call("a.py", n, f"f{n}"),), "", 1) for n in range(5000)]

    bars = Bars(page("job", [], [((STEP,), "", 5000), *rows])).bars

    assert [title for title, _ in bars] == [
        "all: 100.0 %",
        "train_step() at train.py:41: 50.0 %",
    ]


def test_a_profile_without_looks_is_a_page():
    assert "<h1>job</h1>" in page("job", [], [])
