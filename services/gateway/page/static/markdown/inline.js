// Turns the Markdown inside a line into nodes: code, emphasis and links. Everything else stays text.

import { html } from "../dom.js";

const MAX_DEPTH = 6; // of emphasis in emphasis; deeper marks are shown as they are written
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const ORDINARY = /[^\\`*_~[!hH]+/y; // what cannot begin anything
// The bounds keep the time linear: a search that fails costs no more than this many characters.
const LINK = /!?\[([^[\]\n]{0,500})\]\(\s{0,9}<?([^\s()<>]{1,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s{1,9}"[^"\n]{0,500}")?\s{0,9}\)/y;
const ADDRESS = /https?:\/\/[^\s<>"`]{1,2000}/iy;
const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);
const isSpace = (character) => character === undefined || /\s/.test(character);

const matchAt = (pattern, text, at) => {
  pattern.lastIndex = at;
  return pattern.exec(text);
};

/** Return an address that a link may have: http or https without a user name, which could pass for a host. Null otherwise. */
export const safeAddress = (text) => {
  if (!URL.canParse(text)) return null;
  const { protocol, username, password, href } = new URL(text);
  return ["http:", "https:"].includes(protocol) && !username && !password ? href : null;
};

const linkTo = (address, children) => html("a", { href: address, title: address, target: "_blank",
  rel: "noopener noreferrer nofollow" }, ...children);

const code = (text, at, missing) => {
  const ticks = matchAt(/`+/y, text, at)[0];
  const start = at + ticks.length;
  for (let end = start; !missing.has(ticks);) {
    end = text.indexOf(ticks, end);
    if (end < 0) break;
    const run = matchAt(/`+/y, text, end)[0].length;
    if (run === ticks.length) {
      const inner = text.slice(start, end);
      const isPadded = /^ .* $/s.test(inner) && inner.trim();
      return { node: html("code", {}, isPadded ? inner.slice(1, -1) : inner), end: end + run };
    }
    end += run;
  }
  missing.add(ticks);
  return { node: ticks, end: start };
};

const link = (text, at, depth, isInLink) => {
  const found = matchAt(LINK, text, at);
  const address = found && safeAddress(found[2]);
  if (!address || isInLink) return null;
  const label = found[1] || address;
  return { node: linkTo(address, inline(label, depth + 1, true)), end: at + found[0].length };
};

const bareAddress = (text, at, isInLink) => {
  const found = isInLink || isWord(text[at - 1]) ? null : matchAt(ADDRESS, text, at);
  if (!found) return null;
  let shown = found[0].slice(0, found[0].search(/[.,;:!?'*_~\]]*$/));
  if (shown.endsWith(")") && !shown.includes("(")) shown = shown.slice(0, -1);
  const address = safeAddress(shown);
  return address && { node: linkTo(address, [shown]), end: at + shown.length };
};

/** Return the place of the mark that ends the emphasis; -1 if there is none. */
const endOf = (mark, text, from) => {
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end + 1)) {
    const isPart = mark.length === 1 && (text[end - 1] === mark || text[end + 1] === mark);
    const isInWord = mark[0] === "_" && isWord(text[end + mark.length]);
    if (!isPart && !isInWord && end > from && !isSpace(text[end - 1]) && text[end - 1] !== "\\") return end;
  }
  return -1;
};

const emphasis = (text, at, depth, isInLink, missing) => {
  for (const [mark, tag] of MARKS) {
    if (!text.startsWith(mark, at) || missing.has(mark)) continue;
    const start = at + mark.length;
    if (isSpace(text[start]) || (mark[0] === "_" && isWord(text[at - 1]))) continue;
    const end = endOf(mark, text, start);
    if (end >= 0) return { node: html(tag, {}, ...inline(text.slice(start, end), depth + 1, isInLink)), end: end + mark.length };
    missing.add(mark); // nor is there one behind a later beginning
  }
  return null;
};

const pieceAt = (text, at, depth, isInLink, missing) => {
  switch (text[at]) {
    case "\\": return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
    case "`": return code(text, at, missing);
    case "[": return link(text, at, depth, isInLink);
    case "!": return text[at + 1] === "[" ? link(text, at, depth, isInLink) : null; // images are not loaded
    case "h": case "H": return bareAddress(text, at, isInLink);
    default: return emphasis(text, at, depth, isInLink, missing);
  }
};

/** Return the nodes and strings of a text. `isInLink`: whether they become the text of a link, which holds no other link. */
export const inline = (text, depth = 0, isInLink = false) => {
  if (depth > MAX_DEPTH) return [text];
  const pieces = [];
  const missing = new Set(); // marks that nothing ends from here on
  for (let at = 0; at < text.length;) {
    const plain = matchAt(ORDINARY, text, at)?.[0];
    const piece = plain ? { node: plain, end: at + plain.length }
      : pieceAt(text, at, depth, isInLink, missing) ?? { node: text[at], end: at + 1 };
    if (typeof piece.node === "string" && typeof pieces.at(-1) === "string") pieces.push(pieces.pop() + piece.node);
    else pieces.push(piece.node);
    at = piece.end;
  }
  return pieces;
};
