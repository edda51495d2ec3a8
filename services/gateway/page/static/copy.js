// Copies text, and makes the buttons that do it.

import { button, html } from "./dom.js";

const SHOWN_MS = 1500; // for which a button says that it has copied

/** Copy a text; return whether it worked. `near`: an element of the dialog or page that is open, which gets the focus back. */
export const copyText = async (text, near) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* browsers offer the clipboard only with TLS or on this machine, or the user has refused it */ }
  const area = html("textarea", { class: "copy-area", readonly: true, tabindex: "-1", "aria-hidden": "true" });
  area.value = text;
  near.after(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  near.focus();
  return isCopied;
};

/** Return a button that copies what `read` returns. `what`: for its title, such as "the answer". */
export const copyButton = (read, what) => button("Copy", async ({ currentTarget: pressed }) => {
  pressed.textContent = (await copyText(read(), pressed)) ? "Copied" : "Not copied";
  setTimeout(() => { pressed.textContent = "Copy"; }, SHOWN_MS);
}, { title: `Copy ${what}`, "aria-live": "polite" });
