"""The progress page that `progress()` shows in a notebook, and the sentences that it shares with the terminal."""

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from tplab.course.feedback.verdict import AMBER, GREEN, RED
from tplab.course.notebooks.numbering import START_NUMBER, argument, two_digits
from tplab.course.tools.exercise_status import ChapterStanding, Standing

_LOOK = {"passed": ("✓", GREEN), "failed": ("✗", RED), "to do": ("○", AMBER)}
_FONT = "font-family: var(--jp-content-font-family, sans-serif); color: var(--jp-ui-font-color1, inherit);"
_CELL = "text-align: left; padding: 0.1em 1em 0.1em 0; border: none; background: none; vertical-align: top;"
_BAR = (
    "display: inline-block; vertical-align: middle; width: 7em; height: 0.6em; margin: 0 0.8em; "
    "background-color: var(--jp-layout-color3, #bdbdbd);"
)
_FAINT = "opacity: 0.75; font-size: 88%;"
_BUTTON = (
    "display: inline-block; padding: 0.5em 1.2em; margin: 0.2em 0 0.8em 0; border-radius: 4px; font-weight: 600; "
    "text-decoration: none; color: white; background-color: #1565c0;"
)


def chapter_summary(chapter: ChapterStanding) -> str:
    """Return a chapter's counts in words: "2 of 4 passed, about 25 of 50 min left"."""
    of = f"{chapter.minutes_left} of " if chapter.minutes_left < chapter.minutes else ""
    left = f", about {of}{chapter.minutes} min left" if chapter.minutes_left else ""
    return f"{chapter.passed} of {len(chapter.exercises)} passed{left}"


def summary(chapters: list[ChapterStanding]) -> str:
    """Return the counts over all chapters in words, and the next exercise to do."""
    passed, minutes = sum(one.passed for one in chapters), sum(one.minutes_left for one in chapters)
    told = f"{passed} of {sum(len(one.exercises) for one in chapters)} exercises passed."
    following = next((e for one in chapters for e in one.exercises if e.status != "passed"), None)
    return told + (f" Next: {following.number}. About {_time(minutes)} left." if following else "")


def footnote(chapters: list[ChapterStanding]) -> str:
    """Return how to verify the passes that only the saved notebooks show, or "" if all of them are verified."""
    shown = sum(one.shown for one in chapters)
    if not shown:
        return ""
    numbers = " ".join(argument(one.number) for one in chapters if one.shown)
    which = "1 exercise passes" if shown == 1 else f"{shown} exercises pass"
    return f"{which} in your saved notebooks. To check from scratch: tplab check {numbers}"


def _time(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} hours"


class ProgressPage:
    """The learner's progress as HTML and as text. Links are relative to `folder`, where the notebook is."""

    def __init__(self, chapters: list[ChapterStanding], folder: Path) -> None:
        self.chapters, self.folder = chapters, folder

    def __repr__(self) -> str:
        lines = []
        for chapter in self.chapters:
            lines.append(f"{two_digits(chapter.number)} {chapter.title}: {chapter_summary(chapter)}")
            if chapter.problem:
                lines.append(f"   {chapter.problem}")
            for exercise in chapter.exercises:
                mark = _LOOK[exercise.status][0]
                lines.append(f"   {mark} {exercise.number} {exercise.title}: {_told(exercise)}, {exercise.minutes} min")
        return "\n".join([*lines, *filter(None, (summary(self.chapters), footnote(self.chapters)))])

    def _repr_html_(self) -> str:
        chapters = "".join(self._chapter(chapter) for chapter in self.chapters)
        told = f"<p><b>{escape(summary(self.chapters))}</b></p>{self._button()}"
        below = f'<p style="{_FAINT}">{escape(footnote(self.chapters))}</p>'
        return f'<div style="{_FONT} max-width: 62em;">{told}{chapters}{below}</div>'

    def _button(self) -> str:
        """Return the HTML for the button that leads to the chapter of the next exercise, or "" if there is none."""
        chapter = next((one for one in self.chapters if one.minutes_left and not one.problem), None)
        if not chapter:
            return ""
        exercise = next(one for one in chapter.exercises if one.status != "passed")
        if chapter.minutes_left < chapter.minutes or chapter.begun:
            text = f"Go on with {exercise.number}: {exercise.title}"
        else:
            begun = any(one.minutes_left < one.minutes or one.begun for one in self.chapters)
            text = f"{'Go on' if begun else 'Start'} with {_called(chapter)}: {chapter.title}"
        return f'<a style="{_BUTTON}" href="{escape(self._link(chapter))}">{escape(text)} →</a>'

    def _link(self, chapter: ChapterStanding) -> str:
        return quote(os.path.relpath(chapter.path, self.folder).replace(os.sep, "/"))

    def _chapter(self, chapter: ChapterStanding) -> str:
        """Return the HTML for a chapter: a line with a progress bar, which unfolds to show the exercises."""
        parts = ((chapter.passed - chapter.shown, 1), (chapter.shown, 0.6))  # what's verified, then what isn't
        filled = "".join(
            f'<span style="float: left; width: {100 * count / len(chapter.exercises):.0f}%; height: 100%; '
            f'opacity: {opacity}; background-color: {GREEN};"></span>'
            for count, opacity in parts
            if count
        )
        bar = f'<span style="{_BAR}">{filled}</span>'
        title = f"{two_digits(chapter.number)} · {chapter.title}"
        name = (
            f'<a style="display: inline-block; width: 22em;" href="{escape(self._link(chapter))}">{escape(title)}</a>'
        )
        line = f'<b>{name}</b>{bar}<span style="{_FAINT}">{escape(chapter_summary(chapter))}</span>'
        problem = f'<div style="color: {RED};">{escape(chapter.problem)}</div>' if chapter.problem else ""
        rows = "".join(_row(exercise) for exercise in chapter.exercises)
        table = f'<table style="margin: 0.2em 0 0.6em 1.2em; border: none; font-size: inherit;">{rows}</table>'
        opened = " open" if chapter.begun or chapter.problem else ""
        return f'<details{opened} style="margin: 0.3em 0;"><summary>{line}</summary>{problem}{table}</details>'


def _called(chapter: ChapterStanding) -> str:
    return "the start page" if chapter.number == START_NUMBER else f"chapter {chapter.number:02d}"


def _row(exercise: Standing) -> str:
    mark, colour = _LOOK[exercise.status]
    told = f'<span style="color: {colour};">{mark} {escape(_told(exercise))}</span>'
    cells = [exercise.number, escape(exercise.title), told, f'<span style="{_FAINT}">{exercise.minutes} min</span>']
    return "<tr>" + "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells) + "</tr>"


def _told(exercise: Standing) -> str:
    return exercise.status + (f", {exercise.note}" if exercise.note else "")
