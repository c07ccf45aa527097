// One message of the person: text, pictures, and editing in place.

import { copyText } from "./clipboard.js";
import { composing, element, iconButton } from "./dom.js";

export class UserView {
  #message;
  #actions;
  #tools;
  #content;

  constructor(message, actions) {
    this.#message = message;
    this.#actions = actions;
    this.#content = element("div", { class: "bubble" });
    this.edit = iconButton("edit", "Edit and send again", () => this.#startEditing());
    this.#tools = element(
      "div",
      { class: "tools" },
      iconButton("copy", "Copy message", (event) => copyText(message.text, event.currentTarget)),
      this.edit,
    );
    this.node = element(
      "article",
      { class: "message user", "aria-label": "You" },
      this.#content,
      this.#tools,
    );
    this.#showText();
  }

  /** Nothing can be edited while a reply is being written. */
  set busy(busy) {
    this.edit.disabled = busy;
  }

  #showText() {
    const pictures = (this.#message.images ?? []).map(picture);
    this.#content.replaceChildren();
    if (pictures.length) this.#content.append(element("div", { class: "pictures" }, ...pictures));
    if (this.#message.text)
      this.#content.append(element("div", { class: "plain", text: this.#message.text }));
    this.#tools.hidden = false;
    this.node.classList.remove("editing");
  }

  #startEditing() {
    const field = element("textarea", { "aria-label": "Edit message", rows: 3 });
    field.value = this.#message.text;
    const leave = () => {
      this.#showText();
      this.edit.focus();
    };
    const send = () => {
      const text = field.value;
      if (text.trim() || this.#message.images?.length) this.#actions.edit(this.#message, text);
    };
    field.addEventListener("keydown", (event) => {
      if (composing(event)) return;
      if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      } else if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        send();
      }
    });
    const row = element(
      "div",
      { class: "row" },
      element("span", { class: "hint", text: "What follows this message is replaced." }),
      element("span", { class: "space" }),
      element("button", { type: "button", class: "quiet", text: "Cancel", on: { click: leave } }),
      element("button", { type: "button", class: "primary", text: "Send", on: { click: send } }),
    );
    this.#content.replaceChildren(field, row);
    this.#tools.hidden = true;
    this.node.classList.add("editing");
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
    field.style.height = `${Math.min(field.scrollHeight + 2, 400)}px`;
  }
}

function picture({ url, name }) {
  if (!url) return element("span", { class: "lost-picture", text: `${name} (no longer kept)` });
  return element("img", { src: url, alt: name });
}
