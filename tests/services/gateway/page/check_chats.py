"""Part of ``make browser``: keeps conversations, and finds, exports and deletes them, as a user of the page does."""

import json

from tests.services.gateway.page.chromium import Page
from tests.services.gateway.page.page_audit import CONTRASTS, UNNAMED, Findings

FIRST, SECOND, THIRD = "What is 6 plus 7?", "What is 20 minus 5?", "What is 9 plus 4?"
_ANSWER = "[...document.querySelectorAll('.message.assistant')].at(-1)"
_ROWS = "document.querySelectorAll('#chats li')"
_MESSAGES = "[...document.querySelectorAll('.message')].map((each) => each.querySelector('.message-text').textContent)"
_DIALOG = "document.querySelector('#chats-dialog')"
_TEXTS = """import('/page/chats/chat_store.js')
  .then(async ({ ChatStore }) => (await new ChatStore().heads()).map(({ text }) => text))"""
"""The texts of the conversations that are kept."""
_STORED = """(async () => {
  const { ChatStore } = await import('/page/chats/chat_store.js');
  const store = new ChatStore();
  const add = (id, bytes) => store.save({ id, title: '', changed: id, bytes, text: '' }, { id, messages: [] }, 0);
  ADD;
  const ids = (await store.heads()).map(({ id }) => id);
  const bodies = (await store.bodies()).map(({ id }) => id);
  await store.remove(...ids);
  return ids.every((id) => bodies.includes(id)) && bodies.length === ids.length ? ids : 'a body without its head';
})()"""
"""Adds conversations to an empty store, the last being the latest, and returns the ids of those that it has kept."""
_LARGE = """(async () => {
  const { KeptChat } = await import('/page/chats/kept_chat.js');
  const pictures = [{ name: 'a.png', url: 'A'.repeat(SIZE) }];
  const chat = new KeptChat(() => ({ messages: [{ role: 'user', content: 'a', pictures }], settings: {} }));
  await chat.flush();
  const [{ name, url }] = (await chat.last()).messages[0].pictures;
  await chat.forget(chat.id);
  chat.use(null);
  return { name, url: url.length };
})()"""
"""Keeps a conversation with a picture of so many characters, and returns what is left of the picture."""


