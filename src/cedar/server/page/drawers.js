// The two side panels: beside the chat where there is room, over it where there is none.

import { byId } from "./dom.js";

export class Drawer {
  #panel;
  #button;
  #over;
  #wanted;

  /** over: media query that says when the panel lies over the chat. */
  constructor(panel, button, over) {
    this.#panel = panel;
    this.#button = button;
    this.#over = matchMedia(over);
    this.#wanted = remembered(panel.id);
    button.addEventListener("click", () => this.toggle());
    this.#over.addEventListener("change", () => this.#settle());
    this.#settle();
  }

  get isOver() {
    return this.#over.matches;
  }

  get isOpen() {
    return !this.#panel.hidden;
  }

  toggle() {
    if (!this.isOver) {
      this.#wanted = !this.isOpen;
      remember(this.#panel.id, this.#wanted);
      this.#show(this.#wanted);
    } else if (this.isOpen) this.close();
    else this.open();
  }

  /** Lay the panel over the chat; the keyboard goes into it. */
  open() {
    this.#show(true);
    byId("main").inert = true;
    byId("backdrop").hidden = false;
    this.#panel.focus();
  }

  /** Close a panel that lies over the chat; the keyboard goes back. Says whether it did. */
  close() {
    if (!this.isOver || !this.isOpen) return false;
    this.#show(false);
    this.#uncover();
    this.#button.focus();
    return true;
  }

  #settle() {
    this.#uncover();
    this.#show(this.isOver ? false : this.#wanted);
  }

  #uncover() {
    byId("main").inert = false;
    byId("backdrop").hidden = true;
  }

  #show(open) {
    this.#panel.hidden = !open;
    this.#panel.classList.toggle("over", this.isOver);
    this.#button.setAttribute("aria-expanded", String(open));
  }
}

function remembered(name) {
  try {
    return localStorage.getItem(`cedar.panel.${name}`) !== "closed";
  } catch {
    return true;
  }
}

function remember(name, open) {
  try {
    localStorage.setItem(`cedar.panel.${name}`, open ? "open" : "closed");
  } catch {
    // The panel opens as usual next time.
  }
}
