// Short words at the edge of the page, and words for screen readers only.

import { byId, element } from "./dom.js";

const TOAST_SECONDS = 8;

/** Say something to screen readers once they are idle. */
export function announce(text) {
  const place = byId("announcer");
  // The same words twice would not be said twice.
  place.textContent = "";
  setTimeout(() => {
    place.textContent = text;
  }, 50);
}

/** A short notice, with one action if given; it leaves by itself. */
export function toast(text, action = null) {
  const node = element("div", { class: "toast" }, element("span", { text }));
  const leave = () => node.remove();
  if (action) {
    const act = () => {
      leave();
      action.act();
    };
    node.append(
      element("button", { type: "button", class: "quiet", text: action.label, on: { click: act } }),
    );
  }
  const place = byId("toasts");
  while (place.children.length >= 3) place.firstChild.remove();
  place.append(node);
  setTimeout(leave, TOAST_SECONDS * 1000);
}
