// Colours comments, strings, numbers and keywords of code. It knows no grammar: what it mistakes is still the same text.

import { html } from "../dom.js";

const MAX_CHARACTERS = 20000; // longer code stays plain: every piece is an element
const STRINGS = String.raw`"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?`;
const REST = String.raw`(\b\d[\w.]*)|([A-Za-z_$][\w$]*)`;
const SLASHES = String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`;
const HASH = String.raw`(?<!\S)#[^\n]*`;
const TRIPLE = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`;
const TICKS = "`(?:[^`\\\\]|\\\\[\\s\\S])*`?";
const pattern = (comments, strings) => new RegExp(`(${comments})|(${strings})|${REST}`, "g");

const FAMILIES = [
  [pattern(SLASHES, `${STRINGS}|${TICKS}`),
    "js javascript jsx ts typescript tsx json java kotlin c h cpp c++ cs csharp go rust rs swift php scala dart css proto"],
  [pattern(HASH, `${TRIPLE}|${STRINGS}`),
    "py python rb ruby sh bash shell zsh console yaml yml toml dockerfile make makefile r perl"],
  [pattern("--[^\\n]*", STRINGS), "sql lua haskell hs"],
];
const BY_LANGUAGE = new Map(FAMILIES.flatMap(([found, names]) => names.split(" ").map((name) => [name, found])));
const KEYWORDS = new Set(("abstract and as assert async await begin break case catch class const continue def default del " +
  "defer do done elif else end enum except export extends false False fi final finally fn for from func function global go if " +
  "impl implements import in interface is lambda let local match message mod mut namespace new nil None nonlocal not null or " +
  "package pass private protected pub public raise return select self static struct super switch then this throw trait true " +
  "True try type typeof union use using val var void when where while with yield").split(" "));
const SQL = new Set(("select from where and or not insert into update delete create table join left right inner outer on as " +
  "group by order limit having union values set null is in distinct").split(" "));

const kindOf = ([, comment, string, number, word], language) => {
  if (comment) return "comment";
  if (string) return "string";
  if (number) return "number";
  return (language === "sql" ? SQL.has(word.toLowerCase()) : KEYWORDS.has(word)) ? "keyword" : "";
};

/** Return the nodes and strings of code. `language`: as the block names it, in small letters; unknown ones are not coloured. */
export const highlight = (code, language) => {
  const found = BY_LANGUAGE.get(language);
  if (!found || code.length > MAX_CHARACTERS) return [code];
  const pieces = [];
  let at = 0;
  for (const match of code.matchAll(found)) {
    const kind = kindOf(match, language);
    if (!kind) continue;
    pieces.push(code.slice(at, match.index), html("span", { class: `code-${kind}` }, match[0]));
    at = match.index + match[0].length;
  }
  return [...pieces, code.slice(at)];
};
