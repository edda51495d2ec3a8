"""Part of ``make browser``: ten tasks of a user in the demo, with the keyboard, on a narrow and on a wide screen."""

import asyncio
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.conftest import COMMAND, Serve
from tests.services.gateway.page.axe import violations
from tests.services.gateway.page.chromium import Page, page
from tests.services.gateway.page.page_audit import Findings

SCREENS = ((390, 844, "dark"), (1440, 900, "light"))
QUESTION, EDITED = "What is 3 plus 4?", "What is 5 plus 4?"
STORY = "Tell me a story about a dragon."
MAX_STOPS = 90
"""Presses of Tab within which every control must be reached."""

_ANSWERS = "[...document.querySelectorAll('.message.assistant')]"
_ANSWER = f"{_ANSWERS}.at(-1)"
_TEXT = f"{_ANSWER}.querySelector('.message-text').textContent"
_BUTTON = "[...{}.querySelectorAll('button, a')].find((each) => each.textContent.startsWith({}))"


def named(text: str, place: str = "document") -> str:
    """Return an expression for the button or link whose text begins so."""
    return _BUTTON.format(place, json.dumps(text))


class Tasks(Findings):
    """Does the tasks on one screen, and collects what is not as it should be."""

    def __init__(self, tab: Page, downloads: Path, what: str) -> None:
        super().__init__(tab)
        self.downloads = downloads
        self.what = what

    def done(self, is_right: object, text: str) -> None:
        self.expect(is_right, f"{self.what}: {text}")

    async def go(self, element: str) -> None:
        """Press Tab until an element has the focus. Raises ``AssertionError`` if that never happens."""
        for _ in range(MAX_STOPS):
            if await self.tab.run(f"document.activeElement === {element}"):
                return
            await self.tab.press("Tab")
        raise AssertionError(f"the keyboard does not reach {element}")

    async def press(self, element: str) -> None:
        await self.go(element)
        await self.tab.press("Enter")

    async def ask(self, question: str, count: int = 1) -> None:
        """Send a question, and wait for so many answers to it."""
        before = await self.tab.run(f"{_ANSWERS}.length")
        await self.go("document.querySelector('#draft')")
        await self.tab.write(question)
        await self.tab.press("Enter")
        await self.tab.until(f"{_ANSWERS}.length === {before + count}")
        await self.answered()

    async def answered(self) -> None:
        await self.tab.until(f"{_ANSWERS}.every((each) => each.querySelector('.timeline'))")

    async def barriers(self, state: str) -> None:
        """Look for barriers in both colour schemes, and whether the page fits into the screen."""
        for scheme in ("dark", "light"):
            await self.tab.prefer(scheme)
            found = await violations(self.tab)
            self.done(not found, f"axe finds nothing in {state}, {scheme} {found or ''}")
        size = await self.tab.run("[document.documentElement.scrollWidth, innerWidth]")
        self.done(size[0] <= size[1], f"{state} fits into {size[1]} pixels")

    async def first(self) -> None:
        """Ask: the first stop of the keyboard leads to the question."""
        await self.tab.until("document.querySelector('.questions')")
        await self.set("Temperature", "0")
        await self.barriers("the empty page")
        await self.tab.run("document.activeElement.blur()")
        await self.tab.press("Tab", "Enter")
        await self.tab.write(QUESTION)
        await self.tab.press("Enter")
        await self.tab.until(f"{_ANSWERS}.length === 1")
        await self.answered()
        self.done("7" in await self.tab.run(_TEXT), "1. ask")

    async def stop(self) -> None:
        await self.go("document.querySelector('#draft')")
        await self.tab.write(STORY)
        await self.tab.press("Enter", "Escape")  # at once: the demo answers within a quarter of a second
        await self.tab.until(f"{_ANSWERS}.length === 2")
        await self.answered()
        note = await self.tab.run(f"{_ANSWER}.querySelector('.timeline').textContent")
        self.done("stopped" in note, f"2. stop: {note!r}")

    async def edit(self) -> None:
        await self.press(named("Edit", "document.querySelector('.message.user')"))
        await self.tab.press("Shift+Home")
        await self.tab.write(EDITED)
        await self.tab.press("Enter")
        await self.tab.until("document.querySelectorAll('.message').length === 2")
        await self.answered()
        self.done("9" in await self.tab.run(_TEXT), "3. edit")

    async def regenerate(self) -> None:
        await self.tab.run(f"{_ANSWER}.isOld = true")
        await self.press(named("Regenerate", _ANSWER))
        await self.tab.until(f"{_ANSWERS}.length === 1 && !{_ANSWER}.isOld")
        await self.answered()
        self.done("9" in await self.tab.run(_TEXT), "4. regenerate")
        await self.barriers("a conversation")

    async def find(self) -> None:
        """Load the page again, begin another conversation, and find the first one."""
        await self.tab.until("!document.querySelector('#kept-note').textContent")
        await self.tab.reload()
        await self.tab.until("document.querySelectorAll('.message').length === 2")
        await self.press("document.querySelector('#new-chat')")
        await self.ask(QUESTION)
        await self.press("document.querySelector('#open-chats')")
        await self.tab.until("document.querySelector('#chats-dialog').open")
        await self.tab.write("5 PLUS")
        await self.tab.until("document.querySelectorAll('#chats li').length === 1")
        await self.barriers("the list of chats")
        await self.tab.press("Tab", "Enter")
        await self.tab.until(f"document.querySelector('.message').textContent.includes({json.dumps(EDITED)})")
        self.done("9" in await self.tab.run(_TEXT), "5. reload, and find the chat again")

    async def copy_code(self) -> None:
        """Bind an answer to the example of a schema, and copy its code."""
        await self.press("document.querySelector('#toggle-settings')")
        await self.press("document.querySelector('#schema').closest('.field').querySelector('button')")
        await self.barriers("the settings")
        await self.ask("Is 7 more than 3?")
        button = f"{_ANSWER}.querySelector('.code button')"
        await self.press(button)
        await self.tab.until(f"{button}.textContent === 'Copied'")
        same = await self.tab.run(
            f"navigator.clipboard.readText().then((text) => text === {_ANSWER}.querySelector('.code code').textContent)"
        )
        self.done(same, "6. copy a code block")
        await self.set("JSON schema", "")

    async def compare(self) -> None:
        """Compare two temperatures and, in the second question, an adapter."""
        await self.press("document.querySelector('#new-chat')")
        await self.press("document.querySelector('#compare')")
        await self.go("document.querySelectorAll('#settings-b input')[1]")
        await self.tab.write("1.5")
        await self.set("System message", "Tell long stories.", "#settings-b")
        await self.ask(STORY, 2)
        await self.set("System message", "", "#settings-b")
        titles = await self.tab.run(f"{_ANSWERS}.map((each) => each.querySelector('header b').textContent)")
        expected = ["A: no system message, temperature 0", "B: system message, temperature 1.5"]
        self.done(titles == expected, f"7. compare two settings: {titles}")
        boxes = await self.tab.run(f"{_ANSWERS}.map((each) => each.getBoundingClientRect().toJSON())")
        is_beside = boxes[0]["right"] <= boxes[1]["left"] and boxes[0]["top"] == boxes[1]["top"]
        is_below = boxes[0]["bottom"] <= boxes[1]["top"] and boxes[0]["left"] == boxes[1]["left"]
        is_wide = await self.tab.run("innerWidth >= 700")
        self.done(is_beside if is_wide else is_below, "the answers stand side by side, or below each other")
        await self.barriers("a comparison")
        await self.tab.until('document.querySelector(`#settings-b option[value$=":pirate"]`)')
        await self.set("Model", "tokenloom-demo:pirate", "#settings-b")
        await self.set("Temperature", "0", "#settings-b")
        await self.ask("What is the capital of France?", 2)
        texts = await self.tab.run(
            f"{_ANSWERS}.slice(-2).map((each) => each.querySelector('.message-text').textContent)"
        )
        self.done("Arr" in texts[1] and "Arr" not in texts[0], f"a model and its adapter answer: {texts}")
        await self.tab.until("!document.querySelector('#kept-note').textContent")
        await self.tab.reload()
        await self.tab.until(f"{_ANSWERS}.length === 4")
        await self.press("document.querySelector('#compare')")
        await self.ask("What is my name?")
        self.done(True, "a comparison is there after a reload, and ends")
        await self.press("document.querySelector('#new-chat')")

    async def kill(self) -> None:
        """Kill the engine that decodes, by the button, which is the second stop behind the question."""
        await self.tab.until("document.querySelector('#health').className.includes('ok')")
        await self.go("document.querySelector('#draft')")
        await self.tab.write(STORY)
        await self.tab.press("Enter", "Tab", "Tab", "Enter")
        at = await self.tab.run("document.activeElement.textContent")
        self.done("Kill the engine" in at, f"the button is near: {at!r}")
        await self.tab.until("document.querySelector('#events').textContent.includes('was killed by the button')")
        await self.tab.until("document.querySelector('#health').className.includes('bad')")
        await self.answered()
        problem, text = await self.tab.run(f"[{_ANSWER}.querySelector('.problem').textContent, {_TEXT}]")
        await self.tab.until("document.querySelector('#health').className.includes('ok')")
        events = await self.tab.run("document.querySelector('#events').textContent")
        is_back = re.search(r"engine-\d is serving again", events)
        self.done(not problem and len(text) > 40 and is_back, f"8. see a killed engine: {events!r}, {text[-40:]!r}")

    async def follow(self) -> None:
        """Follow a slow answer to its timeline."""
        await self.tab.until("document.querySelector('#health').className.includes('ok')")
        await self.set("Max tokens", "30")
        await self.tab.run("document.activeElement.blur()")
        await self.ask(QUESTION)
        link = f"{_ANSWER}.querySelector('a[href^=\"#timeline\"]')"
        text = await self.tab.run(f"{link}.textContent")
        await self.press(link)
        await self.tab.until("location.hash.startsWith('#timeline-')")
        is_shown = await self.tab.run(
            "(() => { const box = document.querySelector(location.hash).getBoundingClientRect();"
            " return box.top >= 0 && box.bottom <= innerHeight + 1; })()"
        )
        self.done(is_shown and "mostly decode" in text, f"9. follow a slow answer: {text!r}")
        await self.barriers("a slow answer")

    async def export(self) -> None:
        """Export a conversation as a file that the browser saves."""
        await self.tab.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(self.downloads))
        await self.press("document.querySelector('#open-chats')")
        await self.tab.until("document.querySelector('#chats-dialog').open && document.querySelector('#chats li')")
        await self.press(named("Export", "document.querySelector('#chats li')"))
        file = self.downloads / "what-is-5-plus-4.md"
        async with asyncio.timeout(60):
            while not file.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
        self.done(f"## You\n\n{EDITED}" in file.read_text(), "10. export")
        await self.tab.press("Escape")


