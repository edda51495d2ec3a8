"""Part of ``make browser``: shows pictures to the model that comes with the package, as a user of the page does."""

import asyncio
import base64
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tests.e2e.conftest import Serve, Served
from tests.services.gateway.page.chromium import Page, page
from tests.services.gateway.page.page_audit import CONTRASTS, FOCUS, MIN_CONTRAST, UNNAMED, Findings

MODEL = "tokenloom-picture"
NARROW, WIDE, HEIGHT = 390, 1280, 800
WHAT = "What is in the picture?"
TOO_LARGE = 21 << 20
"""Bytes of a file that the page refuses."""

_ANSWER = "[...document.querySelectorAll('.message.assistant')].at(-1)"
_COMPOSER = "#composer .pictures"
_NOTE = "document.querySelector('#picture-note').textContent"


def drawings(directory: Path) -> dict[str, Path]:
    """Draw the files that the checks show, and return them by name."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, colour in (("red square", "#d11"), ("blue circle", "#23d")):
        picture = Image.new("RGB", (240, 240), "white")
        pen = ImageDraw.Draw(picture)
        (pen.rectangle if "square" in name else pen.ellipse)((70, 70, 170, 170), fill=colour)
        files[name] = directory / f"{name}.png"
        picture.save(files[name])
    files["broken"] = directory / "it's broken.png"
    files["broken"].write_bytes(files["red square"].read_bytes()[:200])
    files["text"] = directory / "notes.txt"
    files["text"].write_text("no picture")
    files["large"] = directory / "large.png"
    files["large"].write_bytes(bytes(TOO_LARGE))
    return files


class PictureChecks(Findings):
    """Attaches, drops and pastes pictures, asks about them, and collects what is not as it should be."""

    def __init__(self, tab: Page, files: dict[str, Path]) -> None:
        super().__init__(tab)
        self.files = files

    async def attached(self, count: int) -> None:
        await self.tab.until(f"document.querySelectorAll('{_COMPOSER} img').length === {count}")
        await self.tab.until(f"[...document.querySelectorAll('{_COMPOSER} img')].every((each) => each.naturalWidth)")

    async def choose(self, *names: str) -> None:
        """Choose files: Enter on the button opens the dialog of files, for which the browser's protocol answers."""
        await self.tab.run("""(() => {
          window.isOpened = false;
          const open = (event) => { event.preventDefault(); window.isOpened = true; };
          document.querySelector('#picture-files').addEventListener('click', open, { once: true });
          document.querySelector('#add-pictures').focus();
        })()""")
        await self.tab.press("Enter")
        await self.tab.until("window.isOpened")
        found = await self.tab.call("Runtime.evaluate", expression="document.querySelector('#picture-files')")
        files = [str(self.files[each]) for each in names]
        await self.tab.call("DOM.setFileInputFiles", files=files, objectId=found["result"]["objectId"])

    async def drop(self, *names: str) -> None:
        """Drop files into the conversation."""
        box = await self.tab.run("document.querySelector('#messages').getBoundingClientRect().toJSON()")
        data = {"items": [], "files": [str(self.files[each]) for each in names], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            await self.tab.call("Input.dispatchDragEvent", type=kind, x=box["x"] + 40, y=box["y"] + 40, data=data)

    async def paste(self, name: str) -> None:
        """Paste a picture from the clipboard."""
        content = base64.b64encode(self.files[name].read_bytes()).decode()
        await self.tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        await self.tab.run(
            f"""(() => {{
              const bytes = Uint8Array.from(atob('{content}'), (each) => each.charCodeAt(0));
              const item = new ClipboardItem({{ 'image/png': new Blob([bytes], {{ type: 'image/png' }}) }});
              return navigator.clipboard.write([item]);
            }})()"""
        )
        await self.tab.run("document.querySelector('#draft').focus()")
        await self.tab.call("Input.dispatchKeyEvent", type="rawKeyDown", key="v", modifiers=2, commands=["paste"])
        await self.tab.call("Input.dispatchKeyEvent", type="keyUp", key="v", modifiers=2)

    async def ask(self, text: str) -> str:
        """Send a message, and return the answer, or what the page says is wrong."""
        before = await self.tab.run("document.querySelectorAll('.message.assistant').length")
        await self.tab.run("document.querySelector('#draft').focus()")
        await self.tab.write(text)
        await self.tab.press("Enter")
        await self.tab.until(
            f"document.querySelectorAll('.message.assistant').length === {before + 1} && "
            f"{_ANSWER}.getAttribute('aria-busy') === 'false'"
        )
        answer: str = await self.tab.run(
            f"{_ANSWER}.querySelector('.message-text').textContent + {_ANSWER}.querySelector('.problem').textContent"
        )
        return answer

    async def new_chat(self) -> None:
        await self.tab.run("document.querySelector('#new-chat').click()")

    async def attach(self) -> None:
        """Attach a picture, ask about it, and ask once more in a second turn."""
        await self.choose("red square")
        await self.attached(1)
        answer = await self.ask(WHAT)
        self.expect(answer == "There is a red square in the middle.", f"an attached picture: {answer!r}")
        await self.attached(0)
        shown = await self.tab.run("document.querySelector('.message.user img')?.naturalWidth")
        self.expect(shown == 240, "the message shows the picture")
        answer = await self.ask("What colour is the square?")
        self.expect(answer == "The square is red.", f"a second turn: {answer!r}")

    async def drop_and_paste(self) -> None:
        for place, way in (("dropped", self.drop), ("pasted", self.paste)):
            await self.new_chat()
            await way("blue circle")
            await self.attached(1)
            answer = await self.ask(WHAT)
            self.expect(answer == "There is a blue circle in the middle.", f"a {place} picture: {answer!r}")

    async def remove(self) -> None:
        """Attach two pictures, and remove one with the keyboard; then remove the other one from the sent message."""
        await self.new_chat()
        await self.choose("red square", "blue circle")
        await self.attached(2)
        await self.tab.run(f"document.querySelector('{_COMPOSER} button').focus()")
        await self.tab.press("Enter")
        await self.attached(1)
        name = await self.tab.run(f"document.querySelector('{_COMPOSER} img').alt")
        self.expect(name == "blue circle.png", "the keyboard removes a picture")
        answer = await self.ask(WHAT)
        self.expect("blue circle" in answer and "red" not in answer, f"only the other one is sent: {answer!r}")
        await self.click("document.querySelector('.message.user')", "Edit")
        await self.tab.run("document.querySelector('.message.user .pictures button').click()")
        await self.tab.run("document.querySelector('.message.user form').requestSubmit()")
        await self.tab.until("document.querySelectorAll('.message').length === 2")
        await self.tab.until(f"{_ANSWER}.querySelector('.timeline')")
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        self.expect(text.startswith("I see no picture"), f"an edited message without its picture: {text!r}")

    async def refuse(self) -> None:
        """Show files that cannot be read."""
        await self.new_chat()
        await self.drop("text", "large")
        await self.tab.until(f"{_NOTE} !== ''")
        note = await self.tab.run(_NOTE)
        self.expect("notes.txt is no PNG" in note and "large.png has 21 MiB" in note, f"what is not taken: {note!r}")
        await self.drop("broken")
        await self.tab.until(f"document.querySelectorAll('{_COMPOSER} img').length > 0")
        answer = await self.ask(WHAT)
        self.expect("image" in answer, f"a broken file: {answer!r}")

    async def code(self) -> None:
        """Copy a request with a picture as a command and as a program, and run both beside the file."""
        await self.new_chat()
        await self.choose("red square")
        await self.attached(1)
        await self.tab.write(WHAT)
        await self.tab.run("document.querySelector('#open-code').click()")
        for language, command in (("curl", ("bash", "-c")), ("python", (sys.executable, "-c"))):
            await self.tab.run(f"document.querySelector('input[value={language}]').click()")
            text = await self.tab.run("document.querySelector('#code').textContent")
            folder = self.files["red square"].parent
            run = await asyncio.create_subprocess_exec(*command, text, cwd=folder, stdout=PIPE, stderr=DEVNULL)
            lines = (await run.communicate())[0].decode().splitlines()
            output = "".join(lines if language == "python" else map(_delta, lines))
            is_right = "red square" in output and len(text) < 3000
            self.expect(is_right, f"{language} runs what was copied, which names the file: {output!r}")
        await self.tab.press("Escape")
        await self.tab.run("document.querySelector('#draft').value = ''")
        await self.tab.run("document.querySelector('#pictures button').click()")

    async def stop(self) -> None:
        """Stop a request with a picture, and ask again."""
        await self.new_chat()
        await self.choose("blue circle")
        await self.attached(1)
        await self.tab.run("document.querySelector('#draft').focus()")
        await self.tab.write(WHAT)
        await self.tab.press("Enter", "Escape")
        await self.tab.until(f"{_ANSWER}.getAttribute('aria-busy') === 'false'")
        await self.click(_ANSWER, "Regenerate")
        await self.tab.until(f"{_ANSWER}?.querySelector('.message-text').textContent.includes('blue circle')")
        self.expect(True, "a stopped request is answered again")

    async def looks(self) -> None:
        """Look at pictures in both colour schemes and in a narrow window."""
        await self.tab.until(f"{_ANSWER}.getAttribute('aria-busy') === 'false'")
        await self.choose("red square", "blue circle")
        await self.attached(2)
        for width, scheme in ((WIDE, "light"), (WIDE, "dark"), (NARROW, "light"), (NARROW, "dark")):
            await self.tab.show(width, HEIGHT, scheme)
            for script, what in ((CONTRASTS, f"a contrast of {MIN_CONTRAST}"), (UNNAMED, "a name")):
                found = await self.tab.run(script)
                self.expect(not found, f"{scheme}, {width} pixels: everything has {what} {found or ''}")
            wide = await self.tab.run("document.documentElement.scrollWidth")
            self.expect(wide <= width, f"{scheme}: the page fits into {width} pixels ({wide})")
        await self.tab.show(WIDE, HEIGHT)

    async def reach(self) -> None:
        """Walk over the composer with the keyboard."""
        await self.tab.run("document.querySelector('#messages').focus()")
        seen = []
        for _ in range(12):
            await self.tab.press("Tab")
            seen.append(await self.tab.run(FOCUS))
        names = [name for name, _ in seen]
        self.expect({"draft", "add-pictures", "send"} <= set(names), f"the keyboard reaches {names}")
        self.expect(all(visible for name, visible in seen if name != "BODY"), f"every stop shows its focus {seen}")

    async def reload(self) -> None:
        """Load the page again, which forgets pictures that were not sent and keeps the conversation with the others."""
        await self.tab.reload()
        await self.tab.until("!document.querySelector('#add-pictures').hidden")
        await self.attached(0)
        await self.new_chat()
        await self.choose("blue circle")
        await self.attached(1)
        await self.ask(WHAT)
        await self.tab.reload()
        await self.tab.until("document.querySelector('.message.user img')?.naturalWidth === 240")
        answer = await self.ask("What colour is the circle?")
        self.expect("blue" in answer, f"a picture is there after a reload: {answer!r}")


def _delta(line: str) -> str:
    if not line.startswith("data: {"):
        return ""
    choices: list[dict[str, Any]] = json.loads(line.removeprefix("data: "))["choices"]
    return str(choices[0]["delta"].get("content") or "") if choices else ""


async def _with_page(served: Served, directory: Path, use: Callable[[PictureChecks], Awaitable[None]]) -> list[str]:
    files = await asyncio.to_thread(drawings, directory)
    async with page(directory / "profile") as tab:
        checks = PictureChecks(tab, files)
        await tab.show(WIDE, HEIGHT)
        await tab.open(served.url)
        await tab.until("document.querySelectorAll('.part').length >= 5")
        await use(checks)
        complaints = [each for each in tab.complaints() if "status of 400" not in each and "status of 503" not in each]
        checks.expect(not complaints, f"the browser complains about nothing {complaints or ''}")
        return checks.wrong


async def _with_encoder(checks: PictureChecks) -> None:
    await checks.tab.until("!document.querySelector('#add-pictures').hidden")
    await checks.set("Temperature", "0")
    for name in ("attach", "drop_and_paste", "remove", "refuse", "code", "stop", "looks", "reach", "reload"):
        await getattr(checks, name)()


async def _text_alone(checks: PictureChecks) -> None:
    """See that a model that reads no images is offered none."""
    hidden = await checks.tab.run("document.querySelector('#add-pictures').hidden")
    await checks.drop("red square")
    await checks.tab.until(f"{_NOTE} !== ''")
    note = await checks.tab.run(_NOTE)
    checks.expect(hidden and "No images" in note, f"a model that reads no images: {note!r}")


def check_pictures(serve: Serve, directory: Path) -> list[str]:
    """Return what is not as it should be."""
    wrong = asyncio.run(_with_page(serve(MODEL), directory / "pictures", _with_encoder))
    return wrong + asyncio.run(_with_page(serve("--worker", "hash"), directory / "text", _text_alone))
