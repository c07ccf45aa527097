// The tool calls of a reply: name, arguments, and a place for the result.

import { element, icon } from "./dom.js";

export class CallViews {
  #message;
  #actions;
  #cards = [];
  #send;
  #busy = false;

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.#send = element("button", {
      type: "button",
      class: "primary",
      text: "Send results",
      hidden: true,
      on: { click: () => this.#sendResults() },
    });
    this.node = element("div", { class: "calls", hidden: true }, this.#send);
  }

  set busy(busy) {
    this.#busy = busy;
    this.#send.disabled = busy;
  }

  /** Show the calls so far; results maps call ids to texts. */
  update(streaming, results) {
    const { calls } = this.#message;
    this.node.hidden = !calls.length;
    while (this.#cards.length < calls.length) {
      const card = newCard(this.#cards.length + 1);
      this.#cards.push(card);
      this.node.insertBefore(card.node, this.#send);
    }
    let open = 0;
    calls.forEach((call, place) => {
      const result = results?.get(call.id);
      if (!streaming && result === undefined) open += 1;
      fillCard(this.#cards[place], call, streaming, result);
    });
    this.#send.hidden = open === 0;
  }

  #sendResults() {
    if (this.#busy) return;
    const fields = this.#cards.map((card) => card.field.value);
    this.#actions.answer(this.#message, fields);
  }
}

function newCard(number) {
  const name = element("code");
  const given = element("pre", {
    tabindex: 0,
    role: "group",
    "aria-label": `Arguments of call ${number}`,
  });
  const field = element("textarea", { rows: 2, placeholder: "What the tool returned" });
  const entry = element("label", { class: "field", hidden: true }, "Result", field);
  const result = element("pre", {
    tabindex: 0,
    role: "group",
    "aria-label": `Result of call ${number}`,
  });
  const answered = element(
    "div",
    { class: "result", hidden: true },
    element("span", { class: "hint", text: "Result" }),
    result,
  );
  const head = element(
    "p",
    { class: "call-head" },
    icon("tool"),
    element("span", { text: "Tool call" }),
    name,
  );
  const node = element(
    "section",
    { class: "call", "aria-label": `Tool call ${number}` },
    head,
    given,
    entry,
    answered,
  );
  return { node, name, given, entry, field, answered, result };
}

function fillCard(card, call, streaming, result) {
  card.name.textContent = call.name;
  card.given.textContent = streaming ? call.arguments : pretty(call.arguments);
  card.entry.hidden = streaming || result !== undefined;
  card.answered.hidden = result === undefined;
  card.result.textContent = result ?? "";
}

/** Arguments as indented JSON, or as they came if they are none. */
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
