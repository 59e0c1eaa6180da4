// Puts the page together: what the form says is sent, and what comes back is shown.

import { AnswerView } from "./answer.js";
import { showCluster } from "./cluster.js";
import { byId, make, milliseconds, percent } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { Gateway } from "./gateway.js";
import { partsOf, NO_ROUND, RoundsView, roundInWords } from "./rounds.js";
import { equalCount, Run, SOURCES } from "./run.js";

const CLUSTER_EVERY_MS = 2000;
const MOST_DRAFTS = 8;

const gateway = new Gateway();
const answer = new AnswerView(byId("answer"), (token) => pointAt(token?.round ?? null, token));
const plainAnswer = new AnswerView(byId("plain-answer"), (token) => showToken(token));
const rounds = new RoundsView(byId("rounds"), byId("scale-end"), (round) => pointAt(round, null));

/** The runs on show, and what stops them; null while nothing is asked. */
let shown = { run: new Run(), plain: null };
let stopping = null;

// What is sent

function requestOf(form) {
  const sources = [...form.querySelectorAll("[name=source]:checked")].map((one) => one.value);
  const asked = byId("draft-count").value;
  const paceline = { tell: true, sources };
  // No source is another way to ask for plain decoding.
  if (!sources.length) Object.assign(paceline, { max_draft_count: 0, sources: undefined });
  else if (asked) paceline.max_draft_count = Number(asked);
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: Number(byId("max-tokens").value),
    temperature: Number(byId("temperature").value),
    // A seed always: plain decoding beside it needs the same.
    seed: byId("seed").value ? Number(byId("seed").value) : crypto.getRandomValues(new Uint32Array(1))[0],
    paceline,
  };
  const prompt = byId("prompt").value;
  const prediction = byId("prediction").value;
  if (prediction && sources.includes("prediction")) body.prediction = { type: "content", content: prediction };
  if (byId("chat").checked) return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }];
  return ["v1/completions", { ...body, prompt }];
}

async function send() {
  stopping?.abort();
  const stop = (stopping = new AbortController());
  const [path, body] = requestOf(byId("ask"));
  say("Sending.");
  busy(true);
  try {
    // A gateway whose coordinators do not say what they serve has no name for it, and needs none.
    body.model = (await gateway.get("v1/models", stop.signal)).data[0]?.id;
    shown = { run: new Run(), plain: byId("race").checked ? new Run() : null };
    clear();
    const plainBody = { ...body, paceline: { ...body.paceline, max_draft_count: 0 } };
    const asked = [follow(shown.run, path, body, stop.signal, tookSpeculative)];
    if (shown.plain) asked.push(follow(shown.plain, path, plainBody, stop.signal, tookPlain));
    await Promise.all(asked);
    say(ending(shown.run));
    showNames(shown.run.summary);
  } catch (error) {
    // A newer request took this one's place.
    if (stop !== stopping) return;
    stop.abort();
    if (error.name === "AbortError") say("Stopped.");
    else fail(error);
  }
  if (stop !== stopping) return;
  stopping = null;
  busy(false);
  showRace();
}

async function follow(run, path, body, signal, took) {
  run.start(performance.now());
  for await (const chunk of gateway.stream(path, body, signal)) {
    signal.throwIfAborted();
    const before = run.rounds.length;
    const tokens = run.take(chunk, performance.now());
    took(tokens, run.rounds.slice(before));
  }
  run.ended = true;
}

// What is shown of it

function tookSpeculative(tokens, newRounds) {
  if (tokens.length && shown.run.tokens.length === tokens.length) say("Answering.");
  for (const round of newRounds) rounds.append(shown.run.rounds.length, round);
  answer.append(tokens);
  showTotals(shown.run);
  if (shown.plain) showRace();
}

function tookPlain(tokens) {
  plainAnswer.append(tokens);
  showRace();
}

function clear() {
  answer.clear();
  plainAnswer.clear();
  rounds.clear();
  pointAt(null, null);
  byId("verdict").textContent = "";
  showNames(null);
  byId("race-panel").hidden = !shown.plain;
  showTotals(shown.run);
  showRace();
}

function showTotals(run) {
  const first = run.firstTokenS;
  const totals = [
    ["tokens/s", run.tokens.length ? run.tokensPerS.toFixed(0) : "–"],
    ["tokens a round", run.rounds.length ? (run.tokens.length / run.rounds.length).toFixed(2) : "–"],
    ["drafts accepted", percent(run.accepted, run.drafted)],
    ["first token", first === null ? "–" : `${milliseconds(first)} ms`],
    ["tokens", String(run.tokens.length)],
  ];
  byId("totals").replaceChildren(
    ...totals.map(([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))),
  );
  byId("legend").replaceChildren(
    ...Object.entries(SOURCES).map(([source, words]) => {
      const count = run.counts[source];
      const share = make("span", "share", `${count} · ${percent(count, run.tokens.length)}`);
      return make("li", "", make("span", `token ${source}`, words), share);
    }),
  );
}

