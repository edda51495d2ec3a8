// Divides Markdown into blocks and draws each one: headings, lists, quotes, tables, code, rules and paragraphs.

import { copyButton } from "../copy.js";
import { html } from "../dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const MAX_DEPTH = 6; // of lists and quotes in each other; deeper ones are shown as text
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const ITEM = /^(\s{0,40})([-*+]|\d{1,9}[.)])(?:\s+|$)(.*)$/;
const isBlank = (line) => !line.trim();
/** Return the index of the first line from `at` on for which `test` is true; the number of lines if there is none. */
const seek = (lines, at, test) => {
  let index = at;
  while (index < lines.length && !test(lines[index], index)) index += 1;
  return index;
};

const indentOf = (line) => line.length - line.trimStart().length;

const closes = (line, fence) => {
  const text = line.trim();
  return indentOf(line) < 4 && text.length >= fence.length && text === fence[0].repeat(text.length);
};

const codeBlock = {
  begins: (line) => FENCE.test(line),
  end: (lines, at) => {
    const fence = FENCE.exec(lines[at])[1];
    return Math.min(seek(lines, at + 1, (line) => closes(line, fence)) + 1, lines.length);
  },
  draw: (lines, depth, isLive) => {
    const [, fence, language] = FENCE.exec(lines[0]);
    const isClosed = lines.length > 1 && closes(lines.at(-1), fence);
    const source = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    const name = language.toLowerCase();
    // Code that still grows is drawn again with each piece, so it gets its colours when it is complete.
    const children = isLive && !isClosed ? [source] : highlight(source, name);
    return html("div", { class: "code" },
      html("pre", { tabindex: "0", role: "group", "aria-label": `Code${name && ` in ${name}`}` }, html("code", {}, ...children)),
      copyButton(() => source, "the code"));
  },
};

const heading = {
  begins: (line) => /^ {0,3}#{1,6}(\s|$)/.test(line),
  end: (lines, at) => at + 1,
  draw: ([line], depth, isLive, rank) => {
    const text = inline(line.replace(/^ *#+/, "").trim().replace(/(^|\s)#+$/, ""));
    // Inside of lists and quotes a heading would break the order of the page's headings.
    return rank ? html(`h${rank}`, {}, ...text) : html("p", {}, html("strong", {}, ...text));
  },
};

const rule = {
  begins: (line) => {
    const marks = line.replaceAll(/\s/g, "");
    return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length) && indentOf(line) < 4;
  },
  end: (lines, at) => at + 1,
  draw: () => html("hr"),
};

const quote = {
  begins: (line) => /^ {0,3}>/.test(line),
  end: (lines, at) => seek(lines, at + 1, (line) => !quote.begins(line)),
  draw: (lines, depth) => html("blockquote", {},
    ...drawAll(lines.map((line) => line.replace(/^ {0,3}> ?/, "")), depth + 1)),
};

const cellsOf = (line) => line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/)
  .map((cell) => cell.trim().replaceAll("\\|", "|"));

const table = {
  begins: (line, next) => line.includes("|") && next !== undefined && next.includes("-")
    && cellsOf(next).every((cell) => /^:?-+:?$/.test(cell)) && cellsOf(next).length === cellsOf(line).length,
  end: (lines, at) => seek(lines, at + 2, (line) => !line.includes("|")),
  draw: ([head, marks, ...rows]) => {
    const sides = cellsOf(marks).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "middle" : "number") : undefined));
    const row = (line, tag) => {
      const cells = cellsOf(line);
      return html("tr", {}, ...sides.map((side, index) =>
        html(tag, { class: side, scope: tag === "th" && "col" }, ...inline(cells[index] ?? ""))));
    };
    return html("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, html("table", {},
      html("thead", {}, row(head, "th")), html("tbody", {}, ...rows.map((line) => row(line, "td")))));
  },
};

const isOrdered = (line) => /^\s*\d/.test(line);

