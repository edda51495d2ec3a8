"""Part of ``make browser``: keeps conversations, and finds, exports and deletes them, as a user of the page does."""

import json

from tests.services.gateway.page.page_audit import CONTRASTS, UNNAMED, Findings

FIRST, SECOND = "What is 6 plus 7?", "What is 20 minus 5?"
_ANSWER = "[...document.querySelectorAll('.message.assistant')].at(-1)"
_ROWS = "document.querySelectorAll('#chats li')"
_MESSAGES = "[...document.querySelectorAll('.message')].map((each) => each.querySelector('.message-text').textContent)"
_DIALOG = "document.querySelector('#chats-dialog')"


class ChatChecks(Findings):
    """Uses the list of conversations, and collects what is not as it should be."""

    async def check(self) -> None:
        await self.first_question()
        await self.cut()
        await self.copy()
        await self.reload()
        await self.find()
        await self.export()
        await self.forget()

    async def ask(self, question: str) -> None:
        await self.tab.run("document.querySelector('#draft').focus()")
        await self.tab.write(question)
        await self.tab.press("Enter")
        await self.answered()

    async def answered(self) -> None:
        await self.tab.until(
            f"{_ANSWER}?.getAttribute('aria-busy') === 'false' && {_ANSWER}.querySelector('.timeline')"
        )

    async def first_question(self) -> None:
        """Choose one of the questions that fit the demo model."""
        await self.tab.run("document.querySelector('#new-chat').click()")
        await self.tab.until("document.querySelectorAll('.questions button').length >= 3")
        about = await self.tab.run("document.querySelector('.empty').textContent")
        self.expect("small model" in about, f"the page says what the model is: {about[:60]!r} …")
        await self.click("document", "What is 8 + 9?")
        await self.answered()
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        self.expect("17" in text, f"a suggested question is answered: {text!r}")

    async def cut(self) -> None:
        """See after how many tokens an answer was cut, by a limit in the settings."""
        await self.set("Max tokens", "5")
        await self.ask("Tell me a story about a dragon.")
        note = await self.tab.run(f"{_ANSWER}.querySelector('.cut').textContent")
        self.expect(note == "Cut at 5 tokens, the limit in the settings.", f"an answer that was cut: {note!r}")
        await self.set("Max tokens", "")

    async def copy(self) -> None:
        """Copy an answer as it was written."""
        await self.tab.call("Browser.grantPermissions", permissions=["clipboardReadWrite"])
        await self.click(_ANSWER, "Copy")
        await self.tab.until(f"[...{_ANSWER}.querySelectorAll('button')].some((each) => each.textContent === 'Copied')")
        same = await self.tab.run(
            "navigator.clipboard.readText().then((text) => text === "
            f"{_ANSWER}.querySelector('.message-text').textContent)"
        )
        self.expect(same, "an answer is copied")

    async def reload(self) -> None:
        """Load the page again: the conversation and the settings are still there."""
        await self.tab.run("document.querySelector('#new-chat').click()")
        await self.set("Seed", "12")
        await self.ask(FIRST)
        before = await self.tab.run(_MESSAGES)
        await self.tab.until("!document.querySelector('#kept-note').textContent")
        await self.reopen()
        await self.tab.until("document.querySelectorAll('.message').length === 2")
        self.expect(await self.tab.run(_MESSAGES) == before, f"a reload finds the conversation again: {before}")
        seed = await self.tab.run(
            "[...document.querySelectorAll('.field')].find((each) => each.textContent === 'Seed')"
            ".querySelector('input').value"
        )
        self.expect(seed == "12", "a reload finds the settings again")
        await self.set("Seed", "")
        stored = await self.tab.run("Object.keys(localStorage).length")
        self.expect(stored == 0, "nothing is in the local storage")

    async def reopen(self) -> None:
        await self.tab.run("window.isOld = true")
        await self.tab.call("Page.reload")
        await self.tab.until("window.isOld === undefined && document.readyState === 'complete'")

    async def find(self) -> None:
        """Search for a conversation and open it."""
        await self.tab.run("document.querySelector('#new-chat').click()")
        await self.ask(SECOND)
        await self.tab.run("document.querySelector('#open-chats').click()")
        await self.tab.until(f"{_DIALOG}.open && {_ROWS}.length >= 3")
        contrasts, unnamed = await self.tab.run(CONTRASTS), await self.tab.run(UNNAMED)
        self.expect(not contrasts and not unnamed, f"the list of chats can be read {contrasts or ''} {unnamed or ''}")
        await self.tab.write("6 PLUS")
        await self.tab.until(f"{_ROWS}.length === 1")
        await self.tab.press("Tab", "Enter")
        await self.tab.until(f"!{_DIALOG}.open && document.querySelector('.message').textContent.includes('6 plus 7')")
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        self.expect("13" in text, f"a conversation is found with the keyboard and opened: {text!r}")
        await self.ask("What is my name?")
        count = await self.tab.run("document.querySelectorAll('.message').length")
        self.expect(count == 4, "it goes on")

    async def export(self) -> None:
        """Export one conversation as Markdown and all as JSON."""
        await self.tab.run("""window.files = [];
          URL.createObjectURL = (blob) => { window.files.push(blob.text()); return '#'; };
          HTMLAnchorElement.prototype.click = function () {
            window.names = [...window.names ?? [], this.download];
          };""")
        await self.tab.run("document.querySelector('#open-chats').click()")
        await self.tab.until(f"{_DIALOG}.open && {_ROWS}.length >= 3")
        await self.click(f"{_ROWS}[0]", "Export")
        await self.tab.run("document.querySelector('#export-chats').click()")
        await self.tab.until("window.files.length === 2")
        names = await self.tab.run("window.names")
        one, every = await self.tab.run("Promise.all(window.files)")
        wanted = names == ["what-is-6-plus-7.md", "tokenloom-chats.json"] and f"## You\n\n{FIRST}" in one
        self.expect(wanted, f"a conversation is exported as {names[0]}")
        chats = json.loads(every)["chats"]
        self.expect(len(chats) >= 3 and all(each["messages"] for each in chats), f"{len(chats)} are exported as JSON")

    async def forget(self) -> None:
        """Delete the open conversation, then all; a reload finds nothing."""
        rows = await self.tab.run(f"{_ROWS}.length")
        await self.click("document.querySelector('#chats [aria-current]')", "Delete")
        await self.click("document.querySelector('#chats [aria-current]')", "Really delete?")
        await self.tab.until(f"{_ROWS}.length === {rows - 1}")
        left = await self.tab.run("document.querySelectorAll('.message').length")
        self.expect(left == 0, "the open conversation is deleted")
        for text in ("Delete all", "Really delete?"):
            await self.click(_DIALOG, text)
        await self.tab.until(f"{_ROWS}.length === 0")
        await self.reopen()
        await self.tab.until("document.querySelector('.questions')")
        kept = await self.tab.run("sessionStorage.getItem('tokenloom-chat')")
        self.expect(kept is None, "all are deleted, and a reload finds none")
