// Writes numbers for people.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value < 10000 ? plain.format(value) : compact.format(value));
export const percent = (share) => `${plain.format(100 * share)} %`;
export const megabytes = (bytes) => `${plain.format(bytes / (1 << 20))} MiB`;
export const several = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

/** Return a duration with three digits at most. */
export const milliseconds = (value) => {
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1000) return `${(value / 1000).toFixed(2)} s`;
  return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`;
};

/** Return the time of day. `date`: a Date. */
export const timeOfDay = (date) => date.toLocaleTimeString([], { hour12: false });
