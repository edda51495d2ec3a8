// A small chart: lines or bars over ten minutes, with a cursor for pointer and keyboard.

import { html, setText, svg } from "../dom.js";
import { timeOfDay } from "../numbers.js";

const WIDTH = 300;
const HEIGHT = 38;
const TOP = 3;

/** Return 1, 2 or 5 times a power of ten that is not below `value`. */
const niceTop = (value) => {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-6)));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.999);
};

const span = (duration) =>
  (duration < 120000 ? `${Math.round(duration / 1000)} s` : `${Math.round(duration / 60000)} min`);

export class Chart {
  /**
   * `format`: writes a value. `series`: the names of the lines, the first one is the main one. `top`: the upper end of
   * the axis; by default it follows the values. `bars`: draw bars instead of lines. `about`: explains a position.
   */
  constructor({ title, format, series, top, bars = false, about = () => "" }) {
    Object.assign(this, { title, format, series, top, bars, about });
    this.columns = [];
    this.at = null; // position of the cursor; null: the latest one
    this.value = html("div", { class: "chart-value" });
    this.plot = html("div", { class: "plot", role: "slider", tabindex: "0", "aria-label": title, "aria-valuemin": 0, "aria-valuenow": 0,
      pointermove: (event) => this.point(event), pointerleave: () => this.move(null),
      keydown: (event) => this.press(event), blur: () => this.move(null) });
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.cursor = html("div", { class: "cursor", hidden: true });
    this.scale = html("span");
    this.when = html("span", {}, "no data yet");
    this.plot.append(this.picture, this.cursor);
    this.root = html("figure", { class: "chart" }, html("figcaption", {}, html("span", {}, title), this.scale),
      this.value, this.plot, html("div", { class: "chart-foot" }, this.when, this.legend()));
  }

  legend() {
    const names = this.series.length > 1 ? this.series : [];
    return html("span", { class: "legend" },
      ...names.map((name, index) => html("span", {}, html("i", { class: `s${index}` }), name)));
  }

  /**
   * Show values, the oldest first. `columns`: a list for each series. `times`: a Date of each. `slots`: how many
   * fit. `duration`: that of all slots, in milliseconds.
   */
  show(columns, times, slots, duration) {
    Object.assign(this, { columns, times, slots, duration });
    const known = columns.flat().filter((value) => value !== null);
    const top = this.top ?? niceTop(Math.max(...known, 0));
    setText(this.scale, known.length ? this.format(top) : "");
    const lines = columns.map((values, index) => this.draw(values, top, index)).reverse();
    this.picture.replaceChildren(...lines.flat());
    this.plot.setAttribute("aria-valuemax", Math.max(times.length - 1, 0));
    this.tell();
  }

  draw(values, top, index) {
    const step = WIDTH / Math.max(this.slots - 1, 1);
    const left = WIDTH - step * (values.length - 1);
    const x = (at) => (left + step * at).toFixed(1);
    const y = (value) => (HEIGHT - (HEIGHT - TOP) * Math.min(value / top, 1)).toFixed(1);
    if (this.bars) {
      const d = values.map((value, at) => (value ? `M${x(at)} ${HEIGHT}V${y(value)}` : "")).join("");
      return [svg("path", { class: "bars", d })];
    }
    const isKnown = (at) => typeof values[at] === "number";
    let d = "";
    let dots = "";
    values.forEach((value, at) => {
      if (!isKnown(at)) return;
      if (!isKnown(at - 1) && !isKnown(at + 1)) dots += `M${x(at)} ${y(value)}h0.01`;
      else d += `${isKnown(at - 1) ? "L" : "M"}${x(at)} ${y(value)}`;
    });
    const paths = [svg("path", { class: `s${index}`, d }), svg("path", { class: `s${index} dots`, d: dots })];
    if (index === 0 && values.length > 1 && values.every((value) => value !== null)) {
      paths.unshift(svg("path", { class: "area", d: `${d}V${HEIGHT}H${left.toFixed(1)}z` }));
    }
    return paths;
  }

  /** Describe the position of the cursor, or the latest one. */
  tell() {
    const last = (this.times?.length ?? 0) - 1;
    if (last < 0) return;
    const at = Math.min(this.at ?? last, last);
    const values = this.columns.map((column) => column[at]);
    const written = values.map((value) => (value === null ? "–" : this.format(value)));
    const others = written.slice(1).map((text, index) => html("small", {}, `${this.series[index + 1]} ${text}`));
    const about = this.about(at);
    this.value.replaceChildren(written[0], ...others, ...(about ? [html("small", {}, about)] : []));
    const time = timeOfDay(this.times[at]);
    setText(this.when, this.at === null ? span(this.duration) : time);
    this.plot.setAttribute("aria-valuenow", at);
    this.plot.setAttribute("aria-valuetext",
      `${time}: ${written.map((text, index) => `${this.series[index]} ${text}`).join(", ")} ${about}`);
    this.cursor.hidden = this.at === null;
    this.cursor.style.left = `${100 * (1 - (last - at) / Math.max(this.slots - 1, 1))}%`;
  }

  move(at) {
    this.at = at;
    this.tell();
  }

  point(event) {
    const last = this.columns[0]?.length - 1;
    if (!(last >= 0)) return;
    const share = event.offsetX / Math.max(this.plot.clientWidth, 1);
    this.move(Math.min(Math.max(last - Math.round((1 - share) * (this.slots - 1)), 0), last));
  }

  press(event) {
    const last = (this.times?.length ?? 0) - 1;
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -12, PageUp: 12,
      Home: -last, End: last };
    if (!(event.key in steps) || last < 0) return;
    event.preventDefault();
    this.move(Math.min(Math.max((this.at ?? last) + steps[event.key], 0), last));
  }
}
