"""One palette for the eight kinds of memory, in the terminal and on the page.

Every colour keeps a contrast of at least 3:1 against both paper white and the dark page, so that one set
serves the light scheme, the dark scheme and terminals of either colour (WCAG 2.1, 1.4.11; a test holds it).
"""

from __future__ import annotations

COLOURS = {
    "weights": "#3a72b4",
    "optimizer": "#9079cf",
    "gradients": "#a3781f",
    "inputs": "#1f8f9e",
    "cache": "#3d8b57",
    "activations": "#d9663f",
    "temporaries": "#b0508c",
    "workspace": "#7b8592",
}
"""By kind, in the order in which the chart stacks them: what lives longest lies at the bottom."""

STACK = tuple(COLOURS)
BESIDE = "#8a8f98"
"""What the process holds beside tensors: context, libraries, the allocator's own reserve."""

GOOD, BAD, WARN = "#2f8f5b", "#d0453a", "#b0771c"
LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181d"


def contrast(one: str, other: str) -> float:
    """The WCAG contrast ratio of two ``#rrggbb`` colours, from 1 to 21."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