async def _in_demo(url: str, directory: Path) -> list[str]:
    wrong = []
    for width, height, scheme in SCREENS:
        async with page(directory / f"profile-{width}") as tab:
            await tab.show(width, height, scheme)
            await tab.open(url)
            await tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
            tasks = Tasks(tab, directory / f"files-{width}", f"{width} pixels")
            for name in ("first", "stop", "edit", "regenerate", "find", "copy_code", "export", "compare", "kill"):
                await getattr(tasks, name)()
            tasks.network(url)
            wrong += tasks.wrong
    return wrong


async def _slow(url: str, directory: Path) -> list[str]:
    wrong = []
    for width, height, scheme in SCREENS:
        async with page(directory / f"slow-{width}") as tab:
            await tab.show(width, height, scheme)
            await tab.open(url)
            tasks = Tasks(tab, directory, f"{width} pixels")
            await tasks.follow()
            tasks.network(url)
            wrong += tasks.wrong
    return wrong


@contextmanager
def demo() -> Iterator[str]:
    """Run ``tokenloom demo --keep``, and yield the address of its page."""
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        command = (*COMMAND, "demo", "--keep", "--kills", "0")
        environment = {**os.environ, "XDG_RUNTIME_DIR": directory, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
        assert process.stdout is not None
        try:
            found = (re.search(r"the page at (http://[\w.:]+)/", line) for line in process.stdout)
            match = next(filter(None, found), None)
            assert match is not None, "the demo has ended"
            yield match[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def check_tasks(serve: Serve, directory: Path) -> list[str]:
    """Return what is not as it should be."""
    for width, _, _ in SCREENS:
        (directory / f"files-{width}").mkdir(parents=True)
    with demo() as url:
        wrong = asyncio.run(_in_demo(url, directory))
    served = serve("--worker", "hash", "--hash-step-seconds", "0.1")
    return wrong + asyncio.run(_slow(served.url, directory))
