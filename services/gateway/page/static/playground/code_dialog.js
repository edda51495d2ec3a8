// Shows the request as a command or a program, and copies it.

import { copyText } from "../copy.js";
import { byId, setText } from "../dom.js";
import { readKey } from "../keys.js";
import { toCurl, toPython } from "./code_export.js";

const WRITERS = { curl: toCurl, python: toPython };

const copy = async (text) => {
  if (await copyText(text, byId("copy-code"))) return "Copied.";
  getSelection().selectAllChildren(byId("code"));
  return "Selected: copy it with Ctrl + C.";
};

/** `currentBody` and `currentPictures`: return the body of the request that would be sent now, and its pictures. */
export const startCodeDialog = (currentBody, currentPictures) => {
  const dialog = byId("code-dialog");
  const show = () => {
    const language = dialog.querySelector("input:checked").value;
    const base = new URL("v1", document.baseURI).href;
    let code = "";
    let problem = "";
    try {
      code = WRITERS[language](currentBody(), base, Boolean(readKey("api")), currentPictures());
    } catch (error) {
      problem = `The settings are not right: ${error.message}`;
    }
    setText(byId("code"), code);
    setText(byId("code-note"), problem);
    byId("copy-code").disabled = !code;
  };
  byId("open-code").addEventListener("click", () => {
    show();
    dialog.showModal();
  });
  for (const input of dialog.querySelectorAll("input")) input.addEventListener("change", show);
  byId("close-code").addEventListener("click", () => dialog.close());
  byId("copy-code").addEventListener("click", async () => {
    setText(byId("code-note"), await copy(byId("code").textContent));
  });
};
