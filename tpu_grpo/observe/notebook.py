"""Shows a run below the cell of a notebook that trains: its progress, and its report as it is written."""

import html
import sys

PAGE_HEIGHT = 640
"""The height of the report in pixels; the reader scrolls in it."""


def is_in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython.core.getipython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class Cell:
    """A part of a cell's output; each call replaces what it showed before."""

    def __init__(self) -> None:
        from IPython.display import display

        self._handle = display({"text/html": ""}, raw=True, display_id=True)

    def show_progress(self, step: int, most: int, line: str) -> None:
        """Show a bar for the steps that are done, and a line of text below."""
        bar = f'<progress value="{step}" max="{most}" style="width: 100%"></progress>'
        self._show(f"{bar}<pre>{html.escape(line)}</pre>")

    def show_page(self, page: str) -> None:
        """Show a whole page of HTML, in a frame of its own."""
        frame = f'width="100%" height="{PAGE_HEIGHT}" style="border: 1px solid #ccc"'
        self._show(f'<iframe srcdoc="{html.escape(page)}" {frame}></iframe>')

    def _show(self, content: str) -> None:
        if self._handle is not None:
            self._handle.update({"text/html": content}, raw=True)
