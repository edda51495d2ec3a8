"""Looks for barriers in a page that is open: contrasts that are too low, and controls without a name."""

import json
from urllib.parse import urlsplit

from tests.services.gateway.page.chromium import Page

MIN_CONTRAST = 4.5


class Findings:
    """Uses a page, prints what was checked, and collects what is not as it should be."""

    def __init__(self, tab: Page) -> None:
        self.tab = tab
        self.wrong: list[str] = []

    def expect(self, is_right: object, text: str) -> None:
        print(f"{'ok   ' if is_right else 'WRONG'} {text}", flush=True)
        if not is_right:
            self.wrong.append(text)

    async def click(self, place: str, text: str) -> None:
        """Click the button with this text."""
        await self.tab.run(
            f"[...{place}.querySelectorAll('button')].find((each) => each.textContent === '{text}').click()"
        )

    async def set(self, label: str, value: str, form: str = "#settings") -> None:
        """Set a field of the settings."""
        script = """((form, label, value) => {
          const fields = [...document.querySelectorAll(`${form} .field`)];
          const named = fields.filter((each) => each.textContent.startsWith(label));
          const input = named.at(-1).querySelector('input, select, textarea');
          input.value = value;
          input.dispatchEvent(new Event('input', { bubbles: true }));
        })"""
        await self.tab.run(f"{script}({json.dumps(form)}, {json.dumps(label)}, {json.dumps(value)})")

    def network(self, url: str, *secrets: str, expected: tuple[str, ...] = ()) -> None:
        """Look at every request of the browser. ``secrets``: what no URL may hold. ``expected``: what is in complaints
        of the browser that belong to the test."""
        home, urls = urlsplit(url).netloc, self.tab.requested()
        others = {
            each for each in urls if urlsplit(each).netloc != home and not each.startswith(("data:", "about:", "blob:"))
        }
        self.expect(not others, f"{len(urls)} requests, none to another host {others or ''}")
        self.expect(not any(secret in each for each in urls for secret in secrets), "no key in a URL")
        complaints = [each for each in self.tab.complaints() if not any(text in each for text in expected)]
        self.expect(not complaints, f"the browser complains about nothing {complaints or ''}")


CONTRASTS = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) => rgba(color).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (node) => {
    while (node && rgba(getComputedStyle(node).backgroundColor)[3] < 255) node = node.parentElement;
    return node ? getComputedStyle(node).backgroundColor : '#fff';
  };
  const found = [];
  for (const node of document.body.querySelectorAll('*')) {
    const hasText = [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim());
    if (!hasText || !node.checkVisibility() || node.matches(':disabled, script, noscript, .hidden, .skip')) continue;
    const pair = [luminance(getComputedStyle(node).color), luminance(behind(node))].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < LIMIT) found.push(`${node.className || node.tagName}: ${contrast.toFixed(2)}`);
  }
  return [...new Set(found)];
})()""".replace("LIMIT", str(MIN_CONTRAST))
"""Lists the texts whose contrast against the first opaque background behind them is too low."""

UNNAMED = """(() => {
  const kinds = 'button, input, select, textarea, a[href], [role=slider], [role=meter], [role=listbox]';
  const isNamed = (each) => each.textContent.trim() || each.getAttribute('aria-label') || each.labels?.length
    || each.getAttribute('aria-labelledby');
  const ids = [...document.querySelectorAll('[id]')].map((each) => each.id);
  return [...document.querySelectorAll(kinds)].filter((each) => !isNamed(each))
    .map((each) => each.outerHTML.slice(0, 80))
    .concat(ids.filter((id, index) => ids.indexOf(id) !== index).map((id) => `id ${id} twice`));
})()"""
"""Lists controls without a name, and ids that are used twice."""

FOCUS = """(() => {
  const at = document.activeElement, style = getComputedStyle(at);
  const isShown = style.outlineStyle !== 'none' || getComputedStyle(at.parentElement).boxShadow !== 'none';
  return [at.id || at.className || at.tagName, isShown];
})()"""
"""Names the element with the focus, and says whether it shows that it has it."""
