// Shows the gateway's last ten minutes, which the gateway itself remembers.

import { Chart } from "./chart.js";
import { byId } from "../dom.js";
import { onModel } from "../model.js";
import { count, milliseconds, percent } from "../numbers.js";
import { Poll } from "../poll.js";

const SECONDS = 5;
const MIN_SLOTS = 12; // a young gateway shows its first minute
const total = (reasons) => Object.values(reasons).reduce((sum, number) => sum + number, 0);
const named = (reasons) =>
  Object.entries(reasons).map(([reason, number]) => `${number} ${reason.toLowerCase().replaceAll("_", " ")}`).join(", ");

export const startTraffic = () => {
  let refused = [];
  let missed = [];
  const charts = [
    { title: "Time to first token", format: milliseconds, series: ["p50", "p95"], names: ["ttft_p50_ms", "ttft_p95_ms"] },
    { title: "Between tokens", format: milliseconds, series: ["p50", "p95"], names: ["itl_p50_ms", "itl_p95_ms"] },
    { title: "Output tokens/s", format: count, series: ["tokens/s"], names: ["output_tokens_per_second"] },
    { title: "Prefix hits", format: percent, series: ["share"], names: ["hit_share"], top: 1 },
    { title: "Missed in the cache", format: count, series: ["tokens"], names: ["missed"], bars: true,
      about: (at) => named(missed[at] ?? {}) },
    { title: "Queue of the mesh", format: count, series: ["running", "waiting"], names: ["running", "waiting"] },
    { title: "Refused", format: count, series: ["requests"], names: ["refused"], bars: true,
      about: (at) => named(refused[at] ?? {}) },
  ].map(({ names, ...options }) => ({ names, chart: new Chart(options) }));
  byId("charts").append(...charts.map(({ chart }) => chart.root));

  const show = (traffic) => {
    ({ refused, missed } = traffic);
    const columns = { ...traffic, refused: refused.map(total), missed: missed.map(total) };
    const newest = refused.length - 1;
    const times = refused.map((_, at) => new Date(1000 * (traffic.ended_at - (newest - at) * traffic.interval_seconds)));
    const slots = Math.max(times.length, MIN_SLOTS);
    const duration = 1000 * slots * traffic.interval_seconds;
    for (const { names, chart } of charts) chart.show(names.map((name) => columns[name]), times, slots, duration);
  };
  const poll = new Poll("traffic", SECONDS, show, () => {}); // the mesh reports why nothing comes
  onModel(() => poll.now());
  poll.now();
};