const list = {
  begins: (line) => ITEM.test(line),
  /** Return the line behind the list: text that is not indented behind a blank line, or the first item of another list. */
  end: (lines, at) => {
    const indent = indentOf(lines[at]);
    return seek(lines, at + 1, (line, index) => !isBlank(line) && indentOf(line) <= indent
      && (ITEM.test(line) ? isOrdered(line) !== isOrdered(lines[at]) : isBlank(lines[index - 1]) || startsBlock(line)));
  },
  draw: (lines, depth) => {
    const [, indent, mark] = ITEM.exec(lines[0]);
    const items = [];
    for (const line of lines) {
      const found = indentOf(line) <= indent.length + 1 && ITEM.exec(line);
      if (found) items.push([found[3]]);
      else items.at(-1).push(line);
    }
    const start = isOrdered(lines[0]) && parseInt(mark, 10) !== 1 ? parseInt(mark, 10) : undefined;
    return html(isOrdered(lines[0]) ? "ol" : "ul", { start }, ...items.map((item) => html("li", {}, ...itemOf(item, depth))));
  },
};

/** Return the nodes of an item: its first line, and what is indented below it. */
const itemOf = ([first, ...rest], depth) => {
  const indents = rest.filter((line) => !isBlank(line)).map(indentOf);
  const indent = Math.min(...indents, 40);
  const nodes = drawAll([first, ...rest.map((line) => line.slice(Math.min(indent, indentOf(line))))], depth + 1);
  const [head] = nodes; // a first paragraph needs no element of its own
  return head?.tagName === "P" ? [...head.childNodes, ...nodes.slice(1)] : nodes;
};

const startsBlock = (line, next) => [codeBlock, heading, rule, quote].some((kind) => kind.begins(line)) || table.begins(line, next);
const interrupts = (line, next) => startsBlock(line, next) || (list.begins(line) && !/^\s*(?!1[.)])\d/.test(line));

const paragraph = {
  begins: () => true,
  end: (lines, at) => seek(lines, at + 1, (line, index) => isBlank(line) || interrupts(line, lines[index + 1])),
  draw: (lines) => html("p", {}, ...inline(lines.join("\n"))),
};

const KINDS = [codeBlock, heading, rule, quote, table, list, paragraph];

/**
 * Return the ranks of the headings among blocks: 3 at first, because h1 and h2 are the page's, and one more for a heading
 * inside of another, however many marks the model gives it. 0 for other blocks.
 */
const ranksOf = (blocks) => {
  const open = []; // the number of marks of the headings around the place
  return blocks.map(({ kind, lines }) => {
    if (kind !== heading) return 0;
    const marks = lines[0].trim().search(/[^#]|$/);
    while (open.at(-1) >= marks) open.pop();
    return Math.min(2 + open.push(marks), 6);
  });
};

/** Return the blocks of lines: {kind, lines}. */
const divide = (lines) => {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const kind = KINDS.find((each) => each.begins(lines[at], lines[at + 1]));
    const end = kind.end(lines, at);
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  }
  return blocks;
};

const drawAll = (lines, depth) => (depth > MAX_DEPTH ? [html("p", {}, lines.join("\n"))]
  : divide(lines).map((block) => block.kind.draw(block.lines, depth, false, 0)));

/** Shows a Markdown text that may grow. Blocks that have not changed keep their elements, and so their focus and selection. */
export class MarkdownView {
  /** `root`: the element that holds the blocks. */
  constructor(root) {
    this.root = root;
    this.keys = [];
  }

  /** `isLive`: whether more may follow. */
  show(text, isLive) {
    const blocks = divide(text.split("\n"));
    const keys = blocks.map(({ lines }, index) => `${isLive && index === blocks.length - 1} ${lines.join("\n")}`);
    let kept = 0;
    while (kept < keys.length && keys[kept] === this.keys[kept]) kept += 1;
    while (this.root.childNodes.length > kept) this.root.lastChild.remove();
    const ranks = ranksOf(blocks).slice(kept);
    this.root.append(...blocks.slice(kept).map(({ kind, lines }, index) => kind.draw(lines, 0, isLive, ranks[index])));
    this.keys = keys;
  }
}
