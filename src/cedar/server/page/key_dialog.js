// Asking for the server's API key.

import { byId } from "./dom.js";

/** Ask; the promise gives the key, or null if the person would rather not. */
export function askForKey(problem) {
  const dialog = byId("key");
  const form = byId("key-form");
  const field = byId("key-value");
  byId("key-problem").textContent = problem;
  field.value = "";
  return new Promise((resolve) => {
    const finish = (value) => {
      form.onsubmit = null;
      dialog.onclose = null;
      if (dialog.open) dialog.close();
      field.value = "";
      resolve(value);
    };
    form.onsubmit = (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (key) finish(key);
    };
    dialog.onclose = () => finish(null);
    byId("key-cancel").onclick = () => dialog.close();
    dialog.showModal();
    field.focus();
  });
}
