// An answer, token by token, each in the colour and underline of what proposed it.

import { make } from "./dom.js";

export class AnswerView {
  #element;
  #onToken;
  #tokens = [];

  /** `onToken` gets the token that is pointed at or focused, or null. */
  constructor(element, onToken) {
    this.#element = element;
    this.#onToken = onToken;
    element.addEventListener("pointerover", (event) => this.#pointed(event.target));
    element.addEventListener("pointerleave", () => onToken(null));
    element.addEventListener("focusin", (event) => this.#pointed(event.target));
    element.addEventListener("focusout", () => onToken(null));
    element.addEventListener("keydown", (event) => this.#move(event));
  }

  clear() {
    this.#element.replaceChildren();
    this.#tokens = [];
  }

  append(tokens) {
    const followed = this.#element.scrollTop + this.#element.clientHeight >= this.#element.scrollHeight - 30;
    for (const token of tokens) {
      const shown = make("span", `token ${token.source}`, token.text);
      if (token.text === "") shown.classList.add("empty");
      else if (token.text.includes("\n") && !token.text.trim()) shown.classList.add("newline");
      shown.dataset.at = this.#tokens.length;
      // One stop of the tab key for all tokens; arrow keys go on from there.
      shown.tabIndex = this.#tokens.length ? -1 : 0;
      this.#tokens.push(token);
      this.#element.append(shown);
    }
    if (followed) this.#element.scrollTop = this.#element.scrollHeight;
  }

  /** Set off the tokens of a round; null: of none. */
  light(round) {
    for (const shown of this.#element.querySelectorAll(".lit")) shown.classList.remove("lit");
    if (round === null) return;
    this.#tokens.forEach((token, at) => this.#element.children[at].classList.toggle("lit", token.round === round));
  }

  #pointed(target) {
    if (target.dataset.at !== undefined) this.#onToken(this.#tokens[target.dataset.at]);
  }

  #move(event) {
    const last = this.#tokens.length - 1;
    const at = Number(event.target.dataset.at);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (to === undefined || Number.isNaN(at)) return;
    event.preventDefault();
    const next = this.#element.children[Math.max(0, Math.min(last, to))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}
