"""``make browser``: uses the page at ``/`` of a real mesh in a real browser, and takes its pictures for the docs."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from tests.e2e.conftest import Served, serving
from tests.services.gateway.page.check_chats import ChatChecks
from tests.services.gateway.page.check_markdown import MarkdownChecks
from tests.services.gateway.page.check_pictures import check_pictures
from tests.services.gateway.page.check_tasks import check_tasks
from tests.services.gateway.page.chromium import Page, page
from tests.services.gateway.page.other_clients import other_clients
from tests.services.gateway.page.page_audit import CONTRASTS, FOCUS, MIN_CONTRAST, UNNAMED, Findings

IMAGES = Path(__file__).parents[4] / "docs" / "images"
KEY, ADMIN_KEY = "key-of-the-test", "admin-key-of-the-test"
ENGINE = "engine-1"
WIDTH, HEIGHT = 1280, 800
MAX_PICTURE_BYTES = 150_000
MIN_INTERVALS = 9
"""Of the charts, in a picture."""
QUESTION = "What is 3 plus 4?"

_TEXT = "document.querySelector({!r})?.textContent.trim()"
_STATE = (
    "[...document.querySelectorAll('.part')].find((each) => each.querySelector('b').textContent === {!r})"
    "?.querySelector('.part-state').textContent ?? ''"
)
_ANSWER = "[...document.querySelectorAll('.message.assistant')].at(-1)"


class Checks(Findings):
    """Uses the page as a user would, and collects what is not as it should be."""

    def __init__(self, tab: Page, served: Served) -> None:
        super().__init__(tab)
        self.served = served

    async def keys(self) -> None:
        """Enter the keys, which the page asks for."""
        await self.tab.until("document.querySelector('#keys-dialog').open")
        await self.tab.write(KEY)
        await self.tab.press("Tab")
        await self.tab.write(ADMIN_KEY)
        await self.tab.press("Enter")
        await self.tab.until("document.querySelectorAll('.part').length >= 7")
        stored = await self.tab.run("JSON.stringify([Object.keys(localStorage), Object.keys(sessionStorage).length])")
        self.expect(json.loads(stored) == [[], 2], "the keys are in the storage of the tab only")

    async def parts(self) -> None:
        health = await self.tab.run(_TEXT.format("#health"))
        names = await self.tab.run("[...document.querySelectorAll('.part b')].map((each) => each.textContent)")
        self.expect("serving" in health, f"every part is shown ({', '.join(names)}): {health}")

    async def ask(self, question: str) -> None:
        await self.tab.run("document.querySelector('#draft').focus()")
        await self.tab.write(question)
        await self.tab.press("Enter")

    async def answered(self) -> None:
        await self.tab.until(
            f"{_ANSWER}?.getAttribute('aria-busy') === 'false' && {_ANSWER}.querySelector('.timeline')"
        )

    async def stream(self) -> None:
        """Stream an answer, stop a long one, and regenerate it."""
        await self.set("Temperature", "0")  # drawn freely, the small model sometimes calls no tool
        await self.ask(QUESTION)
        await self.answered()
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        legend = await self.tab.run(f"{_ANSWER}.querySelector('.timeline-legend').textContent")
        self.expect("7" in text, f"an answer streams: {text!r}")
        self.expect("prefill" in legend and "decode" in legend, f"its timeline: {legend}")
        await self.set("Max tokens", "400")
        await self.ask("Tell me a story about a dragon.")
        await self.tab.until(f"{_ANSWER}.querySelector('.message-text').textContent.length > 2")
        await self.tab.press("Escape")
        await self.answered()
        note = await self.tab.run(f"{_ANSWER}.querySelector('.timeline').textContent")
        self.expect("stopped" in note, f"a stopped answer: {note}")
        await self.set("Max tokens", "60")
        await self.click(_ANSWER, "Regenerate")
        await self.tab.until(f"{_ANSWER}?.querySelector('.timeline') && !{_ANSWER}.textContent.includes('stopped')")
        count = await self.tab.run("document.querySelectorAll('.message.assistant').length")
        self.expect(count == 2, "the stopped answer is generated again in its place")

    async def edit(self) -> None:
        """Change the first message, which drops what came after it."""
        first = "document.querySelector('.message.user')"
        await self.tab.run(
            f"[...{first}.querySelectorAll('button')].find((each) => each.textContent === 'Edit').click()"
        )
        await self.tab.run(f"{first}.querySelector('textarea').select()")
        await self.tab.write("What is 5 plus 4?")
        await self.tab.press("Enter")
        await self.tab.until("document.querySelectorAll('.message').length === 2")
        await self.answered()
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        self.expect("9" in text, f"an edited message is answered anew: {text!r}")

    async def tokens(self) -> None:
        """Show the tokens of an answer that is drawn freely, and choose one with the keyboard."""
        for label, value in (("Log probabilities", "5"), ("Temperature", "1"), ("Seed", "3"), ("Max tokens", "60")):
            await self.set(label, value)
        await self.ask("Tell me a story.")
        await self.answered()
        await self.tab.run(f"{_ANSWER}.querySelector('.tokens').focus()")
        await self.tab.press(*["ArrowRight"] * 6)
        rows = await self.tab.run(f"{_ANSWER}.querySelectorAll('.inspector li').length")
        self.expect(rows >= 3, f"a token shows {rows} alternatives")
        await self.set("Log probabilities", "")

    async def schema(self) -> None:
        """Bind an answer to a JSON schema."""
        await self.set(
            "JSON schema", '{"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}'
        )
        await self.ask("What is 2 plus 2?")
        await self.answered()
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        self.expect(text.startswith("{"), f"an answer in the form of a schema: {text!r}")
        await self.set("JSON schema", "")

    async def tool(self) -> None:
        """Offer a tool, give its result, and see the model continue."""
        parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        function = {"name": "get_weather", "description": "Current weather in a city", "parameters": parameters}
        await self.set("Tools", json.dumps([{"type": "function", "function": function}]))
        await self.new_chat()
        await self.ask("What is the weather in Paris?")
        await self.answered()
        call = await self.tab.run(f"{_ANSWER}.querySelector('.tool-call').textContent")
        self.expect("get_weather" in call and "Paris" in call, f"a tool is called: {call}")
        await self.tab.run(f"{_ANSWER}.querySelector('.tool-result textarea').focus()")
        await self.tab.write('{"weather": "sunny"}')
        await self.tab.run(f"{_ANSWER}.querySelector('.tool-result').requestSubmit()")
        await self.tab.until(f"!{_ANSWER}.querySelector('.tool-call')")
        await self.answered()
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        self.expect(text, f"the model continues with the tool's result: {text!r}")
        await self.set("Tools", "")

    async def new_chat(self, *questions: str) -> None:
        """Begin another conversation."""
        await self.tab.run("document.querySelector('#new-chat').click()")
        for question in questions:
            await self.ask(question)
            await self.answered()

    async def code(self) -> None:
        """Show the request as a command and as a program, without the key, and run them."""
        await self.new_chat(QUESTION)
        await self.tab.run("document.querySelector('#open-code').click()")
        shown = [await self.tab.run(_TEXT.format("#code"))]
        await self.tab.run("document.querySelector('input[value=python]').click()")
        shown.append(await self.tab.run(_TEXT.format("#code")))
        await self.tab.press("Escape")
        self.expect(not any(KEY in each for each in shown), "the request as curl and as Python, without the key")
        for wanted, command in (
            (b"[DONE]", ("bash", "-c", shown[0])),
            (b"= 7", (sys.executable, "-c", shown[1])),
        ):
            process = await asyncio.create_subprocess_exec(
                *command, env={**os.environ, "TOKENLOOM_API_KEY": KEY}, stdout=PIPE, stderr=DEVNULL
            )
            output, _ = await process.communicate()
            self.expect(wanted in output, f"{Path(command[0]).name} runs what was copied: {output[-60:]!r}")

    async def requests(self) -> None:
        """See the last requests with the admin key."""
        await self.tab.until("document.querySelectorAll('#requests tbody tr').length >= 5")
        text = await self.tab.run(_TEXT.format("#requests"))
        self.expect("chat/completions" in text and "plus" not in text, "the last requests, without prompts")

    async def kill(self) -> None:
        """Kill an engine; the page shows it as lost, and as serving when the supervisor has started it again."""
        index = int(ENGINE.rpartition("-")[2])
        (engine,) = (row for row in self.served.ps() if (row["service"], row["index"]) == ("engine", index))
        os.kill(engine["pid"], signal.SIGKILL)
        await self.tab.until(f"({_STATE.format(ENGINE)}).startsWith('lost')")
        pill = await self.tab.run("document.querySelector('#health').className")
        self.expect("bad" in pill, f"{ENGINE} was killed and is red")
        await self.looks("dark")
        await self.tab.until(f"({_STATE.format(ENGINE)}) === 'serving'")
        await self.tab.until("document.querySelector('#health').className.includes('ok')")
        events = await self.tab.run(_TEXT.format("#events"))
        self.expect(f"{ENGINE} is serving again" in events, f"it has come back: {events}")

    async def reach(self) -> None:
        """Walk over the page with the keyboard; every stop shows its focus."""
        await self.tab.run("document.activeElement.blur()")
        seen = []
        for _ in range(80):
            await self.tab.press("Tab")
            seen.append(await self.tab.run(FOCUS))
        names = {name for name, _ in seen}
        wanted = {"theme", "open-keys", "map", "plot", "toggle-settings", "messages", "draft", "send"}
        self.expect(wanted - names == set(), f"the keyboard reaches everything ({wanted - names or 'nothing'} missing)")
        self.expect(all(visible for name, visible in seen if name != "BODY"), "every stop shows its focus")

    async def looks(self, scheme: str) -> None:
        """Take a picture in one colour scheme, and check contrasts and names."""
        await self.tab.show(WIDTH, HEIGHT, scheme)
        await self.tab.run("document.querySelectorAll('.column, .map').forEach((each) => each.scrollTo(0, 0))")
        await self.tab.until(f"document.querySelector('.plot').ariaValueMax >= {MIN_INTERVALS - 1}")
        IMAGES.mkdir(exist_ok=True)
        path = IMAGES / f"page-{scheme}.png"
        await self.tab.picture(path)
        self.expect(path.stat().st_size <= MAX_PICTURE_BYTES, f"{path.name}: {path.stat().st_size} bytes")
        contrasts = await self.tab.run(CONTRASTS)
        self.expect(not contrasts, f"{scheme}: every text has a contrast of {MIN_CONTRAST} {contrasts or ''}")
        unnamed = await self.tab.run(UNNAMED)
        self.expect(not unnamed, f"{scheme}: every control has a name {unnamed or ''}")
        wide = await self.tab.run("document.documentElement.scrollWidth")
        self.expect(wide <= WIDTH, f"{scheme}: the page fits into {WIDTH} pixels")


async def check(served: Served, directory: Path) -> list[str]:
    """Return what is not as it should be."""
    async with page(directory) as tab:
        checks = Checks(tab, served)
        await tab.show(WIDTH, HEIGHT)
        await tab.open(served.url)
        await checks.keys()
        await checks.parts()
        async with other_clients(served.url, KEY):
            for step in (
                *(checks.stream, checks.edit, checks.schema, checks.tool),
                *(checks.code, checks.requests, checks.reach),
            ):
                await step()
            await checks.new_chat(QUESTION, "Explain prefill and decode.")
            await checks.looks("light")
            await checks.new_chat()
            await checks.tokens()
            await checks.kill()
        markdown = MarkdownChecks(tab)
        await markdown.check()
        chats = ChatChecks(tab)
        await chats.check()
        checks.network(served.url, KEY, expected=("401",))
        return checks.wrong + markdown.wrong + chats.wrong


def main() -> int:
    if shutil.which("chromium") is None:
        print("there is no chromium; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory, serving() as serve:
        flags = ("--prefill", "1", "--decode", "2", "--pd-threshold", "0", "--num-kv-blocks", "48")
        served = serve(*flags, TOKENLOOM_API_KEY=KEY, TOKENLOOM_ADMIN_API_KEY=ADMIN_KEY)
        wrong = asyncio.run(check(served, Path(directory)))
        served.stop(signal.SIGTERM)
        wrong += check_pictures(serve, Path(directory) / "images")
        wrong += check_tasks(serve, Path(directory) / "tasks")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
