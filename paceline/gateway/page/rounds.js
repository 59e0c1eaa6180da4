// Rounds as they happen: one line each, with its drafts as dots and its time as a bar of waiting, hops and the rest.

import { make, milliseconds } from "./dom.js";
import { knownSource, SOURCES } from "./run.js";

const HOP_PARTS = ["wire", "queued", "executed"];
const SHOWN_COUNT = 300;
/** The latest rounds set the scale: a long prompt's first round must not flatten all others for ever. */
const SCALE_COUNT = 24;

/** Return the parts of a round's time in their order: [class, words, seconds]. */
export function partsOf(round) {
  const hops = ["propose", "verify"].flatMap((hop) =>
    HOP_PARTS.map((part) => [`${hop} ${part}`, `${hop}: ${part}`, round[hop]?.[`${part}_s`] ?? 0]),
  );
  const hopS = hops.reduce((sum, [, , seconds]) => sum + seconds, 0);
  return [
    ["waited", "waited", round.waited_s],
    ...hops,
    ["own-time", "coordinator", Math.max(0, round.round_s - hopS)],
  ];
}

export const NO_ROUND = { drafted: 0, accepted: 0, propose: null, verify: null, round_s: 0, waited_s: 0 };

/** Return one line about a round: what was accepted and where its time went. */
export function roundInWords(number, round) {
  const drafts = round.drafted
    ? `${round.accepted} of ${round.drafted} drafts accepted (${SOURCES[knownSource(round.source)]})`
    : "no drafts";
  const hops = ["propose", "verify"].filter((hop) => round[hop]).map((hop) => hopInWords(hop, round[hop]));
  const [waited, ...rest] = partsOf(round);
  const times = [`waited ${milliseconds(waited[2])}`, ...hops, `coordinator ${milliseconds(rest.at(-1)[2])}`];
  return `Round ${number}: ${drafts}, in a group of ${round.group_size}. In ms: ${times.join(", ")}.`;
}

function hopInWords(hop, times) {
  const parts = HOP_PARTS.map((part) => times[`${part}_s`]);
  const shown = parts.map((seconds, at) => `${HOP_PARTS[at]} ${milliseconds(seconds)}`).join(", ");
  return `${hop} ${milliseconds(parts.reduce((sum, one) => sum + one, 0))} (${shown})`;
}

export class RoundsView {
  #list;
  #scaleEnd;
  #onRound;
  #totalsS = [];

  /** `onRound` gets the number of the round that is pointed at, or null. */
  constructor(list, scaleEnd, onRound) {
    this.#list = list;
    this.#scaleEnd = scaleEnd;
    list.addEventListener("pointerover", (event) => onRound(Number(event.target.closest("li")?.dataset.round) || null));
    list.addEventListener("pointerleave", () => onRound(null));
  }

  clear() {
    this.#list.replaceChildren();
    this.#totalsS = [];
    this.#scaleEnd.textContent = "";
  }

  append(number, round) {
    const followed = this.#list.scrollTop + this.#list.clientHeight >= this.#list.scrollHeight - 30;
    const totalS = round.waited_s + round.round_s;
    const line = make("li", "round", make("span", "number", String(number)), dots(round), bar(round));
    line.append(make("span", "took", milliseconds(totalS)));
    line.dataset.round = number;
    line.setAttribute("aria-label", roundInWords(number, round));
    this.#list.append(line);
    if (this.#list.children.length > SHOWN_COUNT) this.#list.firstChild.remove();
    this.#totalsS = [...this.#totalsS, totalS].slice(-SCALE_COUNT);
    this.#rescale();
    if (followed) this.#list.scrollTop = this.#list.scrollHeight;
  }

  /** Set off a round; null: none. */
  light(number) {
    for (const line of this.#list.querySelectorAll(".lit")) line.classList.remove("lit");
    this.#list.querySelector(`[data-round="${number}"]`)?.classList.add("lit");
  }

  #rescale() {
    const fullMs = roundUp(1000 * Math.max(...this.#totalsS));
    this.#list.style.setProperty("--full-ms", fullMs);
    this.#scaleEnd.textContent = `${fullMs} ms`;
  }
}

function dots(round) {
  const row = make("span", "dots");
  for (let at = 0; at < round.drafted; at += 1) {
    row.append(make("i", at < round.accepted ? `dot ${knownSource(round.source)}` : "dot rejected"));
  }
  row.append(make("i", "dot own"));
  return row;
}

function bar(round) {
  const row = make("span", "bar");
  for (const [kind, , seconds] of partsOf(round)) {
    if (!(seconds > 0)) continue;
    const part = make("i", `part ${kind}`);
    part.style.setProperty("--ms", 1000 * seconds);
    row.append(part);
  }
  return row;
}

/** Return the next of 1, 2, 5, 10, 20, ... */
function roundUp(ms) {
  const power = 10 ** Math.floor(Math.log10(Math.max(ms, 0.1)));
  return [1, 2, 5, 10].map((one) => Number((one * power).toPrecision(1))).find((one) => one >= ms);
}
