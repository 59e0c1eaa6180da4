// The cluster as its coordinator describes it: models, replicas, load and acceptance.

import { make, percent, short } from "./dom.js";
import { knownSource, SOURCES } from "./run.js";

/** Show the answer of GET /cluster within `element`. */
export function showCluster(element, described) {
  const { target, draft, targets, drafts } = described;
  element.replaceChildren(
    service("Target", target, targets),
    service("Draft", draft, drafts),
    facts("Load", [
      ["live", described.live_sequence_count],
      ["waiting", described.waiting_sequence_count],
      ["most in a group", described.batch_size],
      ["lanes", described.lane_count],
      ["policy", described.policy],
      ["drafts a round", described.draft_count ?? "auto"],
    ]),
    acceptance(described.statistics),
  );
}

function service(title, model, replicas) {
  const card = make("section", "card", make("h3", "", title));
  card.append(model ? modelWords(model) : make("p", "soft", replicas.length ? "None answers yet." : "None is wanted."));
  card.append(make("ul", "replicas", ...replicas.map(replicaLine)));
  return card;
}

function modelWords(model) {
  const words = [`${short(model.parameter_count)} parameters`, model.device, model.dtype, model.numerics];
  const kernels = model.kernels ? [model.kernels] : [];
  return make("p", "", make("strong", "model", model.model_id), make("span", "soft", [...words, ...kernels].filter(Boolean).join(" · ")));
}

function replicaLine(replica) {
  const circuit = replica.circuit && replica.circuit !== "closed" ? `, circuit ${replica.circuit.replace("_", " ")}` : "";
  const state = make("span", `state ${replica.state}`, `${replica.state}${circuit}`);
  return make("li", "", state, make("code", "", replica.address), make("span", "soft", `${replica.sequence_count} live`));
}

function facts(title, pairs) {
  const list = make("dl", "facts");
  for (const [name, value] of pairs) list.append(make("div", "", make("dt", "", name), make("dd", "", String(value))));
  return make("section", "card", make("h3", "", title), list);
}

function acceptance(statistics) {
  const card = make("section", "card", make("h3", "", "Accepted so far"));
  const { accepted_count: accepted, drafted_count: drafted, committed_count: committed, round_count: rounds } = statistics;
  const shown = drafted ? `${percent(accepted, drafted)} of ${short(drafted)} drafts` : "no drafts yet";
  card.append(make("p", "", make("strong", "", shown), " ", make("span", "soft", `${short(committed)} tokens in ${short(rounds)} rounds`)));
  const meters = make("div", "meters");
  for (const one of statistics.sources) {
    const source = knownSource(one.source);
    const name = one.model ? `${SOURCES[source]}, ${one.model}` : SOURCES[source];
    const meter = make("meter", source);
    Object.assign(meter, { max: one.drafted || 1, value: one.accepted });
    meters.append(make("label", "metered", make("span", "", name), meter, make("span", "share", percent(one.accepted, one.drafted))));
  }
  card.append(meters);
  return card;
}
