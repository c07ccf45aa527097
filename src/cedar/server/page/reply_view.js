// One reply: reasoning, text, tool calls, and what became of it.

import { copyText } from "./clipboard.js";
import { element, icon, iconButton } from "./dom.js";
import { counted, seconds, short } from "./format.js";
import { MarkdownBody } from "./markdown.js";
import { CallViews } from "./call_view.js";

const ENDINGS = {
  length: "Cut at the longest allowed reply; Settings has the limit.",
  stopped: "Stopped.",
  failed: "Not complete.",
  content_filter: "Withheld by the server.",
};

export class ReplyView {
  #message;
  #body;
  #calls;
  #reasoning;
  #reasoningTitle;
  #reasoningText;
  #waiting;
  #copy;
  #note;
  #tools;
  #failure = null;

  constructor(message, actions, markdown) {
    this.#message = message;
    this.#body = new MarkdownBody(markdown);
    this.#calls = new CallViews(message, actions);
    this.#reasoningTitle = element("span", { text: "Reasoning" });
    this.#reasoningText = element("div", { class: "plain" });
    this.#reasoning = element(
      "details",
      { class: "reasoning", hidden: true },
      element("summary", {}, icon("down"), this.#reasoningTitle),
      this.#reasoningText,
    );
    this.#waiting = element(
      "p",
      { class: "waiting", hidden: true },
      element("i"),
      element("i"),
      element("i"),
      element("span", { text: "Reading the prompt" }),
    );
    this.#note = element("span", { class: "hint" });
    this.#copy = iconButton("copy", "Copy reply", (event) =>
      copyText(message.text, event.currentTarget),
    );
    this.again = iconButton("again", "Write this reply again", () => actions.again(message));
    this.#tools = element("div", { class: "tools" }, this.#copy, this.again, this.#note);
    this.node = element(
      "article",
      { class: "message reply", "aria-label": "Reply" },
      this.#reasoning,
      this.#waiting,
      this.#body.node,
      this.#calls.node,
      this.#tools,
    );
  }

  set busy(busy) {
    this.again.disabled = busy;
    this.#calls.busy = busy;
  }

  /** Show the reply as it is; results are the answers to its calls by call id. */
  update(streaming, results) {
    const { text, reasoning, calls } = this.#message;
    this.node.setAttribute("aria-busy", String(streaming));
    this.node.classList.toggle("streaming", streaming);
    this.#waiting.hidden = !(streaming && !text && !reasoning && !calls.length);
    this.#updateReasoning(streaming);
    this.#body.set(text, streaming);
    this.#body.node.hidden = !text;
    this.#calls.update(streaming, results);
    this.#tools.hidden = streaming;
    this.#copy.hidden = !text;
    this.#note.textContent = streaming ? "" : this.#ending();
  }

  /** A failure under what had arrived, with a way to try again; null takes it away. */
  fail(failure, retry) {
    this.#failure?.remove();
    this.#failure = null;
    if (!failure) return;
    const again = element("button", {
      type: "button",
      class: "quiet",
      text: "Try again",
      on: { click: retry },
    });
    if (failure.wait > 0) countDown(again, Math.ceil(failure.wait));
    this.#failure = element(
      "div",
      { class: "failure", role: "alert" },
      element("p", {}, element("strong", { text: failure.message }), ` ${failure.detail}`),
      failure.again ? again : null,
    );
    this.node.insertBefore(this.#failure, this.#tools);
  }

  #updateReasoning(streaming) {
    const { reasoning, text, calls, reasoningSeconds, usage } = this.#message;
    this.#reasoning.hidden = !reasoning;
    if (!reasoning) return;
    if (this.#reasoningText.textContent.length !== reasoning.length)
      this.#reasoningText.textContent = reasoning;
    const going = streaming && !text && !calls.length;
    const tokens = usage?.completion_tokens_details?.reasoning_tokens;
    const facts = [
      reasoningSeconds ? `for ${seconds(reasoningSeconds)}` : "",
      tokens ? counted(tokens, "token") : "",
    ];
    const said = facts.filter(Boolean).join(", ");
    this.#reasoningTitle.textContent = going ? "Reasoning …" : `Reasoned ${said}`.trim();
    this.#reasoning.classList.toggle("going", going);
  }

  #ending() {
    const { finish, usage, figures } = this.#message;
    const parts = [];
    if (usage?.completion_tokens) parts.push(counted(usage.completion_tokens, "token"));
    if (figures?.tokens_per_second) parts.push(`${short(figures.tokens_per_second)} tokens/s`);
    if (ENDINGS[finish]) parts.push(ENDINGS[finish]);
    return parts.join(" · ");
  }
}

/** The button waits as long as the server asked to, and says so. */
function countDown(button, remaining) {
  button.disabled = true;
  button.textContent = `Try again in ${remaining} s`;
  const timer = setInterval(() => {
    remaining -= 1;
    if (remaining > 0 && button.isConnected) {
      button.textContent = `Try again in ${remaining} s`;
      return;
    }
    clearInterval(timer);
    button.disabled = false;
    button.textContent = "Try again";
  }, 1000);
}
