// One request from its sending to its end: tokens, rounds and the numbers made from them. It touches no element.

/** What can have proposed a token, in the legend's order; `own` is the target's own choice. */
export const SOURCES = {
  draft: "draft service",
  suffix: "text that repeats",
  prediction: "prediction",
  heads: "target's heads",
  own: "target's own",
};

/** A source that this page does not know counts as a draft service. */
export const knownSource = (source) => (source in SOURCES ? source : "draft");

export class Run {
  tokens = [];
  rounds = [];
  counts = Object.fromEntries(Object.keys(SOURCES).map((source) => [source, 0]));
  finishReason = null;
  /** What the last chunk tells: request id, trace id, seed and counts. */
  summary = null;
  ended = false;
  #startMs = 0;
  #firstMs = null;
  #lastMs = 0;

  start(nowMs) {
    this.#startMs = this.#lastMs = nowMs;
  }

  /** Take a chunk of the stream; return its tokens, each with its source and the number of its round, from 1. */
  take(chunk, nowMs) {
    this.finishReason = chunk.choices?.[0]?.finish_reason ?? this.finishReason;
    const { tokens = [], round = null, ...summary } = chunk.paceline ?? {};
    if (summary.request_id) this.summary = summary;
    if (round) this.rounds.push(round);
    if (!tokens.length) return [];
    this.#firstMs ??= nowMs;
    this.#lastMs = nowMs;
    const told = tokens.map(({ id, text, accepted, source }) => ({
      id, text, source: accepted ? knownSource(source) : "own", round: this.rounds.length,
    }));
    for (const token of told) this.counts[token.source] += 1;
    this.tokens.push(...told);
    return told;
  }

  get elapsedS() {
    return (this.#lastMs - this.#startMs) / 1000;
  }

  get tokensPerS() {
    return this.elapsedS ? this.tokens.length / this.elapsedS : 0;
  }

  get firstTokenS() {
    return this.#firstMs === null ? null : (this.#firstMs - this.#startMs) / 1000;
  }

  get drafted() {
    return this.rounds.reduce((sum, round) => sum + round.drafted, 0);
  }

  get accepted() {
    return this.rounds.reduce((sum, round) => sum + round.accepted, 0);
  }
}

/** Return how many leading tokens of two runs have the same ids. */
export function equalCount(one, other) {
  const least = Math.min(one.tokens.length, other.tokens.length);
  for (let at = 0; at < least; at += 1) if (one.tokens[at].id !== other.tokens[at].id) return at;
  return least;
}
