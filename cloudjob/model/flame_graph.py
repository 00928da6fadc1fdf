"""A flame graph as one HTML file that loads nothing: a bar for each call, as wide as its time.

Names of functions and files are a stranger's text: they are escaped, and no script contains them.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from cloudjob.model.text import one_line, short_path

# Narrower bars are not drawn: nobody sees them, and a page with all of them would be slow.
_LEAST_SHARE = 0.001
_MOST_BARS = 6000
_BAR_PX = 19
_WAIT_COLOURS = {
    "waits for other ranks": "#f59e0b",
    "waits for other ranks to start": "#f59e0b",
    "waits for its device": "#10b981",
    "waits for its data loader": "#ec4899",
    "waits for a lock or a thread": "#a855f7",
    "reads or writes a file": "#06b6d4",
    "waits for the network": "#84cc16",
    "sleeps": "#94a3b8",
}
_OTHER_WAIT, _OWN, _LIBRARY = "#cbd5e1", "#93c5fd", "#e2e8f0"
_LIBRARIES = ("site-packages/", "dist-packages/", "lib/python", "<frozen ")
_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px Roboto, system-ui, sans-serif; margin: 20px; }
h1 { font-size: 20px; margin: 0 0 6px; }
p { margin: 2px 0; color: #64748b; }
#keys { margin: 12px 0 8px; display: flex; flex-wrap: wrap; gap: 4px 16px; }
#keys span::before { content: ""; display: inline-block; width: 12px; height: 12px;
  margin-right: 5px; border-radius: 2px; background: var(--c); vertical-align: -1px; }
#graph { position: relative; }
#graph div { position: absolute; height: 18px; box-sizing: border-box; overflow: hidden;
  white-space: nowrap; text-overflow: ellipsis; font-size: 12px; line-height: 18px;
  text-indent: 3px; border-radius: 2px; cursor: pointer; color: #0f172a; border: 0 solid #fff;
  border-right-width: 1px; }
#graph div:hover { filter: brightness(0.88); }
#graph div.dim { opacity: 0.45; }
#what { min-height: 20px; margin-top: 10px; color: inherit; }
"""
_SCRIPT = """
const graph = document.getElementById("graph");
const what = document.getElementById("what");
const bars = [...graph.children].map((bar) => ({
  bar, left: Number(bar.dataset.left), width: Number(bar.dataset.width),
}));
const zoom = (left, width) => {
  for (const each of bars) {
    const start = Math.max(0, (each.left - left) / width);
    const end = Math.min(1, (each.left + each.width - left) / width);
    each.bar.hidden = end - start <= 0.0004;
    each.bar.style.left = `${100 * start}%`;
    each.bar.style.width = `${100 * Math.max(0, end - start)}%`;
    each.bar.classList.toggle("dim", each.width > width * 1.0001);
  }
};
graph.addEventListener("click", ({ target }) => {
  const each = bars.find(({ bar }) => bar === target);
  if (each) zoom(each.left, each.width);
});
graph.addEventListener("mouseover", ({ target }) => { what.textContent = target.title || ""; });
document.addEventListener("keydown", ({ key }) => { if (key === "Escape") zoom(0, 1); });
zoom(0, 1);
"""


class Call(NamedTuple):
    """A call: the function, and the line that it is on."""

    file: str
    line: int
    function: str


@dataclass(slots=True)
class _Node:
    """A function below the same callers, or what it waits for.

    Args:
        colour: As CSS has it.
        lines: The lines at which it was seen, each with how often.
    """

    name: str
    file: str
    colour: str
    looks: int = 0
    lines: Counter[int] = field(default_factory=Counter)
    children: dict[tuple[str, str], _Node] = field(default_factory=dict)


class _Bar(NamedTuple):
    depth: int
    left: float
    width: float
    node: _Node


def page(title: str, notes: Sequence[str], rows: Iterable[tuple[Sequence[Call], str, int]]) -> str:
    """Return the page.

    Args:
        notes: Sentences about the graph.
        rows: Stacks, each with the outermost call first, with what the innermost call waits for
            (empty if for nothing), and with how often it was seen.
    """
    root = _tree(rows)
    bars = _bars(root)
    height_px = _BAR_PX * (1 + max((bar.depth for bar in bars), default=0))
    # Only this script and this style may run, whatever a name contains.
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{_text(title)}</h1>",
            *(f"<p>{_text(note)}</p>" for note in notes),
            "<p>A bar is as wide as its share of the time. A click zooms in, Escape out.</p>",
            f'<div id="keys">{_keys(root)}</div>',
            f'<div id="graph" style="height:{height_px}px">',
            *(_element(bar, root.looks) for bar in bars),
            '</div><p id="what"></p>',
            f"<script>{_SCRIPT}</script></body></html>",
            "",
        )
    )


def _tree(rows: Iterable[tuple[Sequence[Call], str, int]]) -> _Node:
    root = _Node("all", "", _LIBRARY)
    for calls, wait, looks in rows:
        node = root
        node.looks += looks
        for call in calls:
            key = (call.file, call.function)
            colour = _LIBRARY if any(part in call.file for part in _LIBRARIES) else _OWN
            node = node.children.setdefault(key, _Node(call.function, call.file, colour))
            node.looks += looks
            node.lines[call.line] += looks
        if wait:
            key = ("", wait)
            colour = _WAIT_COLOURS.get(wait, _OTHER_WAIT)
            node = node.children.setdefault(key, _Node(wait, "", colour))
            node.looks += looks
    return root


def _bars(root: _Node) -> list[_Bar]:
    """Return the bars to draw, callers first, without those that are too narrow to be seen."""
    bars = [_Bar(0, 0.0, 1.0, root)]
    for bar in bars:
        left = bar.left
        children = sorted(bar.node.children.items(), key=lambda item: (-item[1].looks, item[0]))
        for _, child in children:
            width = child.looks / root.looks
            if width >= _LEAST_SHARE and len(bars) < _MOST_BARS:
                bars.append(_Bar(bar.depth + 1, left, width, child))
            left += width
    return bars


def _element(bar: _Bar, looks: int) -> str:
    node, share = bar.node, f"{100 * bar.node.looks / max(1, looks):.1f} %"
    place = ""
    if node.file:
        lines = ", ".join(str(line) for line, _ in node.lines.most_common(4))
        place = f" at {short_path(node.file)}:{lines}"
    call = f"{node.name}()" if node.file else node.name
    title = _text(f"{call}{place}: {share}")
    return (
        f'<div data-left="{bar.left:.6f}" data-width="{bar.width:.6f}" title="{title}" '
        f'style="top:{_BAR_PX * bar.depth}px;background:{node.colour}">{_text(call)}</div>'
    )


def _keys(root: _Node) -> str:
    """Return the legend: the waits, with their shares of the time."""
    waits: Counter[str] = Counter()
    nodes = [root]
    for node in nodes:
        nodes += node.children.values()
        if not node.file and node is not root:
            waits[node.name] += node.looks
    computes = root.looks - sum(waits.values())
    rows = [("computes", _OWN, computes), ("in a library", _LIBRARY, 0)]
    rows += [(name, _WAIT_COLOURS.get(name, _OTHER_WAIT), n) for name, n in waits.most_common()]
    return "".join(
        f'<span style="--c:{colour}">{_text(name)}{_share(looks, root.looks)}</span>'
        for name, colour, looks in rows
    )


def _share(looks: int, all_looks: int) -> str:
    return f" {100 * looks / all_looks:.0f} %" if looks and all_looks else ""


def _text(text: str) -> str:
    return escape(one_line(text))
