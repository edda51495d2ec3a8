// Makes elements. Data only ever becomes text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
};

/** Return an HTML element. A function among the attributes listens for the event of its name. */
export const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** Return an SVG element. */
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

/** Return a button that does not send a form. */
export const button = (text, onClick, attributes = {}) =>
  html("button", { type: "button", class: "button quiet", click: onClick, ...attributes }, text);

/** Set a node's text only if it differs, so that screen readers and selections are left alone. */
export const setText = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};