class ChatChecks(Findings):
    """Uses the list of conversations, and collects what is not as it should be."""

    async def check(self) -> None:
        for label, value in (("Temperature", "0"), ("Seed", ""), ("Max tokens", "")):
            await self.set(label, value)
        await self.first_question()
        await self.cut()
        await self.copy()
        await self.copy_code()
        await self.copy_without_clipboard()
        await self.reload()
        await self.find()
        await self.export()
        await self.two_tabs()
        await self.forget()
        await self.bounds()

    async def ask(self, question: str, tab: Page | None = None) -> None:
        tab = tab or self.tab
        await tab.run("document.querySelector('#draft').focus()")
        await tab.write(question)
        await tab.press("Enter")
        await self.answered(tab)

    async def answered(self, tab: Page | None = None) -> None:
        await (tab or self.tab).until(
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

    async def copied(self, button: str) -> str:
        """Press a button that copies, and return what is in the clipboard."""
        await self.tab.run(f"{button}.focus()")
        # What the button says lasts a moment, which a busy machine would miss.
        await self.tab.run(f"""(() => {{
          const button = {button};
          window.said = new Promise((done) => {{
            new MutationObserver(() => done(button.textContent)).observe(button, {{ childList: true }});
          }});
        }})()""")
        await self.tab.press("Enter")
        text: str = await self.tab.run(
            "window.said.then(async (said) => `${said} ${await navigator.clipboard.readText()}`)"
        )
        self.expect(await self.tab.run(f"document.activeElement === {button}"), "a button that copies keeps the focus")
        return text

    async def copy_code(self) -> None:
        """Copy a block of code, here an answer that a schema binds."""
        schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
        await self.set("JSON schema", json.dumps(schema))
        await self.ask("What is 2 plus 2?")
        await self.set("JSON schema", "")
        source = await self.tab.run(f"{_ANSWER}.querySelector('.code code').textContent")
        found = await self.copied(f"{_ANSWER}.querySelector('.code button')")
        self.expect(source.startswith("{") and found == f"Copied {source}", f"a block of code is copied: {found!r}")

    async def copy_without_clipboard(self) -> None:
        """Copy where the browser offers no clipboard, as over HTTP to another machine, and where nothing helps."""
        await self.ask("What is 2 plus 3?")
        text = await self.tab.run(f"{_ANSWER}.querySelector('.message-text').textContent")
        button = f"{_ANSWER}.querySelector('header button[title^=Copy]')"
        await self.tab.run("navigator.clipboard.writeText = () => Promise.reject(new Error('refused'))")
        found = await self.copied(button)
        self.expect(found == f"Copied {text}", f"an answer is copied without the clipboard: {found!r}")
        left = await self.tab.run("document.querySelectorAll('.copy-area').length")
        self.expect(left == 0, "what it takes is gone, and the button has the focus")
        await self.tab.until(f"{button}.textContent === 'Copy'")
        await self.tab.run("document.execCommand = () => false")
        found = await self.copied(button)
        self.expect(found.startswith("Not copied "), "a button says that nothing was copied")
        await self.tab.run("document.querySelector('#open-code').click()")
        await self.tab.run("document.querySelector('#copy-code').click()")
        await self.tab.until("document.querySelector('#code-note').textContent.startsWith('Selected')")
        is_selected = await self.tab.run(
            "getSelection().toString().trim() === document.querySelector('#code').textContent.trim()"
        )
        self.expect(is_selected, "a request is selected where it cannot be copied")
        await self.tab.press("Escape")
        await self.tab.run("delete navigator.clipboard.writeText; delete document.execCommand")

    async def reload(self) -> None:
        """Load the page again: the conversation and the settings are still there."""
        await self.tab.run("document.querySelector('#new-chat').click()")
        await self.set("Seed", "12")
        await self.ask(FIRST)
        before = await self.tab.run(_MESSAGES)
        await self.tab.until("!document.querySelector('#kept-note').textContent")
        await self.tab.reload()
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

    async def two_tabs(self) -> None:
        """Go on with one conversation in two tabs: both are kept."""
        await self.tab.run("document.querySelector('#close-chats').click()")
        await self.tab.run("document.querySelector('#new-chat').click()")
        await self.ask(THIRD)
        await self.kept(THIRD)
        other = await self.tab.another()
        await other.open(await self.tab.run("location.href"))
        key = await self.tab.run("sessionStorage.getItem('tokenloom-api-key') ?? ''")
        await other.run(f"sessionStorage.setItem('tokenloom-api-key', {json.dumps(key)})")
        await other.reload()
        await other.run("document.querySelector('#open-chats').click()")
        await other.until(f"[...{_ROWS}].some((each) => each.textContent.includes({json.dumps(THIRD)}))")
        await other.run(f"{_ROWS}[0].querySelector('button').click()")
        await other.until("document.querySelectorAll('.message').length === 2")
        await self.ask("What is 1 plus 2?", other)
        await self.kept("1 plus 2")
        await self.tab.call("Page.bringToFront")
        await self.ask("What is 3 plus 2?")
        await self.kept("3 plus 2")
        texts = [text for text in await self.tab.run(_TEXTS) if THIRD in text]
        found = sorted((("1 plus 2" in text), ("3 plus 2" in text)) for text in texts)
        self.expect(found == [(False, True), (True, False)], f"two tabs keep a conversation each: {len(texts)}")
        await other.call("Page.close")

    async def kept(self, text: str) -> None:
        """Wait until a conversation with this text is in the browser's database."""
        await self.tab.until(f"{_TEXTS}.then((texts) => texts.some((text) => text.includes({json.dumps(text)})))")

    async def bounds(self) -> None:
        """Keep more and larger conversations than there is room for."""
        ids = await self.tab.run(_STORED.replace("ADD", "for (let at = 1; at <= 205; at += 1) await add(at, 10)"))
        self.expect(ids == list(range(205, 5, -1)), f"the last {len(ids)} of 205 conversations are kept")
        for sizes, left in (((40, 20, 20), [3, 2]), ((40, 20, 4), [3, 2, 1]), ((1, 2, 70), [3])):
            adding = "; ".join(f"await add({at}, {size} << 20)" for at, size in enumerate(sizes, 1))
            ids = await self.tab.run(_STORED.replace("ADD", adding))
            self.expect(ids == left, f"of conversations with {sizes} MiB the last {len(ids)} are kept")
        for size, is_kept in ((7 << 20, True), ((8 << 20) + 1, False)):
            picture = await self.tab.run(_LARGE.replace("SIZE", str(size)))
            wanted = {"name": "a.png", "url": size if is_kept else 0}
            self.expect(picture == wanted, f"a picture of {size} characters is kept as {picture}")

    async def forget(self) -> None:
        """Delete the open conversation, then all; a reload finds nothing."""
        await self.tab.run("document.querySelector('#open-chats').click()")
        current = "document.querySelector('#chats [aria-current]')"
        await self.tab.until(f"{_DIALOG}.open && {current}?.textContent.includes({json.dumps(THIRD)})")
        rows = await self.tab.run(f"{_ROWS}.length")
        await self.click("document.querySelector('#chats [aria-current]')", "Delete")
        await self.click("document.querySelector('#chats [aria-current]')", "Really delete?")
        await self.tab.until(f"{_ROWS}.length === {rows - 1}")
        left = await self.tab.run("document.querySelectorAll('.message').length")
        self.expect(left == 0, "the open conversation is deleted")
        for text in ("Delete all", "Really delete?"):
            await self.click(_DIALOG, text)
        await self.tab.until(f"{_ROWS}.length === 0")
        await self.tab.reload()
        await self.tab.until("document.querySelector('.questions')")
        kept = await self.tab.run("sessionStorage.getItem('tokenloom-chat')")
        self.expect(kept is None, "all are deleted, and a reload finds none")