function showRace() {
  const { run, plain } = shown;
  if (!plain) return;
  const lines = [["with drafts", run, "draft"], ["plain", plain, "own"]].map(([name, one, kind]) => {
    const track = make("meter", kind);
    Object.assign(track, { max: Math.max(run.tokens.length, plain.tokens.length, 1), value: one.tokens.length });
    const rate = `${one.tokens.length} tokens, ${one.tokensPerS.toFixed(0)} tokens/s`;
    return make("label", "metered", make("span", "", name), track, make("span", "share", rate));
  });
  byId("race-bars").replaceChildren(...lines);
  if (stopping && !(run.ended && plain.ended)) return;
  showVerdict(run, plain);
}

function showVerdict(run, plain) {
  const equal = equalCount(run, plain);
  const whole = run.ended && plain.ended;
  const counts = [run.tokens.length, plain.tokens.length];
  // An output that was stopped is compared as far as it came.
  const same = equal === (whole ? Math.max(...counts) : Math.min(...counts));
  const sameWords = whole ? "✓ equal, token for token" : `equal as far as both came: ${equal} tokens`;
  const words = same ? sameWords : `✗ they differ from token ${equal + 1} on`;
  const verdict = make("strong", same ? "good" : "bad", words);
  const ratio = make("strong", "ratio", `${(run.tokensPerS / plain.tokensPerS).toFixed(2)} ×`);
  const speed = whole && plain.tokensPerS ? [ratio, make("span", "soft", "the speed of plain decoding")] : [];
  byId("verdict").replaceChildren(...speed, verdict);
}

function showToken(token) {
  byId("token-detail").textContent = token
    ? `${JSON.stringify(token.text)} · id ${token.id} · ${SOURCES[token.source]} · round ${token.round}`
    : "Point at a token, or go through them with Tab and the arrow keys.";
}

function pointAt(number, token) {
  showToken(token);
  answer.light(number);
  rounds.light(number);
  const round = shown.run.rounds[number - 1];
  byId("round-detail").textContent = round ? roundInWords(number, round) : "";
}

const REASONS = { length: "the limit was reached", stop: "the model ended it", tool_calls: "the model calls a tool" };

function ending(run) {
  const reason = REASONS[run.finishReason] ?? run.finishReason ?? "it ended";
  return `${run.tokens.length} tokens in ${run.elapsedS.toFixed(2)} s; ${reason}.`;
}

/** Show what logs and traces call the request, and the seed to ask again with. */
function showNames(summary) {
  const names = { seed: summary?.seed, request: summary?.request_id, trace: summary?.trace_id };
  const told = Object.entries(names).filter(([, value]) => value !== undefined && value !== null && value !== "");
  byId("names").textContent = told.map(([name, value]) => `${name} ${value}`).join(" · ");
}

function say(words) {
  byId("status").className = "";
  byId("status").textContent = words;
}

function fail(error) {
  say(error.message);
  byId("status").className = "bad";
  if (error.status !== 401) return;
  byId("token-field").hidden = false;
  byId("token").focus();
}

/** Show Stop in place of Send, or Send again, and leave the focus where it was. */
function busy(isBusy) {
  const focused = document.activeElement;
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (focused === byId("send") && isBusy) byId("stop").focus();
  if (focused === byId("stop") && !isBusy) byId("send").focus();
}

// The cluster

async function watchCluster() {
  for (;;) {
    if (!document.hidden) await lookAtCluster();
    await new Promise((resolve) => setTimeout(resolve, CLUSTER_EVERY_MS));
  }
}

async function lookAtCluster() {
  try {
    const described = await gateway.get("cluster");
    showCluster(byId("cluster-state"), described);
    byId("cluster-trouble").textContent = "";
    byId("pulse").textContent = `${described.live_sequence_count} live, ${described.waiting_sequence_count} waiting`;
    byId("pulse").className = "soft alive";
  } catch (error) {
    byId("cluster-trouble").textContent = error.message;
    byId("pulse").textContent = "no answer";
    byId("pulse").className = "soft";
    if (error.status === 401) byId("token-field").hidden = false;
  }
}

// The form

function fillForm() {
  for (let count = 0; count <= MOST_DRAFTS; count += 1) byId("draft-count").append(make("option", "", String(count)));
  for (const [label, example] of Object.entries(EXAMPLES)) {
    const button = make("button", "chip", label);
    button.type = "button";
    button.addEventListener("click", () => useExample(example));
    byId("examples").append(button);
  }
  useExample(Object.values(EXAMPLES)[0]);
  const kinds = partsOf(NO_ROUND).map(([kind, words]) => make("li", "", make("i", `part ${kind}`), words));
  byId("hop-legend").replaceChildren(...kinds);
}

function useExample({ prompt, prediction = "" }) {
  byId("prompt").value = prompt;
  byId("prediction").value = prediction;
  byId("prediction-box").open = prediction !== "";
}

function listen() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("stop").addEventListener("click", () => stopping?.abort());
  byId("token").addEventListener("input", (event) => (gateway.token = event.target.value));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stopping?.abort();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
  });
}

fillForm();
listen();
clear();
watchCluster();
