// Copying, also where the page came over plain HTTP and the clipboard's interface is missing.

import { announce } from "./notices.js";
import { element } from "./dom.js";

/** Copy a text; the button that asked for it says how it went. */
export async function copyText(text, button) {
  const done = await written(text);
  announce(done ? "Copied" : "Copying is not allowed here");
  const symbol = button?.querySelector("use");
  if (!done || !symbol) return;
  const before = symbol.getAttribute("href");
  if (before === "#i-check") return;
  symbol.setAttribute("href", "#i-check");
  setTimeout(() => symbol.setAttribute("href", before), 1500);
}

async function written(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const field = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    field.value = text;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}
