"""An HTML page as a test reads it: its elements, every one of them closed, and its texts."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        assert self.open == []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def values(self, name: str) -> list[str]:
        """The values of an attribute, on all elements that have it."""
        return [attributes[name] or "" for _, attributes in self.tags if name in attributes]

    def handle_starttag(self, tag, attrs) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)
