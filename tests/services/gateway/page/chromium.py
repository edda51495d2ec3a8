"""Drives a headless Chromium through its debugging pipe, without a library or a port."""

import asyncio
import json
import os
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from tests.services.gateway.page.picture import TO_PALETTE, palette_png

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--disable-lcd-text",  # pictures are smaller without coloured edges
    "--remote-debugging-pipe",
)
_LIMIT = 64 << 20
"""Bytes of the largest message: a picture."""
SECONDS = 120.0
"""Bound of every wait: a hang is a failure."""
_MODIFIERS = {"Shift": 8}
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
"""Names of keys, with the codes that Windows gives them."""


class PageFailed(Exception):
    """Raised when a script of the test fails in the page."""


class Browser:
    """Speaks the debugging protocol: JSON messages, each followed by a zero byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Hand out answers and keep events, until the browser ends."""
        while data := await self._reader.readuntil(b"\0"):
            message = json.loads(data[:-1])
            if (answer := self._answers.pop(message.get("id", 0), None)) is None:
                self.events.append(message)
            elif "error" in message:
                answer.set_exception(PageFailed(message["error"]["message"]))
            else:
                answer.set_result(message["result"])

    async def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if session:
            message["sessionId"] = session
        answer = self._answers[message["id"]] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(SECONDS):
            return await answer

    async def tab(self) -> "Page":
        """Open an empty tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        return Page(self, attached["sessionId"])


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def another(self) -> "Page":
        """Open one more tab of the same browser."""
        return await self._browser.tab()

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def reload(self) -> None:
        """Load the page again."""
        await self.run("window.isOld = true")
        await self.call("Page.reload")
        await self.until("window.isOld === undefined && document.readyState === 'complete'")

    async def show(self, width: int, height: int, scheme: str = "light", motion: str = "reduce") -> None:
        """Set the size in CSS pixels, and what the user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.prefer(scheme, motion)

    async def prefer(self, scheme: str, motion: str = "reduce") -> None:
        """Set the colour scheme and the motion that the user prefers."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def run(self, script: str) -> Any:
        """Return the value of an expression, or of the promise that it is."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise PageFailed(f"{script}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression, or the promise that it is, is true. Raises ``TimeoutError`` naming it."""
        script = (
            "new Promise((done, fail) => {const ask = async () => "
            f"(await ({condition})) ? done(true) : setTimeout(() => ask().catch(fail), 20); ask().catch(fail);}})"
        )
        try:
            await self.run(script)
        except TimeoutError:
            raise TimeoutError(f"this did not become true: {condition}") from None

    async def press(self, *keys: str) -> None:
        """Press keys one after the other: ``Tab``, ``Shift+Tab``, ``Enter``, ``Escape``, ``ArrowLeft`` …"""
        for each in keys:
            *held, key = each.split("+")
            text = {"Enter": "\r", "Space": " "}.get(key, "")
            about: dict[str, Any] = {
                "key": " " if key == "Space" else key,
                "code": key,
                "windowsVirtualKeyCode": _KEYS[key],
                "modifiers": sum(_MODIFIERS[name] for name in held),
            }
            await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
            await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def write(self, text: str) -> None:
        """Write into the element that has the focus."""
        await self.call("Input.insertText", text=text)

    async def picture(self, path: Path) -> None:
        """Save what is visible as PNG."""
        taken = await self.call("Page.captureScreenshot", format="png")
        palette = await self.run(f"{TO_PALETTE}({json.dumps(taken['data'])})")
        await asyncio.to_thread(path.write_bytes, palette_png(**palette))

    def requested(self) -> list[str]:
        """Return the URLs that were requested so far."""
        events = self._browser.events
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Return the exceptions of scripts, and what the browser has logged: refused content, and failed requests other
        than those to a gateway that asks for a key."""
        found = []
        for event in self._browser.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found


@asynccontextmanager
async def page(profile: Path) -> AsyncIterator[Page]:
    """Start a browser with a new profile and open an empty tab."""
    (commands, to_browser), (from_browser, answers) = os.pipe(), os.pipe()
    shell = f'exec chromium "$@" 3<&{commands} 4>&{answers}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", shell, "bash", *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
        pass_fds=(commands, answers),
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    os.close(commands)
    os.close(answers)
    try:
        browser = await _connect(to_browser, from_browser)
        reading = asyncio.create_task(browser.read())
        yield await browser.tab()
        reading.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _connect(to_browser: int, from_browser: int) -> Browser:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser, "rb"))
    transport, protocol = await loop.connect_write_pipe(
        lambda: asyncio.streams.FlowControlMixin(loop), os.fdopen(to_browser, "wb")
    )
    return Browser(reader, asyncio.StreamWriter(transport, protocol, None, loop))
