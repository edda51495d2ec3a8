"""Part of ``make browser``: draws Markdown as answers hold it, and looks at the elements."""

import json

from tests.services.gateway.page.page_audit import Findings

_LINK = '<a href="{0}" title="{0}" target="_blank" rel="noopener noreferrer nofollow">{1}</a>'
CASES = {
    "plain": "<p>plain</p>",
    "two\nlines": "<p>two\nlines</p>",
    "## One\n\ntext\n#### Two #\n# Three": "<h3>One</h3><p>text</p><h4>Two</h4><h3>Three</h3>",
    "> # said": "<blockquote><p><strong>said</strong></p></blockquote>",
    "**bold** *em* `a*b*` ~~no~~": "<p><strong>bold</strong> <em>em</em> <code>a*b*</code> <del>no</del></p>",
    "2 * 3 * 4 and snake_case_name": "<p>2 * 3 * 4 and snake_case_name</p>",
    r"\*no\* **open `open": "<p>*no* **open `open</p>",
    "- a\n- b\n  - c\n\nend": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>",
    "3. c\n4. d": '<ol start="3"><li>c</li><li>d</li></ol>',
    "> said\n> more": "<blockquote><p>said\nmore</p></blockquote>",
    "a\n\n---": "<p>a</p><hr>",
    "[x](https://a.example/b)": "<p>" + _LINK.format("https://a.example/b", "x") + "</p>",
    "see https://a.example/c.": "<p>see " + _LINK.format("https://a.example/c", "https://a.example/c") + ".</p>",
    # What could run, deceive or load something stays text.
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "[x](data:text/html,a)": "<p>[x](data:text/html,a)</p>",
    "[x](https://bank.example@evil.example)": "<p>[x](https://bank.example@evil.example)</p>",
    "<img src=x onerror=alert(1)>": "<p>&lt;img src=x onerror=alert(1)&gt;</p>",
    "![x](https://a.example/p.png)": "<p>" + _LINK.format("https://a.example/p.png", "x") + "</p>",
    "[![x](https://a.example/)](https://b.example/)": "<p>[" + _LINK.format("https://a.example/", "x")
    + "](" + _LINK.format("https://b.example/", "https://b.example/") + ")</p>",
}  # fmt: skip
TABLE = "| a | b |\n|---|--:|\n| `x` | 1 |\n| \\| | |"
CODE = '```python\ndef f():  # "no"\n    return "s", 12\n```'
HOSTILE = (
    *("*a **b " * 4000, "[" * 20000, "[a](" * 5000, "`" * 9999 + "a", "_a" * 9999, "> " * 9999 + "a"),
    *(
        "- " * 9999 + "a",
        "#" * 20000,
        "|" * 9999 + "\n" + "|-" * 9999,
        " " * 50000 + "x",
        "```\n" * 9999,
        "1. a\n" * 9999,
    ),
    *("http://" * 5000, "-" + " " * 50000 + "x", "![" * 9999, "\\" * 9999, "* " * 9999, "~~~" * 9999, "<h" * 9999),
)
MILLISECONDS = 3000
"""For which a hostile text may be drawn at best: what takes a quadratic time needs far longer."""

_DRAW = """(async () => {
  const { MarkdownView } = await import('/page/markdown/blocks.js');
  const drawn = (text, isLive = false) => {
    const root = document.createElement('div');
    new MarkdownView(root).show(text, isLive);
    return root;
  };
  const grown = (text) => {
    const root = document.createElement('div');
    const view = new MarkdownView(root);
    for (let end = 1; end < text.length; end += 1) view.show(text.slice(0, end), true);
    view.show(text, false);
    return root.innerHTML;
  };
  return await (BODY)(drawn, grown, MarkdownView);
})()"""


class MarkdownChecks(Findings):
    """Draws texts without the playground, and collects what is not as it should be."""

    async def ask(self, body: str) -> object:
        """Return what a function of ``drawn``, ``grown`` and ``MarkdownView`` returns in the page."""
        return await self.tab.run(_DRAW.replace("BODY", body))

    async def check(self) -> None:
        await self.shapes()
        await self.growth()
        await self.hostile()

    async def shapes(self) -> None:
        for text, wanted in CASES.items():
            found = await self.ask(f"(drawn) => drawn({json.dumps(text)}).innerHTML")
            self.expect(found == wanted, f"Markdown {text!r}" + ("" if found == wanted else f": {found}"))
        cells = await self.ask(
            f"(drawn) => [...drawn({json.dumps(TABLE)}).querySelectorAll('tr > *')].map((each) => "
            "each.tagName + each.className + ' ' + each.textContent)"
        )
        self.expect(cells == ["TH a", "THnumber b", "TD x", "TDnumber 1", "TD |", "TDnumber "], f"a table: {cells}")
        kinds = await self.ask(
            f"(drawn) => [...drawn({json.dumps(CODE)}).querySelectorAll('span')].map((each) => "
            "each.className + ' ' + each.textContent)"
        )
        wanted_kinds = ["keyword def", 'comment # "no"', "keyword return", 'string "s"', "number 12"]
        self.expect(kinds == [f"code-{each}" for each in wanted_kinds], f"code in colours: {kinds}")

    async def growth(self) -> None:
        """A text that grows a character at a time ends as the one that is drawn at once, and keeps finished blocks."""
        text = "\n\n".join((*(each for each in CASES), TABLE, CODE, "last"))
        same = await self.ask(f"(drawn, grown) => grown({json.dumps(text)}) === drawn({json.dumps(text)}).innerHTML")
        self.expect(same, "an answer that grows ends as the whole one is drawn")
        kept = await self.ask(f"""(drawn, grown, MarkdownView) => {{
          const root = document.createElement('div'), view = new MarkdownView(root);
          view.show({json.dumps(CODE)} + '\\n\\nmo', true);
          const [first] = root.children;
          view.show({json.dumps(CODE)} + '\\n\\nmore', true);
          return first === root.children[0] && root.textContent.endsWith('more');
        }}""")
        self.expect(kept, "a finished block keeps its element while the answer grows")

    async def hostile(self) -> None:
        for text in HOSTILE:
            spent = await self.ask(
                f"(drawn) => Math.min(...[1, 2, 3].map(() => {{ const start = performance.now();"
                f" drawn({json.dumps(text)}); return performance.now() - start; }}))"
            )
            assert isinstance(spent, float | int)
            self.expect(spent < MILLISECONDS, f"{len(text)} characters {text[:12]!r} … are drawn in {spent:.0f} ms")
