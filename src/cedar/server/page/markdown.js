// Markdown by the server, shown block by block while a reply is still growing.

import { pieces, settle } from "./blocks.js";
import { copyText } from "./clipboard.js";
import { element, icon } from "./dom.js";

const REMEMBERED = 200;
const LEAST_PAUSE = 250;
// Rendering may take a tenth of the time at most, so that it never slows the model down.
const PAUSE_FACTOR = 9;

// In browsers with trusted types no other code can turn text into HTML.
const policy = window.trustedTypes?.createPolicy("cedar-markdown", { createHTML: (html) => html });

/** Sanitised HTML of texts; each piece is asked for once, one at a time. */
export class Markdown {
  #api;
  #known = new Map();
  #queue = Promise.resolve();

  constructor(api) {
    this.#api = api;
  }

  /** The HTML if all of it is there already, else undefined. */
  known(text) {
    const parts = pieces(text).map((piece) => this.#known.get(piece));
    return parts.includes(undefined) ? undefined : parts.join("");
  }

  async html(text) {
    const parts = await Promise.all(pieces(text).map((piece) => this.#piece(piece)));
    return parts.join("");
  }

  #piece(text) {
    if (this.#known.has(text)) return this.#known.get(text);
    const asked = this.#queue.then(() => this.#known.get(text) ?? this.#api.markdown(text));
    this.#queue = asked.catch(() => {});
    return asked.then((html) => {
      this.#known.set(text, html);
      if (this.#known.size > REMEMBERED) this.#known.delete(this.#known.keys().next().value);
      return html;
    });
  }
}

/** The body of one reply: rendered blocks, then plain text that is not rendered yet. */
export class MarkdownBody {
  #markdown;
  #text = "";
  #shown = "";
  #wanted = "";
  #busy = false;
  #final = false;
  #notBefore = 0;
  #timer = 0;

  constructor(markdown) {
    this.#markdown = markdown;
    this.blocks = element("div", { class: "markdown" });
    this.tail = element("div", { class: "plain" });
    this.node = element("div", { class: "body" }, this.blocks, this.tail);
  }

  /** Show a text; while it streams only whole blocks are rendered. */
  set(text, streaming) {
    if (!text.startsWith(this.#shown)) {
      this.#shown = "";
      this.blocks.replaceChildren();
    }
    this.#text = text;
    this.#final = !streaming;
    this.#wanted = streaming ? settle(text).settled : text;
    const known = this.#final ? this.#markdown.known(text) : undefined;
    if (known === undefined) {
      this.#plain();
      this.#ask();
    } else {
      this.#put(text, known);
    }
  }

  #plain() {
    const rest = this.#text.slice(this.#shown.length);
    const fence = /^ {0,3}(?:`{3,}|~{3,})[^\n]*\n?/.exec(rest);
    this.tail.classList.toggle("code", Boolean(fence));
    this.tail.textContent = fence ? rest.slice(fence[0].length) : rest.replace(/^\n+/, "");
    this.tail.hidden = !this.tail.textContent;
  }

  #ask() {
    if (this.#busy || this.#wanted === this.#shown || !this.#wanted.trim()) return;
    const pause = this.#final ? 0 : this.#notBefore - performance.now();
    clearTimeout(this.#timer);
    if (pause > 0 || this.#inUse()) {
      this.#timer = setTimeout(() => this.#ask(), Math.max(pause, LEAST_PAUSE));
      return;
    }
    this.#render();
  }

  async #render() {
    const text = this.#wanted;
    const began = performance.now();
    this.#busy = true;
    try {
      const html = await this.#markdown.html(text);
      if (this.#text.startsWith(text)) this.#put(text, html);
    } catch {
      // Plain text is shown already, and a later text asks again.
    } finally {
      const took = performance.now() - began;
      this.#notBefore = performance.now() + Math.max(LEAST_PAUSE, took * PAUSE_FACTOR);
      this.#busy = false;
      if (this.#wanted !== text) this.#ask();
    }
  }

  /** While it grows, blocks that someone reads by selection or keyboard are left alone. */
  #inUse() {
    if (this.#final) return false;
    if (this.blocks.contains(document.activeElement)) return true;
    const selection = document.getSelection();
    return Boolean(
      selection && !selection.isCollapsed && selection.containsNode(this.blocks, true),
    );
  }

  #put(text, html) {
    this.#shown = text;
    const template = document.createElement("template");
    template.innerHTML = policy ? policy.createHTML(html) : html;
    dress(template.content);
    this.blocks.replaceChildren(template.content);
    this.#plain();
  }
}

/** Give code blocks a copy button, and wide tables and code a place to scroll. */
function dress(content) {
  for (const code of content.querySelectorAll("pre > code")) {
    const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
    const copy = element(
      "button",
      { type: "button", class: "quiet small", "aria-label": "Copy this code" },
      icon("copy"),
      "Copy",
    );
    copy.addEventListener("click", () => copyText(code.textContent, copy));
    const head = element("div", { class: "code-head" }, element("span", { text: language }), copy);
    const block = code.parentElement;
    block.tabIndex = 0;
    const frame = element("div", { class: "code-block" }, head);
    block.replaceWith(frame);
    frame.append(block);
  }
  for (const table of content.querySelectorAll("table")) {
    const frame = element("div", {
      class: "table-scroll",
      tabindex: 0,
      role: "region",
      "aria-label": "Table",
    });
    table.replaceWith(frame);
    frame.append(table);
  }
}
