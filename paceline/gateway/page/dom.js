// Short ways to make elements and to write numbers.

export const byId = (id) => document.getElementById(id);

/** Return a new element; `content` holds text or elements. */
export function make(tag, className = "", ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");

/** Milliseconds of seconds, with three digits. */
export function milliseconds(seconds) {
  const ms = 1000 * seconds;
  return ms.toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0);
}

/** A count with its unit's prefix: 8.48 M. */
export function short(count) {
  const [size, prefix] = [[1e12, " T"], [1e9, " B"], [1e6, " M"], [1e3, " k"]].find(([one]) => count >= one) ?? [1, ""];
  return prefix ? `${(count / size).toPrecision(3)}${prefix}` : String(count);
}
