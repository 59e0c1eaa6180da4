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
  const words = [`${short(model.parameter_count)} parameters`, model.device, model.dtype];
  words.push(model.numerics, model.kernels);
  const facts = make("span", "soft", words.filter(Boolean).join(" · "));
  return make("p", "", make("strong", "model", model.model_id), facts);
}

function replicaLine(replica) {
  const { address, state, circuit, sequence_count: count } = replica;
  const trouble = circuit && circuit !== "closed" ? `, circuit ${circuit.replace("_", " ")}` : "";
  const told = make("span", `state ${state}`, `${state}${trouble}`);
  return make("li", "", told, make("code", "", address), make("span", "soft", `${count} live`));
}

function facts(title, pairs) {
  const list = make("dl", "facts");
  for (const [name, value] of pairs) list.append(make("div", "", make("dt", "", name), make("dd", "", String(value))));
  return make("section", "card", make("h3", "", title), list);
}

function acceptance(statistics) {
  const card = make("section", "card", make("h3", "", "Accepted so far"));
  const { accepted_count: accepted, drafted_count: drafted } = statistics;
  const shown = drafted ? `${percent(accepted, drafted)} of ${short(drafted)} drafts` : "no drafts yet";
  const whole = `${short(statistics.committed_count)} tokens in ${short(statistics.round_count)} rounds`;
  card.append(make("p", "", make("strong", "", shown), " ", make("span", "soft", whole)));
  const meters = make("div", "meters");
  for (const one of statistics.sources) {
    const source = knownSource(one.source);
    const name = one.model ? `${SOURCES[source]}, ${one.model}` : SOURCES[source];
    const meter = make("meter", source);
    Object.assign(meter, { max: one.drafted_count || 1, value: one.accepted_count });
    const share = make("span", "share", percent(one.accepted_count, one.drafted_count));
    meters.append(make("label", "metered", make("span", "", name), meter, share));
  }
  card.append(meters);
  return card;
}
